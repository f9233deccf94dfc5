"""k-bit: the op's arithmetic, its codes and scales, and every way to decode them, bit for bit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q import exc, ops
from inductor_q.formats import FORMATS
from tests.quantized import DTYPES, assert_same_bits, e4m4_by_hand, pack_by_hand

KBITS = (2, 3, 4, 5)
ABSMAX = ("e4m4", "fp16")
CASES = list(itertools.product(KBITS, ABSMAX))
SIZES = (1, 31, 32, 33, 1000, 100000)


def codebook(k: int, kind: str = "normal") -> Tensor:
    n = 2**k
    if kind == "normal":
        grid = torch.linspace(0.5 / n, 1 - 0.5 / n, n, dtype=torch.float64)
        values: Tensor = torch.special.ndtri(grid)
        return (values / values.abs().max()).float()
    if kind == "asymmetric":
        return torch.linspace(-0.3, 1.0, n)
    if kind == "skewed":
        return torch.linspace(0.0, 1.0, n) ** 3
    assert kind == "duplicates", kind
    return torch.linspace(-1.0, 1.0, n // 2).repeat_interleave(2)


KINDS = ("normal", "asymmetric", "skewed", "duplicates")


def weight(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 0.02).to(dtype)


def by_hand(x: Tensor, book: Tensor, k: int, absmax: str) -> tuple[Tensor, Tensor]:
    """The docstring of `quantize_kbit`, an element and a comparison at a time."""
    table = torch.tensor([e4m4_by_hand(code) for code in range(256)])
    mids = [(a + b) * 0.5 for a, b in itertools.pairwise(book)]
    blocks = list(x.float().split(32))
    encoded, codes = [], torch.zeros(len(blocks), 32, dtype=torch.int64)
    for b, block in enumerate(blocks):
        largest = block.abs().max()
        if absmax == "e4m4":
            distance = (table.double() - largest.double()).abs()
            nearest = (distance == distance.min()).nonzero().flatten().tolist()
            code = min(nearest, key=lambda c: c % 2)  # ties to even
            encoded.append(torch.tensor(code, dtype=torch.uint8))
            scale = table[code]
        else:
            encoded.append(largest.half())
            scale = encoded[-1].float()
        value = block / scale if scale != 0 else torch.zeros_like(block)
        codes[b, : len(block)] = sum((value > mid).long() for mid in mids)
    return pack_by_hand(codes, k), torch.stack(encoded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "absmax"), CASES)
def test_op_does_what_its_docstring_says(k: int, absmax: str, kind: str) -> None:
    book = codebook(k, kind)
    for numel, dtype in itertools.product((1, 31, 32, 33, 1000), DTYPES):
        x = weight(numel, dtype)
        x[: numel // 8] = 0  # a block of zeros, in the larger ones
        actual = ops.quantize_kbit(x, book, k, absmax)
        for mine, expected in zip(actual, by_hand(x, book, k, absmax), strict=True):
            assert mine.dtype == expected.dtype
            assert torch.equal(mine, expected)


def test_large_tensors_are_quantized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, book = weight(1000), codebook(3)
    whole = ops.quantize_kbit(x, book, 3, "e4m4")
    monkeypatch.setattr(op_module(), "BLOCKS_AT_ONCE", 7)
    for part, expected in zip(ops.quantize_kbit(x, book, 3, "e4m4"), whole, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize(("k", "absmax"), CASES)
def test_round_trip_is_the_nearest_entry_times_the_scale(k: int, absmax: str) -> None:
    fmt, book = f"kbit{k}_{absmax}", codebook(k)
    for numel, dtype in itertools.product(SIZES, DTYPES):
        x = weight(numel, dtype)
        words, scales = ops.quantize_kbit(x, book, k, absmax)
        blocks = math.ceil(numel / 32)
        assert (words.shape, scales.shape) == ((blocks * k,), (blocks,))
        values = ops.dequantize([words, scales, book], fmt, [numel], torch.float32)
        scale = op_module().decode_e4m4(scales) if absmax == "e4m4" else scales.float()
        scale = scale.repeat_interleave(32)[:numel]
        nearest = (book * scale[:, None] - x.float()[:, None]).abs().amin(1)
        assert ((values - x.float()).abs() <= nearest * (1 + 1e-5) + 1e-9).all()
        for other in DTYPES:
            rounded = ops.dequantize([words, scales, book], fmt, [numel], other)
            assert_same_bits(rounded, values.to(other))


def op_module() -> Any:
    import sys

    return sys.modules["inductor_q.ops.quantize_kbit"]


def test_e4m4_table() -> None:
    decoded = op_module().decode_e4m4(torch.arange(256, dtype=torch.uint8))
    assert decoded.tolist() == [e4m4_by_hand(code) for code in range(256)]
    assert torch.equal(op_module().encode_e4m4(decoded).int(), torch.arange(256, dtype=torch.int32))


@pytest.mark.parametrize(("k", "absmax"), [(2, "e4m4"), (5, "fp16")])
def test_opcheck(k: int, absmax: str) -> None:
    x = weight(1000).requires_grad_()
    torch.library.opcheck(torch.ops.qfuse.quantize_kbit.default, (x, codebook(k), k, absmax))
    words, scales = ops.quantize_kbit(x, codebook(k), k, absmax)
    operands = [words, scales, codebook(k)]
    torch.library.opcheck(
        torch.ops.qfuse.dequantize.default,
        (operands, f"kbit{k}_{absmax}", [10, 100], torch.bfloat16),
    )


@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith("kbit")])
@pytest.mark.parametrize("backend", ["inductor", "qfuse"])
def test_compiled_equals_eager_bitwise(name: str, backend: str) -> None:
    from inductor_q import lowerings
    from inductor_q.backend import qfuse

    lowerings.register()  # else stock Inductor calls the op as it is
    k, absmax = int(name[4]), name[6:]
    book = codebook(k, "asymmetric")
    weights = [(n, [*ops.quantize_kbit(weight(n), book, k, absmax), book]) for n in SIZES]

    def every(operands: list[list[Tensor]]) -> list[Tensor]:
        return [
            ops.dequantize(o, name, [n], dtype)
            for o, (n, _) in zip(operands, weights, strict=True)
            for dtype in DTYPES
        ]

    operands = [o for _, o in weights]
    torch._dynamo.reset()
    compiled = torch.compile(every, backend=qfuse if backend == "qfuse" else "inductor")
    for actual, expected in zip(compiled(operands), every(operands), strict=True):
        assert_same_bits(actual, expected)


def test_wrong_arguments() -> None:
    x, book = weight(64), codebook(3)
    with pytest.raises(exc.UnsupportedBits, match="k=6 bits are not supported"):
        ops.quantize_kbit(x, book, 6, "e4m4")
    with pytest.raises(exc.UnknownAbsmax, match="'e4m3'; did you mean 'e4m4'"):
        ops.quantize_kbit(x, book, 3, "e4m3")
    with pytest.raises(exc.WrongShape, match="codebook of k=4 has shape"):
        ops.quantize_kbit(x, book, 4, "e4m4")
    with pytest.raises(exc.WrongDtype, match="codebook is"):
        ops.quantize_kbit(x, book.double(), 3, "e4m4")
    with pytest.raises(exc.WrongDtype, match="tensor to quantize is"):
        ops.quantize_kbit(x.double(), book, 3, "e4m4")
