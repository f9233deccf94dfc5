"""The demo runs from start to end, and what it shows is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from examples import finetune  # noqa: E402


def test_sparkline_goes_from_high_to_low() -> None:
    assert finetune.sparkline([8, 7, 6, 5, 4, 3, 2, 1], width=8) == "█▇▆▅▄▃▂▁"
    assert finetune.sparkline([1.0, 1.0]) == "▁▁"
    assert len(finetune.sparkline(range(100), width=24)) == 24


def test_the_text_ships_with_its_licence_and_suffices() -> None:
    text = finetune.TEXT.read_text(encoding="utf-8")
    assert len(text) > 4 * finetune.SIZES["cuda"].seq_len
    assert finetune.TEXT.name in (finetune.TEXT.parent / "LICENSE.md").read_text()


def test_a_missing_report_is_said_and_a_report_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import inductor_q

    monkeypatch.setattr(inductor_q, "last_report", lambda: None, raising=False)
    assert finetune._print_report() is None
    site = {"pass_name": "extend_k", "provider": "cublas", "rejected": None, "bytes_saved": 2e6}
    refused = {**site, "rejected": "too few rows", "bytes_saved": 0}
    report = SimpleNamespace(
        summary=lambda: "preset cpu", sites=[SimpleNamespace(**s) for s in (site, site, refused)]
    )
    monkeypatch.setattr(inductor_q, "last_report", lambda: report, raising=False)
    assert finetune._print_report() == {"summary": "preset cpu", "sites": 3}
    shown = capsys.readouterr().out
    assert "4.0 MB" in shown
    assert "not applied: too few rows" in shown


@pytest.mark.parametrize(("off", "status"), [(0.95, 0), (1.05, 1)])
def test_losses_that_differ_by_more_than_the_tolerance_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, off: float, status: int
) -> None:
    """Two runs of which the second's losses are off by that part of the tolerance."""
    fine_tune = finetune._fine_tune

    def train(runs: list[finetune.Run], *others: Any) -> None:
        fine_tune(runs, *others)
        first, second = runs
        second.losses = [loss * (1 + off * finetune.TOLERANCE) for loss in first.losses]

    monkeypatch.setattr(finetune, "_fine_tune", train)
    monkeypatch.setattr(finetune, "_usable", lambda arguments: ["eager", "eager"])
    small = ["--size", "tiny", "--steps", "1", "--base-steps", "1", "--tokens", "1"]
    assert finetune.main([*small, "--device", "cpu"]) == status


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    command = [sys.executable, "-m", "examples.finetune", "--device", "cpu", "--size", "tiny"]
    command += ["--steps", "4", "--base-steps", "3", "--tokens", "8", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("fine-tuning with eager", "off eager", "What qfuse did", "writes:"):
        assert shown in done.stdout
    result: dict[str, Any] = json.loads(out.read_text())
    assert [run["backend"] for run in result["runs"]] == list(finetune.BACKENDS)
    eager, inductor, qfuse = result["runs"]
    assert len(qfuse["losses"]) == 4
    assert result["deviation"] <= finetune.TOLERANCE
    assert qfuse["memory_bytes"] <= inductor["memory_bytes"] <= eager["memory_bytes"]
    assert qfuse["compile_seconds"] > 0
    assert result["report"]["sites"] > 0
    assert result["sample"].startswith("In the morning ")
