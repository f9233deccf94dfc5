"""scatter2scatter on Hopper with csrc/scatter2scatter.cu: experts are decoded inside the GEMM.

No decoded expert exists in memory, so it serves few rows per expert (bound by the packed weights)
as well as many (bound by the products), and needs no memory beyond 4 bytes per scale. The adapter
rides in the same product: its projection onto the rank is one more stage of the contraction.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

from inductor_q.csrc import driver, nvrtc
from inductor_q.formats import QuantFormat
from inductor_q.formats.minifloat import E4M3
from inductor_q.kernels import nibbles
from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.expert_scales_triton import ExpandScales, group_of
from inductor_q.kernels.gpu import kept
from inductor_q.kernels.provider import Provider

SOURCE = "scatter2scatter.cu"
CAPABILITY = (9, 0)
NOT_HOPPER = "csrc/scatter2scatter.cu is for compute capability 9.0 (Hopper)"
THREADS = 384
DEPTH = 64  # elements of a row of the weight in a stage of the contraction
MIN_GROUP = 16  # elements of a row that share a scale
MAX_RANK = 64  # the adapter's stage
FEATURES = 128  # columns of a tile


@dataclass(frozen=True)
class Config:
    """The most rows of a tile, the stages of the ring, and the programs per multiprocessor."""

    rows: int
    stages: int
    programs: int


#: One per height of a tile map's parts, for nibbles. They were measured on an H200 with 128 experts
#: 1536 x 2048 and 4 to 256 rows each (bench_moe).
CONFIGS = (
    Config(rows=256, stages=4, programs=1),
    Config(rows=128, stages=6, programs=1),
    Config(rows=64, stages=6, programs=2),
    Config(rows=32, stages=8, programs=2),
)
#: The same for bytes of e4m3, whose stages are larger. No others were tried.
BYTE_CONFIGS = (
    Config(rows=256, stages=3, programs=1),
    Config(rows=128, stages=6, programs=1),
    Config(rows=64, stages=5, programs=2),
    Config(rows=32, stages=6, programs=2),
)
#: What the kernel calls codes of a byte each.
BYTES = "kE4M3"


class Cuda(Provider[Scatter2Scatter]):
    name = "cuda"

    def missing(self) -> str:
        if refused := nvrtc.missing():
            return refused
        if not importlib.util.find_spec("triton"):
            return "triton is not installed"
        return "" if _may_be_hopper() else NOT_HOPPER

    def unknown(self, fmt: QuantFormat | None) -> str:
        if fmt is None:
            return "the weight is dense"
        return "" if _is_e4m3(fmt) else nibbles.refuses(fmt)

    def refuses(self, call: Scatter2Scatter) -> str:
        refused = self.unknown(call.fmt) or _other_shape(call) or _other_operands(call)
        if refused:
            return refused
        device = call.x.device
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
            return NOT_HOPPER
        handle = _function(_kernel_of(call), device.index)
        return handle if isinstance(handle, str) else ""

    def workspace(self, call: Scatter2Scatter) -> int:
        group = DEPTH // _scales_of_a_stage(call)
        return call.grouped_bytes + 4 * math.prod(call.shape) // group

    def plan(self, call: Scatter2Scatter) -> Callable[[Scatter2Scatter], tuple[Tensor, Tensor]]:
        return _Plan(call)


@functools.cache
def _may_be_hopper() -> bool:
    """Whether this machine has a Hopper GPU, or none at all."""
    here = range(torch.cuda.device_count())
    return not here or CAPABILITY in map(torch.cuda.get_device_capability, here)


def _other_shape(call: Scatter2Scatter) -> str:
    _, n, k = call.shape
    if call.x.dtype is not torch.bfloat16:
        return f"the input is {call.x.dtype}, not bfloat16"
    if k % DEPTH or n % (DEPTH if call.transposed else 8):
        return f"features {n} x {k} are no multiples of what a stage takes"
    assert call.fmt is not None
    if group_of(call.fmt, k) < MIN_GROUP:
        return f"rows of {k} do not start where {call.fmt.name} has a new scale"
    if call.rows * call.top_k >= 1 << 32:
        return f"{call.rows} slots, {call.top_k} a token, are too many to divide in 32 bits"
    if call.rank > MAX_RANK:
        return f"rank {call.rank} is over {MAX_RANK}"
    return ""


def _other_operands(call: Scatter2Scatter) -> str:
    assert call.fmt is not None
    for name, operand in zip(call.fmt.operands, call.operands, strict=True):
        if not operand.is_contiguous():
            return f"{name} is not contiguous"
        if name == "qweight" and type(operand) is not FakeTensor and operand.data_ptr() % 16:
            return "qweight is not aligned to 16 bytes"
    return ""


def _is_e4m3(fmt: QuantFormat) -> bool:
    """Whether codes are e4m3, a byte each, with one scale."""
    return fmt.codec == E4M3 and fmt.scaled_bytes


def _codes(call: Scatter2Scatter) -> str:
    """Name the codes as csrc/scatter2scatter.cu does."""
    assert call.fmt is not None
    if _is_e4m3(call.fmt):
        return BYTES
    return "kHighFirst" if call.fmt.nibbles == nibbles.HIGH_FIRST else "kLowFirst"


def _config(call: Scatter2Scatter) -> Config:
    configs = BYTE_CONFIGS if _codes(call) == BYTES else CONFIGS
    return next(c for c in configs if c.rows == call.tile_rows)


def _scales_of_a_stage(call: Scatter2Scatter) -> int:
    assert call.fmt is not None
    return DEPTH // min(DEPTH, group_of(call.fmt, call.shape[2]))


def shared_bytes(transposed: bool, config: Config, scales: int, codes: str) -> int:
    """Add up what csrc/scatter2scatter.cu holds: stages of x, weight, scales; output; barriers."""
    row = (FEATURES if transposed else DEPTH) // (1 if codes == BYTES else 2)
    weight = DEPTH * (row + 16) if transposed else FEATURES * row
    stage = -(-(config.rows * 128 + weight + 512 * scales) // 1024) * 1024
    return config.stages * stage + 2 * config.rows * 128 + 1024 + 16 * config.stages


def kernel_name(transposed: bool, config: Config, scales: int, codes: str) -> str:
    """Name the specialization of csrc/scatter2scatter.cu for a config and a kind of format.

    Args:
        scales: how many scales DEPTH elements of a row have.
        codes: what that file calls the codes.
    """
    flag = "true" if transposed else "false"
    sizes = f"{config.rows}, {config.stages}, {config.programs}, {scales}"
    return f"scatter2scatter<{flag}, {sizes}, {codes}>"


def _kernel_of(call: Scatter2Scatter) -> str:
    config, scales = _config(call), _scales_of_a_stage(call)
    return kernel_name(call.transposed, config, scales, _codes(call))


def _function(kernel: str, device: int | None) -> Any:
    assert device is not None
    return driver.function(SOURCE, kernel, device, arch="sm_90a")


@functools.lru_cache(maxsize=1024)
def _prepared(
    kernel: str,
    device: int | None,
    grid: tuple[int, int, int],
    threads: int,
    pointers: int,
    numbers: tuple[int, ...],
    shared: int,
) -> driver.Launch:
    handle = _function(kernel, device)
    assert device is not None and not isinstance(handle, str), handle
    return driver.Launch(
        handle,
        device,
        grid=grid,
        threads=threads,
        pointers=pointers,
        numbers=numbers,
        shared=shared,
    )


class _Plan:
    """The launches of all calls of a kind."""

    def __init__(self, call: Scatter2Scatter) -> None:
        from inductor_q.kernels.expert_rows_triton import plan_rows_out, project_rows, source_slots

        device, config, fmt = call.x.device, _config(call), call.fmt
        assert fmt is not None
        _, n, k = call.shape
        properties = torch.cuda.get_device_properties(device)
        self._result = (call.rows, call.out_features)
        self._qweight = fmt.operands.index("qweight")
        codes = _codes(call)
        self._planes: Tensor | None = None
        factor = 1.0
        if codes != BYTES:
            self._planes, factor = _codebook(fmt, device)
        scales = _scales_of_a_stage(call)
        self._scales = ExpandScales(call, DEPTH // scales, factor, pairs=True)
        self._project, self._rows_out = project_rows, plan_rows_out(call)
        self._launch = _prepared(
            _kernel_of(call),
            device.index,
            grid=(properties.multi_processor_count * config.programs, 1, 1),
            threads=THREADS,
            pointers=10,
            numbers=(n, k, -(-call.rank // 16) * 16, source_slots(call)),
            shared=shared_bytes(call.transposed, config, scales, codes),
        )

    def __call__(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        x = call.x.contiguous()
        rank, projected = self._project(call, x, depth=128, stages=4)
        out = x.new_empty(self._result)
        tensors = (
            x,
            call.operands[self._qweight],
            self._scales(call),
            projected,
            _factor(call, x.dtype),
            None if call.bias is None else call.bias.to(x.dtype).contiguous(),
            out,
            call.order.contiguous(),
            call.tiles,
            self._planes,
        )
        self._launch(*_pointers(tensors))
        return self._rows_out(call, out), rank


def _pointers(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _factor(call: Scatter2Scatter, dtype: torch.dtype) -> Tensor | None:
    """Return B as the kernel reads it: [E, N, padded] forward, [E, padded, K] transposed; the rank
    is the contraction."""
    if call.lora_b is None or call.rank == 0:
        return None
    b, missing = call.lora_b.to(dtype), -call.rank % 16
    if missing:
        b = pad(b, (0, missing))
    return (b.transpose(1, 2) if call.transposed else b).contiguous()


# --- the codebook -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _codebook(fmt: QuantFormat, device: torch.device) -> tuple[Tensor, float]:
    """Make the planes [8] int32 that csrc/scatter2scatter.cu looks up, and the scales' factor."""
    assert fmt.lut16 is not None, f"{fmt.name=}"
    values, stretch = nibbles.fit(fmt.lut16, torch.bfloat16)
    bits = values.view(torch.int16).to(torch.int32)
    planes = [
        sum(int(byte) << 8 * j for j, byte in enumerate(plane[i : i + 4]))
        for plane in ((bits & 255).tolist(), (bits >> 8 & 255).tolist())
        for i in range(0, 16, 4)
    ]
    packed = torch.tensor(planes, dtype=torch.int64).to(torch.int32)
    return kept(lambda: packed.to(device)), 1 / stretch


KERNEL = Cuda()
