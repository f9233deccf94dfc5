"""Observe the compiles of a run while they happen: who compiles, from which modules, what is saved.

Everything that is kept here is plain data; no graph and no tensor outlives its compile.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from inductor_q.capture.dynamo import (
    device_of,
    is_quantized,
    module_names,
    packed_weights,
    parameter_name,
    source_name,
)
from inductor_q.capture.live import Quantized, module_path, quantized_layers
from inductor_q.diagnostics.dry_run import DryRun, dry_run
from inductor_q.diagnostics.explanation import SavedTensors
from inductor_q.diagnostics.saved import saved_tensors
from inductor_q.graph_report import Report


@dataclass
class Compiled:
    """Describe one graph that reached a backend."""

    compile_id: str
    backend: str
    read: tuple[str, ...] = ()
    dry: DryRun | None = None
    report: Report | None = None
    saved: tuple[SavedTensors, ...] = ()
    observed: bool = False
    wants_cudagraphs: bool = False


@dataclass
class Compiles:
    """Observe for `hooks.installed` and keep one `Compiled` for each graph, in order."""

    dry_runs: bool = True
    collect: bool = False
    all: list[Compiled] = field(default_factory=list)
    layers: dict[tuple[int, str], Quantized] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _open: list[Compiled] = field(default_factory=list)

    def look_at_layers(self) -> None:
        """Add the quantized layers that are alive now; with `collect`, garbage is freed before."""
        if self.collect:
            gc.collect()
        for layer in quantized_layers():
            self.layers.setdefault((layer.tree, layer.module), layer)

    def compiling(self, compiler: Any, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        if not self.all:
            self.look_at_layers()  # the model may be gone when the run is over
        one = Compiled(_current_id(), backend_name(compiler))
        self._open.append(one)
        self.all.append(one)
        sources = _sources(gm)
        one.read = tuple(dict.fromkeys(_layer_path(s) for s in sources))
        if self.dry_runs and one.backend != "qfuse":
            with self._noted(one):
                weights = packed_weights(gm, sources, example_inputs)
                dynamic = any(isinstance(x, torch.SymInt) for x in example_inputs)
                dry = dry_run(gm, device_of(example_inputs), dynamic, sources, weights)
                if is_quantized(gm, weights) or dry.would_chunk(gm.graph):
                    one.dry = dry
        if one.dry is not None:
            with self._noted(one, ends=False):  # it only looks
                one.dry.captured(gm.graph)

    def compiled(self) -> None:
        one = self._open.pop()
        if one.dry is not None and one.observed:
            one.report = one.dry.report
        one.dry = None

    def joint(self, graph: fx.Graph) -> None:
        if not self._open:
            return
        one = self._open[-1]
        one.observed = True
        one.wants_cudagraphs |= bool(inductor_config.triton.cudagraphs) and not _on_gpu(graph)
        if one.dry is not None:
            with self._noted(one):
                one.dry.joint(graph)

    def partitioned(
        self, gm: fx.GraphModule, forward: fx.GraphModule, options: dict[str, Any]
    ) -> None:
        if not self._open:
            return
        one = self._open[-1]
        with self._noted(one):
            one.saved = saved_tensors(forward.graph, int(options.get("num_fwd_outputs", 0)))
            if one.dry is not None:
                static = options.get("static_lifetime_input_indices") or ()
                one.dry.partition(gm.graph, static)

    def _noted(self, one: Compiled, *, ends: bool = True) -> _Noted:
        return _Noted(self, one, ends)


@dataclass
class _Noted:
    """Keep an error of ours from becoming one of the target's: the report shows it instead.

    Where `ends` is set, the error ends the dry run, which it leaves half done.
    """

    compiles: Compiles
    one: Compiled
    ends: bool

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        if self.ends:
            self.one.dry = None
        self.compiles.problems.append(
            f"what qfuse would do with compile {self.one.compile_id} is not known: "
            f"{kind.__name__}: {error}"
        )
        return True


def backend_name(compiler: Any) -> str:
    """Return the name a user knows a compiler by: "inductor", "qfuse", the function's own."""
    seen = compiler
    while seen is not None:
        name = getattr(seen, "compiler_name", None)
        if isinstance(name, str):
            return name
        inner = getattr(seen, "_torchdynamo_orig_backend", None)
        if inner is None:
            break
        seen = inner
    inner = getattr(seen, "compiler_fn", seen)
    inner = getattr(inner, "func", inner)  # a partial
    module = getattr(inner, "__module__", "")
    if module == "inductor_q.backend":
        return "qfuse"
    return str(getattr(inner, "__name__", type(inner).__name__))


def _on_gpu(graph: fx.Graph) -> bool:
    values = (node.meta.get("val") for node in graph.nodes)
    return any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values)


def _current_id() -> str:
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id() or "")


def _sources(gm: fx.GraphModule) -> list[str]:
    """Return Dynamo's name of each input.

    A graph that it has just finished has them in the metadata.
    """
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        if source is None:
            source = getattr(node.meta.get("grapharg"), "source", None)
        names.append(source_name(source))
    return names


def _layer_path(source: str) -> str:
    return module_path(".".join(module_names(source)), parameter_name(source))
