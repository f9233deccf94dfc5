"""The C++ kernel of few rows: every format it takes, any shape, any dtype, any processor."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inductor_q import ops
from inductor_q.csrc import build
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.kernels import linear_rows_cpp, linear_rows_reference
from inductor_q.kernels.dispatch import served_by
from inductor_q.kernels.linear_rows_cuda import MOST_ROWS
from inductor_q.kernels.rows_calls import Adapter, LinearRows
from tests.support.few_rows import error, made
from tests.support.quantized import DTYPES

KERNEL = linear_rows_cpp.KERNEL
SERVED = [fmt for fmt in FORMATS.values() if not KERNEL.unknown(fmt)]
FEW = [
    FORMATS[name]
    for name in ("nf4_b64_nested", "fp4_b128", "int4_g32", "int4_g64", "int4_plain_g64")
]
#: Bit planes of each width, and nibbles in blocks of 32 and 16 with every kind of scale.
SMALL = [
    FORMATS[name]
    for name in (
        *("kbit2_fp16", "kbit3_e4m4", "kbit4_e4m4", "kbit5_fp16", "nf4_b32", "mxfp4"),
        *("nvfp4", "nvfp4_rows", "nvfp4_divided_rows", "nvfp4_tiles"),
    )
]
#: Rows of weights that are no multiple of what is computed together, columns of a few chunks.
SHAPE = (29, 384)
#: Rows from which bfloat16 goes to the matrix unit, and the most that it takes at a time.
TILES_FROM, TILE = 5, 16
#: What the order of a sum changes in float32, where an eager product may be exact to the last bit.
ROUNDING = 3e-7


def check(call: LinearRows, exact: list[torch.Tensor]) -> None:
    assert not KERNEL.refuses(call)
    found, plain = KERNEL.run(call), linear_rows_reference.KERNEL.run(call)
    assert len(found) == len(exact)
    for y, eager, result in zip(found, plain, exact, strict=True):
        assert y.dtype == call.x.dtype and y.is_contiguous() and y.shape == result.shape
        # Of a few numbers one may nearly cancel, and which order rounds it better is chance.
        rounding = ROUNDING if result.numel() > 8 else 10 * ROUNDING
        assert error(y, result) <= 1.25 * error(eager, result) + rounding, call.fmt.name


def test_formats_that_the_kernel_serves() -> None:
    names = {fmt.name for fmt in SERVED}
    assert {"nf4_b32", "nf4_b64_nested", "fp4_b4096", "int4_g32", "int4_plain_g256"} <= names
    assert {"kbit2_fp16", "kbit5_e4m4", "mxfp4", "nvfp4", "nvfp4_tiles"} <= names
    assert not names & {"int8_g32", "int4_tiles_g32", "nf4_tensor_b64", "hqq2_g64_fp16"}


@pytest.mark.parametrize("fmt", SERVED, ids=lambda fmt: fmt.name)
def test_every_format_against_float64(fmt: QuantFormat) -> None:
    shape = (29, 4096) if "4096" in fmt.name else (29, 512)
    for rows, dtype in (
        (1, torch.bfloat16),
        (4, torch.bfloat16),
        (8, torch.float16),
        (3, torch.float32),
    ):
        call, exact = made(fmt, shape, rows, dtype)
        check(call, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [*range(1, 10), 16, 17, MOST_ROWS])
def test_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    for fmt in (*FEW, *SMALL):
        check(*made(fmt, SHAPE, rows, dtype, bias=rows % 2 == 0))


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (5, 95), (40, 320), (13, 1000), (3, 4160)])
def test_any_shape(shape: tuple[int, int]) -> None:
    """Blocks that begin inside of a row, rows that begin inside of a byte."""
    for name in ("nf4_b64", "fp4_b256_nested", "nf4_b4096"):
        for rows in (1, 5):
            check(*made(FORMATS[name], shape, rows, torch.float32, bias=True, ranks=(3,)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 33), (5, 96), (13, 48), (3, 80), (29, 1000), (300, 112), (2, 4160)]
)
def test_any_shape_of_small_blocks(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows that end inside of a block or of what is looked up together, and tiles of scales."""
    for fmt in SMALL:
        for rows in (1, 3, 8):
            check(*made(fmt, shape, rows, dtype, bias=True, ranks=(3,)))


def test_groups_that_rows_end_inside_of() -> None:
    for name in ("int4_g64", "int4_plain_g32"):
        for shape in ((40, 300), (7, 33)):
            check(*made(FORMATS[name], shape, 3, torch.bfloat16))


@pytest.mark.parametrize("fmt", [FEW[0], *SMALL], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, fmt: QuantFormat) -> None:
    """On either side of what the matrix unit, which rounds weights, takes."""
    rows, least = TILE + 3, TILES_FROM if dtype is torch.bfloat16 else 1
    call, _ = made(fmt, SHAPE, rows, dtype, ranks=(8, 0))
    whole = KERNEL.run(call)
    for first, last in ((0, least), (5, 5 + least), (rows - TILE, rows), (rows - least, rows)):
        part = KERNEL.run(replace(call, x=call.x[first:last]))
        for y, all_rows in zip(part, whole, strict=True):
            assert torch.equal(y, all_rows[first:last])


@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_layers_with_adapters_and_a_gate(rows: int, adapter: torch.dtype) -> None:
    for ranks in ((8, 0, 64), (16, 16), (0, 5)):
        for gated in (False, True) if len(ranks) == 2 else (False,):
            call, exact = made(
                FORMATS["nf4_b64_nested"],
                SHAPE,
                rows,
                torch.bfloat16,
                ranks=ranks,
                adapter=adapter,
                gated=gated,
                bias=rows == 3,
            )
            check(call, exact)


def test_layers_of_different_sizes_share_a_call() -> None:
    """As q, k and v: rows are dealt out to threads across their ends."""
    made_of = [
        made(FORMATS["nf4_b64"], (features, 4096), 2, torch.bfloat16, ranks=(4,))
        for features in (600, 7, 130)
    ]
    calls = [call for call, _ in made_of]
    first = calls[0]
    together = replace(
        first,
        weights=[call.weights[0] for call in calls],
        features=[call.features[0] for call in calls],
        biases=[None] * 3,
        adapters=[call.adapters[0] for call in calls],
    )
    assert all(torch.equal(call.x, first.x) for call in calls)  # one seed
    check(together, [exact[0] for _, exact in made_of])


def test_operands_and_inputs_that_are_not_contiguous() -> None:
    call, exact = made(FORMATS["nf4_b64_nested"], SHAPE, 4, torch.bfloat16, bias=True, ranks=(8,))
    [bias], [adapter] = call.biases, call.adapters
    assert bias is not None and adapter is not None
    a, b = adapter.a.t().contiguous().t(), adapter.b.t().contiguous().t()
    spread = replace(
        call,
        x=call.x.t().contiguous().t(),
        weights=[[torch.stack([t, t], -1)[..., 0] for t in call.weights[0]]],
        biases=[torch.stack([bias, bias], -1)[:, 0]],
        adapters=[Adapter(a, b, adapter.scaling)],
    )
    assert not (spread.x.is_contiguous() or a.is_contiguous() or b.is_contiguous())
    check(spread, exact)
    assert torch.equal(KERNEL.run(spread)[0], KERNEL.run(call)[0])
    y = ops.linear(spread.x.view(2, 2, -1), call.weights[0], call.fmt.name, SHAPE, bias)
    assert y.shape == (2, 2, SHAPE[0])


@pytest.mark.parametrize("storage", DTYPES, ids=str)
def test_scales_of_any_dtype(storage: torch.dtype) -> None:
    for fmt in FEW:
        call, _ = made(fmt, SHAPE, 2, torch.bfloat16)
        operands = [t.to(storage) if t.is_floating_point() else t for t in call.weights[0]]
        call = replace(call, weights=[operands])
        weight = ops.dequantize(operands, fmt.name, SHAPE, torch.float32)
        check(call, [call.x.double() @ weight.double().t()])


def test_what_the_kernel_refuses() -> None:
    call, _ = made(FORMATS["int4_g64"], (40, 320), 2, torch.bfloat16)
    assert not KERNEL.refuses(call) and served_by("linear_rows", call) == "cpp"
    many = replace(call, x=call.x.repeat(MOST_ROWS, 1))
    assert KERNEL.refuses(many) == f"{2 * MOST_ROWS} rows, more than {MOST_ROWS}"
    assert "x is torch.float64" in KERNEL.refuses(replace(call, x=call.x.double()))
    assert "runs on a CPU" in KERNEL.refuses(replace(call, x=call.x.to("meta")))
    whole = [Adapter(torch.ones(2, 320), torch.ones(40, 2).int(), 1.0)]
    assert "an adapter is torch.float32 and torch.int32" in KERNEL.refuses(
        replace(call, adapters=whole)
    )
    assert "packed neither as nibbles nor as" in KERNEL.unknown(FORMATS["int4_tiles_g32"])
    assert "have no table of at most 32 values" in KERNEL.unknown(FORMATS["hqq2_g64_fp16"])
    assert "does not know the scale of nf4_tensor" in KERNEL.unknown(FORMATS["nf4_tensor_b64"])
    assert KERNEL.unknown(None)


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The kernel compiled again, with `build.FLAGS` as the test sets them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "load", build.load.__wrapped__)
    yield
    linear_rows_cpp._function.cache_clear()


@pytest.mark.parametrize(
    "flags",
    [
        *[("-mno-amx-bf16",), ("-mno-avx512bf16",), ("-mno-gfni",)],
        *[("-mno-avx512f",), ("-mno-avx2", "-mno-avx512f")],
    ],
    ids=str,
)
def test_as_other_processors_run_it(
    flags: tuple[str, ...], rebuilt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vectors that this machine's own instruction set would hide."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the flags are x86's")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
    linear_rows_cpp._function.cache_clear()
    for fmt in (*FEW, *SMALL):
        for rows in (1, 3, 8):
            for dtype in DTYPES:
                check(*made(fmt, SHAPE, rows, dtype, ranks=(8,)))
    check(*made(FORMATS["nf4_b64"], (7, 33), 5, torch.float32))


def test_a_compiler_that_fails_is_the_reason(
    rebuilt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    linear_rows_cpp._function.cache_clear()
    call, _ = made(FORMATS["nf4_b64"], SHAPE, 1, torch.float32)
    assert "linear_rows.cpp was not built with /nonexistent/g++" in KERNEL.missing()
    assert served_by("linear_rows", call) == "reference"
