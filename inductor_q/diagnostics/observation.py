"""Observe what torch.compile does in this process, and return it as one `Explanation`.

    with observe(target="train.py") as observation:
        ...
    explanation = observation.explanation()

Torch's structured trace reports breaks, recompiles, errors and time. The hooks around each call of
a backend find who compiled which layers and what is saved. Both are in force inside the block only.
torch itself is not imported before the observed code imports it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inductor_q.comparison import Comparison, comparing
from inductor_q.diagnostics.dynamo_hook import observed_backends
from inductor_q.diagnostics.events import OUTPUT_CODE, TRACE, WANTED, TraceHandler, listening
from inductor_q.diagnostics.everywhere import all_to_qfuse, every_compile
from inductor_q.diagnostics.explanation import CudagraphSkip, Exit, Explanation, ProductError
from inductor_q.diagnostics.recompiles import value_now
from inductor_q.exc import UnknownBackend

if TYPE_CHECKING:
    from inductor_q.diagnostics.compiles import Compiles

NOT_COMPARED = (
    "--numerics: no product was compared, since qfuse has compiled none that qfuse.compute takes: "
    "--backend qfuse, or the reasons that stand with the layers"
)
_CUDAGRAPHS = "torch._inductor.cudagraph_utils.__cudagraphs"
_LIBRARIES = ("torch", "triton", "bitsandbytes", "peft", "transformers", "torchao", "accelerate")


@dataclass
class Observation:
    """Hold what was seen; call `explanation()` at any time, also inside the block."""

    target: str = ""
    argv: tuple[str, ...] = ()
    forced: str = ""
    dump: Path | None = None
    dry_run: bool = True
    whole_process: bool = False
    comparison: Comparison | None = None
    handler: TraceHandler = field(default_factory=TraceHandler)
    skips: _Skips = field(default_factory=lambda: _Skips())
    exit: Exit = field(default_factory=Exit)
    rank: int = 0
    world_size: int = 1
    created: float = field(default_factory=time.time)
    _start: float = field(default_factory=time.perf_counter)
    _seconds: float | None = None
    _compiles: Compiles | None = None

    @property
    def compiles(self) -> Compiles:
        """The graphs that reached a backend."""
        from inductor_q.diagnostics.compiles import Compiles

        if self._compiles is None:
            self._compiles = Compiles(dry_runs=self.dry_run, collect=self.whole_process)
        return self._compiles

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start if self._seconds is None else self._seconds

    def close(self) -> None:
        """Take the last look: the time, and the layers that are alive now."""
        if self._seconds is None:
            self._seconds = self.seconds
            if "torch" in sys.modules:
                self.compiles.look_at_layers()

    def _numerics(self) -> tuple[ProductError, ...]:
        errors = self.comparison.errors() if self.comparison else {}
        found = [
            ProductError(layer, forward=of.get(True, 0.0), backward=of.get(False, 0.0))
            for layer, of in errors.items()
        ]
        return tuple(sorted(found, key=lambda layer: -layer.worst))

    def explanation(self) -> Explanation:
        """Return everything seen so far, as plain data."""
        from inductor_q.diagnostics.coverage import beside, layers
        from inductor_q.diagnostics.summary import Run

        run = Run(self.handler.events, self.compiles.all)
        live = self.compiles.layers.values()
        return Explanation(
            target=self.target,
            argv=self.argv,
            exit=self.exit,
            rank=self.rank,
            world_size=self.world_size,
            created=self.created,
            seconds=self.seconds,
            environment=environment(),
            options=run.options(),
            compiles=run.compiles(),
            breaks=run.breaks(),
            recompiles=run.recompiles(),
            fallbacks=run.fallbacks(),
            suppressed=run.suppressed(),
            cudagraph_skips=(*self.skips.records(), *run.cudagraph_skips()),
            phases=run.phases(),
            saved=run.saved(),
            layers=layers(run.reports(), live, run.read(), all_trees=self.whole_process),
            attention=beside("attention", run.reports()),
            loss=beside("loss", run.reports()),
            checkpointing=beside("checkpointing", run.reports()),
            memory=tuple(dict.fromkeys(str(r.memory) for r, _ in run.reports() if r.memory)),
            numerics=self._numerics(),
            warnings=(
                *([NOT_COMPARED] if self.comparison and not self.comparison.norms else []),
                *run.warnings(self.forced),
                *self.skips.warnings,
                *dict.fromkeys(self.compiles.problems),
            ),
            dump=str(self.dump) if self.dump else "",
        )


@contextlib.contextmanager
def observe(
    *,
    target: str = "",
    argv: Sequence[str] = (),
    backend: str | None = None,
    dump: Path | None = None,
    dry_run: bool = True,
    whole_process: bool = False,
    numerics: str = "",
) -> Iterator[Observation]:
    """Observe every compile of this process inside the block.

    Args:
        target, argv: what the report says was run.
        backend: force this backend on everything that torch.compile compiles. Mode and options that
            the target gives to such a backend stay under `whole_process`.
        dump: write graphs, generated code and bytecode under this directory.
        dry_run: run the passes on copies of what other backends compile, to say what qfuse would
            do.
        whole_process: count every quantized layer in memory, not only those of models that were
            compiled in part; this suits a process that has no other models and has compiled nothing
            before the block.
        numerics: "fp8" or "int8": compare products in eight bits with those in 16, where the target
            names no `qfuse.compute` of its own.
    """
    observation = Observation(
        target=target,
        argv=tuple(argv),
        forced=backend or "",
        dump=dump,
        dry_run=dry_run,
        whole_process=whole_process,
    )
    handler = observation.handler
    handler.notes["recompile_reasons"] = value_now
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening(TRACE, handler))
        stack.enter_context(listening(_CUDAGRAPHS, observation.skips))
        stack.enter_context(observed_backends(lambda: observation.compiles))
        if dump is not None:
            from inductor_q.diagnostics.dump import dumping

            handler.wanted = WANTED | {OUTPUT_CODE}
            stack.enter_context(dumping(dump, handler))
        if backend is not None:
            stack.enter_context(_forced(backend, early=not whole_process))
        if numerics:
            observation.comparison = stack.enter_context(comparing())
            stack.enter_context(_by_default("QFUSE_COMPUTE", numerics))
        try:
            yield observation
        finally:
            observation.close()


@contextlib.contextmanager
def _by_default(variable: str, value: str) -> Iterator[None]:
    """Set a variable of the environment, and take it back."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@contextlib.contextmanager
def _forced(backend: str, *, early: bool) -> Iterator[None]:
    """Send everything that torch.compile compiles to `backend`, whatever the target named.

    A stance of torch.compiler also reaches what was compiled `early`, before the block, but it
    drops mode and options.
    """
    import torch

    chosen: Any = backend
    if backend == "qfuse":
        from inductor_q.backend import qfuse_backend

        chosen = qfuse_backend()
    elif backend not in (known := torch._dynamo.list_backends(exclude_tags=())):
        raise UnknownBackend(name=backend, known=known)
    if early:
        with torch.compiler.set_stance(force_backend=chosen):
            yield
        return
    alike = (backend, None) if backend == "inductor" else (backend,)
    with all_to_qfuse() if backend == "qfuse" else every_compile(backend, alike=alike):
        yield


class _Skips(logging.Handler):
    """Collect the reasons for which Inductor did not record CUDA graphs, as it logs them.

    It logs a warning there too: that it recorded too many.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: Counter[str] = Counter()
        self.warnings: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if said.startswith("CUDAGraph supports dynamic shapes"):
            self.warnings[said] = None
        else:
            self.reasons[said] += 1

    def records(self) -> tuple[CudagraphSkip, ...]:
        return tuple(CudagraphSkip(reason, count) for reason, count in self.reasons.most_common())


def environment() -> dict[str, str]:
    """Return what a reader must know to repeat the run."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["device"] = torch.cuda.get_device_name()
    return found


__all__ = ["Observation", "environment", "observe"]
