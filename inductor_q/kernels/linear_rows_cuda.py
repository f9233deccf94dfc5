"""Multiply a few rows with a packed weight on a GPU, with CUDA kernels (`linear_rows_sources`).

Weights are read once, as they are stored, and never written as values. Each byte's pair of codes is
one look-up in a table of shared memory, and the products are those of tensor cores, so that 16 rows
cost little more than one. Several weights of one input share a launch. Their adapters take one more
in front of it, which projects x, and their products in float32 are added before the one rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inductor_q.csrc import driver, nvrtc
from inductor_q.formats import QuantFormat
from inductor_q.kernels.dequantize_cuda import TYPES, VECTOR_BYTES
from inductor_q.kernels.linear_rows_sources import (
    NIBBLES,
    STRIP,
    THREADS,
    TOKENS,
    WEIGHTS,
    Plan,
    bits,
    source_of,
)
from inductor_q.kernels.provider import DENSE_WEIGHT, Provider
from inductor_q.kernels.rows_calls import LinearRows

MOST_TOGETHER = 2 * TOKENS  # rows of x of a launch
MOST_ROWS = 2 * MOST_TOGETHER
MOST_RANK = 256  # of an adapter


class Cuda(Provider[LinearRows]):
    name = "cuda"

    def missing(self) -> str:
        return nvrtc.missing()

    def unknown(self, fmt: QuantFormat | None) -> str:
        return DENSE_WEIGHT if fmt is None else source_of(fmt).unknown(fmt)

    def refuses(self, call: LinearRows) -> str:
        if refused := self.unknown(call.fmt):
            return refused
        x, columns, source = call.x, call.x.shape[1], source_of(call.fmt)
        if x.device.type != "cuda":
            return f"the CUDA kernel runs on a GPU, not on {x.device}"
        if x.dtype not in (torch.bfloat16, torch.float16):
            return f"x is {x.dtype}, not of 16 bits"
        if x.shape[0] > MOST_ROWS:
            return f"{x.shape[0]} rows, more than {MOST_ROWS}"
        if columns % source.chunk or not columns:
            return f"{columns} columns, which are no multiple of {source.chunk}"
        if len(call.weights) > WEIGHTS:
            return f"{len(call.weights)} weights, more than {WEIGHTS}"
        for operands, features, bias in zip(call.weights, call.features, call.biases, strict=True):
            for name, operand in zip(call.fmt.operands, operands, strict=True):
                *others, wanted = source.takes(call.fmt, name)
                if operand.dtype not in (wanted, *others):
                    return f"{name} is {operand.dtype}, not {wanted}"
                if not operand.is_contiguous():
                    return f"{name} is not contiguous"
            if bias is not None and (bias.shape != (features,) or not bias.is_contiguous()):
                return f"the bias is not {features} numbers in a row"
        if refused := _refuses_adapters(call):
            return refused
        properties: Any = torch.cuda.get_device_properties(x.device)  # annotations are partial
        counts = [count for _, count in _launches(x.shape[0])]
        if properties.major < 8 or any(_plan(call, count) is None for count in counts):
            arch = f"sm_{properties.major}{properties.minor}"
            adapted = f" and adapters with rows of {_room(call)} bytes" if _room(call) else ""
            return f"{arch} has too little shared memory for {x.shape[0]} rows{adapted}"
        kernels = [(source.name, kernel_name(call, count)) for count in counts]
        kernels += [(NIBBLES.name, project_name(call))] if _room(call) else []
        handles = [driver.function(*kernel, x.device.index) for kernel in kernels]
        return next((handle for handle in handles if isinstance(handle, str)), "")

    def run(self, call: LinearRows) -> list[Tensor]:
        call = replace(call, x=_aligned(call.x))
        # Copies for alignment come before _project: the kernel behind it does not wait for weights.
        given = [
            [*_in_order(call, operands), bias, None if low is None else _aligned(low.b)]
            for operands, bias, low in zip(call.weights, call.biases, call.adapters, strict=True)
        ]
        projected, first = _project(call) if _room(call) else (None, [0] * WEIGHTS)
        outputs = call.outputs()
        pointers: list[int] = []
        for i, of_weight in enumerate(given):
            out = outputs[0 if call.gated else i]  # both weights of a pair have one result
            pointers += [0 if t is None else t.data_ptr() for t in (*of_weight, out)]
        pointers += [0] * (8 * WEIGHTS - len(pointers))
        for begin, count in _launches(call.x.shape[0]):
            launch = _linear(call, count, first, projected)
            beside = [0 if t is None else t[begin:].data_ptr() for t in (call.x, projected)]
            for i, out in enumerate(outputs):
                pointers[8 * i + 7] = out[begin:].data_ptr()
            if call.gated:
                pointers[8 + 7] = pointers[7]
            launch(*beside, *pointers)
        return outputs


def _launches(rows: int) -> list[tuple[int, int]]:
    """Split the rows of x: the first and how many a launch takes."""
    # More at once would read x, which does not fit beside a program, again for each tile.
    return [(i, min(MOST_TOGETHER, rows - i)) for i in range(0, rows, MOST_TOGETHER)]


def _linear(
    call: LinearRows, count: int, first: list[int], projected: Tensor | None
) -> driver.Launch:
    """Prepare the launch for `count` rows of x, whose projections begin in columns `first`."""
    device, columns = call.x.device.index, call.x.shape[1]
    plan = _plan(call, count)
    assert plan is not None
    tiles = [-(-features // (STRIP * plan.height)) for features in call.features]
    ends = [sum(tiles[: i + 1]) for i in range(WEIGHTS)]
    ranks = [0 if adapter is None else adapter.b.shape[1] for adapter in call.adapters]
    source = source_of(call.fmt)
    missing = [0] * (WEIGHTS - len(tiles))
    return _prepared(
        (source.name, kernel_name(call, count)),
        device,
        _programs(tiles[0] if call.gated else ends[-1], device),
        2 + 8 * WEIGHTS,
        (
            *(*call.features, *missing, *ends, *first, *ranks, *missing),
            *(0 if projected is None else projected.shape[1], _wide(call), _room(call)),
            *(columns, count, *plan.places[:3]),
            *source.numbers(call.fmt, call.x.dtype),
            *plan.places[3:],
        ),
        plan.shared,
        projected is not None,
    )


def _refuses_adapters(call: LinearRows) -> str:
    adapters = [adapter for adapter in call.adapters if adapter is not None]
    dtypes = {t.dtype for adapter in adapters for t in (adapter.a, adapter.b)}
    if len(dtypes) > 1 or not dtypes <= {call.x.dtype, torch.float32}:
        return f"the adapters are {sorted(map(str, dtypes))}, not all {call.x.dtype} or float32"
    for adapter in adapters:
        if not adapter.a.is_contiguous() or not adapter.b.is_contiguous():
            return "an adapter is not contiguous"
        rank = adapter.a.shape[0]
        if not 0 < rank <= MOST_RANK or rank * adapter.b.element_size() % VECTOR_BYTES:
            return f"an adapter's rank is {rank}: its rows are not some times {VECTOR_BYTES} bytes"
    return ""


def _wide(call: LinearRows) -> bool:
    return any(a is not None and a.b.dtype is torch.float32 for a in call.adapters)


def _room(call: LinearRows) -> int:
    """Return the bytes of the longest row of the B of an adapter; 0 where there is none."""
    return max(
        (a.b.shape[1] * a.b.element_size() for a in call.adapters if a is not None), default=0
    )


def _project(call: LinearRows) -> tuple[Tensor, list[int]]:
    """Launch the projections of x; return them and the first column of each weight's."""
    rows, columns = call.x.shape
    adapters = [adapter for adapter in call.adapters if adapter is not None]
    ends = [sum(a.a.shape[0] for a in adapters[: i + 1]) for i in range(WEIGHTS)]
    projected = call.x.new_empty((rows, ends[-1]), dtype=torch.float32)
    launch = _prepared(
        (NIBBLES.name, project_name(call)),
        call.x.device.index,
        (ends[-1], -(-rows // _together(rows)), 1),
        2 + WEIGHTS,
        (
            *(*ends, *(bits(a.scaling) for a in adapters), *[0] * (WEIGHTS - len(adapters))),
            *(columns, rows, ends[-1]),
        ),
        0,
        False,
    )
    tensors = [call.x, *(_aligned(adapter.a) for adapter in adapters)]
    pointers = [t.data_ptr() for t in tensors] + [0] * (WEIGHTS - len(adapters))
    launch(*pointers, projected.data_ptr())
    starts = iter([0, *ends])
    first = [0 if adapter is None else next(starts) for adapter in call.adapters]
    return projected, [*first, *[0] * (WEIGHTS - len(first))]


def kernel_name(call: LinearRows, count: int) -> str:
    """Name the specialization that serves `count` rows of a call."""
    plan = _plan(call, count)
    assert plan is not None
    return source_of(call.fmt).kernel(call.fmt, call.x.dtype, count, call.gated, plan.height)


def project_name(call: LinearRows) -> str:
    wide, together = str(_wide(call)).lower(), _together(call.x.shape[0])
    return f"project<{TYPES[call.x.dtype]}, {wide}, {together}>"


def _together(rows: int) -> int:
    """Return how many rows of x a program projects."""
    return 1 if rows == 1 else TOKENS


@functools.cache
def _most_shared(device: int) -> int:
    """Return the bytes of shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # annotations are partial
    return int(properties.shared_memory_per_block_optin)


def _plan(call: LinearRows, count: int) -> Plan | None:
    device, source = call.x.device.index, source_of(call.fmt)
    strips = sum(-(-n // STRIP) for n in (call.features[:1] if call.gated else call.features))
    tall = strips > _programs(strips, device)  # else half of the multiprocessors had no tile
    sizes = call.fmt, count, _room(call), _most_shared(device)
    found = source.plan(*sizes, 2) if tall and count <= TOKENS else None
    return found or source.plan(*sizes, 1)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % VECTOR_BYTES else x


def _in_order(call: LinearRows, operands: Sequence[Tensor]) -> list[Tensor | None]:
    """Put a weight's operands in the kernel's order, codes and scales as it can copy them."""
    by_name: dict[str | None, Tensor] = dict(zip(call.fmt.operands, operands, strict=True))
    codes, absmax, *others = source_of(call.fmt).in_order(call.fmt)
    return [_aligned(by_name[codes]), _aligned(by_name[absmax]), *map(by_name.get, others)]


def _programs(tiles: int, device: int) -> int:
    """Return how many programs share the tiles: at most one for each multiprocessor."""
    return min(tiles, torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=1024)
def _prepared(
    kernel: tuple[str, str],
    device: int,
    grid: int | tuple[int, int, int],
    pointers: int,
    numbers: tuple[int, ...],
    shared: int,
    early: bool,
) -> driver.Launch:
    handle = driver.function(*kernel, device)
    assert not isinstance(handle, str), handle
    return driver.Launch(
        handle,
        device,
        grid=grid,
        threads=THREADS,
        pointers=pointers,
        numbers=numbers,
        shared=shared,
        early=early,
    )


KERNEL = Cuda()
