"""Read from Dynamo's graph where its inputs come from and which modules own them.

Dynamo names each input by a source, the Python expression that reaches it from the compiled
callable, as `L['self']._modules['layers']._parameters['weight']`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from inductor_q.capture import LIBRARIES
from inductor_q.capture.packed import MAIN_NAMES, is_packed_weight, wraps_codes
from inductor_q.log import log

# `_modules['model']`, or `__dict__['_modules']['model']` where a class has its own __getattr__
_MODULE = re.compile(r"_modules(?:'\])?\['([^']+)'\]")
_OF_SCALE = re.compile(r"_scale_inv$")
_PARAMETER = re.compile(r"(?:_parameters|_buffers)(?:'\])?\['([^']+)'\]")


def is_quantized(gm: fx.GraphModule, weights: Collection[str]) -> bool:
    """Whether anything in the graph could be ours: one of the packed `weights` that it reads, or an
    op of a library or of ours, whose operands may come from anywhere."""
    namespaces = {name for library in LIBRARIES for name in library.namespaces}
    return bool(weights) or any(
        _namespace(node.target) in namespaces
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def packed_weights(
    gm: fx.GraphModule, sources: Sequence[str], example_inputs: Sequence[Any]
) -> tuple[str, ...]:
    """List the paths of the packed weights that the graph reads, as sites have them, whoever packed
    them and whether or not a pass knows them; `sources` are those of its inputs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    given = enumerate(zip(inputs, example_inputs, strict=False))
    read = {i: x for i, (node, x) in given if node.users and isinstance(x, torch.Tensor)}
    found = (sources[i] for i in packed_inputs(sources, read))
    return tuple(dict.fromkeys(weight_path(source) or source for source in found))


def packed_inputs(sources: Sequence[str], values: Mapping[int, torch.Tensor]) -> list[int]:
    """Tell which of these inputs, by their place in `sources`, are packed weights."""
    names: dict[tuple[str, ...], set[str]] = {}
    for source in sources:
        name = "quant_state" if ".quant_state." in source else parameter_name(source)
        names.setdefault(tuple(module_names(source)), set()).add(name)
    found = []
    for index, value in values.items():
        source = sources[index]
        name, beside = parameter_name(source), names[tuple(module_names(source))]
        is_parameter = "_parameters" in source
        if wraps_codes(value) or (
            name and is_packed_weight(value, name, is_parameter=is_parameter, beside=beside)
        ):
            found.append(index)
    return found


def frozen_weights(sources: Sequence[str], example_inputs: Sequence[Any]) -> frozenset[int]:
    """Tell which of Dynamo's inputs are matrices of 16 bits that do not train, or stacks of them as
    experts have, but for adapters."""
    return frozenset(
        index
        for index, (source, value) in enumerate(zip(sources, example_inputs, strict=False))
        if "_parameters" in source
        and isinstance(value, torch.Tensor)
        and not hasattr(type(value), "__tensor_flatten__")
        and value.dtype in (torch.bfloat16, torch.float16)
        and value.dim() in (2, 3)
        and not value.requires_grad
        and ".lora_" not in f".{module_path(source)}"
    )


def held_by_modules(sources: Sequence[str]) -> frozenset[int]:
    """Tell which of Dynamo's inputs modules hold: parameters, buffers, and other attributes, as the
    states of quantized weights are. They live across steps.

    Torch says so of all of these but in layers that FSDP has sharded, where it says it of
    parameters alone.
    """
    return frozenset(i for i, s in enumerate(sources) if module_names(s) or parameter_name(s))


def weight_path(source: str) -> str:
    """Return the module's path, with the name of the weight, or of the weight that a scale is for,
    where a module may have several weights."""
    path, name = module_path(source), _OF_SCALE.sub("", parameter_name(source))
    return path if name in (*MAIN_NAMES, path) else f"{path}.{name}".strip(".")


def _namespace(target: Any) -> str:
    """Return the namespace of an operator: an overload or, as Dynamo traces it, their packet."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0]
    return str(getattr(target, "namespace", ""))


def device_of(example_inputs: Sequence[Any]) -> torch.device:
    """Return the device that the graph computes on: an accelerator if any input lies on one."""
    devices = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def input_sources(gm: fx.GraphModule) -> list[str]:
    """List Dynamo's names of the inputs, from which the report's module paths come."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [source_name(getattr(node, "_dynamo_source", None)) for node in placeholders]


def source_name(source: Any) -> str:
    """Return the text of one of Dynamo's sources; "" for none. It is a method in torch 2.11."""
    name = source.name if source is not None else ""
    return name() if callable(name) else str(name)


def tell_last_graph() -> None:
    """Warn where Dynamo takes no graph of this function after this one: what it meets next runs in
    eager mode."""
    from torch._dynamo import config
    from torch._guards import CompileContext, TracingContext

    compiled = CompileContext.current_compile_id()
    count = compiled.frame_compile_id if compiled is not None else None
    if count is None or count + 1 != config.recompile_limit:
        return
    codes = TracingContext.get_traced_code() or ()
    names = [f"{c.co_name} ({c.co_filename}:{c.co_firstlineno})" for c in codes]
    log.warning(
        "qfuse: graph %d of %s, the last that torch compiles of it: the next shape, mode, adapter "
        "or set of arguments runs in eager mode. torch._dynamo.config.recompile_limit is the "
        "number; a model given to inductor_q.compile has as many for each state of its adapters, "
        "and qfuse explain says what each graph was compiled for",
        count + 1,
        next(iter(names), "a function"),
    )


def is_under_ddp() -> bool:
    """Whether DistributedDataParallel calls what is compiled; torch then splits its graphs."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module() is not None


def counterparts(gm: fx.GraphModule, sources: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Map the path of each layer in nested compile regions to those of the layers that take its
    place in other calls. Torch compiles calls that look alike once, by the parameters of the first.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    paths = dict(zip(inputs, map(module_path, sources), strict=False))
    calls: dict[Any, list[Sequence[Any]]] = {}
    for node in gm.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.invoke_subgraph
    ):
        calls.setdefault(node.args[1], []).append(node.args[2:])
    found: dict[str, tuple[str, ...]] = {}
    for alike in calls.values():
        for operand in zip(*alike, strict=False):
            names = dict.fromkeys(paths.get(given, "") for given in operand)
            for name in filter(None, names):
                found[name] = tuple(other for other in names if other not in ("", name))
    return found


def module_names(source: str) -> list[str]:
    """List the submodule names on the way from the compiled module to what a source names."""
    return _MODULE.findall(source)


def input_index(node: fx.Node) -> int | None:
    """Return which of Dynamo's inputs a placeholder of the joint graph is (or comes from)."""
    desc: Any = node.meta.get("desc")
    while hasattr(desc, "base"):  # an inner tensor of a subclass
        desc = desc.base
    index = getattr(desc, "idx", None)
    return index if isinstance(index, int) else None


def parameter_name(source: str) -> str:
    """Return the name that a source's parameter or buffer has in its module; "" for neither."""
    names: list[str] = _PARAMETER.findall(source)
    return names[-1] if names else ""


def module_path(source: str) -> str:
    """Return the dotted path of the module that owns what a source names, as `live` spells it.

    Where the compiled module is the layer itself there is no path: then it is the parameter's name.
    """
    names = (n for n in module_names(source) if n not in ("base_layer", "parametrizations"))
    path = ".".join(names)
    return path or parameter_name(source)
