"""scatter2scatter with Triton: packed experts are decoded inside the GEMM, on any NVIDIA GPU.

It does what csrc/scatter2scatter.cu does on Hopper alone: no decoded expert exists in memory,
nothing waits for the host, and the memory beside inputs and results is a float per scale. It takes
dense experts and float16, too. What looks values up is printed from a format's codebook, and what
decodes codes of a byte each from the format.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_q.decode.triton import device_functions
from inductor_q.formats import QuantFormat
from inductor_q.kernels import nibbles, tiles
from inductor_q.kernels.dequantize_triton import compile_source
from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.expert_scales_triton import ExpandScales, group_of
from inductor_q.kernels.gpu import on
from inductor_q.kernels.provider import Provider

MIN_GROUP = 16  # elements of a row that share a scale: with 8, scales take as much as codes
MAX_RANK = 128
DTYPES = (torch.bfloat16, torch.float16)

#: Compute capabilities, by their major number, for which torch has a grouped GEMM.
GROUPED_GEMM_MAJORS = (9, 10)

#: Rows per expert up to which decoding in the loop wins there. On an H200, 128 experts 1536 x 2048
#: and r = 16: 334 us to 618 with 32 rows, 937 to 863 with 256; a line through both crosses at about
#: 200 (benchmarks/results/moe_providers-h200.json).
FEW_ROWS = 192
#: The same for codes of a byte: 514 us to 680 with 64 rows, 1286 to 913 with 256. A line crosses at
#: 123, and for backward alone at 63; for experts 3072 x 4096 at 124 and at 52
#: (benchmarks/results/moe_fp8_128x128-h200.json).
FEW_ROWS_OF_BYTES = 64


class Triton(Provider[Scatter2Scatter]):
    name = "triton"

    def missing(self) -> str:
        if not importlib.util.find_spec("triton"):
            return "triton is not installed"
        return "nibbles are looked up in PTX, which AMD has not" if torch.version.hip else ""

    def unknown(self, fmt: QuantFormat | None) -> str:
        """Return why it takes no such weights; empty for dense ones, nibbles of a codebook, and
        bytes."""
        return "" if fmt is None or fmt.scaled_bytes else nibbles.refuses(fmt)

    def refuses(self, call: Scatter2Scatter) -> str:
        if refused := self.unknown(call.fmt) or unfit(call):
            return refused
        device = call.x.device
        if device.type != "cuda":
            return f"there is no Triton for {device.type} tensors"
        capability = torch.cuda.get_device_capability(device)
        if capability < (7, 5) or (call.x.dtype is torch.bfloat16 and capability < (8, 0)):
            major, minor = capability
            return f"compute capability {major}.{minor} does not multiply {call.x.dtype} matrices"
        return ""

    def workspace(self, call: Scatter2Scatter) -> int:
        scales = 4 * math.prod(call.shape) // _group(call) if call.fmt else 0
        return call.grouped_bytes + scales

    def run(self, call: Scatter2Scatter, tile: tiles.Tile | None = None) -> tuple[Tensor, Tensor]:
        with on(call.x.device):
            return _launch(call, tile or tiles.start(work(call), tiles.limits(call.x.device)))


def is_slow(call: Scatter2Scatter) -> bool:
    """Whether this kernel comes after those that pass decoded experts to torch's grouped GEMM.

    It never does where torch has no kernel for that: there torch loops over the groups, and waits
    for the device to know their rows (ATen/native/GroupedMMUtils.h). Elsewhere it does where
    decoding all experts first costs less than the slower product here, and always for experts that
    need no decoding.
    """
    device = call.x.device
    if device.type != "cuda":
        return False
    if torch.cuda.get_device_capability(device)[0] not in GROUPED_GEMM_MAJORS:
        return False
    if call.fmt is None:
        return True
    few = FEW_ROWS_OF_BYTES if call.fmt.in_bytes else FEW_ROWS
    return call.rows > few * call.num_experts


def unfit(call: Scatter2Scatter) -> str:
    """Return why the kernels cannot do a call in a format they know; empty where they can."""
    if call.x.dtype not in DTYPES:
        return f"the input is {call.x.dtype}, not bfloat16 or float16"
    if call.rank > MAX_RANK:
        return f"rank {call.rank} is over {MAX_RANK}"
    if call.fmt and _group(call) < MIN_GROUP:
        return f"rows of {call.shape[2]} do not start where {call.fmt.name} has a new scale"
    if call.fmt is None and call.operands[0].dtype not in (*DTYPES, torch.float32):
        return f"the weight is {call.operands[0].dtype}"
    for name, operand in zip(
        call.fmt.operands if call.fmt else ("weight",), call.operands, strict=True
    ):
        if not operand.is_contiguous():
            return f"{name} is not contiguous"
    return ""


def _group(call: Scatter2Scatter) -> int:
    """Return how many neighbours in a stored row share a scale: a power of two, or 0 if dense."""
    return group_of(call.fmt, call.shape[2]) if call.fmt else 0


def work(call: Scatter2Scatter) -> tiles.Work:
    """Describe the call by what tiles depend on."""
    average = -(-call.rows // max(1, call.num_experts))
    return tiles.Work(
        rows=min(_power_of_two(average), tiles.ROWS[-1]),
        in_features=call.in_features,
        out_features=call.out_features,
        transposed=call.transposed,
        weight_bits=call.fmt.packing.bits if call.fmt else call.operands[0].itemsize * 8,
        group=_group(call),
        rank=_padded_rank(call.rank),
    )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _padded_rank(rank: int) -> int:
    """Pad a rank to what a product takes: a power of two, at least 16. Indices use the rank."""
    return max(16, _power_of_two(rank)) if rank else 0


def _launch(call: Scatter2Scatter, tile: tiles.Tile) -> tuple[Tensor, Tensor]:
    from inductor_q.kernels.expert_gemm_triton import expert_gemm
    from inductor_q.kernels.expert_rows_triton import (
        most_parts,
        project_rows,
        rows_out,
        source_slots,
    )

    device, group = call.x.device, _group(call)
    x = call.x.contiguous()
    rows = min(tile.rows, call.tile_rows)
    parts = call.tile_rows // rows
    stages = 2 if call.rank > 64 else 3  # at most 80 KiB of shared memory, A in float32
    rank, projected = project_rows(call, x, depth=64, stages=stages)
    factor = call.lora_b if projected is not None else None
    out = torch.empty((call.rows, call.out_features), dtype=x.dtype, device=device)
    bias = None if call.bias is None else call.bias.to(x.dtype).contiguous()
    weight = call.operands[0]
    kernel = None
    if call.fmt is not None:
        assert call.fmt.operands[0] == "qweight", call.fmt.operands
        weight = weight.reshape(-1).view(torch.uint8)
        kernel = _kernel(call.fmt, x.dtype)
    even = not (call.in_features % tile.depth or call.out_features % tile.features)
    expert_gemm[(most_parts(call) * parts * -(-call.out_features // tile.features),)](
        out,
        x,
        call.order.contiguous(),
        call.tiles,
        weight,
        None if kernel is None else ExpandScales(call, group, kernel.factor)(call),
        projected,
        factor,
        bias,
        call.in_features,
        call.out_features,
        call.shape[2] * (call.fmt.packing.bits if call.fmt else 8) // 8,
        0 if projected is None else projected.shape[1],
        *((0, 0, 0) if factor is None else factor.stride()),
        call.rank,
        PARTS=parts,
        ROWS=rows,
        FEATURES=tile.features,
        DEPTH=tile.depth,
        RANK=0 if projected is None else _padded_rank(call.rank),
        GROUP=group,
        DECODE=None if kernel is None else kernel.decode,
        BYTES=call.fmt is not None and call.fmt.in_bytes,
        TRANSPOSED=call.transposed,
        TOP_K=source_slots(call),
        BIAS=bias is not None,
        EVEN=even,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return rows_out(call, out), rank


# --- what is printed from a format ----------------------------------------------------------------

#: Per four bytes it looks up both byte planes of four nibbles' values, twice, and joins the bytes.
_LOOK_UP = '''
@triton.jit
def by_permute(packed):
    return tl.inline_asm_elementwise("""{{
        .reg .b32 rest, index, upper, a, b, low, high;
        {first}
        shr.u32 rest, $4, 16;
        {second}
    }}""", "=&r,=&r,=&r,=&r,r", [packed], dtype=({dtype}, {dtype}), is_pure=True, pack=4)
'''
_LOOK_UP_HALF = """
        and.b32 index, {codes}, 0x7777;
        shl.b32 upper, {codes}, 4;
        prmt.b32 upper, upper, {codes}, 0xD9C8;
        prmt.b32 a, {planes[0]}, {planes[1]}, index;
        prmt.b32 b, {planes[2]}, {planes[3]}, index;
        lop3.b32 low, upper, b, a, 0xCA;
        prmt.b32 a, {planes[4]}, {planes[5]}, index;
        prmt.b32 b, {planes[6]}, {planes[7]}, index;
        lop3.b32 high, upper, b, a, 0xCA;
        prmt.b32 {high}, low, high, 0x7351;
        prmt.b32 {low}, low, high, 0x6240;
"""


@dataclass(frozen=True)
class _Kernel:
    """What finds values of a format in one dtype; `factor` undoes the stretch of its values."""

    decode: Any
    factor: float


@functools.cache
def _kernel(fmt: QuantFormat, dtype: torch.dtype) -> _Kernel:
    if fmt.in_bytes:
        source = device_functions(fmt).source
        return _Kernel(compile_source(f"<qfuse experts {fmt.name}>", source, "value_fn"), 1.0)
    assert fmt.lut16 is not None, f"{fmt.name=}"
    values, stretch = nibbles.fit(fmt.lut16, dtype)
    name = f"<qfuse experts {fmt.name} {dtype} look_up>"
    return _Kernel(
        compile_source(name, _printed_look_up(values, fmt.nibbles), "by_permute"), 1 / stretch
    )


def _printed_look_up(values: Tensor, order: tuple[int, int] | None) -> str:
    """Print `by_permute` with the 16 values as constants: a byte permutation looks up 4 nibbles.

    order: the format's `nibbles`, which say whether the high one comes first.
    """
    bits = values.view(torch.int16).to(torch.int32)
    planes = [
        f"0x{sum(int(byte) << 8 * j for j, byte in enumerate(plane[i : i + 4])):08x}"
        for plane in ((bits & 255).tolist(), (bits >> 8 & 255).tolist())
        for i in range(0, 16, 4)
    ]
    high, low = (0, 2) if order == nibbles.HIGH_FIRST else (2, 0)  # the results for either nibble
    return _LOOK_UP.format(
        first=_LOOK_UP_HALF.format(codes="$4", planes=planes, high=f"${high}", low=f"${low}"),
        second=_LOOK_UP_HALF.format(
            codes="rest", planes=planes, high=f"${high + 1}", low=f"${low + 1}"
        ),
        dtype="tl.bfloat16" if values.dtype is torch.bfloat16 else "tl.float16",
    )


KERNEL = Triton()
