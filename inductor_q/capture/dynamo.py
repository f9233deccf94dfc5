"""What Dynamo's graph says of its inputs: where they come from, which modules own them.

Dynamo names each input by a source, the Python expression that reaches it from the compiled
callable, as `L['self']._modules['layers']._parameters['weight']`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from inductor_q.capture import LIBRARIES
from inductor_q.capture.packed import MAIN_NAMES, is_packed_weight, wraps_codes

# `_modules['model']`, or `__dict__['_modules']['model']` where a class has its own __getattr__
_MODULE = re.compile(r"_modules(?:'\])?\['([^']+)'\]")
_PARAMETER = re.compile(r"(?:_parameters|_buffers)(?:'\])?\['([^']+)'\]")


def is_quantized(gm: fx.GraphModule, weights: Collection[str]) -> bool:
    """Whether anything in the graph could be ours: one of the packed `weights` that it reads, or an
    op of a library or of ours, which may have its operands from anywhere."""
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
    """The paths of the packed weights that the graph reads, as sites have them, whoever packed them
    and whether or not a pass knows them; `sources` are those of its inputs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    names: dict[tuple[str, ...], set[str]] = {}
    for source in sources:
        names.setdefault(tuple(module_names(source)), set()).add(parameter_name(source))
    found = []
    for node, source, value in zip(inputs, sources, example_inputs, strict=False):
        if not node.users or not isinstance(value, torch.Tensor):
            continue
        name = parameter_name(source)
        beside = names[tuple(module_names(source))]
        is_parameter = "_parameters" in source
        if wraps_codes(value) or (
            name and is_packed_weight(value, name, is_parameter=is_parameter, beside=beside)
        ):
            found.append(_weight_path(source) or source)
    return tuple(dict.fromkeys(found))


def _weight_path(source: str) -> str:
    """The path of the module, and the name of the weight where a module may have several."""
    path, name = module_path(source), parameter_name(source)
    return path if name in (*MAIN_NAMES, path) else f"{path}.{name}".strip(".")


def _namespace(target: Any) -> str:
    """The namespace of an operator, given as an overload or, as Dynamo traces it, without one."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0]
    return str(getattr(target, "namespace", ""))


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


def counterparts(gm: fx.GraphModule, sources: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Of layers in nested compile regions: the path of each -> those of the layers that take its
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
    """The submodule names on the way from the compiled module to what a source names."""
    return _MODULE.findall(source)


def input_index(node: fx.Node) -> int | None:
    """Which of Dynamo's inputs a placeholder of the joint graph is (or was desugared from)."""
    desc: Any = node.meta.get("desc")
    while hasattr(desc, "base"):  # an inner tensor of a subclass
        desc = desc.base
    index = getattr(desc, "idx", None)
    return index if isinstance(index, int) else None


def parameter_name(source: str) -> str:
    """The name of the parameter or buffer that a source names in its module; "" for neither."""
    names: list[str] = _PARAMETER.findall(source)
    return names[-1] if names else ""


def module_path(source: str) -> str:
    """The dotted path of the module that owns what a source names.

    Where the compiled module is the layer itself there is no path: then it is the parameter's name.
    """
    path = ".".join(n for n in module_names(source) if n != "base_layer")
    return path or parameter_name(source)
