"""Dequantize on a GPU with one Triton launch, double quantization included.

A lane holds one word of 8 codes (32 bits, 64 where a code is a byte) where shapes and alignment
allow it, else one byte; of bit planes it holds the bytes of 8 neighbouring codes, and of tiles the
words that some neighbours have to themselves. Packed data is read once, a scale is found once, and
8 values leave in one 16-byte store. Every other format, and one whose neighbours in a lane do not
share a scale, is decoded element by element. The device functions that find a scale and decode a
code, or do all of it, are printed from the format
(`inductor_q.decode.triton`); this file never looks at a format's name. Products of scale and value
are not contracted to an FMA, so that results equal the eager reference bit for bit.
"""

from __future__ import annotations

import functools
import linecache
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inductor_q.decode.triton import decode_function, device_functions
from inductor_q.formats import QuantFormat
from inductor_q.formats.kbit import BLOCK
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.gpu import kept, unfit
from inductor_q.kernels.provider import DequantizeProvider, Launch, TritonProvider
from inductor_q.kernels.triton_launch import Repeated

INT32_LIMIT = 2**31


@dataclass(frozen=True)
class Config:
    """Words (or bytes) per program, and warps per program.

    These were among the fastest of nine on an H200, over two sizes and seven formats; FP8, whose
    decode computes most, gains most by them.
    """

    block: int = 256
    num_warps: int = 2


DEFAULT = Config()

_KERNEL = """
@triton.jit(do_not_specialize=["rows"])
def dequantize(out, qweight, codebook, {pointers}units, numel, rows, cols, out_stride,
               BLOCK: tl.constexpr, FLAT: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr,
               WIDE: tl.constexpr):
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    u = program * BLOCK + tl.arange(0, BLOCK)
    mask = u < units
    packed = qweight.to(tl.pointer_type({unit}))  # whatever dtype the bytes are stored in
{units}
    i = u * {codes}
{values}
    x = {joined}
    x = tl.reshape(x, [BLOCK, {codes}])
    lane = tl.arange(0, {codes})[None, :]
    if FLAT:
        offset = i[:, None] + lane
        keep = offset < numel
    elif WHOLE:  # a unit never straddles two rows
        row = i // cols
        offset = tl.multiple_of(row * out_stride + (i - row * cols), ALIGN)[:, None] + lane
        keep = mask[:, None] & (lane >= 0)
    else:
        element = i[:, None] + lane
        row = element // cols
        offset = row * out_stride + (element - row * cols)
        keep = element < numel
    tl.store(out + offset, x, mask=keep)
"""


class Triton(TritonProvider[Dequantize], DequantizeProvider):
    def refuses(self, call: Dequantize) -> str:
        if refused := unfit(call.out):
            return refused
        if not all(t.is_contiguous() for t in call.operands):
            return "an operand is not contiguous"
        return ""

    def prepare(self, call: Dequantize, config: Config = DEFAULT) -> Launch:
        return _Plan(call, config)


class _Plan:
    """A launch for all calls that are like the first one."""

    def __init__(self, call: Dequantize, config: Config) -> None:
        operands, fmt, out = call.operands, call.fmt, call.out
        rows, cols = out.shape
        numel, stride = out.numel(), out.stride(0) if rows > 1 else cols
        flat = stride == cols
        codes = codes_of_a_lane(operands[0], fmt, out, flat, stride)
        units = -(-numel // codes)
        if codes == 1:  # a program has half the elements that it has with words, on twice the warps
            config = replace(config, block=4 * config.block, num_warps=2 * config.num_warps)
        elif codes > 8:  # as many elements
            config = replace(config, block=max(1, 8 * config.block // codes))
        kernel = _kernel(fmt, codes)
        self._codebook = codebook_on(fmt, out.device)
        self._order = kernel.order(fmt)
        self.launch = Repeated(
            kernel.function,
            (-(-units // config.block), 1, 1),
            (units, numel, rows, cols, stride),
            {
                "BLOCK": config.block,
                "FLAT": flat,
                "WHOLE": cols % codes == 0,
                "ALIGN": math.gcd(codes, stride),
                "WIDE": rows * stride + config.block * codes >= INT32_LIMIT,
            },
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )

    def __call__(self, operands: Sequence[Tensor], out: Tensor) -> None:
        self.launch(self.tensors(operands, out))

    def tensors(self, operands: Sequence[Tensor], out: Tensor) -> list[Tensor]:
        """Put the tensors of a call in the order of the kernel's pointers."""
        given = (*operands, self._codebook)
        return [out, *[given[i] for i in self._order]]


def codes_of_a_lane(qweight: Tensor, fmt: QuantFormat, out: Tensor, flat: bool, stride: int) -> int:
    """Return how many elements a lane decodes; all of them share their scales."""
    cols = out.shape[1]
    codes = 1
    if fmt.planes:
        codes = 8
    elif fmt.places and cols % len(fmt.places) == 0:
        codes = len(fmt.places)
    elif fmt.nibbles:
        codes = 8 if _fits_words(qweight, out, flat, stride, 4) else 2
    elif fmt.in_bytes:
        codes = 8 if _fits_words(qweight, out, flat, stride, 8) else 1
    run = fmt.run(cols)
    if run % codes and run % 2 == 0 and fmt.nibbles:
        codes = 2
    return 1 if run % codes else codes


def _fits_words(qweight: Tensor, out: Tensor, flat: bool, stride: int, word: int) -> bool:
    """Whether the codes come in whole words of so many bytes, and 8 elements lie in one row."""
    if out.numel() % 8 or qweight.data_ptr() % word:
        return False
    return flat or (out.shape[1] % 8 == 0 and stride % 8 == 0)


@dataclass(frozen=True)
class Kernel:
    """A printed kernel, its pointers behind the table, and the operand that is the table."""

    function: Any
    pointers: tuple[str, ...]
    table: str

    def order(self, fmt: QuantFormat) -> tuple[int, ...]:
        """Order the operands and, behind them, the codebook as the kernel takes them."""
        table = fmt.operands.index(self.table) if self.table else len(fmt.operands)
        return (0, table, *(fmt.operands.index(name) for name in self.pointers))


@functools.cache
def _kernel(fmt: QuantFormat, codes: int) -> Kernel:
    """Print and compile the kernel of `fmt` for `codes` codes in a lane."""
    return print_kernel("dequantize", _KERNEL, fmt, codes, _CAST)


def print_kernel(name: str, template: str, fmt: QuantFormat, codes: int, cast: str) -> Kernel:
    """Fill a template with the decode of `fmt`, whose values are followed by `cast`; compile it."""
    printed = print_parts(fmt, codes, cast)
    source = printed.functions + template.format(
        pointers="".join(f"{name}, " for name in printed.pointers),
        codes=codes,
        unit=printed.unit,
        units=printed.units,
        values="\n".join(f"    {line}" for line in [*printed.scales, *printed.values]),
        joined=printed.joined,
    )
    function = compile_source(f"<qfuse {name} {fmt.name} x{codes}>", source, name)
    return Kernel(function, printed.pointers, printed.table)


@dataclass(frozen=True)
class Printed:
    """The parts that a kernel is printed from.

    unit: the dtype of what a lane loads.
    units: the lines that load the units `u` from `packed`, under `mask`; they give `loaded`.
    scales: the lines that find `shared` of the elements `i`.
    values: the lines that decode all that to the values v0, v1, ...; `joined` puts those in order.
    """

    functions: str
    pointers: tuple[str, ...]
    table: str
    unit: str
    units: str
    loaded: tuple[str, ...]
    scales: tuple[str, ...]
    shared: tuple[str, ...]
    values: tuple[str, ...]
    joined: str


_CAST = ".to(out.dtype.element_ty)"


def print_parts(
    fmt: QuantFormat, codes: int, cast: str, scale_mask: str = "mask", rows: str = "rows"
) -> Printed:
    """Print the decode of `fmt` for `codes` codes in a lane, each followed by `cast`.

    `rows` and `cols` are the names of the weight's sizes.
    """
    sizes = {"rows": rows, "columns": "cols"}
    if codes == 1:
        return _by_element(fmt, cast, sizes)
    return _by_unit(fmt, codes, cast, scale_mask, sizes)


def _by_element(fmt: QuantFormat, cast: str, sizes: Mapping[str, str]) -> Printed:
    """Let a lane decode one element, with the whole decode as it is printed."""
    decode = decode_function(fmt)
    table = fmt.table.name if fmt.table else ""
    names = ["codebook" if name == table else name for name in fmt.operands[1:]]
    names += ["codebook"] if decode.codebook else []
    arguments = ", ".join(["u", "mask", "packed", *names, *(sizes[name] for name in decode.sizes)])
    return Printed(
        functions=decode.source,
        pointers=tuple(name for name in fmt.operands[1:] if name != table),
        table=table,
        unit=f"tl.{fmt.packing.unit}",
        units=f"    value = decode_fn({arguments})",
        loaded=("value",),
        scales=(),
        shared=(),
        values=(f"v0 = value{cast}",),
        joined="v0",
    )


def _by_unit(
    fmt: QuantFormat, codes: int, cast: str, scale_mask: str, sizes: Mapping[str, str]
) -> Printed:
    """Let a lane unpack the codes of a unit and decode them under what they share, found once."""
    device = device_functions(fmt)
    units = _units(fmt, codes, [sizes[name] for name in device.word_sizes])
    of_weight = [sizes[name] for name in device.sizes]
    arguments = ", ".join(["i", scale_mask, *device.scale_operands, *of_weight])
    found = tuple(f"found{n}" for n in range(len(device.shared)))  # operands have names, too
    shared = ", ".join(found)
    decoded = [f"value_fn({code}, {shared}, codebook){cast}" for code in units.codes]
    return Printed(
        functions=device.source + (_NIBBLES_OF_PLANES if fmt.planes else ""),
        pointers=device.scale_operands,
        table=device.table,
        unit=units.dtype,
        units=units.lines,
        loaded=units.loaded,
        scales=(f"{shared} = scale_fn({arguments})",),
        shared=found,
        values=(*_gathered(fmt.planes), *[f"v{e} = {value}" for e, value in enumerate(decoded)]),
        joined=_join(list(range(codes))),
    )


class _Units(NamedTuple):
    """The dtype of what a lane loads, the loads, what they give, and each of the lane's codes."""

    dtype: str
    lines: str
    loaded: tuple[str, ...]
    codes: list[str]


def _units(fmt: QuantFormat, codes: int, sizes: Sequence[str]) -> _Units:
    """Print how the units `u` of so many codes are loaded."""
    load = "    unit = tl.load(packed + u, mask=mask, other=0).to(tl.int32)"
    if fmt.in_bytes:
        if codes == 4:
            shifts = [8 * e for e in range(4)]
            return _Units("tl.int32", load, ("unit",), [f"(unit >> {s}) & 255" for s in shifts])
        load = load.removesuffix(".to(tl.int32)")
        halves = [f"(unit >> {32 * (e // 4)}).to(tl.int32)" for e in range(8)]
        unpacked = [f"({half} >> {8 * (e % 4)}) & 255" for e, half in enumerate(halves)]
        return _Units("tl.int64", load, ("unit",), unpacked)
    if fmt.nibbles:
        shifts = [8 * (e // 2) + fmt.nibbles[e % 2] for e in range(codes)]
        unit = "tl.int32" if codes == 8 else "tl.uint8"
        return _Units(unit, load, ("unit",), [f"(unit >> {s}) & 15" for s in shifts])
    if fmt.places:
        low = (1 << fmt.packing.bits) - 1
        words = tuple(f"word{n}" for n in range(1 + max(word for word, _ in fmt.places)))
        arguments = ", ".join([f"u * {codes}", "mask", "packed", *sizes])
        load = f"    {', '.join(words)} = words_fn({arguments})"
        unpacked = [f"({words[word]} >> {bit}) & {low}" for word, bit in fmt.places]
        return _Units(f"tl.{fmt.packing.unit}", load, words, unpacked)
    assert fmt.planes, f"{fmt.name=}"
    per_block = BLOCK // 8  # bytes of a plane, each with 8 neighbouring codes
    lines = [f"    first = (u // {per_block}) * {per_block * fmt.planes} + u % {per_block}"]
    planes = tuple(f"plane{p}" for p in range(fmt.planes))
    for p, plane in enumerate(planes):
        at = f"packed + first + {per_block * p}"
        lines.append(f"    {plane} = tl.load({at}, mask=mask, other=0).to(tl.int32)")
    unpacked = [_from_planes(fmt.planes, e) for e in range(codes)]
    return _Units("tl.uint8", "\n".join(lines), planes, unpacked)


#: The bits of four planes' bytes, as one word, brought together: bit e of byte p goes to bit p of a
#: nibble, by exchanging bits 1 and 4, then 0 and 3, of their places ("Hacker's Delight", 7-3).
_NIBBLES_OF_PLANES = """
@triton.jit
def nibbles_of_planes(word):
    t = (word ^ (word >> 14)) & 0x0000CCCC
    word = word ^ t ^ (t << 14)
    t = (word ^ (word >> 7)) & 0x00AA00AA
    return word ^ t ^ (t << 7)


"""


def _from_planes(planes: int, e: int) -> str:
    """Return code `e` of the 8 of a lane: four planes' from the word `low`, the fifth by itself."""
    place = 16 * (e >> 1 & 1) + 8 * (e & 1) + 4 * (e >> 2)
    code = f"((low >> {place}) & 15)"
    return code if planes <= 4 else f"({code} | (((plane4 >> {e}) & 1) << 4))"


def _gathered(planes: int) -> list[str]:
    """Print the word that `_from_planes` reads, of the planes' bytes."""
    word = " | ".join(f"(plane{p} << {8 * p})" for p in range(min(planes, 4)))
    return [f"low = nibbles_of_planes({word})"] if planes else []


def _join(lanes: list[int]) -> str:
    """Nest `tl.join`s so that a reshape yields the lanes in order."""
    if len(lanes) == 1:
        return f"v{lanes[0]}"
    return f"tl.join({_join(lanes[0::2])}, {_join(lanes[1::2])})"


def compile_source(filename: str, text: str, kernel: str) -> Any:
    """Execute printed source; linecache keeps it readable for Triton's parser and tracebacks."""
    import triton
    import triton.language as tl

    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "inductor_q.printed"}
    exec(compile(text, filename, "exec"), namespace)
    return namespace[kernel]


@functools.cache
def codebook_on(fmt: QuantFormat, device: torch.device) -> Tensor:
    """Return the format's table on `device`, made once: graph capture finds it there."""
    values = fmt.codec.values or (0.0,)
    return kept(lambda: torch.tensor(values, dtype=torch.float32, device=device))


KERNEL = Triton()
