"""k-bit on a GPU: CUDA and Triton write what the reference says, wherever the values lie."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import kbit, ops
from inductor_q.backend import qfuse
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.formats.codec import Codebook, Number, Table
from inductor_q.formats.minifloat import E4M4
from inductor_q.formats.packing import BitPlanes, BytePacking
from inductor_q.formats.scale import BlockScale
from inductor_q.kernels import PROVIDERS, Provider, dequantize_cuda, dequantize_reference
from inductor_q.kernels.calls import Dequantize, QuantizeKbit
from inductor_q.kernels.dequantize import DEQUANTIZE
from inductor_q.kernels.provider import DequantizeProvider
from inductor_q.kernels.quantize_kbit_reference import pack, reference
from tests.kbit.test_kbit import ABSMAX, CASES, KBITS, KINDS, SIZES, codebook, weight
from tests.support.quantized import DTYPES, assert_same_bits, forget_kernels, sample, two_devices

CUDA = dequantize_cuda.KERNEL
DECODERS = [pytest.param(k, id=k.name) for k in DEQUANTIZE["cuda"][:-1]]
ENCODERS = [pytest.param(k, id=k.name) for k in PROVIDERS["quantize_kbit"]["cuda"][:-1]]


# --- what the CUDA kernel refuses ---------------------------------------------------------------

_E4M4 = BlockScale("absmax", 32, E4M4)
_FP16 = BlockScale("absmax", 32, Number(("float16",)))
_E5M3 = replace(E4M4, exponent_bits=5, mantissa_bits=3, bias=7)


def _format(**parts: Any) -> QuantFormat:
    whole = {"packing": BitPlanes(4), "codec": Table("codebook", 16), "shared": (_E4M4,)}
    return QuantFormat(name="mine", **{**whole, **parts})


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        (_format(), ""),
        (_format(shared=(_FP16,)), ""),
        (FORMATS["nf4_b64"], "decodes 2 to 5 bit planes, nf4_b64 has another packing"),
        (
            _format(packing=BitPlanes(6), codec=Table("codebook", 64)),
            "decodes 2 to 5 bit planes, mine has another packing",
        ),
        (
            _format(codec=Codebook((0.0,) * 16)),
            "takes the codebook as an operand, mine has none",
        ),
        (_format(shared=(BlockScale("absmax", 32),)), "does not know the scale of mine"),
        (_format(shared=(BlockScale("absmax", 32, _E5M3),)), "does not know the scale of mine"),
        (_format(shared=(BlockScale("absmax", 64, E4M4),)), "does not know the scale of mine"),
    ],
)
def test_cuda_knows(fmt: QuantFormat, reason: str) -> None:
    assert CUDA.unknown(fmt) == (reason and f"csrc/kbit.cu {reason}")


def test_cuda_knows_what_the_registry_calls_kbit() -> None:
    known = {name for name, fmt in FORMATS.items() if not CUDA.unknown(fmt)}
    assert known == {f"kbit{k}_{absmax}" for k, absmax in CASES}
    assert not any(isinstance(FORMATS[name].packing, BytePacking) for name in known)


def test_cuda_refuses_what_is_not_on_a_gpu() -> None:
    fmt = FORMATS["kbit3_e4m4"]
    operands, _ = sample(fmt, (4, 64))
    assert CUDA.refuses(Dequantize(operands, fmt, torch.empty(4, 64))) == (
        "the CUDA kernel runs on a GPU, not on cpu"
    )
    x, book = torch.empty(4, 64), codebook(3)
    assert PROVIDERS["quantize_kbit"]["cuda"][0].refuses(QuantizeKbit(x, book, 3, "e4m4")) == (
        "the CUDA kernel runs on a GPU, not on cpu"
    )


@functools.cache
def random_weight(fmt: QuantFormat, numel: int) -> list[Tensor]:
    """Operands with any code under any scale, and a skewed codebook."""
    generator = torch.Generator().manual_seed(numel)
    k, blocks = fmt.packing.bits, -(-numel // 32)
    qweight = pack(torch.randint(2**k, (blocks, 32), generator=generator), k)
    absmax = torch.randint(256, (blocks,), generator=generator).to(torch.uint8)
    if fmt.name.endswith("fp16"):
        absmax = torch.randn(blocks, generator=generator).exp().to(torch.float16)
    return [qweight, absmax, torch.rand(2**k, generator=generator).sort().values * 1.5 - 0.5]


# --- dequantize ---------------------------------------------------------------------------------


def check_dequantize(
    kernel: DequantizeProvider,
    operands: list[Tensor],
    fmt: QuantFormat,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    extra: int = 0,
    shift: int = 0,
) -> None:
    """`kernel` against the reference on the CPU, into rows of a matrix `extra` columns wider that
    begins `shift` elements into its storage.
    """
    rows, cols = shape
    expected = torch.empty(shape, dtype=dtype)
    dequantize_reference.KERNEL.run(Dequantize(operands, fmt, expected))
    storage = torch.full((shift + rows * (cols + extra),), 7.0, dtype=dtype, device="cuda")
    wide = storage[shift:].view(rows, cols + extra)
    out = wide[:, :cols]
    moved = [t.cuda() for t in operands]
    assert kernel.refuses(Dequantize(moved, fmt, out)) == ""
    kernel.run(Dequantize(moved, fmt, out))
    assert_same_bits(out.cpu(), expected)
    assert (wide[:, cols:] == 7.0).all(), "wrote beside its columns"
    assert (storage[:shift] == 7.0).all(), "wrote before its rows"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", DECODERS)
@pytest.mark.parametrize(("k", "absmax"), CASES)
def test_gpu_dequantize_sizes(k: int, absmax: str, kernel: DequantizeProvider) -> None:
    fmt = FORMATS[f"kbit{k}_{absmax}"]
    for numel, dtype in itertools.product((*SIZES, 1023, 1024, 1025, 8192 + 40), DTYPES):
        operands = random_weight(fmt, numel)
        for shape in ((1, numel), (numel, 1)):
            check_dequantize(kernel, operands, fmt, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", DECODERS)
@pytest.mark.parametrize("k", KBITS)
def test_gpu_dequantize_into_rows(k: int, kernel: DequantizeProvider) -> None:
    """Rows that vectors fit or straddle, wide rows, storage that is not aligned."""
    fmt = FORMATS[f"kbit{k}_e4m4"]
    shapes = [(9, 1024), (40, 72), (7, 8), (33, 20), (5, 7), (64, 33), (3, 4096)]
    for (rows, cols), dtype in itertools.product(shapes, DTYPES):
        operands = random_weight(fmt, rows * cols)
        for extra, shift in ((0, 0), (64, 0), (8, 0), (4, 0), (3, 0), (0, 1), (8, 8), (64, 3)):
            check_dequantize(kernel, operands, fmt, (rows, cols), dtype, extra=extra, shift=shift)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", DECODERS)
def test_gpu_dequantize_misaligned_operands(kernel: DequantizeProvider) -> None:
    for (k, absmax), dtype in itertools.product(CASES, DTYPES):
        fmt = FORMATS[f"kbit{k}_{absmax}"]
        qweight, scale, book = random_weight(fmt, 40 * 64)
        moved = []
        for t in (qweight, scale, book):
            storage = torch.zeros(t.numel() + 1, dtype=t.dtype, device="cuda")
            storage[1:] = t.cuda()
            moved.append(storage[1:])
        out = torch.empty(40, 64, dtype=dtype, device="cuda")
        kernel.run(Dequantize(moved, fmt, out))
        expected = torch.empty(40, 64, dtype=dtype)
        dequantize_reference.KERNEL.run(Dequantize([qweight, scale, book], fmt, expected))
        assert_same_bits(out.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", DECODERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_every_code_under_every_scale(dtype: torch.dtype, kernel: DequantizeProvider) -> None:
    """32 codes x 256 E4M4 scales, with values that round, overflow and are denormal."""
    fmt = FORMATS["kbit5_e4m4"]
    codes = torch.arange(32).expand(256, 32)
    planes = [(codes >> p & 1) << torch.arange(32) for p in range(5)]
    qweight = torch.stack([p.sum(1) for p in planes], 1).to(torch.int32).reshape(-1)
    absmax = torch.arange(256).to(torch.uint8)
    wild = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 1e-40
    wild[::4] *= 1e44
    wild[1::4] = torch.tensor([-0.0, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12, 65504.0, 1e38, 0.0, 1.0])
    for book in (codebook(5), codebook(5, "skewed"), wild):
        check_dequantize(kernel, [qweight, absmax, book], fmt, (256, 32), dtype)


# --- quantize -----------------------------------------------------------------------------------


def check_quantize(
    kernel: Provider[QuantizeKbit], x: Tensor, book: Tensor, k: int, absmax: str
) -> None:
    expected = reference(x, book, k, absmax)
    moved = x.cuda()
    assert kernel.refuses(QuantizeKbit(moved, book.cuda(), k, absmax)) == ""
    actual = kernel.run(QuantizeKbit(moved, book.cuda(), k, absmax))
    for mine, right in zip(actual, expected, strict=True):
        assert mine.dtype == right.dtype
        assert torch.equal(mine.cpu(), right), f"{x.shape=} {x.dtype=} {k=} {absmax=}"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ENCODERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "absmax"), CASES)
def test_gpu_quantize(k: int, absmax: str, kind: str, kernel: Provider[QuantizeKbit]) -> None:
    book = codebook(k, kind)
    for numel, dtype in itertools.product((*SIZES, 1023, 1024, 1025), DTYPES):
        x = weight(numel, dtype)
        x[: numel // 8] = 0
        check_quantize(kernel, x, book, k, absmax)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ENCODERS)
@pytest.mark.parametrize("absmax", ABSMAX)
def test_gpu_quantize_every_magnitude(absmax: str, kernel: Provider[QuantizeKbit]) -> None:
    """Blocks from denormal to beyond the scale's range, thresholds hit exactly, and -0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 32, generator=generator)
    x *= torch.exp2(torch.linspace(-149, 15.9, 4096))[:, None]
    x[::7, 3] = -0.0
    for k in KBITS:
        book = codebook(k)
        mids = (book[:-1] + book[1:]) * 0.5
        exact = torch.zeros(64, 32)
        exact[:, : mids.numel()] = mids
        exact[:, 31] = 1.0
        exact *= torch.exp2(torch.arange(-14.0, 5.0).repeat(4)[:64])[:, None]
        tiny = torch.cat([torch.tensor([-1e-30, -0.0, 1e-30]), torch.linspace(0.1, 1, 2**k - 3)])
        for t in (x, exact):
            for book_k in (book, tiny.sort().values):
                check_quantize(kernel, t, book_k, k, absmax)
                check_quantize(kernel, t.bfloat16(), book_k, k, absmax)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ENCODERS)
def test_gpu_quantize_views(kernel: Provider[QuantizeKbit]) -> None:
    """Not contiguous, and not aligned to vectors."""
    for k, dtype in itertools.product(KBITS, DTYPES):
        x = weight(64 * 96, dtype).view(64, 96)
        book = codebook(k)
        on_cpu, on_gpu = ([t.t(), t[:, 5:70], t.reshape(-1)[3:1500]] for t in (x, x.cuda()))
        for view, moved in zip(on_cpu, on_gpu, strict=True):
            actual = kernel.run(QuantizeKbit(moved, book.cuda(), k, "e4m4"))
            for mine, right in zip(actual, reference(view, book, k, "e4m4"), strict=True):
                assert torch.equal(mine.cpu(), right)
        empty = kernel.run(QuantizeKbit(x[:0].cuda(), book.cuda(), k, "e4m4"))
        assert [t.numel() for t in empty] == [0, 0]


# --- streams, graphs, devices -------------------------------------------------------------------


def quantized(k: int, shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    book = codebook(k).cuda()
    x = weight(math.prod(shape), torch.bfloat16, seed).view(shape).cuda()
    return x, [*ops.quantize_kbit(x, book, k, "e4m4"), book]


@pytest.mark.gpu
def test_gpu_side_stream() -> None:
    """Launches follow the current stream: they see what that stream wrote before them."""
    x, operands = quantized(4, (1024, 1024))
    expected = ops.dequantize(operands, "kbit4_e4m4", x.shape, x.dtype)
    source = x.clone()
    x.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # longer than a launch on another stream would wait
        x.copy_(source)
        packed = ops.quantize_kbit(x, operands[2], 4, "e4m4")
        actual = ops.dequantize([*packed, operands[2]], "kbit4_e4m4", x.shape, x.dtype)
    side.synchronize()
    assert_same_bits(actual, expected)


@pytest.mark.gpu
def test_gpu_never_synchronizes() -> None:
    x, operands = quantized(3, (256, 256))
    ops.dequantize(operands, "kbit3_e4m4", x.shape, x.dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = ops.quantize_kbit(x, operands[2], 3, "e4m4")
        ops.dequantize([*packed, operands[2]], "kbit3_e4m4", x.shape, x.dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_graph_capture() -> None:
    """Without a warm-up: the kernels of this shape and dtype are loaded while it captures."""
    x, _ = quantized(5, (128, 264))
    other, operands = quantized(5, (128, 264), seed=1)
    x, other = x.float(), other.float()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = ops.quantize_kbit(x, operands[2], 5, "fp16")
        out = ops.dequantize([*packed, operands[2]], "kbit5_fp16", x.shape, torch.float16)
    x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    qweight, absmax = reference(other.cpu(), operands[2].cpu(), 5, "fp16")
    expected = ops.dequantize(
        [qweight, absmax, operands[2].cpu()], "kbit5_fp16", x.shape, out.dtype
    )
    assert_same_bits(out.cpu(), expected)


@pytest.mark.gpu
def test_gpu_threads() -> None:
    """Threads that have not used CUDA yet, launching one kernel with pointers of their own."""
    from concurrent.futures import ThreadPoolExecutor

    cases = [quantized(2, (64, 512), seed) for seed in range(8)]
    expected = [ops.dequantize(o, "kbit2_e4m4", x.shape, x.dtype) for x, o in cases]
    torch.cuda.synchronize()

    def run(case: tuple[Tensor, list[Tensor]]) -> Tensor:
        x, operands = case
        for _ in range(50):
            out = ops.dequantize(operands, "kbit2_e4m4", x.shape, x.dtype)
        torch.cuda.synchronize()
        return out

    with ThreadPoolExecutor(8) as pool:
        for actual, right in zip(pool.map(run, cases), expected, strict=True):
            assert_same_bits(actual, right)


@pytest.mark.gpu
@two_devices
def test_gpu_second_device() -> None:
    x, operands = quantized(4, (64, 128))
    expected = ops.dequantize(operands, "kbit4_e4m4", x.shape, x.dtype).cpu()
    with torch.cuda.device(0):
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            book = operands[2].to(device)
            packed = ops.quantize_kbit(x.to(device), book, 4, "e4m4")
            out = ops.dequantize([*packed, book], "kbit4_e4m4", x.shape, x.dtype)
            assert out.device == torch.device(device)
            assert_same_bits(out.cpu(), expected)
            assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_gpu_ops_are_served_by_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each list serves: the others would raise here."""

    def refuse(*args: Any) -> str:
        raise AssertionError("asked")

    forget_kernels(monkeypatch)
    for kernel in (*DEQUANTIZE["cuda"][1:], *PROVIDERS["quantize_kbit"]["cuda"][1:]):
        monkeypatch.setattr(type(kernel), "refuses", refuse)
    x, operands = quantized(4, (64, 128))
    ops.dequantize(operands, "kbit4_e4m4", x.shape, x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "absmax"), CASES)
def test_gpu_compiled_linear_is_served_by_cuda(
    k: int, absmax: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product with the identity is the weight itself."""
    served: list[Tensor] = []
    original = type(CUDA).prepare

    def prepare(self: Any, call: Dequantize) -> Any:
        launch = original(self, call)

        def count(operands: Any, out: Tensor) -> None:
            served.append(out)
            launch(operands, out)

        return count

    forget_kernels(monkeypatch)
    monkeypatch.setattr(type(CUDA), "prepare", prepare)
    linear: Any = kbit.quantize_model(
        nn.Sequential(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)),
        k,
        absmax=absmax,
        progress=False,
    ).cuda()
    operands = linear[0].kbit_weight.operands
    expected = ops.dequantize(operands, f"kbit{k}_{absmax}", (512, 256), torch.bfloat16)
    served.clear()
    torch._dynamo.reset()
    compiled: Any = torch.compile(linear, backend=qfuse)
    actual = compiled(torch.eye(256).bfloat16().cuda())
    assert len(served) == 1
    assert torch.equal(actual, expected.t())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_gpu_offsets_beyond_int32(kernel: str) -> None:
    """More than 2**31 elements: the last are where a 32-bit offset would go wrong."""
    numel, tail = 2**31 + 64, 4096 + 64
    [encoder] = [k for k in PROVIDERS["quantize_kbit"]["cuda"] if k.name == kernel]
    [decoder] = [k for k in DEQUANTIZE["cuda"] if k.name == kernel]
    book = codebook(4)
    x = torch.empty(numel, dtype=torch.bfloat16, device="cuda").normal_()
    qweight, absmax = encoder.run(QuantizeKbit(x, book.cuda(), 4, "e4m4"))
    last = reference(x[-tail:].cpu(), book, 4, "e4m4")
    assert torch.equal(qweight[-tail // 8 :].cpu(), last[0])
    assert torch.equal(absmax[-tail // 32 :].cpu(), last[1])
    del x
    fmt = FORMATS["kbit4_e4m4"]
    for cols, extra in ((numel, 0), (2**31 // 2**15, 8)):
        rows = numel // cols
        wide = torch.full((rows, cols + extra), 7.0, dtype=torch.bfloat16, device="cuda")
        out = wide[:, :cols]
        operands = [qweight[: rows * cols // 8], absmax[: rows * cols // 32], book.cuda()]
        decoder.run(Dequantize(operands, fmt, out))
        end = rows * cols
        expected = torch.empty(1, tail, dtype=torch.bfloat16)
        mine = [qweight[(end - tail) // 8 : end // 8], absmax[(end - tail) // 32 : end // 32]]
        dequantize_reference.KERNEL.run(Dequantize([*(t.cpu() for t in mine), book], fmt, expected))
        count = min(rows, -(-tail // cols))
        flat = out[-count:].reshape(-1)[-tail:]
        assert_same_bits(flat.cpu(), expected[0])
        assert (wide[:, cols:] == 7.0).all(), "wrote beside its columns"
        del wide, out
