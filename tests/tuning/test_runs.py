"""The file of runs: what was written comes back, a torn line is none, keys are apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs.tune_figures import overcome
from inductor_q.exc import UnusableRuns
from inductor_q.tuning.runs import Run, Runs

ONE = Run(
    condition="base",
    changes={"extend_k.min_rows": 3},
    seconds=(3.0, 2.0, 1.0, 1.5),
    losses=(2.0, 1.0),
    sites={"extend_k": (1, 2)},
    sizes={"rows": 128},
)
TWO = Run(condition="eager", error="exit status 1: RuntimeError: no")


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "folder" / "tune.jsonl", {"device": "x", "steps": 4})
    assert runs.read() == []
    runs.append(ONE)
    runs.append(TWO)
    assert Runs(runs.path, {"steps": 4, "device": "x"}).read() == [ONE, TWO]


def test_what_failed_and_then_did_not_is_overcome() -> None:
    again = replace(TWO, error="", seconds=(1.0,))
    other = replace(TWO, round=2)
    assert overcome([TWO, ONE, other]) == [TWO, ONE, other]
    assert overcome([TWO, ONE, again, other]) == [ONE, again, other]


def test_other_keys_are_others(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    Runs(path, {"torch": "2.11"}).append(ONE)
    assert Runs(path, {"torch": "2.13"}).read() == []


def test_a_line_cut_short_is_none_and_spoils_no_other(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "tune.jsonl", {})
    runs.append(ONE)
    whole = runs.path.read_bytes()
    runs.path.write_bytes(whole + whole[: len(whole) // 2])
    assert runs.read() == [ONE]
    runs.append(TWO)
    assert runs.read() == [ONE, TWO]
    assert runs.path.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "run", [3, {"seconds": [1.0]}, {"condition": "base", "seconds": ["x"]}, {"condition": "base"}]
)
def test_a_damaged_line_is_none(run: Any, tmp_path: Path) -> None:
    runs = Runs(tmp_path / "tune.jsonl", {})
    damaged = json.dumps({"key": {}, "run": run}).encode()
    runs.path.write_bytes(b'{"key": "\xff"}\n' + b"[" * 200_000 + b"\n" + damaged)
    runs.append(ONE)
    assert runs.read() == [ONE]


def test_a_file_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "tune.jsonl").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "tune.jsonl", tmp_path / "file" / "qfuse" / "tune.jsonl"):
        with pytest.raises(UnusableRuns, match="directory"):
            Runs(path, {}).read()


def test_begun_anew_earlier_runs_stay_in_the_file_alone(tmp_path: Path) -> None:
    runs, other = (Runs(tmp_path / "tune.jsonl", {"model": name}) for name in "ab")
    runs.append(ONE)
    other.append(ONE)
    runs.begin_anew()
    assert (runs.read(), other.read()) == ([], [ONE])
    runs.append(TWO)
    assert runs.read() == [TWO]
    assert len(runs.path.read_text().splitlines()) == 4


def test_a_step_takes_the_median_of_the_last_half() -> None:
    assert ONE.step_s == 1.25
