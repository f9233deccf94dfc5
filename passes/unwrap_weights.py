"""Read weights in tensor subclasses as the tensors that they are made of.

`linear(x, W)` becomes `linear(x, qfuse.dequantize(parts of W))` in Dynamo's graph, and so does what
a method of W decodes, also where a segment is checkpointed. There a subclass is one input, whose
class and attributes say what it holds; after AOTAutograd it is a chain of small operators that
differs from class to class, or one that no other library knows. What follows is for `canonicalize`.

It refuses weights that train, layouts that none of our formats describes, other uses than a
product, and nested compile regions, in which torch's own tracing of a subclass fails. A product of
which the library scales the result, and not the weight, rounds otherwise: under strict numerics it
stays the library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from inductor_q import capture
from inductor_q.capture.library import Layout
from inductor_q.context import Context
from inductor_q.passes.runner import CAPTURED, Site

LINEAR = torch.nn.functional.linear
CAST = torch.ops.prims.convert_element_type.default
REGION = torch.ops.higher_order.invoke_subgraph
DEQUANTIZE = torch.ops.qfuse.dequantize.default

TRAINS = "this weight takes a gradient itself"
NO_PRODUCT = "a packed weight is used by {}, which is no linear layer"
IN_REGION = "torch takes no tensor subclass into a nested compile region (2.11 to 2.13)"
STRICT = "{}: numerics strict leaves it so"


class UnwrapWeights:
    name: ClassVar[str] = "unwrap_weights"
    stage: ClassVar[str] = CAPTURED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for inner in _graphs(graph):
            for weight in inner.find_nodes(op="placeholder"):
                value = weight.meta.get("example_value")
                layout = capture.layout(value) if isinstance(value, Tensor) else None
                if layout is None:
                    continue
                for user in weight.users:
                    yield from _match(user, weight, layout, context)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        plan: _Plan = site.plan
        node, inner = site.node, site.node.graph

        def call(target: Any, *args: Any, **keywords: Any) -> fx.Node:
            return _call(inner, node, target, *args, **keywords)

        with inner.inserting_before(node):
            parts, shape = plan.layout.take(plan.weight, call), [*_value(plan.weight).shape]
            values = call(DEQUANTIZE, parts, plan.layout.format, shape, plan.decoded)
            if plan.dtype is not plan.decoded:
                values = call(CAST, values, plan.dtype)
        if node.target is LINEAR:
            node.replace_input_with(plan.weight, values)
        else:
            node.replace_all_uses_with(values)
            inner.erase_node(node)


@dataclass(frozen=True)
class _Plan:
    """The weight that a node reads, how it is stored, the dtype that its values have there, and the
    one in which they are decoded."""

    weight: fx.Node
    layout: Layout
    dtype: torch.dtype
    decoded: torch.dtype


def _graphs(graph: fx.Graph) -> Iterator[fx.Graph]:
    """Find the graph and those of the segments that it calls; nested compile regions are none."""
    yield graph
    for node in graph.find_nodes(op="get_attr"):
        body = getattr(graph.owning_module, str(node.target), None)
        is_region = any(user.target is REGION for user in node.users)
        if isinstance(body, fx.GraphModule) and not is_region:
            yield from _graphs(body.graph)


def _match(user: fx.Node, weight: fx.Node, layout: Layout, context: Context) -> Iterator[Site]:
    if user.target is REGION:
        yield Site(user, IN_REGION, weight)
        return
    if user.op == "output" or isinstance(user.target, torch._ops.HigherOrderOperator):
        return  # the segment that it is given to has it as an input of its own
    is_product = user.target is LINEAR and _argument(user, 1, "weight") is weight
    is_decoder = user.op == "call_method" and capture.is_decoder(user.target)
    if layout.reason:
        yield Site(user, layout.reason, weight)
    elif not is_product and not is_decoder:
        yield Site(user, NO_PRODUCT.format(_name(user)), weight)
    elif _value(weight).requires_grad:
        yield Site(user, TRAINS, weight)
    elif is_product and layout.rounds and context.numerics == "strict":
        yield Site(user, STRICT.format(layout.rounds), weight, by_choice=True)
    else:
        dtype = _value(user if is_decoder else weight).dtype
        if is_product and layout.follows_input:
            dtype = _value(_argument(user, 0, "input")).dtype
        once = is_decoder or context.numerics != "strict"
        decoded = dtype if once else _value(weight).dtype
        yield Site(user, weight=weight, plan=_Plan(weight, layout, dtype, decoded))


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **keywords: Any) -> fx.Node:
    """Insert a call, with its fake value and the origin of `like`."""
    node = graph.call_function(target, args, keywords)
    values = fx.node.map_arg(args, _value)
    node.meta = {key: value for key, value in like.meta.items() if key != "example_value"}
    node.meta["example_value"] = target(*values, **keywords)
    return node


def _argument(node: fx.Node, index: int, name: str) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _value(node: Any) -> Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor), f"{node=} is no tensor"
    return value


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
