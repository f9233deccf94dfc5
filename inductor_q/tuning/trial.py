"""Run one condition: `python -m inductor_q.tuning.trial`, which `qfuse tune` starts.

The condition itself comes by the environment (QFUSE_PRESET and others). What runs is the user's
program as it is, or a Trainer over the user's model. Steps end where an optimizer's step ends, and
a step's loss is what `backward()` was called on; neither makes a GPU wait. With --stock,
Inductor compiles without qfuse what the other conditions compile with it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_post_hook

from inductor_q import backend, inductor_config
from inductor_q.diagnostics.everywhere import qfuse_everywhere
from inductor_q.diagnostics.targets import Target
from inductor_q.options import FOR_DYNAMO, split_options
from inductor_q.tuning import recipe

_compile: Callable[..., Any] = torch.compile
SETTLED = 2  # steps before the tail, in which memory that compiling took is given back


class Watch:
    """Note when each step ends and what its loss is; end the program after `steps` of them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.marks: list[Any] = []
        self.losses: list[torch.Tensor] = []
        self.on_gpu = torch.cuda.is_available()
        self._loss: torch.Tensor | None = None

    def run(self, program: Callable[[], object]) -> None:
        """Run the program under watch, to its end or to that of the last step."""
        backward: Callable[..., Any] = torch.Tensor.backward

        def watched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dim() == 0:  # of several before a step, as in accumulation, the sum counts
                loss = tensor.detach().float().clone()  # a CUDA graph will write there again
                self._loss = loss if self._loss is None else self._loss + loss
            return backward(tensor, *args, **kwargs)

        handle = register_optimizer_step_post_hook(self._stepped)
        try:
            with mock.patch.object(torch.Tensor, "backward", watched):
                program()
        except SystemExit:
            if not self.done:
                raise
        finally:
            handle.remove()

    @property
    def done(self) -> bool:
        return len(self.marks) >= self.steps

    def seconds(self) -> list[float]:
        """Return how long each step took, but the first."""
        if not self.on_gpu:
            return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]

    def peak(self) -> int:
        """Return what the tail has taken: on a GPU reserved memory, which has the pools of graphs,
        on a CPU the process's own."""
        if self.on_gpu:
            return torch.cuda.max_memory_reserved()
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _stepped(self, *_: Any) -> None:
        if self.done:
            return
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        if self._loss is not None:
            self.losses.append(self._loss)
            self._loss = None
        if self.on_gpu and len(self.marks) == self.steps // 2 - SETTLED:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if self.done:
            raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="inductor_q.tuning.trial")
    parser.add_argument("--model", default="")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stock", action="store_true")
    args = parser.parse_args(argv)
    watch = Watch(args.steps)
    with mock.patch.object(torch, "compile", _by_inductor if args.stock else torch.compile):
        sizes = _run(args.model, watch)
    if not watch.done:
        sys.exit(f"the program ended after {len(watch.marks)} of {args.steps} optimizer steps")
    compiled = counters["stats"]["unique_graphs"] if args.stock else backend.reports()
    if not compiled and os.environ.get("TORCH_COMPILE_DISABLE") != "1":
        sys.exit("nothing was compiled, so there is nothing to tune")
    args.out.write_text(json.dumps(measured(watch, sizes)))
    return 0


def measured(watch: Watch, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the fields of a `Run` that a process knows of itself."""
    from torch._dynamo.utils import calculate_time_spent

    return {
        "seconds": watch.seconds(),
        "losses": [float(loss) for loss in watch.losses],
        "compile_s": calculate_time_spent()["total_wall_time"],
        "peak": watch.peak(),
        "allocated": torch.cuda.max_memory_allocated() if watch.on_gpu else 0,
        "memory": torch.cuda.mem_get_info()[1] if watch.on_gpu else 0,
        "skips": counters["inductor"]["cudagraph_skips"],
        "sites": _sites(),
        "providers": _providers(),
        "sizes": sizes,
    }


def _run(model: str, watch: Watch) -> dict[str, int]:
    """Run the script or the Trainer that `model` names; return the sizes of a step if known."""
    words = shlex.split(model)
    if not words or recipe.names_a_factory(words[0]):
        made = recipe.model(words[0] if words else "")
        watch.run(lambda: recipe.train(made, watch.steps))
        return recipe.sizes(made)
    with qfuse_everywhere():
        watch.run(lambda: _script(words))
    return {}


def _by_inductor(*args: Any, **kwargs: Any) -> Any:
    """Compile with stock Inductor, without the options that only qfuse knows."""
    given = dict(kwargs.get("options") or {})
    for_dynamo = {n: given[n] for n in FOR_DYNAMO if n in given}
    ours, options = split_options(given)
    if mode := kwargs.get("mode") or ours.get("qfuse.mode"):
        options = {**inductor_config.modes(bool(kwargs.get("dynamic")))[mode], **options}
    stock = {"backend": "inductor", "mode": None, "options": {**options, **for_dynamo} or None}
    return _compile(*args, **{**kwargs, **stock})


def _script(words: Sequence[str]) -> None:
    ended = Target.parse(words).run()
    if ended.status:
        sys.exit(ended.status)


def _sites() -> dict[str, tuple[int, int]]:
    """Count by pass the sites that it has rewritten, and those that it left alone by choice."""
    counts: dict[str, tuple[int, int]] = {}
    for report in backend.reports():
        for name, applied in report.applied().items():
            chosen = sum(s.by_choice for s in report.sites if s.pass_name == name)
            before = counts.get(name, (0, 0))
            counts[name] = (before[0] + applied, before[1] + chosen)
    return counts


def _providers() -> dict[str, dict[str, int]]:
    """Count by op which provider the compiled graphs call."""
    counts: dict[str, dict[str, int]] = {}
    for report in backend.reports():
        for op, found in report.providers.items():
            of = counts.setdefault(op, {})
            for name, count in found.items():
                of[name] = of.get(name, 0) + count
    return counts


if __name__ == "__main__":
    sys.exit(main())
