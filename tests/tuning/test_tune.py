"""`qfuse tune` as a user has it: its arguments, its table, and a sweep of real processes."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inductor_q import cli
from inductor_q.commands import tune
from inductor_q.presets import PRESETS, select, tuned
from inductor_q.tuning import table, trial
from inductor_q.tuning.choice import Judged
from inductor_q.tuning.plan import BASE, EAGER, STOCK, Condition
from tests.support.processes import ROOT, environment


@pytest.mark.parametrize(
    "args", [["--budget", "20"], ["--budget", "m"], ["--steps", "3"], ["--compute", "fp4"]]
)
def test_arguments_that_are_none(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", *args])
    assert args[1] in capsys.readouterr().err


def test_rows_of_the_table() -> None:
    base = Judged(BASE, step_s=0.01, peak=2 * 10**9, compile_s=20.0, loss_deviation=0.0)
    slow = Judged(EAGER, step_s=0.03, peak=10**9, verdict="the reference")
    stock = Judged(STOCK, step_s=0.02)
    assert table.rows([base, stock, slow]) == [
        ("base", "10.0", "1.000", "0.500", "20.0", "2,000", "0.0e+00", ""),
        ("stock", "20.0", "2.000", "1.000", "", "", "", ""),
        ("eager", "30.0", "3.000", "1.500", "", "1,000", "", "the reference"),
    ]


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        (None, None, None),
        (None, {"qfuse.numerics": "strict"}, None),
        ("reduce-overhead", None, {"triton.cudagraphs": True}),
        (
            None,
            {
                "qfuse.mode": "reduce-overhead",
                "triton": {"cudagraphs": False},
                "guard_filter_fn": 1,
            },
            {"triton.cudagraphs": False, "guard_filter_fn": 1},
        ),
    ],
)
def test_stock_compiles_with_all_but_our_options(
    mode: Any, options: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_compile", lambda *args, **kwargs: (args, kwargs))
    args, kwargs = trial._by_inductor(len, backend="qfuse", mode=mode, options=options)
    assert args == (len,)
    assert kwargs == {"backend": "inductor", "mode": None, "options": expected}


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "tune.png"
    assert table.draw([Judged(BASE, step_s=0.01), Judged(EAGER)], "a device", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    args = argparse.Namespace(model="", steps=30)
    base, place = Judged(BASE, step_s=0.01, compile_s=1.0), tuned.place_of(torch.device("cpu"))
    won = Judged(Condition("x", {"extend_k.min_rows": 9}), step_s=0.008, compile_s=1.0, wins=True)
    for best in (None, won, None):
        sweep: Any = SimpleNamespace(best=best, judged=[base, won])
        tune._keep(sweep, place, PRESETS["cpu"], args)
    nothing, new, still = capsys.readouterr().out.splitlines()
    assert nothing.endswith("noise: the preset cpu stays in force.")
    assert new == f"preset: tuned, extend_k.min_rows=9, in {tuned.path_of(place)}"
    assert still.endswith(f"{tuned.path_of(place)}, of an earlier sweep, stays in force.")
    assert select(torch.device("cpu")).thresholds["extend_k.min_rows"].value == 9


@pytest.mark.parametrize("name", ["--plot", "the preset"])
def test_what_cannot_be_written_is_found_out_before_the_sweep(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The picture was drawn before the preset was kept, so its error lost a sweep's result."""
    (tmp_path / "file").touch()
    config = tmp_path / "file" if name == "the preset" else tmp_path
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    assert cli.main(["tune", "--plot", str(tmp_path / "file" / "x.png")]) == 2
    assert capsys.readouterr().err.startswith(f"qfuse: {name} {tmp_path}/file/")


def test_a_picture_that_fails_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    sweep: Any = SimpleNamespace(judged=[Judged(BASE, step_s=0.01)])
    tune._draw(sweep, tuned.place_of(torch.device("cpu")), tmp_path)
    assert capsys.readouterr().out.startswith("There is no picture: ")


SCRIPT = """
import sys, torch
from inductor_q import testing

torch.manual_seed(0)
model = testing.lora_linear(32, 64, r=4, adapter_dtype=torch.bfloat16)
step = torch.compile(model)
optimizer = torch.optim.SGD(testing.adapter_parameters(model), lr=1e-3)
for index in range(int(sys.argv[1])):
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    step(x).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_script_is_tuned_and_its_records_used_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "inductor_q", "tune", "--model", f"{script} 99"]
    command += ["--steps", "6", "--budget", "9m"]

    def sweep() -> subprocess.CompletedProcess[str]:
        variables = environment(ROOT, XDG_CONFIG_HOME=str(tmp_path))
        return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path)

    first = sweep()
    assert first.returncode == 0, first.stdout + first.stderr
    assert re.search(r"^base +\d+\.\d +1\.000 ", first.stdout, re.MULTILINE)
    assert "max_autotune_gemm, order 2: " in first.stderr
    assert "rejected" not in first.stdout
    records = tmp_path / "qfuse" / "tune.jsonl"
    lines = records.read_text()
    again = sweep()
    assert "order" not in again.stderr and records.read_text() == lines
    assert again.stdout == first.stdout
    if "preset: tuned" in first.stdout:  # which options win is not for a test to say
        assert len(list((tmp_path / "qfuse" / "tuned").glob("*.json"))) == 1
    else:
        assert "the preset cpu stays in force" in first.stdout
