"""What an observed run tells, on real compiles: causes, counts, places, and nothing left behind."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from inductor_q.diagnostics.observation import observe
from tests.support.observing import observed
from tests.support.processes import environment

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# --- graph breaks ---------------------------------------------------------------------------------


def in_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


def test_a_break_that_the_counters_miss() -> None:
    run = observed(lambda: torch.compile(in_loop, backend="eager")(torch.ones(4)))
    (only,) = run.breaks
    assert (only.count, only.gb_id, only.library) == (1, "GB0025", "your code")
    assert only.user == only.origin
    assert only.user.function == "in_loop"
    assert only.user.text == "torch._dynamo.graph_break()"
    assert "remove" in only.fix
    (left,) = run.fallbacks
    assert left.function == "in_loop"
    assert "Call to `torch._dynamo.graph_break()`" in left.reason


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def test_the_same_break_twice_is_one_cause() -> None:
    def call() -> None:
        torch.compile(scale, backend="eager")(torch.ones(4))
        torch._dynamo.reset()
        torch.compile(scale, backend="eager")(torch.ones(4))

    (only,) = observed(call).breaks
    assert only.count == 2
    assert only.user.text == "return x * x.sum().item()"
    assert "capture_scalar_outputs" in only.fix


def test_a_break_under_fullgraph_is_told_too() -> None:
    def call() -> None:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(in_loop, backend="eager", fullgraph=True)(torch.ones(4))

    run = observed(call)
    (only,) = run.breaks
    assert only.user.function == "in_loop"
    assert run.fallbacks == ()


# --- errors, and nothing at all -------------------------------------------------------------------


def broken_backend(gm: Any, example_inputs: Any) -> Any:
    raise RuntimeError("no code for you")


def test_suppressed_errors() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        run = observed(lambda: torch.compile(scale, backend=broken_backend)(torch.ones(4)))
    assert {(s.function, s.count) for s in run.suppressed} >= {("scale", 1)}
    assert "no code for you" in run.suppressed[0].error


def test_cuda_graphs_that_torch_skips() -> None:
    """What it logs on a GPU, through the function that logs it, whatever TORCH_LOGS shows."""
    skip = torch._inductor.cudagraph_utils.log_cudagraph_skip_and_bump_counter
    mutated = "skipping cudagraphs due to mutated inputs (1 instances)"

    def call() -> None:
        for reason in (mutated, "skipping cudagraphs due to cpu device (arg0_1)", mutated):
            skip(reason)

    found = observed(call).cudagraph_skips
    assert [(s.reason, s.count) for s in found] == [
        (mutated, 2),
        ("skipping cudagraphs due to cpu device (arg0_1)", 1),
    ]


def test_too_many_cuda_graphs_are_a_warning_and_no_skip() -> None:
    from torch._inductor.cudagraph_utils import maybe_warning_due_to_dynamic_shape

    def call() -> None:
        with torch._inductor.config.patch({"triton.cudagraph_dynamic_shape_warn_limit": 2}):
            maybe_warning_due_to_dynamic_shape({(n,): print for n in range(3)}, 3)

    run = observed(call)
    assert not run.cudagraph_skips
    assert any("observed 4 distinct sizes" in warning for warning in run.warnings)


@pytest.mark.parametrize("trains", [False, True])
def test_nothing_compiled_says_how_to(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.trainer", raising=False)
    if trains:  # the target has imported it
        monkeypatch.setitem(sys.modules, "transformers.trainer", sys)
    run = observed(lambda: scale(torch.ones(4)), backend="eager")
    (warning,) = run.warnings
    assert "torch.compile" in warning
    assert ("QfuseCallback()" in warning) == trains
    assert "--backend eager" in warning


def test_forced_backend() -> None:
    run = observed(
        lambda: torch.compile(lambda x: x + 1, backend="inductor")(torch.ones(4)), backend="eager"
    )
    assert [c.backend for c in run.compiles] == ["eager"]


# --- nothing is left behind -----------------------------------------------------------------------


def state() -> dict[str, Any]:
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import convert_frame
    from torch._dynamo.eval_frame import _stance
    from torch._dynamo.output_graph import OutputGraph
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    from inductor_q.passes import runner

    trace = logging.getLogger("torch.__trace")
    return {
        "handlers": [h for h in trace.handlers if type(h).__module__.startswith("inductor_q")],
        "level": trace.level,
        "finders": list(sys.meta_path),
        "dynamo": dynamo_config.get_serializable_config_copy(),
        "functorch": functorch_config.get_serializable_config_copy(),
        "inductor": {key: repr(value) for key, value in inductor_config.get_config_copy().items()},
        "stance": repr(_stance),
        "compiler": OutputGraph.call_user_compiler,
        "listeners": list(runner.listeners),
        "bytecode": dict(convert_frame._bytecode_hooks),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "argv": list(sys.argv),
        "path": list(sys.path),
        "main": sys.modules["__main__"],
        "hook": sys.excepthook,
    }


@pytest.mark.parametrize("error", [None, ValueError])
def test_nothing_is_left_behind(error: type[Exception] | None, tmp_path: Any) -> None:
    before = state()
    try:
        with observe(backend="eager", dump=tmp_path):
            torch.compile(scale, backend="inductor")(torch.ones(4))
            if error:
                raise error
    except ValueError:
        assert error
    assert state() == before
    index = json.loads((tmp_path / "index.json").read_text())
    assert {entry["kind"] for entry in index} == {"bytecode"}


def test_torch_is_not_imported_before_the_target_does() -> None:
    look = """
        import sys
        from inductor_q.diagnostics.observation import observe
        with observe() as observation:
            before = "torch" in sys.modules
            import torch
            @torch.compile(backend="eager")
            def f(x):
                torch._dynamo.graph_break()
                return x + 1
            f(torch.ones(3))
        run = observation.explanation()
        print(before, run.break_count, [c.backend for c in run.compiles])
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(look)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout == "False 1 ['eager']\n", done.stderr
