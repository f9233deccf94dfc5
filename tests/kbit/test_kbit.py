"""k-bit: the op's arithmetic, its codes and scales, and every way to decode them, bit for bit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q import exc, kbit, lowerings, ops
from inductor_q.backend import qfuse
from inductor_q.kernels import quantize_kbit_reference
from tests.support.quantized import DTYPES, assert_same_bits, bnb, e4m4_by_hand, pack_by_hand

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
    monkeypatch.setattr(quantize_kbit_reference, "BLOCKS_AT_ONCE", 7)
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
        scale = kbit.decode_absmax_e4m4(scales) if absmax == "e4m4" else scales.float()
        scale = scale.repeat_interleave(32)[:numel]
        nearest = (book * scale[:, None] - x.float()[:, None]).abs().amin(1)
        assert ((values - x.float()).abs() <= nearest * (1 + 1e-5) + 1e-9).all()
        for other in DTYPES:
            rounded = ops.dequantize([words, scales, book], fmt, [numel], other)
            assert_same_bits(rounded, values.to(other))


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


COMPILED = [("inductor", f"kbit{k}_e4m4") for k in KBITS]
COMPILED += [("inductor", "kbit4_fp16"), ("qfuse", "kbit3_e4m4")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("backend", "name"), COMPILED)
def test_compiled_equals_eager_bitwise(backend: str, name: str, device: str) -> None:
    """Inductor's loops, whatever the sizes; one compile serves every codebook."""
    lowerings.register()  # else stock Inductor calls the op as it is
    k, absmax = int(name[4]), name[6:]
    calls = [(n, dtype) for n in SIZES for dtype in (DTYPES if n in (33, 100000) else DTYPES[:1])]

    def every(operands: list[list[Tensor]]) -> list[Tensor]:
        return [
            ops.dequantize(o, name, [n], dtype)
            for o, (n, dtype) in zip(operands, calls, strict=True)
        ]

    torch._dynamo.reset()
    compiled = torch.compile(every, backend=qfuse if backend == "qfuse" else backend)
    for kind in KINDS:
        book = codebook(k, kind).to(device)
        weights = [weight(n).to(device) for n, _ in calls]
        operands = [[*ops.quantize_kbit(w, book, k, absmax), book] for w in weights]
        for actual, expected in zip(compiled(operands), every(operands), strict=True):
            assert_same_bits(actual, expected)


def test_wrong_arguments_of_the_op() -> None:
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


# --- the public functions -----------------------------------------------------------------------


@pytest.mark.parametrize("k", KBITS)
def test_normal_float_codebook(k: int) -> None:
    """Against torch's own inverse of the normal distribution; symmetric; no zero; made once."""
    book = kbit.normal_float_codebook(k)
    torch.testing.assert_close(book, codebook(k), rtol=1e-6, atol=0)
    assert torch.equal(book, -book.flip(0))
    assert (book != 0).all()
    assert [book[0].item(), book[-1].item()] == [-1, 1]
    assert kbit.normal_float_codebook(k, torch.device("cpu")) is book


@pytest.mark.parametrize(("k", "absmax"), CASES)
def test_quantize_and_dequantize(k: int, absmax: str) -> None:
    for dtype, shape in itertools.product(DTYPES, ((5, 7), (64, 33), (3, 4, 8), (0, 4))):
        x = weight(math.prod(shape), dtype).reshape(shape)
        q = kbit.quantize(x, k, absmax=absmax)
        assert (q.k, q.format, q.shape, q.dtype) == (k, f"kbit{k}_{absmax}", shape, dtype)
        words, scales = ops.quantize_kbit(x, kbit.normal_float_codebook(k), k, absmax)
        assert torch.equal(q.qweight, words)
        assert torch.equal(q.absmax, scales)
        back = kbit.dequantize(q)
        assert (back.shape, back.dtype) == (x.shape, dtype)
        assert_same_bits(back, kbit.dequantize(q, torch.float32).to(dtype))


@pytest.mark.parametrize(("k", "absmax"), CASES)
def test_bits_per_element(k: int, absmax: str) -> None:
    q = kbit.quantize(weight(64 * 100).reshape(64, 100), k, absmax=absmax)
    assert q.bits_per_element == k + (0.25 if absmax == "e4m4" else 0.5)


def test_a_strided_tensor_is_quantized_row_by_row() -> None:
    x = weight(64 * 48).reshape(64, 48)
    for view in (x.t(), x[:, ::2], x.requires_grad_()):
        q = kbit.quantize(view, 4)
        assert torch.equal(q.qweight, kbit.quantize(view.detach().contiguous(), 4).qweight)
        assert not q.absmax.requires_grad


@pytest.mark.parametrize(
    ("book", "problem"),
    [
        (torch.linspace(-1, 1, 16), "its shape is (16,)"),
        (torch.linspace(-1, 1, 8).double(), "its dtype is torch.float64"),
        (torch.linspace(-1, 1, 8)[[0, 1, 2, 4, 3, 5, 6, 7]], "value 4 is smaller than value 3"),
        (torch.linspace(1, -1, 8), "value 1 is smaller than value 0"),
        (torch.tensor([*range(7), math.nan]), "a value is NaN or infinite"),
    ],
)
def test_wrong_codebook(book: Tensor, problem: str) -> None:
    with pytest.raises(exc.WrongCodebook) as error:
        kbit.quantize(weight(64), 3, book)
    assert str(error.value) == (
        f"codebook of k=3: {problem}. It takes 8 finite float32 values in ascending order "
        "(duplicates are allowed)"
    )


@pytest.mark.parametrize("k", [1, 6, 0, -3, 2.5, True, "4", None])
def test_wrong_k(k: Any) -> None:
    with pytest.raises(exc.UnsupportedBits, match="are not supported"):
        kbit.quantize(weight(64), k)
    with pytest.raises(exc.UnsupportedBits):
        kbit.normal_float_codebook(k)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite(bad: float, dtype: torch.dtype) -> None:
    x = weight(1000, dtype)
    x[777] = bad
    with pytest.raises(exc.NotFinite, match="my weight contains NaN or infinity"):
        kbit.quantize(x, 4, what="my weight")


def test_scales_out_of_range() -> None:
    """Never clipped or flushed in silence."""
    large, small = torch.full((32,), 31.1), torch.full((32,), 9e-4)
    for x, text in ((large, "reaches 31.1"), (-large, "reaches 31.1"), (small, "reaches 0.0009")):
        with pytest.raises(exc.ScaleOutOfRange, match=f"{text}, outside of the 0.000977 to 31 "):
            kbit.quantize(x, 4)
        back = kbit.dequantize(kbit.quantize(x, 4, absmax="fp16"))
        torch.testing.assert_close(back, x, rtol=1e-3, atol=0)
    with pytest.raises(exc.ScaleOutOfRange, match="reaches 7e"):
        kbit.quantize(torch.full((32,), 7e4), 4, absmax="fp16")
    assert (kbit.dequantize(kbit.quantize(torch.zeros(40), 4)) == 0).all()


@pytest.mark.parametrize(
    "change",
    [
        {"qweight": torch.zeros(5, dtype=torch.int32)},
        {"absmax": torch.zeros(3, dtype=torch.uint8)},
        {"qweight": torch.zeros(6, dtype=torch.int64)},
        {"shape": (65,)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_corrupt_tensor(change: dict[str, Any]) -> None:
    q = kbit.quantize(weight(64), 3)
    with pytest.raises(exc.CorruptQuantState, match="should be"):
        kbit.dequantize(replace(q, **change))


# --- E4M4 ---------------------------------------------------------------------------------------


def test_e4m4_table() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = kbit.decode_absmax_e4m4(codes)
    assert decoded.tolist() == [e4m4_by_hand(code) for code in range(256)]
    assert torch.equal(kbit.encode_absmax_e4m4(decoded), codes)
    assert [decoded[1].item(), decoded[255].item()] == [2.0**-14, 31.0]  # 6.1e-5


def test_e4m4_rounds_to_the_nearest() -> None:
    table = kbit.decode_absmax_e4m4(torch.arange(256, dtype=torch.uint8))
    middle = (table[1:] + table[:-1]) / 2
    codes = torch.arange(255)
    even = codes + codes % 2  # a tie goes to the even one of code and code + 1
    assert torch.equal(kbit.encode_absmax_e4m4(middle).long(), even)
    assert torch.equal(kbit.encode_absmax_e4m4(middle.nextafter(table[1:])).long(), codes + 1)
    assert torch.equal(kbit.encode_absmax_e4m4(middle.nextafter(table[:-1])).long(), codes)


@pytest.mark.parametrize("bad", [-1e-3, 31.5, math.nan, math.inf])
def test_e4m4_refuses(bad: float) -> None:
    with pytest.raises((exc.ScaleOutOfRange, exc.NotFinite), match="absmax"):
        kbit.encode_absmax_e4m4(torch.tensor([1.0, bad]))


def test_e4m4_error() -> None:
    """Over its normal range: mean relative error 1.1 %, 95th percentile 2.4 %."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(1 << 18, generator=generator) * (math.log2(31) + 10) - 10
    absmax = exponents.exp2()
    back = kbit.decode_absmax_e4m4(kbit.encode_absmax_e4m4(absmax))
    relative = ((back - absmax) / absmax).abs()
    assert relative.mean() == pytest.approx(0.0113, abs=2e-4)
    assert relative.quantile(0.95) == pytest.approx(0.0238, abs=3e-4)
    assert relative.max() <= 1 / 32


# --- quality ------------------------------------------------------------------------------------


def sqnr(x: Tensor, back: Tensor) -> float:
    x, back = x.double(), back.double()
    return float(10 * torch.log10(x.square().sum() / (x - back).square().sum()))


@pytest.fixture(scope="module")
def million() -> Tensor:
    return weight(1 << 20)


@pytest.mark.parametrize("absmax", ABSMAX)
@pytest.mark.parametrize("k", KBITS)
def test_error_of_every_element(million: Tensor, k: int, absmax: str) -> None:
    """At most half the widest gap of the codebook, and what rounding the scale may add to it."""
    for book in (kbit.normal_float_codebook(k), codebook(k, "skewed") * 2 - 1):
        back = kbit.dequantize(kbit.quantize(million, k, book, absmax))
        largest = million.reshape(-1, 32).abs().amax(1, keepdim=True)
        bound = (book.diff().max() / 2 + 1 / 16) * largest
        assert ((million - back).abs().reshape(-1, 32) <= bound).all()


def test_signal_to_noise(million: Tensor) -> None:
    """15 dB with three bits; four are no worse than plain NF4, with a quarter of a bit less; E4M4
    scales cost less than 0.07 dB against fp16."""
    found = {
        (k, absmax): sqnr(million, kbit.dequantize(kbit.quantize(million, k, absmax=absmax)))
        for k, absmax in CASES
    }
    expected = {2: 7.4, 3: 15.0, 4: 21.2, 5: 26.3}
    for k in KBITS:
        assert found[k, "e4m4"] == pytest.approx(expected[k], abs=0.1)
        assert 0 <= found[k, "fp16"] - found[k, "e4m4"] < 0.07
    packed, state = bnb.quantize_4bit(million, blocksize=64, quant_type="nf4")
    nf4 = sqnr(million, bnb.dequantize_4bit(packed, state))
    assert nf4 - 0.1 < found[4, "e4m4"]


@pytest.mark.parametrize("k", KBITS)
def test_rounding_scales_up_would_cost_more(million: Tensor, k: int) -> None:
    q = kbit.quantize(million, k)
    blocks = million.reshape(-1, 32)
    table = kbit.decode_absmax_e4m4(torch.arange(256, dtype=torch.uint8))
    up = table[torch.searchsorted(table, blocks.abs().amax(1))][:, None]
    mids = (q.codebook[1:] + q.codebook[:-1]) * 0.5
    back = q.codebook[torch.bucketize(blocks / up, mids)] * up
    loss = sqnr(million, kbit.dequantize(q)) - sqnr(blocks, back)
    assert 0.1 < loss < 0.25
