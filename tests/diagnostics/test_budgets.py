"""Budgets: what is missed and in which words; the pytest fixture that holds a block to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inductor_q.diagnostics.budgets import Budget
from inductor_q.diagnostics.explanation import (
    Compile,
    Explanation,
    Frame,
    GraphBreak,
    Layer,
    Recompile,
    SavedTensors,
)
from tests.support.processes import environment

PEFT = Frame("/opt/env/lib/python3.11/site-packages/peft/layer.py", 7, "_activate")
RUN = Explanation(
    target="train.py",
    breaks=(
        GraphBreak("Data-dependent branching", 3, library="peft 0.21", origin=PEFT),
        GraphBreak("print", 1),
    ),
    recompiles=(Recompile("step", Frame("t.py", 3), "n == 1", count=2),),
    layers=(Layer("a", "linear", "nf4", "fused"), Layer("b", "linear", "nf4", "unseen", "no run")),
    saved=(SavedTensors("aten.mm", 2, 3 * 2**20), SavedTensors("aten.mul", 1, 2**20)),
)


def test_no_budget_is_missed_by_default() -> None:
    assert Budget().missed(RUN) == []


@pytest.mark.parametrize(
    ("budget", "line"),
    [
        (
            Budget(max_breaks=3),
            "4 graph breaks, at most 3 allowed; "
            "first: Data-dependent branching (peft 0.21, peft/layer.py:7)",
        ),
        (Budget(max_recompiles=1), "2 recompiles, at most 1 allowed; first: step: n == 1"),
        (
            Budget(min_fused=0.75),
            "1 of 2 quantized layers fused (50%), at least 75% wanted; first: b: no run",
        ),
        (
            Budget(max_saved_mb=3.5),
            "4.0 MiB saved for backward, at most 3.5 MiB allowed; "
            "first: aten.mm keeps 3.0 MiB in 2 tensors",
        ),
    ],
)
def test_a_missed_budget_names_number_limit_and_cause(budget: Budget, line: str) -> None:
    assert budget.missed(RUN) == [line]


def test_what_cannot_be_seen_keeps_no_limit() -> None:
    compiled = Compile("0/0", "step", Frame("t.py", 3), "eager", observed=False)
    run = Explanation("train.py", compiles=(compiled,))
    assert Budget(max_breaks=0, min_fused=1.0).missed(run) == []
    assert Budget(max_saved_mb=1).missed(run) == [
        "what 1 graph of backend 'eager' saves for backward cannot be seen, "
        "at most 1 MiB allowed; run with --backend qfuse"
    ]


def test_limits_that_are_just_kept() -> None:
    kept = Budget(max_breaks=4, max_recompiles=2, min_fused=0.5, max_saved_mb=4)
    assert kept.missed(RUN) == []


def test_what_is_left_to_its_library_is_not_fused() -> None:
    left = Layer("b", "linear", "nf4", "left", "2 rows, fewer than 4")
    run = Explanation("train.py", layers=(Layer("a", "linear", "nf4", "fused"), left))
    assert Budget(min_fused=1.0).missed(run) == [
        "1 of 2 quantized layers fused (50%, 1 left to its library), at least 100% wanted; "
        "first: b: 2 rows, fewer than 4"
    ]
    assert Budget(min_fused=0.5).missed(run) == []


def test_nothing_quantized_is_fully_fused() -> None:
    assert Budget(min_fused=1.0).missed(Explanation("t")) == []


TESTS = """
import torch

@torch.compile(backend="eager")
def clean(x):
    return x + 1

@torch.compile(backend="eager")
def breaks(x):
    torch._dynamo.graph_break()
    return x + 1

def test_clean(assert_compiles_clean):
    with assert_compiles_clean():
        clean(torch.ones(3))

def test_breaks(assert_compiles_clean):
    with assert_compiles_clean():
        breaks(torch.ones(3))

def test_allowed(assert_compiles_clean):
    torch._dynamo.reset()
    with assert_compiles_clean(max_breaks=1):
        breaks(torch.ones(3))

def test_nothing(assert_compiles_clean):
    with assert_compiles_clean():
        pass

def hidden(assert_compiles_clean, **limits):
    def no_kernel(gm, example_inputs):
        raise NotImplementedError("no kernel")
    with assert_compiles_clean(**limits), torch._dynamo.config.patch(suppress_errors=True):
        clean(torch.ones(3))
        torch.compile(torch.tanh, backend=no_kernel)(torch.ones(3))

def test_suppressed(assert_compiles_clean):
    torch._dynamo.reset()
    hidden(assert_compiles_clean, max_breaks=None, max_recompiles=None)

def test_error(assert_compiles_clean):
    with assert_compiles_clean():
        raise KeyError("mine")
"""


def test_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_step.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "inductor_q.pytest_plugin",
        "-p",
        "no:randomly",
    ]
    done = subprocess.run(
        [*command, "-rA", "--tb=short", "test_step.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    said = done.stdout
    assert "PASSED test_step.py::test_clean" in said
    assert "PASSED test_step.py::test_allowed" in said
    assert "1 graph break, at most 0 allowed; first: Call to `torch._dynamo.graph_break()`" in said
    assert "nothing was compiled in the block" in said
    assert "KeyError: 'mine'" in said
    assert "suppressed in " in said and "NotImplementedError: no kernel" in said
    assert "4 failed, 2 passed" in said


def test_the_plugin_imports_nothing_before_it_is_used() -> None:
    look = "import inductor_q.pytest_plugin, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", look], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
