"""Make real quantized weights for tests, bitsandbytes' and our k-bit ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import bitsandbytes
import bitsandbytes.functional
import pytest
import torch
from torch import Tensor

from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.decode.eager import Eager
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.formats.bnb import BNB_FORMATS
from inductor_q.formats.kbit import KBIT_FORMATS
from inductor_q.kernels.dequantize import PREPARED
from inductor_q.log import warn_once
from tests.support import formulas

bnb: Any = bitsandbytes.functional  # as shipped, it is typed in parts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANT_TYPES = ("nf4", "fp4")

AT_LEAST_0_50 = tuple(map(int, bitsandbytes.__version__.split(".")[:2])) >= (0, 50)
needs_0_50 = pytest.mark.skipif(
    not AT_LEAST_0_50,
    reason="bitsandbytes < 0.50 on a CPU: no odd sizes, tables rounded before the product",
)
packs_on_cpu = pytest.mark.skipif(
    not getattr(bnb, "has_avx512bf16", lambda: False)(),
    reason="bitsandbytes packs weights anew only on a CPU with AVX512-BF16",
)
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")


@dataclass(frozen=True)
class Quantized:
    """Hold a weight before and after `quantize_4bit`."""

    original: Tensor
    packed: Tensor
    state: Any

    @property
    def operands(self) -> tuple[list[Tensor], str, list[int]]:
        return bnb_operands(self.packed, self.state)


def quantize(
    shape: Sequence[int],
    quant_type: str = "nf4",
    *,
    blocksize: int = 64,
    nested: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    storage: torch.dtype = torch.uint8,
    device: str = "cpu",
    seed: int = 0,
) -> Quantized:
    """Quantize a seeded normal weight of `shape` with bitsandbytes."""
    generator = torch.Generator().manual_seed(seed)
    original = (torch.randn(tuple(shape), generator=generator) * 0.02).to(device, dtype)
    packed, state = bnb.quantize_4bit(
        original,
        blocksize=blocksize,
        quant_type=quant_type,
        compress_statistics=nested,
        quant_storage=storage,
    )
    return Quantized(original, packed, state)


def random_weight(name: str, shape: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Make random operands in any format; values are finite, none is larger than 2**7."""
    fmt = FORMATS[name]
    operands = fmt.sample(shape, torch.Generator().manual_seed(seed))
    found = dict(zip(fmt.operands, operands, strict=True))
    if "fp8" in name:
        found["qweight"] &= 0xBF  # no NaN, no infinity
    if name.startswith("mx"):
        found["scale"] = 124 + found["scale"] % 4
    if name.startswith("nvfp4"):
        found["scale"] = 0x28 + found["scale"] % 24
    return list(found.values())


def by_table(packed: Tensor, state: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the weight from bitsandbytes' published table and scales: blocks run through the
    rows.

    Its CUDA kernel and its generic implementation compute this, at any row length.
    """
    absmax = state.absmax
    if state.nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    in_bytes = packed.reshape(-1).view(torch.uint8).int()
    codes = torch.stack([in_bytes >> 4, in_bytes & 15], -1).flatten()[: state.shape.numel()]
    table: Tensor = bnb.get_4bit_type(state.quant_type, device=packed.device)
    scale: Tensor = absmax.float().repeat_interleave(state.blocksize)[: codes.numel()]
    return (table[codes] * scale).reshape(state.shape).to(dtype or state.dtype)


def sample(
    fmt: QuantFormat, shape: Sequence[int], *, storage: torch.dtype = torch.uint8, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Make operands of a weight in `fmt`, and its float32 values by another way than `decode`.

    Where no formula is written for a format, the values are the reference's.
    """
    return SAMPLES.get(fmt, sample_any)(fmt, shape, storage, seed)


def sample_bnb(
    fmt: QuantFormat, shape: Sequence[int], storage: torch.dtype, seed: int
) -> tuple[list[Tensor], Tensor]:
    """Let bitsandbytes quantize a normal weight."""
    assert fmt.blockwise is not None
    w = quantize(
        shape,
        fmt.name.partition("_")[0],
        blocksize=fmt.blockwise.block,
        nested=fmt.blockwise.outer > 0,
        storage=storage,
        seed=seed,
    )
    operands, name, _ = w.operands
    assert name == fmt.name
    return operands, by_table(w.packed, w.state, torch.float32)


def sample_kbit(
    fmt: QuantFormat, shape: Sequence[int], storage: torch.dtype, seed: int
) -> tuple[list[Tensor], Tensor]:
    """Draw random codes under random scales and a skewed codebook."""
    k, numel = fmt.planes, math.prod(shape)
    blocks = -(-numel // 32)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**k, (blocks, 32), generator=generator)
    codes.reshape(-1)[numel:] = 0
    codebook = torch.rand(2**k, generator=generator).sort().values * 1.5 - 0.5
    if fmt.name.endswith("e4m4"):
        absmax = torch.randint(256, (blocks,), generator=generator).to(torch.uint8)
        scale = torch.tensor([e4m4_by_hand(code) for code in absmax.tolist()])
    else:
        absmax = torch.rand(blocks, generator=generator).to(torch.float16)
        scale = absmax.float()
    values = (codebook[codes] * scale[:, None]).reshape(-1)[:numel].reshape(tuple(shape))
    return [pack_by_hand(codes, k), absmax, codebook], values


def sample_any(
    fmt: QuantFormat, shape: Sequence[int], storage: torch.dtype, seed: int
) -> tuple[list[Tensor], Tensor]:
    """Draw random operands."""
    operands = fmt.sample(shape, torch.Generator().manual_seed(seed))
    if fmt.name in formulas.FORMULAS:
        values = formulas.values(fmt.name, operands, shape)
    else:
        named = dict(zip(fmt.operands, operands, strict=True))
        index = torch.arange(math.prod(shape))
        values = fmt.decode(Eager(named, shape[-1], math.prod(shape[:-1])), index).reshape(
            tuple(shape)
        )
    missing = -operands[0].nbytes % storage.itemsize
    in_bytes = torch.nn.functional.pad(operands[0].reshape(-1).view(torch.uint8), (0, missing))
    if not fmt.requirements(shape)[0].dtypes:  # bytes, stored in any dtype
        operands[0] = in_bytes.view(storage)
    return operands, values


#: The function that `sample` calls for the formats of a family.
SAMPLES: dict[QuantFormat, Callable[..., tuple[list[Tensor], Tensor]]] = {
    **dict.fromkeys(BNB_FORMATS, sample_bnb),
    **dict.fromkeys(KBIT_FORMATS, sample_kbit),
}


def e4m4_by_hand(code: int) -> float:
    e, m = code >> 4, code & 15
    return 2.0 ** (e - 11) * (1 + m / 16) if e else 2.0**-10 * (m / 16)


def pack_by_hand(codes: Tensor, k: int) -> Tensor:
    """Make bit planes of codes [blocks, 32], one Python integer per word."""
    words = [
        sum(((code >> p) & 1) << j for j, code in enumerate(block))
        for block in codes.tolist()
        for p in range(k)
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns of `x` with one pattern for all NaNs: -0.0 differs from 0.0."""
    nan = torch.full((), float("nan"), dtype=x.dtype, device=x.device)
    return torch.where(x.isnan(), nan, x).view({2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_as_native(actual: Tensor, packed: Tensor, state: Any) -> None:
    """Assert the values of bitsandbytes' native kernel, rounded to nearest, ties to even.

    Its kernels differ among themselves in two things, and in nothing else: the sign of the zero
    that fp4's code 8 is, and float16 on a CPU: the CUDA builds of its library (0.50.2) hold no
    AVX-512 code, and their scalar conversion rounds a tie away from zero.
    """
    exact = bnb.dequantize_4bit(packed, replace_dtype(state, torch.float32))
    assert_same_bits(actual + 0.0, exact.to(state.dtype) + 0.0)
    native = bnb.dequantize_4bit(packed, state)
    if state.dtype == torch.float16:
        differ = native != actual
        tie = (native.float() - exact).abs() == (actual.float() - exact).abs()
        assert (tie & (native.abs() > actual.abs()))[differ].all()
    else:
        assert_same_bits(actual + 0.0, native + 0.0)


def replace_dtype(state: Any, dtype: torch.dtype) -> Any:
    """Return a quant state that decodes to another dtype."""
    other = copy.copy(state)
    other.dtype = dtype
    return other


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    differ = bits(actual.contiguous()) != bits(expected.contiguous())
    assert not differ.any(), (
        f"{int(differ.sum())} of {differ.numel()} values differ, the first at "
        f"{differ.nonzero()[0].tolist()}: {actual[differ][0]!r}, expected {expected[differ][0]!r}"
    )


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Start as a new process does, with no kernel tried and no warning given.

    Returns what is prepared from now on.
    """
    launches: dict[Any, Any] = {}
    warn_once.cache_clear()
    monkeypatch.setattr(PREPARED, "launches", launches)
    monkeypatch.setattr(PREPARED, "checked", set())
    return launches
