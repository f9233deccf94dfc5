"""Choose the tiles of a grouped GEMM that decodes in its loop, by what a device has.

Functions depend on a problem (`Work`) and a device (`Limits`) alone. The candidates are those of
ScatterMoE's LoRA kernels, without the input gradient's steps of 256, which fit with small tiles
only, and with 16 rows for experts that have few; what does not fit in shared memory or registers is
taken out before anything is compiled.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROWS = (16, 32, 64, 128)
FEATURES = (32, 64, 128, 256)
DEPTHS = (32, 64, 128)
WARPS = (4, 8)
STAGES = (3, 4, 5)

#: Shared memory that the compiler takes beside the operands: conversions of layouts, barriers.
SLACK_BYTES = 10_000

#: Register bytes per thread (255 registers). The limit is soft: we estimate, and spilling is legal.
REGISTER_BYTES = 1024


@dataclass(frozen=True)
class Limits:
    """A device: compute capability, and the most shared memory that a block can opt in to."""

    capability: tuple[int, int]
    shared_bytes: int


@dataclass(frozen=True)
class Tile:
    """A program's rows and features of the output, the depth of a step of its loop, how it runs."""

    rows: int
    features: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """A class of problems that one tile is chosen for.

    An expert has `rows` rows on average, rounded up to a power of two; an element is stored in
    `weight_bits`; `group` columns share a scale (0: dense); `rank` is the adapter's as multiplied.
    """

    rows: int
    in_features: int
    out_features: int
    transposed: bool
    weight_bits: int
    group: int
    rank: int


#: (least rows per expert, tile): it is wide enough to use each decoded weight often. On an H200 the
#: best of two dozen near it took 0.64 to 1.0 of its time; on other GPUs nobody has measured.
START = (
    (96, Tile(128, 128, 64, 8, 3)),
    (48, Tile(64, 128, 64, 4, 3)),
    (24, Tile(32, 128, 64, 4, 4)),
    (0, Tile(16, 64, 64, 4, 4)),
)


#: The tile below 8.0: Triton has no matrix instructions there, and keeps operands in registers.
START_SCALAR = Tile(32, 64, 32, 4, 3)


def limits(device: torch.device) -> Limits:
    """Read the limits of a CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks the attribute
    return Limits((properties.major, properties.minor), properties.shared_memory_per_block_optin)


def candidates(work: Work) -> list[Tile]:
    """List every tile that makes sense for `work`, the least shared memory first.

    They are no wider than the problem, and have the two numbers of rows next to an expert's.
    """
    fitting = [r for r in ROWS if r >= work.rows][:1] or [ROWS[-1]]
    rows = [r for r in ROWS if fitting[0] // 2 <= r <= fitting[0]]
    features = [f for f in FEATURES if f == FEATURES[0] or f < 2 * work.out_features]
    depths = [d for d in DEPTHS if d == DEPTHS[0] or d < 2 * work.in_features]
    tiles = itertools.starmap(Tile, itertools.product(rows, features, depths, WARPS, STAGES))
    return sorted(tiles, key=lambda tile: (shared_bytes(tile, work), tile.warps))


def shared_bytes(tile: Tile, work: Work) -> int:
    """Bound what the operands of expert_gemm take: stages of rows, weight and scales, and the
    decoded weight; or, if more, the adapter's operands after the loop."""
    stage = tile.depth * tile.rows * 2 + tile.features * tile.depth * work.weight_bits // 8
    if work.group:
        stored = (tile.depth, tile.features) if work.transposed else (tile.features, tile.depth)
        stage += 4 * stored[0] * -(-stored[1] // work.group)
    loop = tile.stages * stage + 2 * tile.features * tile.depth
    return max(loop, 2 * work.rank * (tile.features + tile.rows))


def register_bytes(tile: Tile, work: Work) -> int:
    """Estimate what a thread holds: sums and, where it is decoded, the weight in float32."""
    element = 4 if work.group else 2
    held = 4 * tile.features * tile.rows + 2 * element * tile.features * tile.depth
    return held // (32 * tile.warps)


def pruned(tiles: Sequence[Tile], work: Work, shared_limit: int) -> list[Tile]:
    """Keep the tiles that fit or, where none does, the one that takes the least."""

    def least(tile: Tile) -> int:
        return shared_bytes(tile, work)

    fit = [t for t in tiles if shared_bytes(t, work) <= shared_limit - SLACK_BYTES]
    fit = fit or [min(tiles, key=least)]
    light = [t for t in fit if register_bytes(t, work) <= REGISTER_BYTES]
    return light or [min(fit, key=least)]


@functools.lru_cache(maxsize=1024)
def start(work: Work, device: Limits) -> Tile:
    """Return the tile of START, or the nearest of those that fit."""
    wanted = next(tile for rows, tile in START if work.rows >= rows)
    if device.capability < (8, 0):
        wanted = START_SCALAR
    tiles = pruned(candidates(work), work, device.shared_bytes)
    return min(tiles, key=lambda tile: distance(tile, wanted))


def distance(one: Tile, other: Tile) -> tuple[int, int]:
    """Count the factors of two between the sizes of two tiles, then other differences."""
    sizes = ((one.rows, other.rows), (one.features, other.features), (one.depth, other.depth))
    steps = sum(abs(a.bit_length() - b.bit_length()) for a, b in sizes)
    warps = abs(one.warps.bit_length() - other.warps.bit_length())
    return steps, warps + abs(one.stages - other.stages)
