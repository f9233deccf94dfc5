"""Tiles: which fit a device and a problem, and which is taken."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from inductor_q.kernels import tiles
from tests.support.tile_cases import DEVICES, WORK, device


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("arch", DEVICES)
def test_tiles_fit_the_device_and_the_problem(arch: int, rows: int) -> None:
    for bits, group, transposed in ((4, 64, False), (4, 32, True), (32, 0, False)):
        work = replace(WORK, rows=rows, weight_bits=bits, group=group, transposed=transposed)
        fit = tiles.pruned(tiles.candidates(work), work, DEVICES[arch])
        assert fit
        for tile in fit:
            assert tiles.shared_bytes(tile, work) <= DEVICES[arch] - 10_000
            assert tiles.register_bytes(tile, work) <= 1024
            assert tile.rows < 2 * max(16, rows)
        assert tiles.start(work, device(arch)) in fit


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "input gradient"])
def test_candidates_are_the_published_ones(transposed: bool) -> None:
    """And 16 rows, for experts that have fewer than 32; without the input gradient's 256 deep."""
    work = replace(WORK, transposed=transposed)
    found = [t for rows in (16, 32, 128) for t in tiles.candidates(replace(work, rows=rows))]
    assert {t.rows for t in found} == {16, 32, 64, 128}
    assert {t.features for t in found} == {32, 64, 128, 256}
    assert {t.depth for t in found} == {32, 64, 128}
    assert {t.warps for t in found} == {4, 8} and {t.stages for t in found} == {3, 4, 5}
    small = replace(work, in_features=64, out_features=48)
    assert {(t.features, t.depth) for t in tiles.candidates(small)} == {
        (features, depth) for features in (32, 64) for depth in (32, 64)
    }


def test_what_is_256_deep_fits_only_where_it_is_small() -> None:
    """Why it is no candidate: with 64 rows and 64 features at most, weights are decoded, or rows
    read, more often. What fits has not been timed."""
    for arch, bits in itertools.product(DEVICES, (4, 16)):
        work = replace(WORK, transposed=True, weight_bits=bits, group=64 if bits == 4 else 0)
        deep = {
            replace(t, rows=rows, depth=256) for t in tiles.candidates(work) for rows in tiles.ROWS
        }
        fit = tiles.pruned([*deep], work, DEVICES[arch])
        assert max(max(t.rows, t.features) for t in fit) <= 64, arch


def test_bytes_are_those_of_the_operands() -> None:
    tile = tiles.Tile(rows=64, features=128, depth=64, warps=4, stages=3)
    x, decoded = 64 * 64 * 2, 128 * 64 * 2
    assert tiles.shared_bytes(tile, WORK) == 3 * (x + 128 * 32 + 128 * 4) + decoded
    transposed = replace(WORK, transposed=True)  # 64 rows with two groups each
    assert tiles.shared_bytes(tile, transposed) == 3 * (x + 128 * 32 + 64 * 2 * 4) + decoded
    dense = replace(WORK, weight_bits=16, group=0)
    assert tiles.shared_bytes(tile, dense) == 3 * (x + decoded) + decoded
    assert tiles.shared_bytes(tile, replace(WORK, rank=1024)) == 2 * 1024 * (64 + 128)


def test_the_smallest_is_left_where_none_fits() -> None:
    every = tiles.candidates(WORK)
    smallest = min(every, key=lambda tile: tiles.shared_bytes(tile, WORK))
    for capacity in (0, 10_000, tiles.shared_bytes(smallest, WORK) + 9_999):
        assert tiles.pruned(every, WORK, capacity) == [smallest]
    assert len(tiles.pruned(every, WORK, tiles.shared_bytes(smallest, WORK) + 10_000)) >= 1
    heavy = [t for t in every if tiles.register_bytes(t, WORK) > tiles.REGISTER_BYTES]
    assert heavy and len(tiles.pruned(heavy, WORK, DEVICES[90])) == 1
