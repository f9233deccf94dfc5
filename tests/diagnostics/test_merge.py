"""The reports of several ranks as one, by files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inductor_q.diagnostics.explanation import (
    Exit,
    Explanation,
    Frame,
    GraphBreak,
    Layer,
    Phase,
    SavedTensors,
)
from inductor_q.diagnostics.merge import Exchange, Ranks, merge
from inductor_q.exc import InvalidOptionValue

PLACE = Frame("model.py", 3)


def rank(number: int, **fields: object) -> Explanation:
    run = Explanation(target="t", rank=number, world_size=2)
    return replace(run, **fields)  # type: ignore[arg-type]


def test_events_add_up_and_times_do_not() -> None:
    both = GraphBreak("print", 2, origin=PLACE)
    alone = GraphBreak(".item()", 1, origin=PLACE)
    merged = merge(
        [
            rank(1, breaks=(both, alone), seconds=3.0, phases=(Phase("dynamo", 2.0),)),
            rank(
                0,
                breaks=(both,),
                seconds=2.0,
                phases=(Phase("dynamo", 1.5), Phase("inductor", 1.0)),
                saved=(SavedTensors("aten.mm", 1, 10),),
            ),
        ]
    )
    assert (merged.rank, merged.world_size, merged.seconds) == (0, 2, 3.0)
    assert [(b.reason, b.count) for b in merged.breaks] == [("print", 4), (".item()", 1)]
    assert merged.phases == (Phase("dynamo", 2.0), Phase("inductor", 1.0))
    assert merged.saved_bytes == 10
    assert merged.warnings == ("rank 1 only: graph break at model.py:3: .item()",)


def test_a_layer_is_as_good_as_its_worst_rank() -> None:
    fused = Layer("a", "linear", "nf4", "fused")
    unseen = replace(fused, status="unseen", reason="did not run")
    assert merge([rank(0, layers=(fused,)), rank(1, layers=(unseen,))]).layers == (unseen,)
    masked = replace(fused, status="canonical", reason="the mask may hold padding")
    merged = merge([rank(0, attention=(masked,)), rank(1, attention=(fused,))])
    assert merged.attention == (masked,)


def test_the_first_failure_and_the_missing_rank_are_told() -> None:
    lost = rank(1, exit=Exit(1, "ValueError: no"))
    merged = merge([lost])
    assert merged.exit.exception == "ValueError: no"
    assert merged.warnings == ("no report of rank 0: it was killed, or is still running",)


def test_ranks_from_the_environment() -> None:
    assert Ranks.here({}) == Ranks()
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    ranks = Ranks.here(launched)
    assert (ranks.rank, ranks.world_size) == (1, 2)
    assert ranks.run != Ranks.here({**launched, "MASTER_PORT": "29501"}).run
    for name, text in (("WORLD_SIZE", "x"), ("RANK", "2"), ("RANK", ""), ("LOCAL_WORLD_SIZE", "-")):
        with pytest.raises(InvalidOptionValue, match=f"'{name}' in the environment: '{text}' is"):
            Ranks.here({**launched, name: text})


@pytest.fixture
def exchanges(tmp_path: Path) -> tuple[Exchange, Exchange]:
    first, second = (
        Exchange(tmp_path / "report.json", Ranks(n, 2, run="one launch")) for n in range(2)
    )
    return first, second


def test_an_exchange_by_files(exchanges: tuple[Exchange, Exchange]) -> None:
    first, second = exchanges
    first.leave(rank(0))
    assert [run.rank for run in first.collect(0)] == [0]
    second.leave(rank(1))
    assert [run.rank for run in second.collect(0)] == [0, 1]
    names = sorted(path.name for path in first.file.parent.iterdir())
    assert names == ["report.rank0.json", "report.rank1.json"]


def test_what_an_earlier_launch_left_is_not_mixed_in(exchanges: tuple[Exchange, Exchange]) -> None:
    first, second = exchanges
    replace(second, ranks=replace(second.ranks, run="an earlier launch")).leave(rank(1))
    first.leave(rank(0))
    assert [run.rank for run in first.collect(0)] == [0]
