"""Dequantize on a GPU with one Triton launch, double quantization included.

A lane holds one 32-bit word (8 codes of 4 bits) where shapes and alignment allow it, else one byte:
each word is read once, its scale found once, and 8 values leave in one 16-byte store. The device
functions that find a scale and decode a code are printed from the format
(`inductor_q.decode.triton`); this file never looks at a format's name. Products of scale and value
are not contracted to an FMA, so that results equal the eager reference bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_q.decode.triton import device_functions
from inductor_q.formats import QuantFormat
from inductor_q.formats.packing import BytePacking

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT32_LIMIT = 2**31


@dataclass(frozen=True)
class Config:
    """Words (or bytes) per program, and warps per program.

    One warp with four words a lane was at or within 1 % of the best of 16 configurations at 4096^2,
    12288 x 4096 and 16384^2, contiguous and into rows 64 columns longer (H200, torch 2.11).
    """

    block: int = 128
    num_warps: int = 1


DEFAULT = Config()

_KERNEL = """
@triton.jit
def dequantize(out, qweight, codebook, {pointers}units, numel, cols, out_stride,
               BLOCK: tl.constexpr, FLAT: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr):
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    u = program * BLOCK + tl.arange(0, BLOCK)
    mask = u < units
    packed = qweight.to(tl.pointer_type({unit}))  # whatever dtype the bytes are stored in
    unit = tl.load(packed + u, mask=mask, other=0).to(tl.int32)
    i = u * {codes}
    scale = scale_fn(i, mask, {operands})
{values}
    x = {joined}
    x = tl.reshape(x, [BLOCK, {codes}])
    lane = tl.arange(0, {codes})[None, :]
    if FLAT:
        offset = i[:, None] + lane
        keep = offset < numel
    elif WHOLE:  # a unit never straddles two rows, and rows start where units do
        row = i // cols
        offset = tl.multiple_of(row * out_stride + (i - row * cols), {codes})[:, None] + lane
        keep = mask[:, None] & (lane >= 0)
    else:
        element = i[:, None] + lane
        row = element // cols
        offset = row * out_stride + (element - row * cols)
        keep = element < numel
    tl.store(out + offset, x, mask=keep)
"""


class Triton:
    name = "triton"

    def available(self) -> str:
        """Empty when this machine can run the kernel, else the reason why not."""
        return "" if importlib.util.find_spec("triton") else "triton is not installed"

    def decodes(self, fmt: QuantFormat) -> str:
        if not isinstance(fmt.packing, BytePacking):
            return f"the Triton kernel decodes codes in bytes, {fmt.name} has another packing"
        if fmt.packing.bits != 4:
            return f"the Triton kernel decodes 4-bit codes, {fmt.name} has {fmt.packing.bits}"
        return ""

    def supports(self, operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor) -> str:
        if refused := self.decodes(fmt):
            return refused
        if out.dtype not in DTYPES:
            return f"output dtype {out.dtype} is not one of float32, bfloat16, float16"
        if out.dim() != 2 or (out.shape[1] > 1 and out.stride(1) != 1):
            return "the output is not a matrix with unit column stride"
        if not all(t.is_contiguous() for t in operands):
            return "an operand is not contiguous"
        return self.available()

    def launch(
        self,
        operands: Sequence[Tensor],
        fmt: QuantFormat,
        out: Tensor,
        config: Config = DEFAULT,
    ) -> None:
        tensors = (out, *operands)
        aligned = tuple([t.data_ptr() % 16 for t in tensors])
        target = (out.shape, out.stride(0), out.dtype, out.device)
        dtypes = tuple([t.dtype for t in operands])
        key = (fmt.name, target, dtypes, aligned, config.block, config.num_warps)
        plan = _PLANS.get(key)
        if plan is None:
            plan = _PLANS[key] = _Plan(operands, fmt, out, config)
        plan.launch(operands, out)


class _Plan:
    """A launch whose arguments differ in their pointers alone.

    The first goes through Triton's JIT, which specializes on sizes and alignments; the others call
    what it compiled, at a tenth of the host time.
    """

    def __init__(
        self, operands: Sequence[Tensor], fmt: QuantFormat, out: Tensor, config: Config
    ) -> None:
        rows, cols = out.shape
        numel, stride = out.numel(), out.stride(0) if rows > 1 else cols
        flat = stride == cols
        codes = 8 if _fits_words(operands[0], out, flat, cols, stride) else 2
        units = -(-numel // codes)
        kernel = _kernel(fmt, codes)
        self._jit = kernel.function
        self._compiled: Any = None
        self._scales = [fmt.operands.index(name) for name in kernel.scale_operands]
        self._codebook = _codebook(fmt, out.device)
        self._grid = (-(-units // config.block), 1, 1)
        self._sizes = (units, numel, cols, stride)
        self._constants = {
            "BLOCK": config.block,
            "FLAT": flat,
            "WHOLE": cols % codes == 0 and stride % codes == 0,
            "WIDE": rows * stride + config.block * codes >= INT32_LIMIT,
        }
        self._num_warps = config.num_warps

    def launch(self, operands: Sequence[Tensor], out: Tensor) -> None:
        scales = [operands[i] for i in self._scales]
        pointers = (out, operands[0], self._codebook, *scales)
        with _on(out.device):
            if self._compiled is not None:
                self._compiled[self._grid](*pointers, *self._sizes, *self._constants.values())
                return
            compiled = self._jit[self._grid](
                *pointers,
                *self._sizes,
                **self._constants,
                num_warps=self._num_warps,
                enable_fp_fusion=False,
            )
            # The interpreter returns nothing to call again.
            self._compiled = compiled if hasattr(compiled, "__getitem__") else None


_PLANS: dict[tuple[Any, ...], _Plan] = {}


def _fits_words(qweight: Tensor, out: Tensor, flat: bool, cols: int, stride: int) -> bool:
    if out.numel() % 8 or qweight.data_ptr() % 4:
        return False
    return flat or (cols % 8 == 0 and stride % 8 == 0)


def _on(device: torch.device) -> Any:
    """The device's context where it is not the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class _Kernel:
    function: Any
    scale_operands: tuple[str, ...]


@functools.cache
def _kernel(fmt: QuantFormat, codes: int) -> _Kernel:
    """Print and compile the kernel of `fmt` for `codes` codes in a lane."""
    device, packing = device_functions(fmt), fmt.packing
    assert isinstance(packing, BytePacking), f"{fmt.name=}"
    shifts = [8 * (e // 2) + packing.shift(e % 2) for e in range(codes)]
    values = "\n".join(
        f"    v{e} = value_fn((unit >> {s}) & 15, scale, codebook).to(out.dtype.element_ty)"
        for e, s in enumerate(shifts)
    )
    source = device.source + _KERNEL.format(
        pointers="".join(f"{name}, " for name in device.scale_operands),
        operands=", ".join(device.scale_operands),
        codes=codes,
        unit="tl.int32" if codes == 8 else "tl.uint8",
        values=values,
        joined=_join(list(range(codes))),
    )
    return _Kernel(_compile(f"<qfuse {fmt.name} x{codes}>", source), device.scale_operands)


def _join(lanes: list[int]) -> str:
    """Nested `tl.join`s after which a reshape yields the lanes in order."""
    if len(lanes) == 1:
        return f"v{lanes[0]}"
    return f"tl.join({_join(lanes[0::2])}, {_join(lanes[1::2])})"


def _compile(filename: str, text: str) -> Any:
    """Execute printed source; linecache keeps it readable for Triton's parser and tracebacks."""
    import triton
    import triton.language as tl

    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "inductor_q.printed"}
    exec(compile(text, filename, "exec"), namespace)
    return namespace["dequantize"]


@functools.cache
def _codebook(fmt: QuantFormat, device: torch.device) -> Tensor:
    """The format's table on `device`, made once: a call under graph capture finds it there."""
    return torch.tensor(getattr(fmt.codec, "values", (0.0,)), dtype=torch.float32, device=device)


KERNEL = Triton()
