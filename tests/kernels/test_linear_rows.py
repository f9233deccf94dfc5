"""`qfuse::linear` of a few rows: the kernel that reads packed weights, the pass that calls it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q import ops, testing
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.formats.bnb import NF4
from inductor_q.kernels import PROVIDERS, linear_rows_cuda, linear_rows_reference, nibbles
from inductor_q.kernels.calls import LinearRows
from inductor_q.kernels.linear_rows_cuda import MOST_ROWS
from tests.support.compiling import compile_step, step
from tests.support.quantized import sample

NESTED = "nf4_b64_nested"
SERVED = [fmt for fmt in FORMATS.values() if not linear_rows_cuda.KERNEL.unknown(fmt)]
#: Rows that are no multiple of a tile, columns that are less and more than a stage and end in one.
SHAPES = ((16, 64), (40, 320), (24, 4096), (2100, 192), (17, 4160), (64, 11008), (33, 12288))


def made(
    fmt: QuantFormat,
    shape: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    bias: bool = False,
) -> tuple[LinearRows, Tensor]:
    """Make a call, and its result in float64."""
    operands, values = sample(fmt, shape)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, shape[1], generator=generator).to(dtype)
    added = torch.randn(shape[0], generator=generator).to(dtype) if bias else None
    exact = x.double() @ values.double().t()
    exact = exact + added.double() if added is not None else exact
    there = [operand.to(device) for operand in operands]
    added = None if added is None else added.to(device)
    return LinearRows(x.to(device), there, fmt, shape, added), exact.to(device)


def error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def test_formats_that_the_kernel_serves() -> None:
    names = {fmt.name for fmt in SERVED}
    assert {"nf4_b64", NESTED, "fp4_b128_nested", "nf4_b4096"} <= names
    assert not names & {"nf4_b32", "kbit4_e4m4"}


@pytest.mark.parametrize("rows", [0, 1, 3, MOST_ROWS])
def test_the_op_serves_any_number_of_rows(rows: int) -> None:
    call, exact = made(FORMATS[NESTED], (40, 320), rows, torch.bfloat16, bias=True)
    out = ops.linear(call.x, call.operands, NESTED, call.shape, call.bias)
    assert out.shape == (rows, 40) and out.is_contiguous()
    assert rows == 0 or error(out, exact) < 5e-3


def test_a_layer_without_columns_gives_its_bias() -> None:
    operands, _ = sample(FORMATS["nf4_b64"], (16, 0))
    bias = torch.arange(16.0)
    out = ops.linear(torch.empty(2, 3, 0), operands, "nf4_b64", (16, 0), bias)
    assert torch.equal(out, bias.expand(2, 3, 16))


@pytest.mark.gpu
def test_a_bias_that_the_kernel_cannot_read_is_left_to_torch() -> None:
    call, _ = made(FORMATS[NESTED], (40, 320), 2, torch.bfloat16, device="cuda")
    row = torch.randn(80, device="cuda").bfloat16()
    assert not linear_rows_cuda.KERNEL.refuses(replace(call, bias=row[:40]))
    for bias in (row[::2], row[:1]):
        assert "the bias is not 40" in linear_rows_cuda.KERNEL.refuses(replace(call, bias=bias))


def test_what_the_kernel_refuses() -> None:
    kernel, fmt = linear_rows_cuda.KERNEL, FORMATS[NESTED]
    call, _ = made(fmt, (40, 320), 2, torch.bfloat16)
    assert "runs on a GPU" in kernel.refuses(call)
    assert "not one scale for each 64" in kernel.unknown(FORMATS["nf4_b32"])
    assert "not packed as nibbles" in kernel.unknown(FORMATS["kbit4_e4m4"])
    assert kernel.unknown(None)


@pytest.mark.parametrize(("shared", "most"), [(99, 0), (163, 2), (227, 4)])
def test_which_devices_have_enough_shared_memory(shared: int, most: int) -> None:
    """What a block may have on an RTX 4090, an A100 and an H100, in kB."""
    strips = [
        n for n in linear_rows_cuda.STRIPS if linear_rows_cuda.shared_bytes(n) <= shared << 10
    ]
    assert max(strips, default=0) == most


def linear(device: str = "cpu", *, bias: bool = False) -> Any:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(128, 64, generator=generator).to(device, torch.bfloat16) * 0.1
    added = torch.randn(128, generator=generator).to(device, torch.bfloat16) if bias else None
    return testing.quantized_linear(weight, added).requires_grad_(False).eval()


def test_a_codebook_lies_on_the_cpu_whatever_device_is_the_default() -> None:
    """Inductor warms CUDA graphs up in their own memory, where nothing may stay."""
    nibbles.fit.cache_clear()
    with torch.device("meta"):
        values, _ = nibbles.fit(NF4.values, torch.bfloat16)
        assert linear_rows_cuda._codebook(FORMATS[NESTED], torch.float16)
    assert values.device.type == "cpu" and values._base is None


class Fake(linear_rows_reference.Reference):
    """The reference, under the name of a kernel that reads packed weights."""

    name = "packed"


@pytest.fixture
def a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PROVIDERS["linear_rows"]
    monkeypatch.setitem(PROVIDERS, "linear_rows", {**table, "cpu": (Fake(), *table["cpu"])})


@pytest.mark.usefixtures("a_kernel")
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_few_rows_of_inference_read_packed_weights(rows: int) -> None:
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", SERVED, ids=lambda fmt: fmt.name)
def test_the_kernel_against_float64(fmt: QuantFormat, dtype: torch.dtype) -> None:
    """No worse than a product with a rounded weight, and the same whatever other rows there are."""
    for shape in SHAPES if fmt.name in (NESTED, "nf4_b64") else SHAPES[1:3]:
        for rows in (1, 7, 8, 9, 16, 25, MOST_ROWS):
            call, exact = made(fmt, shape, rows, dtype, device="cuda", bias=rows % 2 == 0)
            assert not linear_rows_cuda.KERNEL.refuses(call)
            out = linear_rows_cuda.KERNEL.run(call)
            plain = linear_rows_reference.KERNEL.run(call)
            # With few scales, which rounding is closer is luck.
            assert error(out, exact) <= 1.25 * error(plain, exact), (shape, rows)
            assert torch.equal(out, linear_rows_cuda.KERNEL.run(call))
            if rows <= 8:
                last = replace(call, x=call.x[-1:])
                assert torch.equal(linear_rows_cuda.KERNEL.run(last)[0], out[-1])


@pytest.mark.gpu
def test_a_gpu_decodes_few_rows_in_a_graph() -> None:
    """Captured in a CUDA graph, with other weights of the same shape, through compiled code."""
    module = linear("cuda")
    run: Any = torch.compile(module, backend="qfuse", options={"triton.cudagraphs": True})
    with torch.no_grad():
        for seed in range(4):
            x = torch.randn(1, module.in_features, device="cuda").bfloat16() + seed
            torch.testing.assert_close(run(x).clone(), module(x), rtol=2e-2, atol=2e-2)
