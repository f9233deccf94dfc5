"""Linear layers of few rows share a launch: those of one input, with their adapters.

In decoding, where canonicalize leaves `qfuse::linear`, launches cost as much as products do. So q,
k and v, or gate and up, become one `qfuse::linears`, and with each goes its LoRA adapter, whose
projections take one launch together. `silu(gate) * up` is computed where both are.

An adapter is then added in float32 to what is rounded once, and its own product is not rounded
before; so is the product of gate and up. Numerics "strict" adds and multiplies as written.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q.context import Context
from inductor_q.formats import get_format
from inductor_q.kernels.dispatch import served_by
from inductor_q.kernels.linear_rows_sources import WEIGHTS
from inductor_q.kernels.provider import REFERENCE
from inductor_q.kernels.rows_calls import Adapter, LinearRows
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.graph import (
    ADD,
    CAST,
    CHAINED,
    CLONE,
    MM,
    MUL,
    RESHAPE,
    VIEWS,
    arg,
    backward_nodes,
    computed_from,
    emit,
    is_tensor,
    last_size,
    peel_rows,
    peel_transposes,
    positions,
    same_shape,
    tensor,
    widens,
)
from inductor_q.passes.graph import replace as replace_node
from inductor_q.passes.products import as_scaled
from inductor_q.passes.runner import Site

aten = torch.ops.aten
LINEAR = torch.ops.qfuse.linear.default
LINEARS = torch.ops.qfuse.linears.default
TRAINED = "a backward pass reads what the adapters of these few rows projected"
UNSERVED = "no kernel computes these layers together"


@dataclass(frozen=True)
class _Low:
    """The adapter `scaling * (x @ a.t()) @ b.t()`."""

    a: fx.Node
    b: fx.Node
    scaling: float


@dataclass(frozen=True)
class _Layer:
    """A linear layer; `top` is its result, to which its adapter is added."""

    linear: fx.Node
    top: fx.Node
    low: _Low | None = None

    @property
    def x(self) -> fx.Node:
        return arg(self.linear, 0)

    @property
    def operands(self) -> list[fx.Node]:
        return list(self.linear.args[1])  # type: ignore[arg-type]

    @property
    def features(self) -> int:
        return int(self.linear.args[3][0])  # type: ignore[index, arg-type]

    @property
    def bias(self) -> fx.Node | None:
        bias = self.linear.args[4]
        assert bias is None or isinstance(bias, fx.Node)
        return bias

    @property
    def inputs(self) -> list[fx.Node]:
        low = [] if self.low is None else [self.low.a, self.low.b]
        return [self.x, *self.operands, *low, *([] if self.bias is None else [self.bias])]


@dataclass(frozen=True)
class _Group:
    """Layers of one input and format; `product` is silu(first) * second where they are gated."""

    layers: tuple[_Layer, ...]
    product: fx.Node | None = None

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that the op's results replace."""
        return [layer.top for layer in self.layers] if self.product is None else [self.product]

    @property
    def is_plain(self) -> bool:
        """Whether this is one layer as it is."""
        return len(self.layers) == 1 and self.layers[0].low is None


class FuseRows:
    name: ClassVar[str] = "fuse_rows"
    stage: ClassVar[str] = "joint"

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        linears = graph.find_nodes(op="call_function", target=LINEAR)
        if not linears:
            return
        if backward_nodes(graph):
            yield Site(linears[0], TRAINED, by_choice=True)
            return
        strict = context.numerics == "strict"
        groups: dict[Any, list[_Layer]] = defaultdict(list)
        for linear in linears:
            layer = _with_adapter(linear)
            if layer.low is not None and (strict or not _served([layer])):
                reason = STRICT if strict else UNSERVED
                yield Site(linear, reason, layer.operands[0], by_choice=True)
                layer = _Layer(linear, linear)
            x = peel_rows(layer.x)
            wide = None if layer.low is None else tensor(layer.low.b).dtype
            groups[x, linear.args[2], tensor(linear).dtype, wide].append(layer)
        order = positions(graph)
        for members in groups.values():
            for start in range(0, len(members), WEIGHTS):
                layers = members[start : start + WEIGHTS]
                group = _Group(tuple(layers), None if strict else _gated(layers))
                if group.is_plain:
                    continue
                chained = computed_from(
                    [node for layer in layers for node in layer.inputs],
                    [layer.top for layer in layers],
                    order,
                )
                provider = _served(layers, gated=group.product is not None)
                reason = CHAINED if chained else "" if provider else UNSERVED
                yield Site(
                    layers[0].linear, reason, layers[0].operands[0], group, True, provider or "aten"
                )

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        group: _Group = site.plan
        layers, first = group.layers, group.layers[0].linear
        lows = [layer.low for layer in layers]
        with graph.inserting_before(first):
            found = emit(
                graph,
                LINEARS,
                (
                    layers[0].x,
                    [operand for layer in layers for operand in layer.operands],
                    first.args[2],
                    [layer.features for layer in layers],
                    [layer.bias for layer in layers],
                    [None if low is None else low.a for low in lows],
                    [None if low is None else low.b for low in lows],
                    [1.0 if low is None else low.scaling for low in lows],
                    group.product is not None,
                ),
                first,
            )
            for i, old in enumerate(group.results):
                new = emit(graph, operator.getitem, (found, i), old)
                if not same_shape(new, old):
                    new = emit(graph, RESHAPE, (new, list(tensor(old).shape)), old)
                replace_node(old, new)


def _served(layers: Sequence[_Layer], gated: bool = False) -> str:
    """Name the kernel that computes layers together; empty where there is none."""
    x = tensor(layers[0].x)
    adapters = [
        None if low is None else Adapter(tensor(low.a), tensor(low.b), low.scaling)
        for low in (layer.low for layer in layers)
    ]
    call = LinearRows(
        x.reshape(-1, x.shape[-1]),
        [[tensor(operand) for operand in layer.operands] for layer in layers],
        get_format(str(layers[0].linear.args[2])),
        [layer.features for layer in layers],
        [None if layer.bias is None else tensor(layer.bias).to(x.dtype) for layer in layers],
        adapters,
        gated,
    )
    name = served_by("linear_rows", call)
    return "" if name == REFERENCE else name


def _with_adapter(linear: fx.Node) -> _Layer:
    """Read a linear layer and the adapter that is added to it, if one is."""
    node = linear
    while (user := _only_user(node)) is not None and user.target is CLONE:
        node = user
    if user is None or user.target is not ADD or user.kwargs or len(user.all_input_nodes) != 2:
        return _Layer(linear, linear)
    other = arg(user, 1 if user.args[0] is node else 0)
    if not is_tensor(other) or not same_shape(other, node):
        return _Layer(linear, linear)
    if not tensor(other).dtype == tensor(user).dtype == tensor(linear).dtype:
        return _Layer(linear, linear)
    low = _low(other, peel_rows(arg(linear, 0)))
    return _Layer(linear, linear) if low is None else _Layer(linear, user, low)


def _low(node: fx.Node, x: fx.Node) -> _Low | None:
    """Read `node` as an adapter of x, whose products nothing else reads."""
    high, outer = _scaled(node, tensor(x).dtype)
    if high is None or high.target is not MM:
        return None
    b = _factor(arg(high, 1))
    low, inner = _scaled(arg(high, 0), tensor(x).dtype)
    if b is None or low is None or low.target is not MM:
        return None
    a, source = _factor(arg(low, 1)), peel_rows(arg(low, 0))
    if widens(source):
        source = peel_rows(arg(source, 0))
    if a is None or source is not x:
        return None
    rank, features = tensor(a[0]).shape[0], last_size(node)
    if tensor(b[0]).shape != (features, rank):
        return None  # a view between the products has other columns
    return _Low(a[0], b[0], outer * inner * a[1] * b[1])


def _scaled(node: fx.Node, dtype: torch.dtype) -> tuple[fx.Node | None, float]:
    """Return what lies below views, factors and roundings to `dtype` that are read once."""
    factor = 1.0
    while len(node.users) == 1:
        scaled = as_scaled(node)
        rounds = node.target is CAST and tensor(node).dtype == dtype
        if scaled is not None and isinstance(scaled[1], float):
            node, factor = scaled[0], factor * scaled[1]
        elif node.target in VIEWS or (rounds and tensor(node.args[0]).dtype.is_floating_point):
            node = arg(node, 0)
        else:
            return node, factor
    return None, factor


def _factor(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return the matrix that `node` is the transpose of, and a factor between the two."""
    matrix, transposed = peel_transposes(node)
    scaled, factor = as_scaled(matrix), 1.0
    if scaled is not None and isinstance(scaled[1], float):
        factor = scaled[1]
        matrix, again = peel_transposes(scaled[0])
        transposed = transposed is not again
    if matrix.target is CAST and tensor(matrix.args[0]).dtype is torch.float32:
        matrix = arg(matrix, 0)
    return (matrix, factor) if transposed else None


def _gated(layers: Sequence[_Layer]) -> fx.Node | None:
    """Find `silu(first) * second` of two layers of one shape, where nothing else reads them."""
    if len(layers) != 2 or layers[0].features != layers[1].features:
        return None
    gate, up = layers[0].top, layers[1].top
    product = _only_user(up)
    if product is None or product.target is not MUL or len(product.all_input_nodes) != 2:
        return None
    if tensor(product).dtype != tensor(up).dtype or not same_shape(product, up):
        return None  # of a gate that stays float32, or of other dimensions
    activated = arg(product, 1 if product.args[0] is up else 0)
    return product if _is_silu(activated, gate) else None


def _is_silu(node: fx.Node, x: fx.Node) -> bool:
    """Whether `node`, which is read once, is `x / (1 + exp(-x))`, computed in float32 or not."""
    if len(node.users) != 1:
        return False
    if node.target is aten.silu.default:
        return node.args[0] is x and len(x.users) == 1
    if node.target is CAST and tensor(node).dtype == tensor(x).dtype:
        node = arg(node, 0)
    if node.target is not aten.div.Tensor or node.kwargs or not is_tensor(node.args[1]):
        return False
    wide, below = arg(node, 0), arg(node, 1)
    source = arg(wide, 0) if widens(wide) else wide
    if source is not x or len(x.users) != (1 if wide is not x else 2) or len(wide.users) != 2:
        return False
    if below.target is not ADD or below.args[1] != 1 or below.kwargs:
        return False
    exp = arg(below, 0)
    return (
        exp.target is aten.exp.default
        and arg(exp, 0).target is aten.neg.default
        and arg(exp, 0).args[0] is wide
    )


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
