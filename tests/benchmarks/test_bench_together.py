"""Commands that run side by side: one measures at a time, and none is left stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import tail, together
from benchmarks.__main__ import main
from inductor_q.tuning import trial

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

#: Start a module as a command, whose process group is written to a file.
STARTS = """
import os, pathlib, sys, time
from benchmarks import alone
folder = pathlib.Path(os.environ[alone.FOLDER])
process = alone.start(folder, [sys.executable, "-m", sys.argv[1]], env=os.environ)
pathlib.Path(sys.argv[2]).write_text(str(process.pid))
"""
DIES = "import os; alone().__enter__(); os._exit(1)"
#: Write into a file on and on, in a process of its own.
TICKS = """
import subprocess, sys
code = "import sys, time\\nwhile 1: open(sys.argv[1], 'a').write('.'), time.sleep(0.01)"
subprocess.run([sys.executable, "-c", code, {file!r}])
"""


def write(folder: Path, name: str, *code: str) -> None:
    """Make a module that finds this repository."""
    root = f"import sys; sys.path.insert(0, {str(Path(together.__file__).parents[1])!r})"
    (folder / f"{name}.py").write_text("\n".join([root, *code]))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (("measures", MEASURES), ("counts", COUNTS)):
        write(tmp_path, name, code)
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
    start = "import os, time; time.sleep(1)\nfrom benchmarks.alone import alone\n"
    write(modules, "dies", start, f"with alone():\n    {end}\n")
    counts = ["counts", str(modules / "c.json"), str(modules / "counting")]
    commands = {"dies": ["dies"], "c": counts}
    began = time.monotonic()
    assert together.run(commands, modules / "out", 300) == 1
    assert time.monotonic() - began < 200
    assert (modules / "c.json").exists()


def test_who_dies_in_a_command_that_starts_others_stops_nobody(modules: Path) -> None:
    """Its parent is stopped with the others, and cannot see that it died."""
    write(modules, "child", "from benchmarks.alone import alone", DIES)
    write(modules, "parent", STARTS, "process.wait()", "alone.end(folder, process)")
    command = ["parent", "child", str(modules / "pid")]
    began = time.monotonic()
    assert together.run({"parent": command}, modules / "out", 300) == 0
    assert time.monotonic() - began < 200


def test_what_a_late_command_has_started_is_stopped(modules: Path) -> None:
    ticks = modules / "ticks"
    write(modules, "child", TICKS.format(file=str(ticks)))
    write(modules, "parent", STARTS, "time.sleep(600)")
    command = ["parent", "child", str(modules / "pid")]
    assert together.run({"parent": command}, modules / "out", 20) == 1
    written = ticks.stat().st_size
    time.sleep(1)
    assert 0 < written == ticks.stat().st_size


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
            recorded = json.loads(result.read_text())
            assert f"benchmarks.{recorded['benchmark']}".startswith(module), name


def test_what_a_script_times_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From two steps before the last half on, and before trial marks the end of that step."""
    seen: list[str] = []

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        seen.append("alone")
        yield
        seen.append("together")

    def steps(argv: list[str]) -> int:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight])
        handle = register_optimizer_step_post_hook(lambda *_: seen.append("step"))
        for _ in range(10):
            optimizer.step()
        handle.remove()
        return 3

    monkeypatch.setattr(tail, "alone", alone)
    monkeypatch.setattr(trial, "main", steps)
    assert tail.main(["--steps", "10"]) == 3
    assert seen == ["step"] * 2 + ["alone"] + ["step"] * 8 + ["together"]
