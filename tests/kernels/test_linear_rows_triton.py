"""The Triton kernel of few rows: interpreted and compiled here, and run on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import inductor_q
from inductor_q import testing
from inductor_q.formats import FORMATS
from inductor_q.kernels import PROVIDERS, dispatch, linear_rows_reference, linear_rows_triton
from inductor_q.kernels.dequantize_triton import codebook_on
from inductor_q.kernels.linear_rows_tiles import LEAST_STEPS, TILES, Tile, tile_of
from inductor_q.kernels.linear_rows_triton import KERNEL, MOST_ROWS, Plan, codes_of_a_lane, unfit
from inductor_q.kernels.rows_calls import Adapter, LinearRows
from tests.support.compile_triton import compiled
from tests.support.few_rows import error, made
from tests.support.processes import FEW_OR_ALL, interpreted
from tests.support.tile_cases import DEVICES

pytest.importorskip("triton")

NESTED = "nf4_b64_nested"
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
}


@pytest.mark.parametrize("few", FEW_OR_ALL)
def test_in_the_interpreter(few: tuple[str, ...]) -> None:
    """Families of formats at several numbers of rows; every format; several weights of a call."""
    families, formats, several = interpreted("interpret_linear_rows", *few)
    assert families == 5 * (len(few) or 24)
    assert formats == len(few or FORMATS)
    assert several == 40


def compile_all(plan: Plan, call: LinearRows, arch: int) -> list[Any]:
    """Compile the launches of a call for an architecture; return them in their order."""
    found = []
    for launch, tensors in plan.launches(call, call.outputs()):
        names = launch._function.arg_names
        pointers = {name: TYPES[t.dtype] for name, t in zip(names, tensors, strict=False)}
        options = {"enable_fp_fusion": True, **launch._options}
        found.append(compiled(launch._function, launch._constants, pointers, arch=arch, **options))
        assert found[-1].metadata.shared <= DEVICES[arch]
    return found


COMPILED = ("nf4_b64_nested", "kbit3_e4m4", "int4_g128", "int4_tiles_g32", "mxfp4", "fp8_e4m3_row")


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles(name: str, rows: int, arch: int) -> None:
    """With the tile of the table; tensor cores multiply more than one row from 8.0 on."""
    fmt, dtype = FORMATS[name], torch.float16 if arch < 80 else torch.bfloat16
    call, _ = made(fmt, (64, 1024), rows, dtype, bias=True)
    tile = tile_of(rows, fmt.packing.bits, arch // 10, codes_of_a_lane(call))
    [product] = compile_all(Plan(call, tile, 1), call, arch)
    multiplies = re.search(r"mma\.sync|wgmma", product.asm["ptx"])
    assert bool(multiplies) == (rows > 1 and arch >= 80)
    assert "atom" not in product.asm["ptx"]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_compiles_adapters_and_what_adds_parts(gated: bool, rows: int) -> None:
    call, _ = made(FORMATS[NESTED], (64, 1024), rows, torch.bfloat16, ranks=(16, 8), gated=gated)
    plan = Plan(call, tile_of(rows, 4, 9, 8), 2)
    assert len(compile_all(plan, call, 90)) == 3


@pytest.mark.parametrize(
    ("name", "columns", "codes"),
    [
        *((NESTED, 64, 8), (NESTED, 36, 2), (NESTED, 35, 1), ("kbit5_fp16", 64, 8)),
        *(("kbit5_fp16", 36, 1), ("nvfp4", 64, 8), ("int8_row", 20, 4), ("int4_tiles_g32", 48, 1)),
        ("int4_tiles_g32", 64, 32),
    ],
)
def test_codes_of_a_lane_share_their_scales(name: str, columns: int, codes: int) -> None:
    call, _ = made(FORMATS[name], (4, columns), 2, torch.float16)
    assert codes_of_a_lane(call) == codes
    assert FORMATS[name].group(columns) % codes == 0


def test_codes_that_do_not_lie_in_whole_words_are_loaded_by_the_byte() -> None:
    call, _ = made(FORMATS["nf4_b64"], (4, 64), 2, torch.float16)
    qweight, absmax = call.weights[0]
    moved = torch.cat([qweight.reshape(-1)[:1], qweight.reshape(-1)])[1:]
    assert codes_of_a_lane(replace(call, weights=[[moved, absmax]])) == 2


@pytest.mark.parametrize(
    ("tiles", "steps", "parts"), [(192, 32, 3), (16, 32, 16), (1000, 32, 1), (64, 3, 1)]
)
def test_columns_are_split_to_fill_a_gpu(tiles: int, steps: int, parts: int) -> None:
    """Of 132 multiprocessors; no program has less than LEAST_STEPS steps."""
    assert Tile(64, 128, 4, programs=4).split(tiles, steps, 132) == parts
    assert parts == 1 or steps // parts >= LEAST_STEPS


def test_there_is_a_tile_for_all_rows_and_codes() -> None:
    for rows in range(1, MOST_ROWS + 1):
        for fmt in FORMATS.values():
            for major, codes in ((7, 8), (9, 8), (9, 1)):
                tile = tile_of(rows, fmt.packing.bits, major, codes)
                assert not tile.is_sum or rows == 1
    assert len({(most, bits) for most, bits, _ in TILES}) == len(TILES)


def test_what_the_kernel_refuses() -> None:
    call, _ = made(FORMATS[NESTED], (40, 320), 2, torch.bfloat16, bias=True)
    assert KERNEL.refuses(call) == "there is no Triton for cpu tensors"
    assert KERNEL.unknown(None) and not unfit(call)
    many = replace(call, x=call.x.repeat(33, 1))
    assert unfit(many) == "66 rows, more than 64"
    assert "320 numbers" not in unfit(call)
    assert "40 numbers in a row" in unfit(replace(call, biases=[torch.zeros(1)]))
    a, b = torch.zeros(4, 320).bfloat16(), torch.zeros(40, 4).bfloat16()
    assert "not all" in unfit(replace(call, adapters=[Adapter(a.double(), b, 1.0)]))
    assert "not contiguous" in unfit(
        replace(call, adapters=[Adapter(a, b.t().contiguous().t(), 1.0)])
    )
    empty = [Adapter(a[:0], b[:, :0].contiguous(), 1.0)]
    assert unfit(replace(call, adapters=empty)) == "an adapter's rank is 0, not from 1 to 256"
    two, _ = made(FORMATS[NESTED], (40, 320), 2, torch.bfloat16, ranks=(0, 0))
    other = [two.weights[0], [t.half() if t.is_floating_point() else t for t in two.weights[1]]]
    assert "torch.float16 and torch.float32, in one call" in unfit(replace(two, weights=other))


def test_calls_that_differ_in_what_a_launch_holds_are_of_another_kind() -> None:
    call, _ = made(FORMATS[NESTED], (40, 320), 2, torch.bfloat16, ranks=(8, 8))
    kind = call.kind()
    assert kind == replace(call, x=call.x + 1).kind()
    first, second = call.adapters
    assert first is not None
    for changed in (
        replace(call, gated=True),
        replace(call, x=call.x[:1]),
        replace(call, adapters=[replace(first, scaling=1.0), second]),
        replace(call, adapters=[first, None]),
        replace(call, biases=[torch.zeros(40).bfloat16(), None]),
        replace(call, x=torch.cat([call.x[:, :1], call.x], 1)[:, 1:]),
    ):
        assert changed.kind() != kind


def test_a_codebook_is_no_tensor_of_the_graph_that_first_needs_it() -> None:
    """A thread of its own makes it: neither fake, nor where a CUDA graph is warmed up."""
    codebook_on.cache_clear()
    with FakeTensorMode():
        table = codebook_on(FORMATS["mxfp4"], torch.device("cpu"))
    assert type(table) is Tensor
    codebook_on.cache_clear()


# --- on a GPU -------------------------------------------------------------------------------------

#: Rows that are no multiple of a tile, columns that end in a step, and split ones.
SHAPES = ((40, 320), (24, 4096), (2100, 192), (17, 4160), (33, 12288))
ROWS = (1, 2, 7, 16, 17, 33, 64)


def served(call: LinearRows) -> list[Tensor]:
    assert not KERNEL.refuses(call)
    result: list[Tensor] = KERNEL.run(call)
    return result


def check(call: LinearRows, exact: list[Tensor]) -> None:
    """No worse than a product with a rounded weight, and the same whatever other rows there are."""
    found, plain, again = served(call), linear_rows_reference.KERNEL.run(call), served(call)
    others = call.x.clone()
    others[:-1] += 1
    alone = served(replace(call, x=others))
    for i, result in enumerate(exact):
        # With few scales, which rounding is closer is luck.
        assert error(found[i], result) <= 1.25 * error(plain[i], result), (call.fmt, call.x.shape)
        assert torch.equal(found[i], again[i])
        assert torch.equal(alone[i][-1], found[i][-1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES if name in (NESTED, "kbit3_e4m4", "int4_g128") else SHAPES[1:2]:
        for rows in ROWS if name in (*COMPILED, "kbit5_fp16") else (1, 16):
            call, exact = made(FORMATS[name], shape, rows, dtype, device="cuda", bias=rows == 2)
            check(call, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17, MOST_ROWS])
@pytest.mark.parametrize("name", [NESTED, "kbit4_e4m4", "int4_g128"])
def test_weights_and_adapters_of_one_call(name: str, rows: int, adapter: torch.dtype) -> None:
    """Ranks of one input may differ, and a layer may have no adapter; a pair may be gated."""
    for shape, ranks in (((40, 320), (8, 0, 64)), ((2100, 4160), (16, 16)), ((64, 11008), (0, 5))):
        for gated in (False, True) if len(ranks) == 2 else (False,):
            call, exact = made(
                FORMATS[name],
                shape,
                rows,
                torch.bfloat16,
                device="cuda",
                ranks=ranks,
                adapter=adapter,
                gated=gated,
                bias=rows == 3,
            )
            check(call, exact)


@pytest.mark.gpu
def test_a_cuda_graph_replays_it() -> None:
    """Captured with its three launches; replayed for another input of the same place."""
    call, _ = made(
        FORMATS["kbit4_e4m4"], (64, 4096), 3, torch.bfloat16, device="cuda", ranks=(8, 8)
    )
    served(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = served(call)
    call.x.mul_(-2)
    graph.replay()
    for mine, again in zip(outputs, served(call), strict=True):
        assert torch.equal(mine, again)


@pytest.mark.gpu
def test_compiled_code_calls_it_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Inductor, which warms it up where nothing may stay; with the codebook not made before."""
    only = (KERNEL, linear_rows_reference.KERNEL)
    monkeypatch.setitem(PROVIDERS, "linear_rows", {**PROVIDERS["linear_rows"], "cuda": only})
    codebook_on.cache_clear()
    weight = torch.randn(128, 256, device="cuda").bfloat16() * 0.1
    module = testing.quantized_linear(weight).requires_grad_(False).eval()
    state = module.weight.quant_state
    exact = inductor_q.dequantize(module.weight, state, dtype=torch.float32).double()
    # Rows that other tests have varied would be dynamic, and those are dequantized.
    run: Any = torch.compile(
        module, backend="qfuse", options={"triton.cudagraphs": True}, dynamic=False
    )
    with torch.no_grad():
        for seed in range(4):
            x = torch.randn(5, 256, device="cuda").bfloat16() + seed
            result = x.double() @ exact.t()
            assert error(run(x), result) <= 1.25 * error(module(x), result), seed
    served_by = {type(plan) for plan in dispatch._PLANS.values()}
    assert linear_rows_triton.Plan in served_by, (served_by, str(inductor_q.last_report()))
