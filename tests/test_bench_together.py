"""Commands that run side by side: one measures at a time, and none is left stopped."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from pathlib import Path

import pytest

from benchmarks import together
from benchmarks.__main__ import main

MEASURES = """
import json, pathlib, sys, time
from benchmarks.alone import alone
deadline = time.monotonic() + 60
while not pathlib.Path(sys.argv[2]).exists() and time.monotonic() < deadline:
    time.sleep(0.01)
seen = []
for _ in range(3):
    with alone(), alone():
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            pass
        seen.append((began, time.monotonic()))
    time.sleep(0.01)
json.dump(seen, open(sys.argv[1], "w"))
"""
COUNTS = """
import json, pathlib, sys, time
ticks = [time.monotonic()]
pathlib.Path(sys.argv[2]).touch()
while ticks[-1] - ticks[0] < 4:
    time.sleep(0.01)
    ticks.append(time.monotonic())
json.dump(ticks, open(sys.argv[1], "w"))
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (("measures", MEASURES), ("counts", COUNTS)):
        root = f"import sys; sys.path.insert(0, {str(Path(together.__file__).parents[1])!r})\n"
        (tmp_path / f"{name}.py").write_text(root + code)
    return tmp_path


def test_one_measures_while_the_others_stand_still(modules: Path) -> None:
    names = ("a", "b")
    counting = modules / "counting"  # c takes longer to start on some machines than a to measure
    lines = [f"{name}: measures {modules / name}.json {counting}" for name in names]
    plan = modules / "plan.txt"
    plan.write_text("\n".join([*lines, "# stands still", "", f"c: counts {{json}} {counting}"]))
    assert main(["together", str(plan), "--out", str(modules / "out")]) == 0
    spans = [span for name in names for span in json.loads((modules / f"{name}.json").read_text())]
    spans.sort()
    assert len(spans) == 6
    assert all(one[1] < two[0] for one, two in itertools.pairwise(spans))
    ticks = json.loads((modules / "out" / "c.json").read_text())
    stopped = [(a, b) for a, b in spans if ticks[0] < a and b < ticks[-1]]
    assert stopped and not any(a < tick < b for a, b in stopped for tick in ticks)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(1)"])
def test_who_dies_while_it_measures_stops_nobody(modules: Path, end: str) -> None:
    dies = "import os, time\nfrom benchmarks.alone import alone\n"
    dies += f"time.sleep(1)\nwith alone():\n    {end}\n"
    head = (modules / "measures.py").read_text().splitlines()[0]
    (modules / "dies.py").write_text(f"{head}\n{dies}")
    counts = ["counts", str(modules / "c.json"), str(modules / "counting")]
    commands = {"dies": ["dies"], "c": counts}
    began = time.monotonic()
    assert together.run(commands, modules / "out", 300) == 1
    assert time.monotonic() - began < 200
    assert (modules / "c.json").exists()


def test_what_takes_too_long_is_stopped(modules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"c": ["counts", str(modules / "c.json"), str(modules / "counting")]}
    assert together.run(commands, modules / "out", 1) == 1
    assert "c: stopped after" in capsys.readouterr().out
    assert not (modules / "c.json").exists()


@pytest.mark.parametrize("line", ["bench_step", "a:", "a: b\na: c", "a b: c"])
def test_a_line_without_a_name_of_its_own_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is not a name of its own"):
        together.read(line)


def test_benchmarks_write_where_the_run_does(tmp_path: Path) -> None:
    plan = tmp_path / "plan.txt"
    plan.write_text("x: benchmarks.bench_launch --help\ny: benchmarks.bench_step --help\n")
    command = ["together", str(plan), "--only", "x", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "--rounds" in (tmp_path / "out" / "x.txt").read_text()
    assert not (tmp_path / "out" / "y.txt").exists()
    with pytest.raises(SystemExit):
        main([*command, "--only", "z"])


def test_the_file_for_one_gpu_names_benchmarks_and_their_results() -> None:
    folder = Path(together.__file__).parent
    commands = together.read((folder / "h200.txt").read_text())
    for name, (module, *_) in commands.items():
        assert importlib.util.find_spec(module) is not None
        result = folder / "results" / f"{name}.json"
        if result.exists():
            recorded = json.loads(result.read_text())["benchmark"]
            assert f"benchmarks.{recorded}".startswith(module), name
