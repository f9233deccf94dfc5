"""Read and edit FX graphs: the few verbs that every pass uses.

Passes insert where it reads naturally; the runner restores a topological order after each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from inductor_q.capture.example import hint, likely
from inductor_q.context import Context

aten = torch.ops.aten
prims = torch.ops.prims

MM = aten.mm.default
ADD = aten.add.Tensor
ADDMM = aten.addmm.default
MUL = aten.mul.Tensor
CAT = aten.cat.default
PERMUTE = aten.permute.default
RESHAPE = aten.reshape.default
SLICE = aten.slice.Tensor
CLONE = aten.clone.default
PAD = aten.constant_pad_nd.default
CAST = prims.convert_element_type.default
HALVES = frozenset({torch.bfloat16, torch.float16})
VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
#: What has all elements of its input, shown or copied, in another layout: what is said of the input
#: holds of it. `is_view` is another question, about memory: slices are views, copies are none.
LAYOUT = VIEWS | {PERMUTE, CLONE, aten.expand.default, aten.unsqueeze.default}

# The key in `meta` under which `replace` leaves the node that stands in for another.
_REPLACED = "qfuse_replaced_by"

# The key in `meta` under which a pass remembers what it has made of a node.
MADE = "qfuse_made"

# The keys in `meta` that a new node inherits from the node it stands for.
_INHERITED = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "seq_nr",
    "partitioner_tag",
    "ac_graph_id",
    "recompute",
)


def tensor(node: Any) -> torch.Tensor:
    """The fake tensor of a node."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node=} is no tensor"
    return value


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_view(node: fx.Node) -> bool:
    """Whether an operator only shows its input's memory, all of it or a part, as its schema says.

    `_unsafe_view` does too, of an input that nobody reads beside it.
    """
    return node.target in VIEWS or bool(getattr(node.target, "is_view", False))


def arg(node: fx.Node, index: int) -> fx.Node:
    """Return an argument, which has to be a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node), f"argument {index} of {node=} is {value!r}"
    return value


def argument(node: fx.Node, name: str) -> Any:
    """Return an operator's argument by its name, or its default; None where it has no such one."""
    schema = getattr(node.target, "_schema", None)
    for i, known in enumerate(schema.arguments if schema else ()):
        if known.name == name:
            given: Any = node.args[i] if i < len(node.args) else node.kwargs.get(name)
            return known.default_value if given is None else given
    return None


def emit(
    graph: fx.Graph, target: Any, args: Sequence[Any], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """Insert a call at the graph's insertion point, with its fake value and the origin of `like`.

    An argument that an earlier site has replaced (see `replace`) is read in its new place.
    """
    given: Any = fx.node.map_arg((tuple(args), kwargs), _current)
    node = graph.call_function(target, *given)
    with V.fake_mode:
        values, named = fx.node.map_arg(given, lambda a: a.meta["val"])
        node.meta["val"] = target(*values, **named)
    for key in _INHERITED:
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def inline(
    graph: fx.Graph, function: Callable[..., Any], args: Sequence[fx.Node | None], like: fx.Node
) -> list[fx.Node]:
    """Emit the operators that a torch function of tensors consists of; return its results."""
    values = [None if a is None else tensor(a) for a in args]
    with V.fake_mode:
        traced = make_fx(function, select_decomp_table())(*values)
    given = iter(args)
    env: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "output":
            return [env[result] for result in node.all_input_nodes]
        else:
            found = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = emit(graph, node.target, found[0], like, **found[1])
    raise AssertionError("a graph has an output")


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let `new` be read instead of `old`, also by what `emit` makes of plans that name `old`."""
    old.replace_all_uses_with(new)
    old.meta[_REPLACED] = new


def forget_marks(graph: fx.Graph) -> None:
    """Forget what only the plans of one pass read: which nodes are read in the place of others, and
    what was made of a node."""
    for node in graph.nodes:
        node.meta.pop(_REPLACED, None)
        node.meta.pop(MADE, None)


def _current(node: fx.Node) -> fx.Node:
    """Return the node that is read in the place of `node` now."""
    while _REPLACED in node.meta:
        node = node.meta[_REPLACED]
    return node


def replay(graph: fx.Graph, view: fx.Node, source: fx.Node, like: fx.Node) -> fx.Node:
    """Emit the layout change `view` of `source` instead of its own input, which may have had
    another layout."""
    copies = view.target in VIEWS and not tensor(source).is_contiguous()
    return emit(graph, RESHAPE if copies else view.target, (source, *view.args[1:]), like)


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors have the same shape; a comparison of symbols adds no guard."""
    one, other = tensor(a).shape, tensor(b).shape
    sizes = zip(one, other, strict=False)
    return len(one) == len(other) and all(statically_known_true(x == y) for x, y in sizes)


def rows(node: fx.Node) -> int:
    """Return how many rows the tensor has as a matrix whose columns are its last dimension."""
    return math.prod(map(hint, tensor(node).shape[:-1]))


def likely_rows(node: fx.Node) -> int:
    """Return how many rows the tensor is likely to have in long batches, if their lengths vary."""
    return likely(math.prod(tensor(node).shape[:-1]))


def too_few_rows(node: fx.Node, name: str, context: Context) -> str:
    """Return that a product is too short for a threshold in long batches, too; else nothing."""
    least = context.threshold(name)
    count, most = rows(node), likely_rows(node)
    if most >= least:
        return ""
    others = f", and likely up to {most} in other batches" if most > count else ""
    return f"{count} rows{others}, fewer than {name}={least} of the preset"


def peel_rows(node: fx.Node) -> fx.Node:
    """Return the tensor below views that only regroup rows and keep the last dimension."""
    while node.target in VIEWS:
        source = arg(node, 0)
        if last_size(source) != last_size(node):
            break
        node = source
    return node


def last_size(node: fx.Node) -> int:
    """Return the last dimension if it is a number, else -1 for a scalar and -2 for a symbol."""
    shape = tensor(node).shape
    if not shape:
        return -1
    return shape[-1] if isinstance(shape[-1], int) else -2


def columns(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return the matrix and span that a slice of columns reads, where both ends are numbers."""
    if node.target is not SLICE or len(node.args) != 4 or node.args[1] != 1:
        return None
    matrix, start, end = arg(node, 0), node.args[2], node.args[3]
    if tensor(matrix).dim() != 2 or not isinstance(start, int) or not isinstance(end, int):
        return None
    end = min(end, last_size(matrix))  # `x[:, 2:]` ends at the largest integer
    return (matrix, start, end) if 0 <= start < end else None


def widens(node: fx.Node) -> bool:
    """Whether a node casts a 16-bit tensor to float32, which keeps its values."""
    return (
        node.target is CAST
        and tensor(node).dtype is torch.float32
        and tensor(node.args[0]).dtype in HALVES
    )


def shows(node: fx.Node) -> bool:
    """Whether a node is a view that keeps the last dimension, or a cast that keeps the values."""
    return widens(node) or (node.target in VIEWS and peel_rows(node) is not node)


def readers(node: fx.Node, shown: Container[object]) -> Iterator[fx.Node]:
    """Yield what reads a value, itself or as the operators in `shown` show it."""
    for user in node.users:
        if user.target in shown:
            yield from readers(user, shown)
        else:
            yield user


def single_user(node: fx.Node) -> fx.Node | None:
    """Return what alone reads a node; None where nothing does, or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def peel_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return the tensor below 2-D permutes, and whether they show it transposed."""
    transposed = False
    while node.target is PERMUTE and list(node.args[1]) == [1, 0]:  # type: ignore[arg-type]
        transposed = not transposed
        node = arg(node, 0)
    return node, transposed


def as_matrix(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Reshape `node` to [rows, last dimension] at the insertion point."""
    value = tensor(node)
    if value.dim() == 2:
        return node
    return emit(graph, RESHAPE, (node, [-1, value.shape[-1]]), node)


#: The reason why products of one input are not stacked, where `computed_from` holds.
CHAINED = "one product is computed from another's result"


def computed_from(
    targets: Iterable[fx.Node], sources: Iterable[fx.Node], order: Mapping[fx.Node, int]
) -> bool:
    """Whether any of `targets` is one of `sources` or computed from one: then what needs all
    targets cannot stand in for the sources. `order` is the position of each node."""
    wanted, todo = set(targets), list(sources)
    last = max(order[node] for node in wanted)
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node in wanted:
            return True
        found = [u for u in node.users if u not in seen and order[u] <= last]
        seen.update(found)
        todo += found
    return False


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Find nodes that depend on a tangent. (Tags of autograd are no help: the bodies of a user's
    autograd.Function carry none.)"""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Find inputs that the graph updates: by the copies that functionalization leaves at its end,
    or by an output that the caller copies back."""
    inputs = {base_descriptor(n.meta.get("desc")): n for n in graph.find_nodes(op="placeholder")}
    written: set[Any] = {
        node.args[0]
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    }
    output = next(iter(graph.find_nodes(op="output")))
    for desc in tree_leaves(output.meta.get("desc", [])):
        updated = base_descriptor(getattr(desc, "mutated_input", None))
        if updated is not None:
            written |= {n for d, n in inputs.items() if d == updated}
    return written


def is_nested(graph: fx.Graph) -> bool:
    """Whether this is the graph of a nested compile region: torch describes no input of those."""
    inputs = graph.find_nodes(op="placeholder")
    return bool(inputs) and not any("desc" in n.meta for n in inputs)


def base_descriptor(desc: Any) -> Any:
    """Return the descriptor of what a desugared or cloned tensor comes from."""
    while hasattr(desc, "base"):
        desc = desc.base
    return desc
