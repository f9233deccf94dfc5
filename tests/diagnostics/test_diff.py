"""`qfuse diff`: every kind of difference, its verdict, and the exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from inductor_q import cli
from inductor_q.diagnostics.diff import Change, compare
from inductor_q.diagnostics.explanation import Explanation, Frame, Phase, SavedTensors
from inductor_q.diagnostics.render.json import to_json
from tests.support.explanations import PADDED, REASON, clean, explanation, llama

LAYERS = "base_model.model.model.layers"
CANONICAL = f"recognized, not fused: {REASON}"


def only(before: Explanation, after: Explanation) -> Change:
    [change] = compare(before, after)
    return change


def test_a_run_does_not_differ_from_itself() -> None:
    assert compare(explanation(), explanation()) == []


def test_every_cause_that_appears_is_worse_and_that_goes_is_better() -> None:
    changes = compare(clean(), explanation())
    assert [(c.verdict, c.kind) for c in changes] == [
        ("worse", "exit"),
        ("worse", "graph break"),
        ("worse", "graph break"),
        ("worse", "recompile"),
        ("worse", "left in eager mode"),
        ("worse", "suppressed error"),
        ("worse", "CUDA graph skipped"),
        ("worse", "fusion"),
        ("worse", "fusion"),
    ]
    assert changes[1] == Change(
        "worse",
        "graph break",
        "Unsupported Tensor.item() call with capture_scalar_outputs=False in step of train.py",
        "x0",
        "x3",
    )
    assert changes[-2:] == [
        Change("worse", "fusion", f"{LAYERS}.2.mlp.down_proj", "fused", CANONICAL),
        Change("worse", "fusion", f"{LAYERS}.3.self_attn", "fused", f"still masked: {PADDED}"),
    ]
    back = compare(explanation(), clean())
    assert {c.verdict for c in back} == {"better"}
    assert [(c.kind, c.before, c.after) for c in back] == [
        (c.kind, c.after, c.before) for c in changes
    ]


def test_a_cause_that_moved_to_another_line_is_the_same() -> None:
    before = explanation()
    moved = tuple(replace(b, user=replace(b.user, line=b.user.line + 9)) for b in before.breaks)
    assert compare(before, replace(before, breaks=moved)) == []


def test_counts_of_one_cause_compare() -> None:
    before = explanation()
    more = (replace(before.breaks[0], count=5), *before.breaks[1:])
    change = only(before, replace(before, breaks=more))
    assert (change.verdict, change.before, change.after) == ("worse", "x3", "x5")


def test_one_guard_in_two_functions_is_two_causes() -> None:
    before = explanation()
    other = replace(before.recompiles[0], where=Frame("train.py", 4, "evaluate"), count=1)
    change = only(before, replace(before, recompiles=(*before.recompiles, other)))
    assert (change.what.endswith("in evaluate of train.py"), change.after) == (True, "x1")


def test_layers_with_one_fate_stand_together_folded() -> None:
    broken = {f"{i}.mlp.down_proj": REASON for i in range(32)}
    change = only(
        replace(clean(), layers=llama(32)), replace(clean(), layers=llama(32, broken=broken))
    )
    assert change.what == f"{LAYERS}.0-31.mlp.down_proj"


def test_another_model_is_a_change_and_no_verdict() -> None:
    change = only(clean(), replace(clean(), layers=llama(5)))
    assert (change.verdict, change.before, change.after) == ("changed", "not there", "fused")
    assert change.what == "; ".join(
        f"{LAYERS}.4.{part}" for part in ("self_attn.q_proj, k_proj", "mlp.gate_proj, down_proj")
    )


def test_saved_bytes_are_exact_and_judged_in_all() -> None:
    before = clean()
    moved = (SavedTensors("aten.mm", 4, 2 << 20), SavedTensors("aten.silu", 3, 2 << 20))
    assert {c.verdict for c in compare(before, replace(before, saved=moved))} == {"changed"}
    one_more = (*before.saved, SavedTensors("aten.exp", 1, 1))
    worse, other = compare(before, replace(before, saved=one_more))
    assert (worse.verdict, worse.what) == ("worse", "in all")
    assert (other.verdict, other.what, other.after) == ("changed", "aten.exp", "1 B")


@pytest.mark.parametrize(
    ("seconds", "noise", "verdict"),
    [(11.9, 0.2, None), (12.1, 0.2, "worse"), (7.9, 0.2, "better"), (12.1, 0.3, None)],
)
def test_seconds_count_beyond_the_noise(seconds: float, noise: float, verdict: str | None) -> None:
    before = replace(clean(), phases=(Phase("dynamo", 10.0),))
    changes = compare(before, replace(before, phases=(Phase("dynamo", seconds),)), noise=noise)
    assert [c.verdict for c in changes] == ([verdict] if verdict else [])


def test_short_phases_are_noise() -> None:
    before = replace(clean(), phases=(Phase("dynamo", 0.1),))
    assert compare(before, replace(before, phases=(Phase("dynamo", 0.5),))) == []


def test_other_versions_are_told() -> None:
    after = replace(clean(), environment={**clean().environment, "torch": "2.15.0"})
    change = only(clean(), after)
    assert change == Change("changed", "environment", "torch", "2.13.0+cpu", "2.15.0")


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for name, run in (("good", clean()), ("bad", explanation())):
        (tmp_path / f"{name}.json").write_text(to_json(run))
    return str(tmp_path / "good.json"), str(tmp_path / "bad.json")


def test_exit_status_says_whether_it_got_worse(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = files
    assert cli.main(["diff", good, bad]) == 1
    out = capsys.readouterr().out
    assert (
        "\nWorse\n  exit\n    the target  ended well -> the target raised ValueError: diverged"
        in out
    )
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert cli.main(["diff", bad, good]) == 0
    assert "\nBetter\n" in capsys.readouterr().out
    assert cli.main(["diff", good, good]) == 0
    assert capsys.readouterr().out.endswith("no difference\n")


def test_diff_as_json(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", *files, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["worse"] is True
    assert {change["verdict"] for change in data["changes"]} == {"worse"}
    assert cli.main(["diff", *reversed(files), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worse"] is False


def test_what_is_not_a_report_is_exit_status_2(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.json").write_text('{"schema_version": 0}')
    assert cli.main(["diff", files[0], str(tmp_path / "old.json")]) == 2
    assert "old.json has schema_version 0, this qfuse reads 1" in capsys.readouterr().err
    assert cli.main(["diff", files[0], str(tmp_path / "none.json")]) == 2
    assert "none.json is not a report: it cannot be read" in capsys.readouterr().err


def test_noise_is_a_percentage(tmp_path: Path) -> None:
    paths = []
    for seconds in (10.0, 14.0):
        run = replace(clean(), phases=(Phase("dynamo", seconds),))
        paths.append(tmp_path / f"{seconds}.json")
        paths[-1].write_text(to_json(run))
    command = ["diff", *map(str, paths)]
    assert [cli.main(command), cli.main([*command, "--noise", "50"])] == [1, 0]
