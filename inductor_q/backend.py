"""The backend: `torch.compile(model, backend="qfuse", mode=..., options=...)`.

Resolves the options, installs one pass manager and one partitioner for this compile, and calls
Inductor. Everything is handed over as `config_patches`, which Inductor applies to the forward and
to the lazily compiled backward and takes back afterwards; no global configuration is written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._logging._internal import trace_structured

from inductor_q import kernels, lowerings
from inductor_q.cache import bodies_are_cacheable, load_report, report_key, store_report
from inductor_q.capture.bnb_graph import CPU_PACKED, packed_in_forward
from inductor_q.diagnostics.context import Context, counterparts
from inductor_q.diagnostics.report import SCHEMA_VERSION, PassRecord, Report
from inductor_q.exc import NotFused, UnwritableOutput
from inductor_q.files import write_whole
from inductor_q.manager import JointPasses, Partitioner, run_stage
from inductor_q.options import Resolved, resolve
from inductor_q.passes import PIPELINE
from inductor_q.passes.runner import CAPTURED

log = logging.getLogger("inductor_q")

# What the fused pointwise dequantization needs: it has about 60 operations and five reads, and
# Inductor would otherwise write it out before its consumer could absorb it.
FUSION_LIMITS = {
    "realize_opcount_threshold": 200,
    "realize_reads_threshold": 32,
    "realize_acc_reads_threshold": 32,
}

_last: Report | None = None
_written: dict[str, list[Report]] = {}  # what this process has put into each report file


def last_report() -> Report | None:
    """The report of the latest compile in this process; None before the first."""
    return _last


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
        QfuseError: an option is unknown or wrong, or, under "qfuse.strict", a quantized layer was
            not fused.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    global _last
    lowerings.register()
    dynamic = any(isinstance(x, torch.SymInt) for x in example_inputs)
    device = device_of(example_inputs)
    resolved = resolve(mode, options, device=device, dynamic=dynamic)
    report = new_report(resolved, device)
    if resolved.report and resolved.report not in _written:
        _write(resolved.report)  # before time goes into compiling
    if not is_quantized(gm):
        # Nothing of ours applies: this is Inductor, at no cost.
        _last = report
        compiled = compile_fx(gm, example_inputs, config_patches=dict(resolved.inductor))
        _tell(report, resolved)
        return compiled
    sources = input_sources(gm)
    context = Context(resolved, report, sources, counterparts=counterparts(gm, sources))
    if packing := packed_in_forward(gm.graph):
        # Runs once, for the next call finds packed weights: as traced, since Inductor would take
        # these inputs for what they are afterwards and refuse them as they are.
        sites = [context.describe("canonicalize", n, rejected=CPU_PACKED) for n in packing]
        report.add(PassRecord("canonicalize", 0, 0.0), sites)
        _last = report
        _tell(report, resolved)
        return gm.forward
    run_stage(CAPTURED, gm.graph, context)
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    captured = len(report.passes)
    provider = context.provider("dequantize", device)
    patches = {
        **(FUSION_LIMITS if provider == kernels.POINTWISE else {}),
        **resolved.inductor,
    }
    for name, hook in (
        ("joint_custom_pre_pass", JointPasses),
        ("custom_partitioner_fn", Partitioner),
    ):
        patches[name] = hook(context, patches.get(name, getattr(inductor_config, name)))
    _last = report
    with functorch_config.patch(
        autograd_cache_allow_custom_autograd_functions=bodies_are_cacheable(gm)
        or functorch_config.autograd_cache_allow_custom_autograd_functions
    ):
        compiled = compile_fx(gm, example_inputs, config_patches=patches)
    key = report_key(gm, example_inputs, context)
    behind = any(s.stage != CAPTURED and s.name in resolved.passes for s in PIPELINE)
    if len(report.passes) > captured or not behind:
        store_report(key, report)
    else:  # the AOTAutograd cache had it: no pass behind it has run
        _last = report = load_report(key, report)
    _tell(report, resolved)
    return compiled


def _reset() -> None:
    """Called by `torch.compiler.reset()`."""
    global _last
    _last = None
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


qfuse.reset = _reset  # type: ignore[attr-defined]


def is_quantized(gm: fx.GraphModule) -> bool:
    """Whether anything in the graph could be ours: a packed weight, or a tensor subclass."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if _namespace(node.target) in ("bitsandbytes", "qfuse"):
                return True
            value = node.meta.get("example_value") if node.op == "placeholder" else None
            if isinstance(value, torch.Tensor) and (
                _is_subclass(value) or (value.dtype in _PACKED and _is_held(node))
            ):
                return True
    return False


def _namespace(target: Any) -> str:
    """The namespace of an operator, given as an overload or, as Dynamo traces it, without one."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0]
    return str(getattr(target, "namespace", ""))


#: What packed weights are stored in; as an input of the model it may as well be an image.
_PACKED = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _is_subclass(value: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor)


def _is_held(node: fx.Node) -> bool:
    """Whether a placeholder is a parameter or a buffer of a module."""
    name = source_name(getattr(node, "_dynamo_source", None))
    return "_parameters" in name or "_buffers" in name


def device_of(example_inputs: Sequence[Any]) -> torch.device:
    """Where the graph computes: an accelerator if any input lies on one."""
    devices = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def input_sources(gm: fx.GraphModule) -> list[str]:
    """Dynamo's name of each input: where module paths in the report come from."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [source_name(getattr(node, "_dynamo_source", None)) for node in placeholders]


def source_name(source: Any) -> str:
    """The text of one of Dynamo's sources; "" for none. torch 2.11 has it as a method."""
    name = source.name if source is not None else ""
    return name() if callable(name) else str(name)


def new_report(resolved: Resolved, device: torch.device) -> Report:
    """An empty report that says under which options a graph is compiled."""
    values = {**resolved.inductor, "qfuse.numerics": resolved.numerics}
    return Report(
        preset=resolved.preset.name,
        preset_reason=resolved.preset.reason,
        torch=torch.__version__,
        device=str(device),
        numerics=resolved.numerics,
        options={
            key: {"value": str(values.get(key, "")), "source": source}
            for key, source in resolved.sources.items()
        },
    )


def _write(path: str) -> None:
    """The reports of this process's compiles so far, whole at any time."""
    documents = [report.to_dict() for report in _written.get(path, ())]
    text = json.dumps({"schema_version": SCHEMA_VERSION, "compiles": documents}, indent=1)
    try:
        write_whole(Path(path), text)
    except OSError as error:
        problem = error.strerror or str(error)
        raise UnwritableOutput(option="qfuse.report", path=path, problem=problem) from None


def _tell(report: Report, resolved: Resolved) -> None:
    log.info(report.summary())
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "qfuse_report", "encoding": "json"},
        payload_fn=report.to_json,
    )
    if resolved.report:
        _written.setdefault(resolved.report, []).append(report)
        _write(resolved.report)
    unwanted = [s for s in report.sites if s.rejected and not s.by_choice]
    if resolved.strict and unwanted:
        sites = ((s.module or s.source or s.target, s.rejected) for s in unwanted)
        raise NotFused(sites=tuple(sites))
