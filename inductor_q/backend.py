"""The backend: `torch.compile(model, backend="qfuse", mode=..., options=...)`.

Resolves the options, installs our passes and one partitioner for this compile, and calls Inductor.
Everything is handed over as `config_patches`, which Inductor applies to the forward and to the
lazily compiled backward and takes back afterwards; no global configuration is written. What is
set for the process is where Triton keeps its kernels, which Inductor sets too (`kept`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._logging._internal import trace_structured

from inductor_q import capture, corrections, lowerings, memory
from inductor_q.cache import (
    add_stored,
    bodies_are_cacheable,
    cacheable_functions,
    load_report,
    report_key,
    report_tag,
    store_report,
)
from inductor_q.capture import live
from inductor_q.capture.dynamo import (
    counterparts,
    device_of,
    frozen_weights,
    input_sources,
    is_quantized,
    is_under_ddp,
    packed_weights,
    tell_last_graph,
)
from inductor_q.compiled_for import CompiledFor, began, counted_before
from inductor_q.context import Context, new_report
from inductor_q.exc import NotFused, PackedForInference, UnwritableOutput
from inductor_q.exclusions import without_effect
from inductor_q.files import write_whole
from inductor_q.graph_report import REPORT_VERSION, PassRecord, Report
from inductor_q.hooks import JointPasses, Partitioner, behind, passes_off, run_stage
from inductor_q.kept import keep_triton_kernels
from inductor_q.kernels.dequantize import POINTWISE
from inductor_q.log import log, warn_once
from inductor_q.logits import with_logits
from inductor_q.offload import find_link
from inductor_q.options import resolve
from inductor_q.passes import PIPELINE
from inductor_q.passes.chunk_loss import would_chunk
from inductor_q.passes.grouped_keys import keeps_kernels
from inductor_q.passes.runner import CAPTURED, LOWERED
from inductor_q.resolved import Resolved

# The fused pointwise dequantization needs these: it has about 60 operations and five reads, and
# Inductor would otherwise write it out before its consumer could absorb it.
FUSION_LIMITS = {
    "realize_opcount_threshold": 200,
    "realize_reads_threshold": 32,
    "realize_acc_reads_threshold": 32,
}

capture.trace_gathered()  # torch.compile imports this module before it traces anything

_reports: list[Report] = []  # one for each graph of this process
_compiled_for: list[CompiledFor] = []  # what each graph was compiled for
_before: Counter[str] = Counter()  # what torch had counted at the last reset
_written: dict[str, list[Report]] = {}  # what this process has put into each report file


def last_report() -> Report | None:
    """Return the report of the latest graph of this process, or None before the first.

    `graph` says which one it is; `inductor_q.report()` sums up all of them.
    """
    return _reports[-1] if _reports else None


def reports() -> tuple[Report, ...]:
    """Return the report of each graph that this process has compiled since the last reset."""
    return tuple(_reports)


def reports_of(model: nn.Module, every: Set[int] | None = None) -> tuple[Report, ...]:
    """Return the reports of the graphs of `model`.

    A model that has none, and no break that says why, may run a graph of a model that is gone:
    then it is the reports of such graphs.

    Args:
        every: the ids of the parameters of all live modules, if they are known already.
    """
    own = {id(p) for p in model.parameters()}
    every = {id(p) for p in live.parameters()} if every is None else every
    found: dict[str, list[Report]] = {"own": [], "other": [], "gone": []}
    for report, compiled_for in zip(_reports, _compiled_for, strict=True):
        found[compiled_for.whose(model, own, every)].append(report)
    if not found["own"] and counted_before(model) is not None and graph_breaks(model):
        return ()
    return tuple(found["own"] or found["gone"])


def graph_breaks(model: nn.Module | None = None) -> int:
    """Return how many graph breaks torch has counted since the last reset, or since
    `inductor_q.compile` first compiled `model`."""
    return _counted(model)["breaks"]


def functions_at_limit(model: nn.Module | None = None) -> int:
    """Return of how many functions torch has refused another graph in that time.

    They go on in eager mode wherever no graph that they have fits.
    """
    return _counted(model)["limits"]


def begins(model: nn.Module) -> None:
    """Note that `model` is compiled from here on, where it was not yet."""
    began.setdefault(model, _counted())


def count_anew() -> None:
    """Count breaks and refused graphs from here on.

    `torch.compiler.reset()` does this too, but only if this backend has compiled a graph since the
    last reset: torch resets no other backends.
    """
    global _before
    _before = _all()
    began.clear()


def _counted(model: nn.Module | None = None) -> Counter[str]:
    """Return what torch has counted since the last reset, since its counters were cleared, or since
    `model` was compiled first."""
    found = _since(_before, _all())
    before = None if model is None else counted_before(model)
    return found if before is None else _since(before, found)


def _since(before: Counter[str], now: Counter[str]) -> Counter[str]:
    return Counter(
        {what: n - (before[what] if n >= before[what] else 0) for what, n in now.items()}
    )


def _all() -> Counter[str]:
    """Return what torch has counted."""
    from torch._dynamo.utils import counters

    limits = (n for why, n in counters["unimplemented"].items() if "limit exceeded" in why[:60])
    return Counter(breaks=sum(counters["graph_break"].values()), limits=sum(limits))


def qfuse(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile one graph with Inductor and the passes of this library.

    Args:
        gm, example_inputs: what Dynamo captured.
        mode: as `torch.compile` means it; or give "qfuse.mode" inside `options`.
        options: Inductor keys and "qfuse.*" keys; `inductor_q.list_options()` lists them.

    Raises:
        QfuseError: an option is unknown or wrong, no gradient would go through a layer, or, under
            "qfuse.strict", a quantized layer was not fused.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    lowerings.register()
    tell_last_graph()
    dynamic = any(isinstance(x, torch.SymInt) for x in example_inputs)
    device = device_of(example_inputs)
    resolved = resolve(mode, options, device=device, dynamic=dynamic)
    report = new_report(resolved, device)
    place = len(_reports)
    if _reports and _reports[-1].graph == report.graph and is_under_ddp():
        warn_once(
            "qfuse: DDP splits the graph where a bucket of gradients is full, so less of it can be "
            "fused; inductor_q.compile(model) keeps it whole, and so does "
            "torch._dynamo.config.optimize_ddp = False, set before the first step"
        )
    _reports.append(report)
    _compiled_for.append(CompiledFor.of(example_inputs))
    if resolved.report and resolved.report not in _written:
        _write(resolved.report)  # before time goes into compiling
    sources = input_sources(gm)
    weights = packed_weights(gm, sources, example_inputs)
    frozen = frozen_weights(sources, example_inputs) if resolved.compute != "bf16" else frozenset()
    context = Context(
        resolved,
        report,
        sources,
        frozen=frozen,
        counterparts=counterparts(gm, sources),
        attention=keeps_kernels(gm),
    )
    quantized = is_quantized(gm, weights)
    unplanned = ""
    if resolved.memory is not None:
        unplanned = report_key(gm, example_inputs, context)
        added = corrections.difference(unplanned)
        budget = memory.measure(resolved.memory, device, example_inputs, added)
        context.budget = replace(budget, link=find_link(resolved, device))
    ours = quantized or frozen or context.budget is not None or would_chunk(gm.graph, context)
    if not ours:  # This is Inductor, at no cost.
        _warn_of_breaks()
        with _unless_traced_anew(report):
            compiled = compile_fx(gm, example_inputs, config_patches=dict(resolved.inductor))
        _tell(report, resolved)
        return compiled
    if stopping := capture.stops_gradients(gm.graph):
        layers = [context.describe("canonicalize", node).module for node in stopping]
        raise PackedForInference(layers=layers)
    if packing := capture.packs_anew(gm.graph):
        # The graph runs once, as traced: the next call finds packed weights, and Inductor would
        # take these inputs for what they are afterwards and refuse them as they are.
        sites = [context.describe("canonicalize", r.node, rejected=r.reason) for r in packing]
        report.add(PassRecord("canonicalize", 0, 0.0), sites)
        _tell(report, resolved)
        if torch.is_grad_enabled():
            from torch._dynamo import lookup_backend

            # Only AOTAutograd casts between the bodies of autograd.Functions that mix dtypes.
            return lookup_backend("aot_eager")(gm, list(example_inputs))
        return gm.forward
    report.weights, report.off = list(weights), passes_off(resolved)
    keep_triton_kernels(device)
    run_stage(CAPTURED, gm.graph, context)
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    captured = len(report.passes)
    provider = context.dequantizer(device)
    patches = {
        **(FUSION_LIMITS if quantized and provider == POINTWISE else {}),
        **(memory.PATCHES if context.budget is not None else {}),
        **resolved.inductor,
    }
    cacheable = cacheable_functions(patches)
    patches |= cacheable
    for name, hook in (
        ("joint_custom_pre_pass", JointPasses),
        ("custom_partitioner_fn", Partitioner),
        ("post_grad_custom_post_pass", behind),
    ):
        patches[name] = hook(context, patches.get(name, getattr(inductor_config, name)))
    key = report_key(gm, example_inputs, context)
    report.tag = context.tag = report_tag(key, together=resolved.strict)
    cached = (
        bodies_are_cacheable(gm, cacheable)
        or functorch_config.autograd_cache_allow_custom_autograd_functions
    )
    with (
        functorch_config.patch(autograd_cache_allow_custom_autograd_functions=cached),
        _unless_traced_anew(report),
    ):
        compiled = compile_fx(gm, example_inputs, config_patches=patches)
    if context.recipes:
        compiled = with_logits(compiled, gm, context.recipes)
    on = {s.name: s.stage for s in PIPELINE if s.name in resolved.passes}
    if len(report.passes) > captured or {*on.values()} <= {CAPTURED, LOWERED}:
        lowered = {name for name, stage in on.items() if stage == LOWERED}
        add_stored(key, report, lowered - {record.name for record in report.passes})
        store_report(key, report)
        context.changed = functools.partial(_tell_again, key, report, resolved)
    else:  # the AOTAutograd cache had it: no pass behind it has run
        _reports[place] = report = load_report(key, report)
    _tell(report, resolved)
    if report.memory is not None and corrections.is_measured(device):
        tell = functools.partial(_measured, unplanned, report, resolved)
        compiled = corrections.measuring(compiled, device, tell)
    return compiled


@contextlib.contextmanager
def _unless_traced_anew(report: Report) -> Iterator[None]:
    """Forget the report where Inductor sends Dynamo back to trace the frame another way.

    With dynamic=True a number of Python is a symbol at first, and again a constant where no tensor
    can take its place. What was compiled until then never runs.
    """
    from torch._dynamo.exc import RestartAnalysis

    try:
        yield
    except RestartAnalysis:
        for place in [i for i, one in enumerate(_reports) if one is report]:
            del _reports[place], _compiled_for[place]
        raise


def qfuse_backend() -> Any:
    """Return ``"qfuse"`` where the package is installed, and otherwise the function itself.

    A bare checkout has no entry points.
    """
    from torch._dynamo import list_backends

    if "qfuse" in list_backends():
        return "qfuse"
    return qfuse


def _reset() -> None:
    """Forget the reports; `torch.compiler.reset()` calls this."""
    _reports.clear()
    _compiled_for.clear()
    corrections.forget()
    count_anew()
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


qfuse.reset = _reset  # type: ignore[attr-defined]


def _write(path: str) -> None:
    """Write the reports of this process's compiles so far, so that the file is always whole."""
    documents = [report.to_dict() for report in _written.get(path, ())]
    text = json.dumps({"schema_version": REPORT_VERSION, "compiles": documents}, indent=1)
    try:
        write_whole(Path(path), text)
    except OSError as error:
        problem = error.strerror or str(error)
        raise UnwritableOutput(option="qfuse.report", path=path, problem=problem) from None


def _warn_of_breaks() -> None:
    """Warn at the third graph where there are breaks, and quantized layers that no graph read."""
    if len(_reports) != 3 or not graph_breaks() or any(report.weights for report in _reports):
        return
    if alive := len(live.quantized_layers()):
        by_others = any(each.model is None for each in _compiled_for)
        prevented = (
            ". inductor_q.compile(model) prevents most breaks, and in a Trainer "
            "inductor_q.integrations.QfuseCallback() does"
        )
        log.warning(
            "qfuse: 0 of %d quantized layers fused so far; 3 graphs, %d breaks: `qfuse explain` "
            "names them%s",
            *(alive, graph_breaks(), prevented if by_others else ""),
        )


def _measured(
    key: str, report: Report, resolved: Resolved, most: int, exact: bool, code: CodeType | None
) -> None:
    """Say how the memory of the first step compares to its plan; where it has to, plan anew."""
    assert report.memory is not None
    report.memory = found = replace(report.memory, measured=most, exact=exact)
    is_off = corrections.misses(found)
    log.log(logging.WARNING if is_off else logging.INFO, "qfuse: %s", found)
    if corrections.correct(key, found, code):
        log.warning("qfuse.memory: the next step is compiled again, with what this one has shown")
    if resolved.report:
        _write(resolved.report)


def _tell(report: Report, resolved: Resolved) -> None:
    log.info(report.summary())
    if nothing := report.nothing_fused():
        warn_once(f"qfuse: {nothing}; run `qfuse explain` for the causes")
    if unused := without_effect(resolved.exclude, _reports):
        warn_once(f"qfuse.compute.exclude: {unused}")
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "qfuse_report", "encoding": "json"},
        payload_fn=report.to_json,
    )
    if resolved.report:
        _written.setdefault(resolved.report, []).append(report)
        _write(resolved.report)
    if resolved.strict and (unwanted := _unwanted(report)):
        raise NotFused(sites=unwanted)


def _tell_again(key: str, report: Report, resolved: Resolved) -> None:
    """Keep and write the report of a compile to which its backward has added."""
    store_report(key, report)
    if resolved.report:
        _write(resolved.report)


def _unwanted(report: Report) -> tuple[tuple[str, str], ...]:
    """List what is not fused: the sites that were refused, and the layers that no pass rewrote."""
    refused = [s for s in report.sites if s.rejected and not s.by_choice]
    found = [(s.module or s.source or s.target, s.rejected) for s in refused]
    for layer, verdict in report.verdicts().items():
        if not verdict.is_accepted and verdict.reason not in {s.rejected for s in verdict.sites}:
            found.append((layer, verdict.reason))
    return tuple(found)
