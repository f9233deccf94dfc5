"""`qfuse::linear` of a few rows: the kernel that reads packed weights, the pass that calls it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_q
from inductor_q import kbit, ops, testing
from inductor_q.exc import WrongShape
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.formats.bnb import NF4
from inductor_q.formats.kbit import KBITS
from inductor_q.kernels import (
    linear_rows_cuda,
    linear_rows_reference,
    linear_rows_sources,
    nibbles,
)
from inductor_q.kernels.linear_rows_cuda import MOST_ROWS, MOST_TOGETHER
from inductor_q.kernels.linear_rows_sources import LOW, STRIP, TABLE, WARPS, source_of
from inductor_q.kernels.rows_calls import Adapter, LinearRows
from inductor_q.ops.linears import linears
from tests.support.compiling import compile_step, step
from tests.support.few_rows import error, made, serve_rows
from tests.support.quantized import sample

NESTED = "nf4_b64_nested"
SERVED = [fmt for fmt in FORMATS.values() if not linear_rows_cuda.KERNEL.unknown(fmt)]
#: Rows that are no multiple of a tile, columns that are less and more than a stage and end in one.
SHAPES = ((16, 64), (40, 320), (24, 4096), (2100, 192), (17, 4160), (64, 11008), (33, 12288))
#: The same in twice as wide chunks.
SHAPES_OF_PLANES = ((16, 128), (40, 384), (24, 4096), (2100, 256), (17, 4224), (64, 11008))


def test_formats_that_the_kernel_serves() -> None:
    names = {fmt.name for fmt in SERVED}
    assert {"nf4_b64", NESTED, "fp4_b128_nested", "nf4_b4096", "kbit4_e4m4"} <= names
    assert not names & {"nf4_b32", "int4_g64"}


@pytest.mark.parametrize("rows", [0, 1, 3, MOST_ROWS])
def test_the_op_serves_any_number_of_rows(rows: int) -> None:
    call, [exact] = made(FORMATS[NESTED], (40, 320), rows, torch.bfloat16, bias=True)
    out = ops.linear(call.x, call.weights[0], NESTED, (40, 320), call.biases[0])
    assert out.shape == (rows, 40) and out.is_contiguous()
    assert rows == 0 or error(out, exact) < 5e-3


@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_the_op_of_several_layers(gated: bool, adapter: torch.dtype) -> None:
    call, exact = made(
        FORMATS[NESTED],
        (40, 320),
        6,
        torch.bfloat16,
        bias=True,
        ranks=(8, 0),
        adapter=adapter,
        gated=gated,
    )
    found = several(call, call.x.view(2, 3, 320))
    assert [tuple(y.shape) for y in found] == [(2, 3, 40)] * (1 if gated else 2)
    for y, result in zip(found, exact, strict=True):
        assert error(y.view(6, 40), result) < 8e-3
    with pytest.raises(WrongShape, match="adapter 0"):
        several(replace(call, adapters=[Adapter(exact[0], exact[0], 1.0), None]), call.x)
    empty = several(call, call.x[:0])
    assert [tuple(y.shape) for y in empty] == [(0, 40)] * len(found)


def several(call: LinearRows, x: Tensor) -> list[Tensor]:
    """Call `qfuse::linears` with the arguments of a call."""
    return linears(
        x,
        [operand for operands in call.weights for operand in operands],
        call.fmt.name,
        call.features,
        call.biases,
        [None if adapter is None else adapter.a for adapter in call.adapters],
        [None if adapter is None else adapter.b for adapter in call.adapters],
        [1.0 if adapter is None else adapter.scaling for adapter in call.adapters],
        call.gated,
    )


def test_a_layer_without_columns_gives_its_bias() -> None:
    operands, _ = sample(FORMATS["nf4_b64"], (16, 0))
    bias = torch.arange(16.0)
    out = ops.linear(torch.empty(2, 3, 0), operands, "nf4_b64", (16, 0), bias)
    assert torch.equal(out, bias.expand(2, 3, 16))


@pytest.mark.gpu
def test_a_bias_that_the_kernel_cannot_read_is_left_to_torch() -> None:
    call, _ = made(FORMATS[NESTED], (40, 320), 2, torch.bfloat16, device="cuda")
    row = torch.randn(80, device="cuda").bfloat16()
    assert not linear_rows_cuda.KERNEL.refuses(replace(call, biases=[row[:40]]))
    for bias in (row[::2], row[:1]):
        assert "the bias is not 40" in linear_rows_cuda.KERNEL.refuses(replace(call, biases=[bias]))


def test_what_the_kernel_refuses() -> None:
    kernel, fmt = linear_rows_cuda.KERNEL, FORMATS[NESTED]
    call, _ = made(fmt, (40, 320), 2, torch.bfloat16)
    assert "runs on a GPU" in kernel.refuses(call)
    odd = [Adapter(torch.empty(4, 320).bfloat16(), torch.empty(40, 4).bfloat16(), 1.0)]
    assert "rank is 4" in linear_rows_cuda._refuses_adapters(replace(call, adapters=odd))
    mixed = [Adapter(torch.empty(8, 320), torch.empty(40, 8).bfloat16(), 1.0)]
    assert "not all" in linear_rows_cuda._refuses_adapters(replace(call, adapters=mixed))
    assert "not one scale for each 64" in kernel.unknown(FORMATS["nf4_b32"])
    assert "not packed as nibbles" in kernel.unknown(FORMATS["int8_row"])
    assert kernel.unknown(None)


def test_copies_precede_the_launch_behind_which_weights_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, _ = made(FORMATS[NESTED], (40, 320), 2, torch.bfloat16, ranks=(8, 8))
    events: list[str] = []

    def aligned(x: Tensor) -> Tensor:
        events.append("copy")
        return x

    def prepared(kernel: tuple[str, str], *_: Any) -> Any:
        return lambda *pointers: events.append(kernel[1].partition("<")[0])

    monkeypatch.setattr(linear_rows_cuda, "_aligned", aligned)
    monkeypatch.setattr(linear_rows_cuda, "_prepared", prepared)
    monkeypatch.setattr(linear_rows_cuda, "_programs", lambda *_: 1)
    monkeypatch.setattr(linear_rows_cuda, "_most_shared", lambda _: 227 << 10)
    linear_rows_cuda.KERNEL.run(call)
    assert events == ["copy"] * 9 + ["project", "linear"]


#: What a block may have on an RTX 2080, a 4090, an A100 and an H100, in kB, and the most rows.
DEVICES = {NESTED: {64: 0, 99: 0, 163: 16, 227: 16}}
DEVICES |= {f"kbit{k}_e4m4": DEVICES[NESTED] for k in (2, 4)}
DEVICES |= {
    "kbit3_e4m4": {64: 0, 99: 16, 163: 16, 227: 16},
    "kbit5_e4m4": {64: 0, 99: 0, 163: 0, 227: 16},
}


@pytest.mark.parametrize(
    ("name", "shared", "most"), [(f, *case) for f, of in DEVICES.items() for case in of.items()]
)
def test_which_devices_have_enough_shared_memory(name: str, shared: int, most: int) -> None:
    fmt, counts = FORMATS[name], range(1, MOST_TOGETHER + 1)
    fit = [n for n in counts if source_of(fmt).plan(fmt, n, 0, shared << 10, 1)]
    assert fit == list(range(1, most + 1))


@pytest.mark.parametrize("name", [NESTED, "kbit2_fp16", "kbit3_e4m4", "kbit4_e4m4", "kbit5_fp16"])
@pytest.mark.parametrize("height", [1, 2])
@pytest.mark.parametrize("room", [0, 32, 256, 1024])
@pytest.mark.parametrize("count", [1, 8, 16])
def test_places_in_shared_memory_do_not_overlap(
    count: int, room: int, height: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    place = linear_rows_sources.placed

    def placed(*given: Any) -> Any:
        asked.append(given)
        return place(*given)

    monkeypatch.setattr(linear_rows_sources, "placed", placed)
    found = source_of(FORMATS[name]).plan(FORMATS[name], count, room, 227 << 10, height)
    [(_, sizes, table, _)] = asked
    rows = STRIP * height
    assert sizes[0] >= WARPS * STRIP * 32 * FORMATS[name].packing.bits
    assert sizes[1] >= WARPS * count * (rows + 4) * 4 and sizes[2] >= 3 * rows * room
    if found is None:
        assert room == 1024 or height * count > 8 or (height == 2 and table > TABLE)
        return
    taken = sorted([*zip(found.places, sizes, strict=True), (0, table)])
    assert taken[0][0] >= -LOW
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))
    assert taken[-1][0] + taken[-1][1] + TABLE <= found.shared <= 227 << 10


def linear(device: str = "cpu", *, bias: bool = False) -> Any:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(128, 64, generator=generator).to(device, torch.bfloat16) * 0.1
    added = torch.randn(128, generator=generator).to(device, torch.bfloat16) if bias else None
    return testing.quantized_linear(weight, added).requires_grad_(False).eval()


def values(layer: Any) -> Tensor:
    """The values of a 4-bit layer's weight in float64, which nothing has rounded to 16 bits."""
    found = inductor_q.dequantize(layer.weight, layer.weight.quant_state, dtype=torch.float32)
    return found.double()


def test_a_codebook_lies_on_the_cpu_whatever_device_is_the_default() -> None:
    """Inductor warms CUDA graphs up in their own memory, where nothing may stay."""
    nibbles.fit.cache_clear()
    with torch.device("meta"):
        values, _ = nibbles.fit(NF4.values, torch.bfloat16)
        assert linear_rows_sources._codebook(FORMATS[NESTED], torch.float16)
    assert values.device.type == "cpu" and values._base is None


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_few_rows_of_inference_read_packed_weights(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_rows(monkeypatch)
    module = linear(bias=True)
    x = torch.randn(rows, module.in_features).bfloat16()
    with torch.no_grad():
        expected, _ = step(module, x)
        result = compile_step(module, x, options={"qfuse.thresholds": {"linear_rows.max_rows": 16}})
    assert result.ops["qfuse.linear"] == (rows <= 16)
    assert result.ops["qfuse.dequantize"] == (rows > 16)
    assert result.applied["canonicalize"] == 1
    torch.testing.assert_close(result.output, expected)
    [site] = [s for s in result.report.sites if s.pass_name == "canonicalize"]
    assert (site.provider == "packed") == (rows <= 16)


@pytest.mark.parametrize(("rows", "is_packed"), [(1, False), (2, True), (16, True), (17, False)])
def test_the_kernel_in_triton_has_a_threshold_of_its_own(
    rows: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves one row to bitsandbytes, whose kernel reads packed weights, too."""
    serve_rows(monkeypatch, "triton")
    thresholds = {
        **{"linear_rows.max_rows": 1, "linear_rows.triton_max_rows": 16},
        "canonicalize.min_rows": 2,
    }
    module = linear()
    x = torch.randn(rows, module.in_features).bfloat16()
    with torch.no_grad():
        result = compile_step(module, x, options={"qfuse.thresholds": thresholds})
    assert result.ops["qfuse.linear"] == is_packed


@pytest.mark.parametrize(("rows", "least"), [(1, 8193), (2, 8193), (2, 8192), (16, 1), (17, 1)])
def test_the_kernel_in_triton_takes_more_rows_of_large_kbit_weights(
    rows: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_rows(monkeypatch, "triton")
    layer = kbit.quantize_model(torch.nn.Linear(64, 128, dtype=torch.bfloat16), k=3)
    thresholds = {
        "linear_rows.triton_max_rows": 16,
        "linear_rows.min_elements_of_planes": least,
    }
    with torch.no_grad():
        x = torch.randn(rows, 64).bfloat16()
        result = compile_step(layer, x, options={"qfuse.thresholds": thresholds})
    assert result.ops["qfuse.linear"] == (rows == 1 or (rows <= 16 and least <= 128 * 64))


@pytest.mark.parametrize(("rows", "least"), [(1, 8193), (16, 8193), (17, 8193), (17, 8192)])
def test_small_kbit_weights_have_one_launch_of_rows_in_cuda(
    rows: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_rows(monkeypatch, linear_rows_cuda.KERNEL.name)
    layer = kbit.quantize_model(torch.nn.Linear(64, 128, dtype=torch.bfloat16), k=3)
    thresholds = {
        **{"linear_rows.max_rows": 32, "linear_rows.triton_max_rows": 64},
        **{"linear_rows.triton_max_rows_of_planes": 1},
        "linear_rows.min_elements_of_planes": least,
    }
    with torch.no_grad():
        x = torch.randn(rows, 64).bfloat16()
        result = compile_step(layer, x, options={"qfuse.thresholds": thresholds})
    assert result.ops["qfuse.linear"] == (rows <= 16 or least <= 128 * 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", SERVED, ids=lambda fmt: fmt.name)
def test_the_kernel_against_float64(fmt: QuantFormat, dtype: torch.dtype) -> None:
    """No worse than a product with a rounded weight, and the same whatever other rows there are."""
    shapes = SHAPES_OF_PLANES if fmt.planes else SHAPES
    for shape in shapes if fmt.planes or fmt.name in (NESTED, "nf4_b64") else shapes[1:3]:
        for rows in (1, 7, 8, 9, 16, 25, MOST_ROWS):
            call, exact = made(fmt, shape, rows, dtype, device="cuda", bias=rows % 2 == 0)
            check(call, exact)


def check(call: LinearRows, exact: list[Tensor]) -> None:
    kernel = linear_rows_cuda.KERNEL
    assert not kernel.refuses(call)
    found, plain, again = kernel.run(call), linear_rows_reference.KERNEL.run(call), kernel.run(call)
    # Up to two rows of planes are added up in another order.
    rows = 3 if call.fmt.planes and call.x.shape[0] > 2 else 1
    last = kernel.run(replace(call, x=call.x[-rows:]))
    for i, result in enumerate(exact):
        # With few scales, which rounding is closer is luck.
        assert error(found[i], result) <= 1.25 * error(plain[i], result), call.x.shape
        assert torch.equal(found[i], again[i])
        assert call.x.shape[0] > 8 or torch.equal(last[i][-1], found[i][-1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [NESTED, *(f"kbit{k}_e4m4" for k in KBITS)])
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 9, MOST_ROWS])
def test_weights_and_adapters_of_one_launch(rows: int, adapter: torch.dtype, name: str) -> None:
    """Ranks of one input may differ, and a layer may have no adapter; a pair may be gated, and each
    weight of planes has a codebook of its own."""
    sizes = ((40, 384), (8, 0, 64)), ((2100, 4224), (16, 16)), ((264, 11008), (0, 32))
    for shape, ranks in sizes:
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
def test_a_gpu_decodes_few_rows_in_a_graph() -> None:
    """Captured in a CUDA graph, with other weights of the same shape, through compiled code."""
    module = linear("cuda")
    exact = values(module)
    run: Any = torch.compile(
        module, backend=testing.qfuse_backend(), options={"triton.cudagraphs": True}
    )
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(1, module.in_features, device="cuda").bfloat16() + seed
            result = x.double() @ exact.t()
            assert error(run(x), result) <= 1.25 * error(module(x), result), seed
