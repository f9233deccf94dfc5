"""The environment of a run, and a preset made of a sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from inductor_q.presets import PRESETS, tuned
from inductor_q.tuning import result
from inductor_q.tuning.choice import Judged
from inductor_q.tuning.launch import Launcher, inherited
from inductor_q.tuning.plan import BASE, EAGER, Condition

PLACE = tuned.Place("a device", "2.13.0", "0.1.0")


def launcher(work: Path, model: str = "") -> Launcher:
    return Launcher(model, 4, PLACE, PRESETS["cpu"], work)


def test_environment_of_each_kind_of_change(tmp_path: Path) -> None:
    launch = launcher(tmp_path)
    assert launch.environment(BASE, tmp_path)["QFUSE_PRESET"] == "cpu"
    assert launch.environment(BASE, tmp_path)["TORCH_COMPILE_DISABLE"] == "0"
    assert launch.environment(EAGER, tmp_path)["TORCH_COMPILE_DISABLE"] == "1"
    more = replace(launch, variables={"SOME": "1"})
    assert more.environment(BASE, tmp_path)["SOME"] == "1"
    own = launch.environment(Condition("c", {"qfuse.compute": "int8"}), tmp_path)
    assert (own["QFUSE_COMPUTE"], own["QFUSE_PRESET"]) == ("int8", "cpu")
    both = {"extend_k.min_rows": 9, "max_autotune_gemm": True, "kernels.dequantize": "inductor"}
    path = launch.environment(Condition("d", both), tmp_path)["QFUSE_PRESET"]
    _, preset = tuned.read(Path(path))
    assert preset.thresholds["extend_k.min_rows"].value == 9
    options = {name: entry.value for name, entry in preset.options.items()}
    assert options == {"max_autotune_gemm": True}
    assert preset.kernels["dequantize"].value == "inductor"


def test_variables_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With QFUSE_THRESHOLDS no condition changed anything."""
    mine = {"QFUSE_THRESHOLDS": "extend_k.min_rows=7", "QFUSE_KERNELS": "dequantize=eager"}
    mine |= {"QFUSE_NUMERICS": "strict", "QFUSE_COMPUTE": "fp8", "QFUSE_LOSS": " "}
    for name, text in mine.items():
        monkeypatch.setenv(name, text)
    condition = Condition("c", {"extend_k.min_rows": 9, "qfuse.compute": "int8"})
    found = launcher(tmp_path).environment(condition, tmp_path)
    assert not {"QFUSE_THRESHOLDS", "QFUSE_KERNELS"} & set(found)
    assert (found["QFUSE_NUMERICS"], found["QFUSE_COMPUTE"]) == ("strict", "int8")
    assert inherited(mine) == {"QFUSE_COMPUTE": "fp8", "QFUSE_NUMERICS": "strict"}


def test_a_program_that_fails_has_its_last_error(tmp_path: Path) -> None:
    run = launcher(tmp_path, "no_such_script.py")(BASE, 1, 300)
    assert run.error.startswith("exit status 1: inductor_q.exc.commands.UnknownTarget: ")
    assert "no_such_script.py" in run.error and run.cold and run.wall_s > 0


def test_the_preset_has_the_measurement_as_evidence(tmp_path: Path) -> None:
    base = Judged(BASE, step_s=0.010, peak=10**9, compile_s=20, verdict="the base")
    best = replace(base, condition=Condition("both", {"max_autotune_gemm": True}), step_s=0.008)
    eager = replace(base, condition=EAGER, verdict="the reference")
    other = replace(base, condition=Condition("other"), verdict="no gain")
    judged = [base, eager, other, best]
    made = result.preset_of(PRESETS["cpu"], best, judged, model="", steps=30)
    path = tmp_path / "tuned.json"
    tuned.write(path, PLACE, made, base="cpu")
    _, read = tuned.read(path)
    evidence = read.options["max_autotune_gemm"].evidence
    assert evidence.startswith("both: 8.0 ms a step against 10.0, peak 1,000 MB against 1,000")
    [fact] = read.facts
    assert fact.startswith("other: no gain (the default model, 30 steps, ")
    assert json.loads(path.read_text())["thresholds"] == {}
