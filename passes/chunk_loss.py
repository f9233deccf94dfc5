"""The loss of a language model, computed chunk by chunk, so that its logits are never all there.

Matches `F.cross_entropy` over the product of hidden states with a head, as the loss functions of
transformers and their like write it: logits in float32, the last of each sequence cut off or its
label ignored, summed and divided by a number or averaged. The op `qfuse::linear_cross_entropy`
takes its place. A head may be frozen, trained, tied to the embeddings or have LoRA beside it, and
its logits may be multiplied with a number or divided by one.

A model also returns its logits, which a trainer drops: they are computed when they are read, with
gradients (`inductor_q.logits`). A loss that the op does not express is left alone, and so are
logits that the graph itself reads.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.frames import user_frame
from inductor_q.logits import Recipe
from inductor_q.passes.dynamo_graph import called, is_transformed, same_size, written_by
from inductor_q.passes.runner import CAPTURED, Site

F = torch.nn.functional
LOSS = F.cross_entropy
LINEAR = (F.linear, torch._C._nn.linear)
ADD = (operator.add, operator.iadd, torch.add)
MUL = (operator.mul, operator.imul, torch.mul)
DIV = (operator.truediv, operator.itruediv, torch.div)

#: Methods that leave each row of the logits what it is.
_CASTS = {"float", "to", "bfloat16", "half", "type"}
_VIEWS = {"view", "reshape", "flatten", "contiguous", "clone"}
_SIZES = {"size", "dim", "numel", "ndimension"}

#: The rows that a graph of any length is taken to have.
MANY = 1 << 20

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Refused(Exception):
    """Why a loss is left as it is."""


@dataclass(frozen=True)
class _Term:
    """One of the products whose sum is the logits: `scale * x @ weight.T`, in a dtype."""

    x: fx.Node
    weight: fx.Node
    dtype: torch.dtype
    scale: float = 1.0


@dataclass(frozen=True)
class _Head:
    """What the logits are made of, and the nodes on the way from there to the loss."""

    terms: tuple[_Term, ...]
    bias: fx.Node | None
    dtype: torch.dtype  # of the logits
    rows: tuple[Any, ...] = ()  # indices that leave rows out, in the order in which they are taken
    returned: dict[fx.Node, torch.dtype] = field(default_factory=dict)  # node of an output -> dtype


class ChunkLoss:
    name: ClassVar[str] = "chunk_loss"
    stage: ClassVar[str] = CAPTURED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        for node in graph.find_nodes(op="call_function", target=LOSS):
            try:
                head = _head(node, context)
                _check_size(node, context)
            except _Refused as reason:
                yield Site(node, rejected=str(reason), by_choice=True)
                continue
            value = head.terms[0].x.meta["example_value"]
            rows, columns = _value(_arguments(node)["input"]).shape
            logits = hint(rows) * hint(columns)
            provider = "qfuse.linear_cross_entropy"
            if head.returned:
                provider += ", logits on demand"
            yield Site(
                node,
                plan=head,
                provider=provider,
                bytes_saved=logits * value.dtype.itemsize,
                weight=head.terms[0].weight,
            )

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        node, head = site.node, site.plan
        given = _arguments(node)
        divisor, replaced = _divisor(node, given["reduction"])
        with graph.inserting_before(replaced):
            operands = [_cast(graph, t, head.dtype) for t in head.terms]
            inputs = []
            for x, term in zip([x for x, _ in operands], head.terms, strict=True):
                for index in head.rows:
                    x = graph.call_function(operator.getitem, (x, index))
                inputs.append(
                    x if term.scale == 1 else graph.call_function(operator.mul, (x, term.scale))
                )
            bias = head.bias
            if bias is not None and _value(bias).dtype != head.dtype:
                bias = graph.call_method("to", (bias, head.dtype))
            new = graph.call_function(
                torch.ops.qfuse.linear_cross_entropy.default,
                (
                    inputs,
                    [weight for _, weight in operands],
                    bias,
                    given["target"],
                    divisor,
                    given["reduction"] == "mean",
                    given["ignore_index"],
                    context.threshold(_elements(head)),
                ),
            )
            if _value(replaced).dtype != torch.float32:
                new = graph.call_method("to", (new, _value(replaced).dtype))
        new.meta = dict(replaced.meta)
        replaced.replace_all_uses_with(new)
        # Dead nodes stay in Dynamo's graph; these are ours to tell, and would keep the logits.
        dead = [replaced, node] if replaced is not node else [node]
        for one in dead:
            graph.erase_node(one)
        if head.returned:
            _return_recipes(graph, head, context)


def would_chunk(graph: fx.Graph, context: Context) -> bool:
    """Whether the pass applies: the graph behind a break may hold the loss and no packed weight."""
    step = ChunkLoss()
    on = step.name in context.resolved.passes
    return on and any(not site.rejected for site in step.match(graph, context))


def _head(node: fx.Node, context: Context) -> _Head:
    """Trace the logits of a loss back to the products that they are made of."""
    given = _arguments(node)
    if context.resolved.loss == "whole":
        raise _Refused("qfuse.loss='whole'")
    if given["label_smoothing"]:
        raise _Refused("label smoothing: its loss reads every logit, not that of the label alone")
    if given["weight"] is not None:
        raise _Refused("the loss has weights of classes")
    if given["size_average"] is not None or given["reduce"] is not None:
        raise _Refused("the loss is reduced by an argument that torch deprecates: use reduction=")
    if given["reduction"] not in ("mean", "sum"):
        raise _Refused(
            "reduction='none': each row has a gradient of its own to scale, which 'sum' and 'mean' "
            "do not"
        )
    logits, target = _value(given["input"]), _value(given["target"])
    if logits is None or target is None or logits.dim() != 2 or target.dim() != 1:
        raise _Refused("the logits are not a matrix with a label for each row")
    if target.dtype != torch.int64:
        raise _Refused("the labels are probabilities")
    if not logits.requires_grad:
        raise _Refused("nothing trains here: the logits are kept")
    if any(map(is_transformed, node.all_input_nodes)):
        raise _Refused("the loss is inside of a transform of torch.func")
    return _traced(given["input"], node, context)


def _traced(node: fx.Node, loss: fx.Node, context: Context) -> _Head:
    way: list[fx.Node] = [loss]
    rows: list[Any] = []
    while (source := _row_by_row(node, rows)) is not None:
        way.append(node)
        node = source
    way.append(node)
    made: list[fx.Node] = []
    terms, bias = _terms(node, made)
    dtype = _dtype(terms, way, context)
    columns = _value(node).shape[-1]
    if not all(same_size(_value(n).shape[-1], columns) for n in way[1:]):
        raise _Refused("the loss takes the logits in another shape")
    _check_slices(way)
    if any(_value(n).device != _value(node).device for n in way[1:]):
        raise _Refused("the loss is computed on another device than the logits")
    _check_gradients([*made, *way[1:-1]])
    _check_writes({*made, *way}, made, _divisor(loss, _arguments(loss)["reduction"])[1])
    returned = _returned(node, way)
    if returned:
        for weight in [t.weight for t in terms] + ([] if bias is None else [bias]):
            if weight.op not in ("placeholder", "get_attr"):
                raise _Refused("the logits are returned, and the graph computes the head's weight")
    return _Head(tuple(terms), bias, dtype, tuple(reversed(rows)), returned)


def _check_slices(way: Sequence[fx.Node]) -> None:
    """Refuse rows that are left out behind a view: they are left out of the hidden states, which
    have the shape of the product."""
    is_viewed = False
    for source, node in itertools.pairwise(reversed(way[1:])):
        if node.target is operator.getitem:
            if is_viewed:
                raise _Refused("rows are left out of a view of the logits")
        elif not _same_shape(node, source):
            is_viewed = True


def _check_gradients(nodes: Iterable[fx.Node]) -> None:
    """Refuse what was computed under `torch.no_grad()`, where a gradient would go through."""
    for node in nodes:
        given = (_value(n) for n in node.all_input_nodes)
        if _value(node).requires_grad != any(v is not None and v.requires_grad for v in given):
            raise _Refused("a part of the logits is computed under torch.no_grad()")


def _check_writes(path: Set[fx.Node], made: Iterable[fx.Node], loss: fx.Node) -> None:
    """Refuse where numbers are written to behind the first of the products: they could be those of
    the logits, which are not there any more, or of what they are computed from, later than before.
    """
    ahead, node = {n for n in made if n.target in LINEAR}, loss
    while ahead:
        node = node.prev
        ahead.discard(node)
        if node in path:  # as `logits /= number`
            continue
        for written in written_by(node):
            value = _value(written)
            if value is None or value.is_floating_point():
                name, where = called(node), user_frame(node)
                at = f" at {where}" if where else ""
                raise _Refused(f"{name}{at} writes between the logits and their loss")


def _same_shape(one: fx.Node, other: fx.Node) -> bool:
    a, b = _value(one).shape, _value(other).shape
    return len(a) == len(b) and all(map(same_size, a, b))


def _dtype(terms: Sequence[_Term], way: Sequence[fx.Node], context: Context) -> torch.dtype:
    """Return the dtype of the head's own product, which is that of the logits in chunks."""
    dtype = max(terms, key=lambda term: hint(_value(term.x).shape[-1])).dtype
    if dtype not in _DTYPES:
        raise _Refused(f"the logits are {dtype}")
    for other in {term.dtype for term in terms} - {dtype}:
        if context.numerics != "relaxed":
            raise _Refused(
                f"the head's adapter computes in {other}, and the head in {dtype}: autocast or "
                "qfuse.numerics='relaxed' takes one dtype for both"
            )
    between = {_value(node).dtype for node in way[1:]} - {dtype, torch.float32}
    if between:
        raise _Refused(f"the logits are {dtype}, and rounded to {between.pop()} on the way")
    return dtype


def _row_by_row(node: fx.Node, rows: list[Any]) -> fx.Node | None:
    """Return what `node` is made of, if it has rows of it as they are; note which in `rows`."""
    if node.op == "call_method" and str(node.target) in _CASTS | _VIEWS:
        return _argument(node, 0)
    if node.target in (torch.reshape, torch.flatten, torch.clone):
        return _argument(node, 0)
    if node.target is operator.getitem:
        source, index = _argument(node, 0), node.args[1]
        if source is None or not _keeps_columns(index, _value(source)):
            return None
        rows.append(index)
        return source
    return None


def _keeps_columns(index: Any, value: Any) -> bool:
    """Whether `x[index]` takes slices of x and all of its columns."""
    if value is None:
        return False
    index = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, slice) or i is Ellipsis for i in index):
        return False
    if Ellipsis not in index and len(index) < value.dim():
        return True
    return bool(index[-1] == slice(None) or index[-1] is Ellipsis)


def _terms(node: fx.Node, made: list[fx.Node]) -> tuple[list[_Term], fx.Node | None]:
    """Read logits as a sum of products with weights [V, K], and their bias; list what makes them
    in `made`."""
    args = node.args
    made.append(node)
    if node.op == "call_function" and node.target in LINEAR:
        names: dict[str, Any] = dict(zip(("input", "weight", "bias"), args, strict=False))
        names |= node.kwargs
        product = _Term(names["input"], names["weight"], _value(node).dtype)
        bias = names.get("bias")
        if bias is not None and not same_size(_value(bias).shape[0], _value(node).shape[-1]):
            raise _Refused("the head's bias is not a number for each column")
        return [product], bias
    if node.op == "call_function" and node.target in ADD and len(args) == 2 and not node.kwargs:
        nodes = [side for side in args if isinstance(side, fx.Node)]
        if not all(_value(n) is not None and _same_shape(n, node) for n in nodes):
            raise _Refused("the logits are a sum of which a part is repeated")
        sides = [_terms(side, made) for side in nodes]
        biases = [bias for _, bias in sides if bias is not None]
        if len(sides) == 2 and len(biases) < 2:
            return sides[0][0] + sides[1][0], biases[0] if biases else None
    if (scaled := _scaled(node)) is not None:
        terms, bias = _terms(scaled[0], made)
        if bias is None:
            return [replace(t, scale=t.scale * scaled[1]) for t in terms], None
    if node.op == "call_method" and node.target in ("to", "clone"):
        source = _argument(node, 0)
        assert source is not None, f"{node} is a method of nothing"
        return _terms(source, made)
    name = getattr(node.target, "__name__", node.target)
    raise _Refused(f"the logits come from {name}, not from a product with a plain weight alone")


def _scaled(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Read `x * number`, `number * x` (Cohere) or `x / number` (Granite)."""
    if node.op != "call_function" or node.target not in MUL + DIV or node.kwargs:
        return None
    numbers = [a for a in node.args if isinstance(a, (int, float))]
    others = [a for a in node.args if isinstance(a, fx.Node)]
    if len(numbers) != 1 or len(others) != 1:
        return None
    if node.target in MUL:
        return others[0], numbers[0]
    return (others[0], 1 / numbers[0]) if others[0] is node.args[0] and numbers[0] else None


def _returned(logits: fx.Node, way: Sequence[fx.Node]) -> dict[fx.Node, torch.dtype]:
    """Return the nodes by which the graph returns the logits; raise where it reads them itself."""
    found: dict[fx.Node, torch.dtype] = {}
    todo = [(node, user) for node in way[1:] for user in node.users if user not in way]
    while todo:
        node, user = todo.pop()
        if user.op == "output":
            if not _same_shape(node, logits):
                raise _Refused("the graph returns its logits in another shape, or a part of them")
            if _value(node).device != _value(logits).device:
                raise _Refused("the graph returns its logits on another device")
            if node in way and node is not logits and not _is_cast(node):
                raise _Refused("the graph returns a view of its logits")
            found[node] = _value(node).dtype
        elif _is_cast(user):
            todo += [(user, other) for other in user.users]
        elif not (user.op == "call_method" and user.target in _SIZES):
            name, where = getattr(user.target, "__name__", user.target), user_frame(user)
            raise _Refused(
                f"the graph reads its logits: {name}" + (f" at {where}" if where else "")
            )
    return found


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _CASTS


def _check_size(node: fx.Node, context: Context) -> None:
    rows, columns = _value(_arguments(node)["input"]).shape
    least = context.threshold("chunk_loss.min_logits")
    if not isinstance(rows, int):
        rows = MANY  # another batch may have any number
    count = rows * hint(columns)
    if count < least and context.resolved.loss != "chunked":
        raise _Refused(
            f"{count} logits, fewer than chunk_loss.min_logits={least} of the preset "
            "(qfuse.loss='chunked' has no such limit)"
        )


def _divisor(node: fx.Node, reduction: str) -> tuple[fx.Node | None, fx.Node]:
    """Return a tensor that the loss is divided by and nothing else, and the node of the result."""
    if reduction == "sum" and len(node.users) == 1:
        (user,) = node.users
        if user.target in (operator.truediv, torch.div) and len(user.args) == 2:
            divisor = user.args[1]
            value = _value(divisor)
            if user.args[0] is node and value is not None and value.dim() == 0:
                same = value.device == _value(node).device
                if same and not value.requires_grad and not user.kwargs:
                    assert isinstance(divisor, fx.Node)
                    return divisor, user
    return None, node


def _cast(graph: fx.Graph, term: _Term, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
    """The operands of a product in the dtype of the logits, as autocast makes them; but a float32
    weight that does not train, which the op rounds part by part."""
    x, weight = (
        node if _value(node).dtype == dtype or kept else graph.call_method("to", (node, dtype))
        for node, kept in ((term.x, False), (term.weight, _is_rounded(term, dtype)))
    )
    return x, weight


def _is_rounded(term: _Term, dtype: torch.dtype) -> bool:
    """Whether the op rounds the weight of a term, part by part."""
    given = _value(term.weight)
    return given.dtype is torch.float32 and dtype.itemsize == 2 and not given.requires_grad


def _elements(head: _Head) -> str:
    """Name the threshold for how many logits a chunk has."""
    rounded = any(_is_rounded(term, head.dtype) for term in head.terms)
    return "chunk_loss.elements_of_rounded" if rounded else "chunk_loss.elements"


def _return_recipes(graph: fx.Graph, head: _Head, context: Context) -> None:
    """Return the head's inputs instead of logits, and tell the backend what to make of them."""
    output = graph.output_node()
    given = output.args[0]
    assert isinstance(given, (tuple, list)), f"Dynamo's graph returns {given!r}"
    outputs = list(given)
    places = [i for i, node in enumerate(outputs) if node in head.returned]
    dtypes = [head.returned[outputs[i]] for i in places]
    first, inputs = len(outputs), [term.x for term in head.terms]
    for i in places:
        outputs[i] = None
    output.args = ((*outputs, *inputs),)
    context.recipes += [
        Recipe(
            place=place,
            inputs=tuple(range(first, first + len(inputs))),
            weights=tuple(term.weight for term in head.terms),
            scales=tuple(term.scale for term in head.terms),
            bias=head.bias,
            computed=head.dtype,
            dtype=dtype,
        )
        for place, dtype in zip(places, dtypes, strict=True)
    ]


_PARAMETERS: dict[str, Any] = {
    "input": None,
    "target": None,
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**_PARAMETERS, **dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}


def _argument(node: fx.Node, index: int) -> fx.Node | None:
    value = node.args[index] if len(node.args) > index else None
    return value if isinstance(value, fx.Node) else None


def _value(node: Any) -> Any:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
