"""Multiply a few rows with packed weights in any format, with Triton, on any NVIDIA GPU.

It is what `linear_rows_cuda` is for some formats on Hopper. Weights are read once, as they are
stored, and decoded in registers by the device functions that are printed from the format; scales
are found once a group. A program has some features of one weight and some of the columns. It holds
what it needs for its next step while it computes one. One row is multiplied and summed as it is;
more are a narrow product of tensor cores, padded to 16.

Several weights of one input share a launch. Their adapters take one more in front of it, which
projects x. Where weights are too small to fill the GPU, columns are split among programs, whose
sums are written in float32 and added in order by one more launch: results do not vary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_q.formats import QuantFormat
from inductor_q.kernels.dequantize_triton import Printed, codebook_on, compile_source, print_parts
from inductor_q.kernels.linear_rows_parts import ADD_PARTS, FINISH, LINEAR_ROWS, PRODUCT, PROJECT
from inductor_q.kernels.linear_rows_sources import WEIGHTS
from inductor_q.kernels.linear_rows_tiles import Tile, tile_of
from inductor_q.kernels.provider import DENSE_WEIGHT, TritonProvider
from inductor_q.kernels.rows_calls import Adapter, LinearRows
from inductor_q.kernels.triton_launch import Repeated

INT32_LIMIT = 2**31
MOST_ROWS = 64
MOST_RANK = 256  # of an adapter
#: Rows of x that a program projects together, and columns of a step of it.
TOKENS, PROJECTED_DEPTH, PROJECTED_WARPS = 8, 1024, 8
#: What the interpreter has of multiprocessors, and for a major compute capability.
INTERPRETED = (1, 9)


class Triton(TritonProvider[LinearRows]):
    def unknown(self, fmt: QuantFormat | None) -> str:
        return DENSE_WEIGHT if fmt is None else ""

    def refuses(self, call: LinearRows) -> str:
        x = call.x
        if refused := self.unknown(call.fmt):
            return refused
        if x.device.type != "cuda":
            return f"there is no Triton for {x.device.type} tensors"
        if x.dtype not in (torch.bfloat16, torch.float16):
            return f"x is {x.dtype}, not of 16 bits"
        capability = torch.cuda.get_device_capability(x.device)
        if capability < (7, 5) or (x.dtype is torch.bfloat16 and capability < (8, 0)):
            major, minor = capability
            return f"compute capability {major}.{minor} does not multiply {x.dtype} matrices"
        return unfit(call)

    def plan(self, call: LinearRows) -> Plan:
        return Plan(call)


def unfit(call: LinearRows) -> str:
    """Return what the kernel cannot do of a call on any device; empty where it can do it."""
    x = call.x
    if x.shape[0] > MOST_ROWS:
        return f"{x.shape[0]} rows, more than {MOST_ROWS}"
    if not x.shape[1]:
        return "x has no columns"
    if len(call.weights) > WEIGHTS:
        return f"{len(call.weights)} weights, more than {WEIGHTS}"
    for name, *stored in zip(call.fmt.operands, *call.weights, strict=True):
        if not all(t.is_contiguous() for t in stored):
            return f"{name} is not contiguous"
        if len(dtypes := {t.dtype for t in stored}) > 1:
            return f"{name} is {' and '.join(sorted(map(str, dtypes)))}, in one call"
    for features, bias in zip(call.features, call.biases, strict=True):
        if bias is not None and (bias.shape != (features,) or not bias.is_contiguous()):
            return f"the bias is not {features} numbers in a row"
    adapters = _present(call)
    dtypes = {t.dtype for adapter in adapters for t in (adapter.a, adapter.b)}
    if len(dtypes) > 1 or not dtypes <= {x.dtype, torch.float32}:
        return f"the adapters are {sorted(map(str, dtypes))}, not all {x.dtype} or float32"
    for adapter in adapters:
        if not adapter.a.is_contiguous() or not adapter.b.is_contiguous():
            return "an adapter is not contiguous"
        if not 0 < adapter.a.shape[0] <= MOST_RANK:
            return f"an adapter's rank is {adapter.a.shape[0]}, not from 1 to {MOST_RANK}"
    return ""


def _present(call: LinearRows) -> list[Adapter]:
    return [adapter for adapter in call.adapters if adapter is not None]


class Plan:
    """The launches of all calls that are like the first one.

    tile: how programs cut the work; by default, what the table has for the call.
    split: among how many programs columns are split; by default, enough to fill the GPU.
    """

    def __init__(
        self, call: LinearRows, tile: Tile | None = None, split: int | None = None
    ) -> None:
        rows, cols = call.x.shape
        fmt, count, features = call.fmt, len(call.weights), call.features
        processors, major = _device(call.x.device)
        codes = codes_of_a_lane(call)
        tile = tile or tile_of(rows, fmt.packing.bits, major, codes)
        kernel = _kernel(fmt, codes, count, call.gated)
        assert rows == 1 or not tile.is_sum, (tile, rows)
        height = 1 if tile.is_sum else max(16, _power_of_two(rows))
        tiles = sum(-(-n // tile.features) for n in features[: 1 if call.gated else None])
        steps = -(-cols // tile.depth)
        each = -(-steps // (split or tile.split(tiles, steps, processors)))
        self._split = -(-steps // each)
        self._width = sum(a.a.shape[0] for a in _present(call))
        self._total = sum(features)
        self._order = kernel.order
        self._codebook = codebook_on(fmt, call.x.device)
        self._project = _projection(call) if self._width else None
        group = fmt.group(cols) & -fmt.group(cols)
        units = cols // codes
        align = math.gcd(units, 16)
        ranks = [0 if a is None else a.a.shape[0] for a in call.adapters]
        starts = [sum(ranks[:i]) for i in range(count)]
        of_result = {
            "GATED": call.gated,
            "ADAPTED": self._width > 0,
            "BIASED": sum(1 << i for i, bias in enumerate(call.biases) if bias is not None),
            "ROWS": height,
            "FEATURES": tile.features,
        }
        self._launch = Repeated(
            kernel.function,
            (tiles, self._split, 1),
            (cols, units // align, each, rows, self._width, *features, *ranks, *starts),
            {
                **of_result,
                "DEPTH": tile.depth,
                "GROUP": min(group, tile.depth),
                "ALIGN": align,
                "EVEN": cols % tile.depth == 0,
                "IS_SUM": tile.is_sum,
                "IS_SPLIT": self._split > 1,
                "WIDE": max(features) * cols + tile.depth >= INT32_LIMIT,
            },
            num_warps=tile.num_warps,
            num_stages=1,  # more would move each look-up in a table through shared memory
        )
        self._add = Repeated(
            _adding(count, call.gated),
            (tiles, 1, 1),
            (self._split, rows, self._width, *features, *ranks, *starts),
            of_result,
            num_warps=4,
        )

    def __call__(self, call: LinearRows) -> list[Tensor]:
        outputs = call.outputs()
        for launch, tensors in self.launches(call, outputs):
            launch(tensors)
        return outputs

    def launches(
        self, call: LinearRows, outputs: Sequence[Tensor]
    ) -> list[tuple[Repeated, list[Tensor]]]:
        """Return the launches in their order, and what each is given."""
        x, rows = call.x.contiguous(), call.x.shape[0]
        projected = partial = self._codebook  # what is not read
        found: list[tuple[Repeated, list[Tensor]]] = []
        if self._project is not None:
            projected = x.new_empty((rows, self._width), dtype=torch.float32)
            found.append((self._project, [projected, x, *[a.a for a in _present(call)]]))
        if self._split > 1:
            partial = x.new_empty((self._split, rows, self._total), dtype=torch.float32)
        results = self._results(call, outputs)
        weights: list[Tensor] = []
        for i, operands in enumerate(call.weights):
            given = (*operands, self._codebook)
            weights += [*results[3 * i : 3 * i + 3], *[given[j] for j in self._order]]
        found.append((self._launch, [x, projected, partial, *weights]))
        if self._split > 1:
            found.append((self._add, [partial, projected, *results]))
        return found

    def _results(self, call: LinearRows, outputs: Sequence[Tensor]) -> list[Tensor]:
        """List the result, the bias and the adapter's B of each weight, or what is not read."""
        present = _present(call)
        found = []
        for i, (bias, adapter) in enumerate(zip(call.biases, call.adapters, strict=True)):
            found.append(outputs[0 if call.gated else i])
            found.append(call.x if bias is None else bias)
            found.append(adapter.b if adapter else present[0].b if present else call.x)
        return found


def codes_of_a_lane(call: LinearRows) -> int:
    """Return how many codes a lane loads together; all of them share their scales."""
    fmt, cols = call.fmt, call.x.shape[1]
    aligned = all(operands[0].data_ptr() % 4 == 0 for operands in call.weights)
    widths: tuple[int, ...] = ()
    if fmt.planes:
        widths = (8,)
    elif fmt.places:
        widths = (len(fmt.places),)
    elif fmt.nibbles:
        widths = (8, 2) if aligned else (2,)
    elif fmt.in_bytes:
        widths = (4,) if aligned else ()
    shared = math.gcd(cols, fmt.group(cols))
    return next((width for width in widths if shared % width == 0), 1)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """Return how many multiprocessors a GPU has, and its major compute capability."""
    if device.type != "cuda":
        return INTERPRETED
    properties: Any = torch.cuda.get_device_properties(device)  # annotations are partial
    return int(properties.multi_processor_count), int(properties.major)


def _projection(call: LinearRows) -> Repeated:
    """Prepare the launch that projects x for all adapters, each times its factor."""
    rows, cols = call.x.shape
    present = _present(call)
    ranks = [adapter.a.shape[0] for adapter in present]
    together = 1 if rows == 1 else TOKENS
    return Repeated(
        _projecting(len(present)),
        (sum(ranks), -(-rows // together), 1),
        (cols, rows, sum(ranks), *ranks),
        {
            **{f"SCALING{i}": adapter.scaling for i, adapter in enumerate(present)},
            "ROWS": together,
            "DEPTH": PROJECTED_DEPTH,
        },
        num_warps=PROJECTED_WARPS,
        num_stages=1,
    )


# --- what is printed ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A printed kernel, and the order in which it takes a weight's operands and the codebook."""

    function: Any
    order: tuple[int, ...]


@functools.cache
def _kernel(fmt: QuantFormat, codes: int, count: int, gated: bool) -> Kernel:
    """Print the kernel of `fmt` for `codes` codes in a lane and so many weights."""
    printed = print_parts(fmt, codes, ".to(dtype)", scale_mask="of_group", rows="features")
    operands = ("qweight", "codebook", *printed.pointers)
    source = printed.functions + FINISH + _product(printed, codes)
    source += LINEAR_ROWS.format(
        **_of_weights(count, gated, ("out", "bias", "b", *operands)),
        pointers="".join(f"{name}, " for name in operands),
    )
    name = f"<qfuse linear_rows {fmt.name} x{codes} of {count}{' gated' * gated}>"
    table = fmt.operands.index(printed.table) if printed.table else len(fmt.operands)
    order = (0, table, *[fmt.operands.index(name) for name in printed.pointers])
    return Kernel(compile_source(name, source, "linear_rows"), order)


def _product(printed: Printed, codes: int) -> str:
    """Fill in how a step's units and scales are loaded and decoded."""
    held = [*printed.loaded, *printed.shared]
    return PRODUCT.format(
        pointers="".join(f"{name}, " for name in printed.pointers),
        unit=printed.unit,
        codes=codes,
        units="\n".join(f"    {line.strip()}" for line in printed.units.splitlines()),
        scales="\n".join(f"    {line}" for line in printed.scales),
        held=", ".join(held),
        following=", ".join(f"next_{name}" for name in held),
        values="\n".join(f"        {line}" for line in printed.values),
        joined=printed.joined,
    )


@functools.cache
def _adding(count: int, gated: bool) -> Any:
    """Print the kernel that adds up what programs had of split columns."""
    source = FINISH + ADD_PARTS.format(**_of_weights(count, gated, ("out", "bias", "b")))
    return compile_source(f"<qfuse add_parts of {count}{' gated' * gated}>", source, "add_parts")


@functools.cache
def _projecting(count: int) -> Any:
    return compile_source(
        f"<qfuse project of {count}>",
        PROJECT.format(
            matrices="".join(f"a{i}, " for i in range(count)),
            ranks="".join(f"rank{i}, " for i in range(count)),
            quoted="".join(f'"rank{i}", ' for i in range(count)),
            scalings="".join(f"SCALING{i}: tl.constexpr, " for i in range(count)),
            which=" + ".join(["0", *[f"(column >= {_sum('rank', i)})" for i in range(1, count)]]),
            before=_picked([_sum("rank", i) for i in range(count)]),
            matrix=_picked([f"a{i}" for i in range(count)]),
            scaling=_picked([f"SCALING{i}" for i in range(count)]),
        ),
        "project",
    )


def _of_weights(count: int, gated: bool, names: Sequence[str]) -> dict[str, str]:
    """Print the arguments of `count` weights, and the choice of one of them.

    A program has a tile of one weight, or the same tile of the two of a gate, in two turns.
    """
    numbers = ("features", "rank", "start")
    each = [f"{name}{i}" for i in range(count) for name in names]
    every = [f"{name}{i}" for name in numbers for i in range(count)]
    tiles = [f"tl.cdiv(features{i}, FEATURES)" for i in range(count)]
    lines = ["which = 0"]
    if not gated:
        lines += [f"below{i} = {' + '.join(['0', *tiles[:i]])}" for i in range(count)]
        after = [f"(tile >= below{i}).to(tl.int32)" for i in range(1, count)]
        lines += [f"which = {' + '.join(after)}"] if after else []
        lines += [f"tile -= {_picked([f'below{i}' for i in range(count)])}"]
    turns = []
    for turn in range(2 if gated else 1):
        bound = [f"which = {turn}"] if gated else []
        for name in (*names, *numbers):
            of = [f"{name}{i}" for i in range(count)]
            bound.append(f"{name} = {of[turn] if gated else _picked(of)}")
        before = [_sum("features", i) for i in range(count)]
        bound.append(f"before = {before[turn] if gated else _picked(before)}")
        turns.append("\n".join(f"    {'    ' * turn}{line}" for line in bound))
    return {
        "each": "".join(f"{name}, " for name in each),
        "every": "".join(f"{name}, " for name in every),
        "quoted": "".join(f'"{name}", ' for name in every),
        "everything": _sum("features", count),
        "choice": "\n".join(f"    {line}" for line in lines),
        "first": turns[0],
        "second": turns[-1] if gated else "        pass",
    }


def _sum(name: str, count: int) -> str:
    """Add up the first `count` numbers of that name."""
    return f"({' + '.join([f'{name}{i}' for i in range(count)] or ['0'])})"


def _picked(names: Sequence[str]) -> str:
    """Choose the one of `names` that `which` counts to."""
    text = names[-1]
    for i in reversed(range(len(names) - 1)):
        text = f"tl.where(which == {i}, {names[i]}, {text})"
    return text


KERNEL = Triton()
