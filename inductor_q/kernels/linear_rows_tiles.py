"""How programs of the Triton kernel of few rows cut their work: a table to edit after a sweep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Features of a program, columns of a step, warps, and programs that fill a multiprocessor.

    is_sum: multiply one row and sum in float32; else tensor cores multiply 16 rows or more.
    """

    features: int
    depth: int
    num_warps: int
    programs: int
    is_sum: bool = False

    def split(self, tiles: int, steps: int, multiprocessors: int) -> int:
        """Return among how many programs the columns of `tiles` are split to fill a GPU."""
        wanted = -(-self.programs * multiprocessors // max(tiles, 1))
        return max(1, min(wanted, steps // LEAST_STEPS))


#: Steps that a program has at least where columns are split: its first one waits for memory.
LEAST_STEPS = 2

#: Rows and bits of a code up to which a tile serves, the first that does: those of a sweep on an
#: H200 that were nearest to the best of eight formats and four shapes.
TILES = (
    (1, 8, Tile(features=8, depth=512, num_warps=4, programs=2, is_sum=True)),
    (16, 5, Tile(features=64, depth=128, num_warps=4, programs=2)),
    (16, 8, Tile(features=32, depth=128, num_warps=4, programs=4)),
    (32, 8, Tile(features=128, depth=128, num_warps=8, programs=4)),
    (64, 8, Tile(features=64, depth=64, num_warps=4, programs=2)),
)


#: More than one row before compute capability 8.0, for which Triton has no tensor cores: larger
#: tiles of such products spill registers.
WITHOUT_TENSOR_CORES = Tile(features=32, depth=32, num_warps=4, programs=4)


#: For one row, and for more, of codes that lie in no order of words and are decoded one by one,
#: which takes registers for places: larger tiles spill them.
BY_ELEMENT = (
    Tile(features=16, depth=128, num_warps=4, programs=4, is_sum=True),
    Tile(features=64, depth=32, num_warps=8, programs=2),
)


def tile_of(rows: int, bits: int, major: int, codes: int) -> Tile:
    """Return the tile for so many rows of x, bits of a code, a major compute capability, and codes
    that a lane decodes together."""
    if rows > 1 and major < 8:
        return WITHOUT_TENSOR_CORES
    if codes == 1:
        return BY_ELEMENT[rows > 1]
    return next(tile for most, widest, tile in TILES if rows <= most and bits <= widest)
