"""Casts, scales and products in eight bits, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from inductor_q.formats import FORMATS
from inductor_q.kernels import rounding
from inductor_q.ops import eight_bits
from inductor_q.ops.registry import define_ops
from tests.support.quantized import quantize, sample

define_ops()
QFUSE = torch.ops.qfuse
FP8, INT8 = rounding.DTYPES["fp8"], rounding.DTYPES["int8"]
DTYPES = pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_magnitude_of_a_row(name: str) -> None:
    """It is a bound, and tight where blocks lie within a row and have their scale as a value."""
    operands, values = sample(FORMATS[name], (24, 128))
    bound = QFUSE.row_amax(operands, name, [24, 128])
    exact = values.abs().amax(1)
    assert (bound >= exact).all() or bound.isnan().any()
    if name in ("nf4_b32", "nf4_b64", "nf4_b128", "int8_row"):
        torch.testing.assert_close(bound, exact, rtol=1e-6, atol=0)


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["nf4_b64_nested", "nf4_b64", "kbit3_e4m4", "int8_row"])
def test_a_weight_in_eight_bits(name: str, transposed: bool, dtype: torch.dtype) -> None:
    shape = [48, 128]
    operands, values = sample(FORMATS[name], shape)
    scale = rounding.to_scale(QFUSE.row_amax(operands, name, shape), dtype)
    codes = QFUSE.requantize(operands, scale, name, shape, dtype, transposed)
    assert codes.is_contiguous()
    assert codes.dtype is dtype
    decoded = (codes.t() if transposed else codes).float() * scale[:, None]
    # Half a step of three bits of mantissa, or of a 127th of the row.
    step = values.abs() / 16 + scale[:, None] / 512 if dtype is FP8 else scale[:, None] / 2
    assert ((decoded - values).abs() <= step * 1.001).all()


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["nf4_b64_nested", "kbit3_e4m4", "fp4_b64"])
def test_several_weights_at_once(name: str, transposed: bool, dtype: torch.dtype) -> None:
    """They lie below each other or, transposed, side by side; each as it is by itself."""
    rows, operands, scales, alone = [48, 16], [], [], []
    for n in rows:
        given, values = sample(FORMATS[name], (n, 128), seed=n)
        scales.append(rounding.to_scale(values.abs().amax(1), dtype))
        alone.append(QFUSE.requantize(given, scales[-1], name, [n, 128], dtype, transposed))
        operands += given
    args = (operands, torch.cat(scales), name, [64, 128], dtype, transposed, rows)
    opcheck(QFUSE.requantize.default, args)
    expected = torch.cat([codes.view(torch.uint8) for codes in alone], int(transposed))
    torch._dynamo.reset()
    together = torch.compile(QFUSE.requantize.default, backend="qfuse", fullgraph=True)
    for found in (QFUSE.requantize(*args), together(*args)):
        assert torch.equal(found.view(torch.uint8), expected)


@pytest.mark.parametrize("name", ["nf4_b64_nested", "kbit3_e4m4", "fp4_b64", "int4_g32"])
def test_rows_of_several_weights_at_once(name: str) -> None:
    """One kernel finds for each row what it is in its own weight."""
    rows, columns = [48, 8, 24], 1024
    given = [sample(FORMATS[name], (n, columns), seed=n)[0] for n in rows]
    alone = [QFUSE.row_amax(o, name, [n, columns]) for o, n in zip(given, rows, strict=True)]
    args = ([o for operands in given for o in operands], name, [80, columns], rows)
    opcheck(QFUSE.row_amax.default, args)
    torch._dynamo.reset()
    together = torch.compile(QFUSE.row_amax.default, backend="qfuse", fullgraph=True)
    for found in (QFUSE.row_amax(*args), together(*args)):
        assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("transposed", [False, True])
def test_generated_code_calls_a_kernel_for_several_weights(transposed: bool) -> None:
    """It says what it knows of them; they are written into the tensors of each call."""
    name, rows, shape = "nf4_b64", [48, 16], [64, 128]
    given = [t for n in rows for t in sample(FORMATS[name], (n, 128))[0]]

    def call(scale: Tensor) -> Tensor:
        result: Tensor = QFUSE.requantize(given, scale.exp(), name, shape, INT8, transposed, rows)
        return result

    torch._dynamo.reset()
    options: Any = {"qfuse.kernels": {"requantize": "reference"}}
    with config.patch(fx_graph_cache=False):
        compiled = torch.compile(call, backend="qfuse", options=options, fullgraph=True)
        found, (code,) = run_and_get_code(compiled, torch.zeros(64))
    text = f"requantize: '{name}', {transposed}, {rows}, 'reference'; cpu: uint8 [3072, 1]"
    assert f'kind="{text}' in code
    assert torch.equal(found, call(torch.zeros(64)))
    for seed in range(3):
        given[:] = [t for n in rows for t in sample(FORMATS[name], (n, 128), seed=seed)[0]]
        scale = normal(64, seed=seed)
        assert torch.equal(compiled(scale), call(scale))


STORED = {"fp8_e4m3_row": FP8, "fp8_e4m3_tensor": FP8, "int8_absmax": INT8}


@pytest.mark.parametrize("name", STORED)
def test_a_weight_that_is_stored_in_eight_bits(name: str) -> None:
    """Its codes and the scales of its rows are its values, bit for bit."""
    operands, values = sample(FORMATS[name], (24, 128))
    opcheck(QFUSE.row_scale.default, (operands, name, [24, 128]))
    place = FORMATS[name].operands.index("qweight")
    operands[place] = codes = operands[place].view(STORED[name]).view(24, 128)
    assert eight_bits.stored_codes(operands, name, [24, 128], STORED[name]) == place
    scale = QFUSE.row_scale(operands, name, [24, 128])
    torch.testing.assert_close(
        codes.float() * scale[:, None], values, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", ["fp8_e4m3_row", "int8_absmax"])
def test_a_scale_may_be_zero_or_negative(name: str) -> None:
    operands, _ = sample(FORMATS[name], (24, 128))
    place = FORMATS[name].operands.index("qweight")
    (given,) = (operand for i, operand in enumerate(operands) if i != place)
    given[3], given[5] = 0, -given[5].abs()
    values = QFUSE.dequantize(operands, name, [24, 128], torch.float32)
    codes = operands[place].view(STORED[name]).view(24, 128)
    scale = QFUSE.row_scale(operands, name, [24, 128])
    assert scale[3] == 0
    assert scale[5] < 0
    torch.testing.assert_close(
        codes.float() * scale[:, None], values, rtol=0, atol=0, equal_nan=True
    )


@DTYPES
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.in_bytes])
def test_which_formats_are_stored_so(name: str, dtype: torch.dtype) -> None:
    shape = (24, 256)  # so wide that a row has several groups of any format
    operands, _ = sample(FORMATS[name], shape)
    place = FORMATS[name].operands.index("qweight")

    def found(codes: Tensor) -> int | None:
        operands[place] = codes
        return eight_bits.stored_codes(operands, name, shape, dtype)

    flat = operands[place].view(torch.uint8).flatten()
    codes = flat.view(dtype).view(shape)
    expected = place if STORED.get(name) is dtype else None
    assert found(codes) == found(flat) == found(flat.view(48, 128)) == expected
    assert found(flat.view(torch.int32)) is None
    assert found(codes.t().contiguous().t()) is None


@DTYPES
def test_opcheck(dtype: torch.dtype) -> None:
    operands, name, shape = quantize((48, 64)).operands
    opcheck(QFUSE.row_amax.default, (operands, name, shape))
    scale = torch.rand(48) + 0.1
    for transposed in (False, True):
        opcheck(QFUSE.requantize.default, (operands, scale, name, shape, dtype, transposed))


@DTYPES
def test_rows_of_any_magnitude(dtype: torch.dtype) -> None:
    """Zero, a gradient without loss scaling, an outlier: no row becomes infinite or NaN."""
    magnitudes = torch.tensor([0.0, 1e-12, 1.0, 1e30])[:, None]
    codes, scale = rounding.cast_rows(normal(4, 64) * magnitudes, dtype)
    assert codes.float().isfinite().all()
    assert scale.shape == (4, 1)
    assert (codes[0] == 0).all()
    largest = codes.float().abs().amax(1)[1:]
    assert (largest == rounding.LARGEST[dtype]).all()


@pytest.mark.parametrize(("dtype", "most"), [(FP8, 0.045), (INT8, 0.015)], ids=["fp8", "int8"])
def test_error_of_products(dtype: torch.dtype, most: float) -> None:
    """Two e4m3 casts, each with a relative error of 2 to 3 %, give one of 3 to 4.5 %."""
    x, w, grad = normal(64, 256), normal(128, 256, seed=1) * 0.02, normal(64, 128, seed=2)
    (a, of_a), (b, of_b) = rounding.cast_rows(x, dtype), rounding.cast_rows(w, dtype)
    y = eight_bits.scaled_product(a, b.t(), of_a, of_b.t(), torch.bfloat16)
    assert most / 3 < error(y, x.double() @ w.double().t()) < most
    # The weight's scales are along what is contracted now: they are in the gradient's cast.
    g, of_g = rounding.cast_rows(grad, dtype, of_b.squeeze(1))
    dx = eight_bits.scaled_product(g, b, of_g, None, torch.bfloat16)
    assert most / 3 < error(dx, grad.double() @ w.double()) < most
