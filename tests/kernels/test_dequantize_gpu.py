"""Dequantization on a GPU: the values, and the streams, graphs and devices it runs on."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import inductor_q
from inductor_q import ops
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.formats.bnb import BLOCKSIZES
from inductor_q.kernels import dequantize_reference, dequantize_triton
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.dequantize import DEQUANTIZE
from inductor_q.kernels.provider import DequantizeProvider
from tests.support.dequantize_kernels import LAYOUTS, SCALES, check
from tests.support.quantized import (
    DTYPES,
    QUANT_TYPES,
    assert_same_bits,
    bnb,
    forget_kernels,
    quantize,
    two_devices,
)

_FMT = FORMATS["nf4_b64"]


def positive_zero(x: Tensor) -> Tensor:
    """bitsandbytes' CUDA kernel decodes fp4's code 8 to -0.0, its other kernels to 0.0."""
    return x + 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [pytest.param(k, id=k.name) for k in DEQUANTIZE["cuda"]])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_gpu_kernel_equals_the_reference(fmt: QuantFormat, kernel: DequantizeProvider) -> None:
    if refused := kernel.unknown(fmt):
        pytest.skip(refused)
    for layout in [*LAYOUTS, (64, 4096, 0), (64, 4096, 64)]:
        for dtype in DTYPES:
            check(kernel, fmt, layout, dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("storage", DTYPES)
def test_gpu_kernel_reads_any_storage(storage: torch.dtype) -> None:
    for layout in ((4, 128, 3), (4, 128, 8), (4, 128, 0)):
        check(
            dequantize_triton.KERNEL,
            FORMATS["nf4_b64_nested"],
            layout,
            torch.bfloat16,
            device="cuda",
            storage=storage,
        )


@pytest.mark.gpu
def test_gpu_kernel_reads_scales_of_any_dtype_in_turn() -> None:
    weight = quantize((64, 128), nested=False, device="cuda")
    (packed, absmax), name, shape = weight.operands
    expected = [
        ops.dequantize([packed.cpu(), absmax.cpu().to(d)], name, shape, torch.float32)
        for d in DTYPES
    ]
    for dtype, values in [*zip(DTYPES, expected, strict=True)] * 2:
        actual = ops.dequantize([packed, absmax.to(dtype)], name, shape, torch.float32)
        assert_same_bits(actual.cpu(), values)


@pytest.mark.gpu
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_gpu_equals_bitsandbytes(quant_type: str, blocksize: int, nested: bool) -> None:
    for dtype in DTYPES:
        for shape in ((48, 2 * blocksize), (5, 96), (3, 7)):
            w = quantize(
                shape, quant_type, blocksize=blocksize, nested=nested, dtype=dtype, device="cuda"
            )
            expected = bnb.dequantize_4bit(w.packed, w.state)
            assert_same_bits(inductor_q.dequantize(w.packed, w.state), positive_zero(expected))


@pytest.mark.gpu
def test_gpu_denormal_and_extreme_scales() -> None:
    scales = torch.cat(list(SCALES.values())).repeat_interleave(2)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (scales.numel() * 32,), dtype=torch.uint8, generator=generator)
    for dtype in DTYPES:
        expected = torch.empty(scales.numel(), 64, dtype=dtype)
        dequantize_reference.KERNEL.run(Dequantize([packed, scales], _FMT, expected))
        out = torch.empty(scales.numel(), 64, dtype=dtype, device="cuda")
        dequantize_triton.KERNEL.run(Dequantize([packed.cuda(), scales.cuda()], _FMT, out))
        assert_same_bits(out.cpu(), expected)


@pytest.mark.gpu
def test_gpu_side_stream() -> None:
    """The launch follows the current stream: it sees what that stream wrote before it."""
    w = quantize((1024, 1024), device="cuda")
    expected = inductor_q.dequantize(w.packed, w.state)
    source = w.packed.clone()
    w.packed.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # longer than a launch on another stream would wait
        w.packed.copy_(source)
        actual = inductor_q.dequantize(w.packed, w.state)
    side.synchronize()
    assert_same_bits(actual, expected)


@pytest.mark.gpu
def test_gpu_never_synchronizes() -> None:
    w = quantize((256, 256), device="cuda")
    inductor_q.dequantize(w.packed, w.state)  # compiles, and puts the codebook on the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        inductor_q.dequantize(w.packed, w.state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_graph_capture() -> None:
    """Captured after a warm-up, a replay decodes what the operands hold then."""
    first, second = (quantize((128, 256), seed=seed, device="cuda") for seed in (1, 2))
    expected = inductor_q.dequantize(second.packed, second.state)
    operands, name, shape = first.operands
    ops.dequantize(operands, name, shape, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.dequantize(operands, name, shape, torch.bfloat16)
    for mine, new in zip(operands, second.operands[0], strict=True):
        mine.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out, expected)


@pytest.mark.gpu
@two_devices
def test_gpu_second_device() -> None:
    w = quantize((64, 128))
    operands, name, shape = w.operands
    expected = ops.dequantize(operands, name, shape, torch.bfloat16)
    with torch.cuda.device(0):
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            out = ops.dequantize([t.to(device) for t in operands], name, shape, torch.bfloat16)
            assert out.device == torch.device(device)
            assert_same_bits(out.cpu(), expected)
            assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_gpu_strided_operands_go_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_kernels(monkeypatch)
    w = quantize((64, 128), nested=False, device="cuda")
    operands, name, shape = w.operands
    expected = ops.dequantize(operands, name, shape, torch.bfloat16)
    operands[1] = torch.stack([operands[1], operands[1]], 1)[:, 0]
    with caplog.at_level(logging.WARNING, "inductor_q"):
        assert_same_bits(ops.dequantize(operands, name, shape, torch.bfloat16), expected)
    assert caplog.messages == [
        "dequantize: provider 'triton' is not used: an operand is not contiguous"
    ]


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_offsets_beyond_int32() -> None:
    """More than 2**31 values: the last rows are where a 32-bit offset would go wrong."""
    rows, cols, tail = 2**16 + 8, 2**15, 8
    packed = torch.randint(256, (rows * cols // 2,), dtype=torch.uint8, device="cuda")
    absmax = torch.rand(rows * cols // 64, device="cuda")
    out = ops.dequantize([packed, absmax], _FMT.name, [rows, cols], torch.bfloat16)
    last = [packed[-tail * cols // 2 :], absmax[-tail * cols // 64 :]]
    expected = torch.empty(tail, cols, dtype=torch.bfloat16, device="cuda")
    dequantize_reference.KERNEL.run(Dequantize(last, _FMT, expected))
    assert_same_bits(out[-tail:], expected)
