"""Dequantize bit planes on a GPU with the CUDA kernel of csrc/kbit.cu.

A lane loads the words of one block and writes 16-byte vectors; its codes go through two
transpositions in registers and its values come by shuffles, so nothing is read twice and nothing
passes through shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_q.csrc import driver, nvrtc
from inductor_q.formats import QuantFormat
from inductor_q.formats.codec import Codec
from inductor_q.formats.kbit import BLOCK, KBIT_SCALES, KBITS
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.gpu import unfit
from inductor_q.kernels.provider import DENSE_WEIGHT, DequantizeProvider, Launch

SOURCE = "kbit.cu"
#: The storage types of csrc/numeric.cuh.
TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
VECTOR_BYTES = 16
#: The scales of k-bit weights, by their types of csrc/numeric.cuh.
SCALES: dict[str, Codec] = {"E4M4": KBIT_SCALES["e4m4"], "Float16": KBIT_SCALES["fp16"]}
RUN = 8  # neighbouring elements of a lane


@dataclass(frozen=True)
class Config:
    """How many threads a program has; each decodes one block's worth of elements."""

    threads: int = 128


DEFAULT = Config()


def scale_type(stored: Codec) -> str:
    """Name the type of csrc/numeric.cuh that decodes a scale as stored; "" without one."""
    return next((name for name, codec in SCALES.items() if codec == stored), "")


class Cuda(DequantizeProvider):
    name = "cuda"

    def missing(self) -> str:
        return nvrtc.missing()

    def unknown(self, fmt: QuantFormat | None) -> str:
        if fmt is None:
            return DENSE_WEIGHT
        if fmt.planes not in KBITS:
            return f"csrc/{SOURCE} decodes 2 to 5 bit planes, {fmt.name} has another packing"
        if fmt.table is None or fmt.table.numel != 2**fmt.planes:
            return f"csrc/{SOURCE} takes the codebook as an operand, {fmt.name} has none"
        scale = fmt.blockwise
        if scale is None or scale.block != BLOCK or not scale_type(scale.codec):
            return f"csrc/{SOURCE} does not know the scale of {fmt.name}"
        return ""

    def refuses(self, call: Dequantize) -> str:
        if refused := self.unknown(call.fmt):
            return refused
        operands, out = call.operands, call.out
        if out.device.type != "cuda":
            return f"the CUDA kernel runs on a GPU, not on {out.device}"
        if refused := unfit(out):
            return refused
        if operands[2].dtype != torch.float32:
            return f"the codebook is {operands[2].dtype}, not float32"
        if not all(t.is_contiguous() for t in operands):
            return "an operand is not contiguous"
        handle = _function(call)
        return handle if isinstance(handle, str) else ""

    def prepare(self, call: Dequantize, config: Config = DEFAULT) -> Launch:
        handle, out = _function(call), call.out
        assert not isinstance(handle, str), handle
        blocks = -(-out.numel() // BLOCK)
        again = driver.Launch(
            handle,
            out.device.index,
            grid=-(-blocks // config.threads),
            threads=config.threads,
            pointers=4,
            numbers=(out.numel(), *_rows(out)),
        )

        def launch(operands: Sequence[Tensor], out: Tensor) -> None:
            qweight, absmax, codebook = operands
            again(qweight.data_ptr(), absmax.data_ptr(), codebook.data_ptr(), out.data_ptr())

        return launch


def _function(call: Dequantize) -> Any:
    """Load the specialization of csrc/kbit.cu for calls like this one; else return why not."""
    operands, fmt, out = call.operands, call.fmt, call.out
    assert out.device.index is not None, f"{out.device=}"
    aligned = (operands[0].data_ptr() | out.data_ptr()) % VECTOR_BYTES == 0
    cols, stride = _rows(out)
    layout = "kElements"
    if aligned and cols % RUN == 0 and stride * out.itemsize % VECTOR_BYTES == 0:
        layout = "kFlat" if cols == out.numel() else "kRows"
    assert fmt.blockwise is not None, f"{fmt.name=}"
    types = f"{scale_type(fmt.blockwise.codec)}, {TYPES[out.dtype]}"
    kernel = f"dequantize<{fmt.planes}, {types}, {layout}>"
    return driver.function(SOURCE, kernel, out.device.index)


def _rows(out: Tensor) -> tuple[int, int]:
    """Return length and stride of the rows of `out`, which are one where they follow each other."""
    rows, cols = out.shape
    if rows == 1 or out.stride(0) == cols:
        return out.numel(), out.numel()
    return cols, out.stride(0)


KERNEL = Cuda()
