"""What `formats/encode.py` writes: bitwise what libraries write, and else the nearest numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q import exc, ops
from inductor_q.formats import FORMATS, encode
from inductor_q.formats.encode import ENCODED
from inductor_q.formats.minifloat import E4M3, E5M2
from tests.support import formulas

BF16 = torch.bfloat16
NAMES = [fmt.name for fmt in ENCODED]


def written(weight: Tensor, name: str) -> list[Tensor]:
    return encode.encode(weight, FORMATS[name])


def weights(dtype: torch.dtype) -> Tensor:
    """Rows of every size, a row and a block of zeros, subnormal numbers, and every tie of E2M1."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-30, 30, 96).unsqueeze(1)
    w = (torch.randn(96, 256, generator=generator) * sizes).to(dtype)
    ties = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    w[3], w[4, :32], w[5], w[7, 64:96] = 0, 1e-39, 6, 0
    w[6, :16], w[6, 16:] = ties, -ties.repeat(15)
    return w


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("mxfp4", torch.float4_e2m1fn_x2),
        ("mxfp8_e4m3", torch.float8_e4m3fn),
        ("mxfp8_e5m2", torch.float8_e5m2),
    ],
)
def test_mx_is_bitwise_torchaos(name: str, number: torch.dtype, dtype: torch.dtype) -> None:
    mx: Any = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    scale, codes = mx.to_mx(weights(dtype), number, 32, mx.ScaleCalculationMode.FLOOR)
    found = written(weights(dtype), name)
    assert torch.equal(found[0], codes.view(torch.uint8).flatten())
    assert torch.equal(found[1], scale.view(torch.uint8).flatten())


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_nvfp4_is_bitwise_torchaos(dtype: torch.dtype) -> None:
    nvfp4: Any = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    w = torch.randn(48, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    w[5, 16:64] = 0
    for name, parts in (("nvfp4", [w]), ("nvfp4_rows", [row.unsqueeze(0) for row in w])):
        whole = [nvfp4.per_tensor_amax_to_scale(part.abs().amax()) for part in parts]
        expected = [
            nvfp4.nvfp4_quantize(part, 16, own) for part, own in zip(parts, whole, strict=True)
        ]
        codes, scale, global_scale = written(w, name)
        assert torch.equal(codes, torch.cat([c.flatten() for _, c in expected]))
        assert torch.equal(scale, torch.cat([s.view(torch.uint8).flatten() for s, _ in expected]))
        assert torch.equal(global_scale, torch.stack(whole))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_fp8_in_tiles_is_bitwise_transformers(dtype: torch.dtype) -> None:
    fp8: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
    w = torch.randn(3, 256, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    w[0, :128, :128] = 0
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    quantizer = fp8.Fp8Quantize(SimpleNamespace(quantization_config=config))
    expected = quantizer.convert({"a.weight": w})
    codes, scale = written(w, "fp8_e4m3_128x128")
    assert torch.equal(codes, expected["a.weight"].view(torch.uint8).flatten())
    assert torch.equal(scale, expected["a.weight_scale_inv"].flatten())


def table(name: str) -> Tensor:
    """The finite numbers of a format's codes."""
    number: Any = FORMATS[name].codec
    found = {E4M3: formulas.E4M3, E5M2: formulas.E5M2}.get(number, formulas.E2M1)
    return found.masked_select(found.isfinite())


def scales(name: str, operands: list[Tensor], shape: tuple[int, int]) -> Tensor:
    """The scale of each element, which is what the code of 1 decodes to."""
    number: Any = FORMATS[name].codec
    one = {E4M3: 0x38, E5M2: 0x3C}.get(number, 0x22)
    codes = torch.full_like(operands[0], one)
    return ops.dequantize([codes, *operands[1:]], name, shape, torch.float32).double()


@pytest.mark.parametrize("name", NAMES)
def test_each_number_is_the_nearest(name: str) -> None:
    """No other code under the same scale is nearer, in rows that do not fill their blocks too."""
    for shape in ((11, 150), (3, 33), (1, 1)):
        w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        operands = written(w, name)
        decoded = ops.dequantize(operands, name, shape, torch.float32).double()
        scale = scales(name, operands, shape)
        nearest = ((w.double() / scale).unsqueeze(-1) - table(name)).abs().amin(-1) * scale
        # Quotients and products of float32 are rounded, next to the values' own size.
        assert ((decoded - w).abs() <= nearest + 1e-6 * w.abs()).all()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_the_format_stay_what_they_are(name: str) -> None:
    values = table(name).float()
    w = values.repeat(-(-512 // len(values)))[:512].repeat(2, 1) * 2
    w[:, ::16] = values.max() * 2  # so that each block has the largest number
    found = ops.dequantize(written(w, name), name, w.shape, torch.float32)
    # NVFP4's and FP8's scales are quotients of the largest number, which float32 rounds.
    assert torch.allclose(found, w, rtol=0 if name.startswith("mx") else 3e-7, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_slabs_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(300, 32, generator=torch.Generator().manual_seed(0))
    expected = written(w, name)
    monkeypatch.setattr(encode, "_SLAB", 4096)  # of 128 rows
    for found, other in zip(written(w, name), expected, strict=True):
        assert torch.equal(found, other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number(name: str, value: float) -> None:
    w = torch.ones(4, 32)
    w[2, 3] = value
    with pytest.raises(exc.NotFinite, match="the weight contains NaN"):
        written(w, name)
