"""Attention under a mask that is causal, and hides padding, other documents, or what is far behind.

In eager, transformers leaves a mask out where it is the causal one. Under torch.compile it writes
the mask out up to torch 2.13 (`masking_utils._ignore_causal_mask_sdpa`: Dynamo traces as if it
exported), and a kernel that is given a mask computes the half of attention that is masked. Keys and
values that it repeated on that account for groups of queries are taken as they were, as in eager.

A mask that also hides padding (every collator of text passes one) becomes none: queries, keys and
values are reordered so that the valid positions come first, which `is_causal` then treats as the
mask did. Rows of valid positions are what they were. Attention gives zero for rows of padding, as
eager does for those before the first valid position; those after it see valid keys in eager.
Nothing valid sees them, so a loss that ignores them has the same gradients. Under strict numerics
the mask is kept.

A mask that keeps documents apart, of packed `position_ids` or of numbers that say of which sequence
a position is, or has a sliding window, becomes FlexAttention, which computes the blocks of scores
that such a mask leaves; padding is hidden there as the mask hides it. What layers need is made
once, before the first. A window that is no shorter than the sequence hides nothing. Where only the
lengths of other batches could pass it, one guard keeps them from this graph; where this one's does,
FlexAttention serves every length.

Short sequences keep their mask, which costs them little. Where lengths vary, the batch at hand may
be a short one: a second graph for longer ones takes longer to compile than many short batches gain
by their mask, so the mask goes from an eighth of that length on.

Attention that a model writes out, for a softcap or for sinks, becomes FlexAttention under each of
these masks. Rows that see no key give zero; in eager they give that with sinks, and a mean of all
values without. It stays under strict numerics.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_q.capture.example import hint, likely
from inductor_q.context import Context
from inductor_q.passes.causal_mask import MADE_OUTSIDE, Unproven, read
from inductor_q.passes.dynamo_graph import CHECKPOINT, same_size, written_to
from inductor_q.passes.grouped_keys import before_repeat
from inductor_q.passes.mask_meaning import COMPARED, VALID, Meaning
from inductor_q.passes.runner import CAPTURED, Site
from inductor_q.passes.written_attention import Written, additive, fixed, read_written

ATTENTION = torch.nn.functional.scaled_dot_product_attention
QFUSE = torch.ops.qfuse

#: What torch._inductor.kernel.flex.flex_attention asks for.
LEAST_FEATURES = 16


class CausalAttention:
    name: ClassVar[str] = "causal_attention"
    stage: ClassVar[str] = CAPTURED

    def match(self, graph: fx.Graph, context: Context) -> Iterator[Site]:
        module = graph.owning_module
        outside = {} if module is None else _checkpointed(module)
        found: dict[fx.Node, _Mask | Unproven] = {}
        graphs = [graph, *dict.fromkeys(n.graph for n in outside)]
        for node in (n for g in graphs for n in g.nodes):
            written = None if node.target is ATTENTION else read_written(node)
            if isinstance(written, str):
                yield Site(node, rejected=written, by_choice=True)
            if isinstance(written, str) or (written is None and node.target is not ATTENTION):
                continue
            arguments = arguments_of(node) if written is None else dict(written.arguments)
            mask = arguments["attn_mask"]
            if not isinstance(mask, fx.Node) or arguments["is_causal"]:
                continue
            root = _root(mask, outside)
            if root not in found:
                found[root] = _known(root, written is not None, outside, graphs)
            known = found[root]
            if isinstance(known, Unproven):
                yield Site(node, rejected=known.reason, by_choice=True)
            elif reason := _of_other_sizes(arguments, known.node) or _kept(known, context):
                yield Site(node, rejected=reason, by_choice=True)
            elif root.graph is not graph and known.shares:
                reason = "the mask is made inside of a checkpoint"
                yield Site(node, rejected=reason, by_choice=True)
            elif known.in_blocks:
                yield _blocks(node, arguments, graphs, known, written)
            else:
                yield _causal(node, arguments, graphs, known)

    def apply(self, graph: fx.Graph, site: Site, context: Context) -> None:
        plan: _Plan = site.plan
        arguments = dict(plan.arguments)
        query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
        node, mask = site.node, plan.mask
        mask.guard()
        if not mask.shares:
            node.args, node.kwargs = (query, key, value), arguments
            return
        made = _given_to(node.graph, graph, mask.shared(graph))
        with node.graph.inserting_before(node):
            if mask.in_blocks:
                more = (arguments["scale"], plan.softcap, plan.sinks)
                given = (query, key, value, made, mask.meaning.window, *more)
                new = node.graph.call_function(QFUSE.block_attention.default, given)
            else:
                order, inverse, _ = made
                moved = tuple(_move(x, order, inverse, node) for x in (query, key, value))
                attended = node.graph.call_function(ATTENTION, moved, arguments)
                attended.meta = dict(node.meta)
                new = node.graph.call_function(QFUSE.restore.default, (attended, *made))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)


@dataclass
class _Mask:
    """A mask whose meaning is known, and what stands for it.

    Args:
        node: in Dynamo's graph.
        meaning: what of it counts; a window that hides nothing at these lengths does not.
        guarded: the window that this takes to hide nothing, which is to be guarded; 0: none.
        written: whether attention under it is written out: only FlexAttention does the same.
        made: the tensors that all layers under it share, once they are made.
    """

    node: fx.Node
    meaning: Meaning
    guarded: int
    written: bool
    made: list[fx.Node] | None = None

    @staticmethod
    def of(node: fx.Node, meaning: Meaning, *, written: bool) -> _Mask:
        window, length = meaning.window, _value(node).shape[-1]
        if window is None or hint(length) > window:
            return _Mask(node, meaning, 0, written)
        known = statically_known_true(length <= window)
        if not known and _is_bounded(length):  # by the user, who wants one graph up to there
            return _Mask(node, meaning, 0, written)
        return _Mask(node, replace(meaning, window=None), 0 if known else window, written)

    @property
    def in_blocks(self) -> bool:
        """Whether it leaves blocks of scores out; else valid keys come first, or all are seen."""
        meaning = self.meaning
        hiding = (meaning.positions, meaning.sequences, meaning.window)
        return self.written or any(part is not None for part in hiding)

    @property
    def shares(self) -> bool:
        """Whether layers under it share something that is made for them."""
        return self.in_blocks or self.meaning.valid is not None

    @property
    def length(self) -> int | torch.SymInt:
        """The number of positions."""
        length: int | torch.SymInt = _value(self.node).shape[-1]
        return length

    def guard(self) -> None:
        """Keep batches of which this does not hold from the graph: to ask is to add a guard."""
        batch = _value(self.node).shape[0]
        holds = [not self.guarded or self.length <= self.guarded]
        for source in self.meaning.inputs:
            rows, columns = _value(source).shape
            holds += [columns == self.length, rows == 1 or rows == batch]
        held = all(holds)
        assert held, f"{self.length=} {self.guarded=} {batch=}"

    def shared(self, graph: fx.Graph) -> list[fx.Node]:
        """Make once, behind the mask, the tensors that all layers under it share."""
        if self.made is None:
            place = self.node.next
            while getattr(place.target, "__name__", "") == "_vmap_decrement_nesting":
                place = place.next
            with graph.inserting_before(place):
                self.made = self._make(graph)
        return self.made

    def _make(self, graph: fx.Graph) -> list[fx.Node]:
        value, meaning = _value(self.node), self.meaning
        make = QFUSE.valid_first.default
        valid = meaning.valid
        if valid is not None and meaning.is_valid != VALID[0]:  # else our ops compare
            compares, number = COMPARED[meaning.is_valid]
            valid = self._call(graph, compares, (valid, number))
        args: tuple[Any, ...] = (valid,)
        if self.in_blocks:
            sizes = (self._size(graph, dim) for dim in (0, -1))
            make = QFUSE.block_tables.default
            args = (meaning.positions, valid, *sizes, meaning.window, value.device)
        if meaning.sequences is not None:
            real = None
            if meaning.real:
                compares, number = COMPARED[meaning.real]
                real = self._call(graph, compares, (meaning.sequences, number))
            args = (*args, meaning.sequences, real)
        call = self._call(graph, make, args)
        items = []
        for i, item in enumerate(call.meta["example_value"]):
            items.append(graph.call_function(operator.getitem, (call, i)))
            items[-1].meta["example_value"] = item
        return items

    def _call(self, graph: fx.Graph, make: Any, args: tuple[Any, ...]) -> fx.Node:
        call = graph.call_function(make, args)
        with _value(self.node).fake_mode:  # Dynamo's own: the backend's is another by now
            given = fx.node.map_arg(args, lambda node: node.meta["example_value"])
            call.meta["example_value"] = make(*given)
        return call

    def _size(self, graph: fx.Graph, dim: int) -> int | fx.Node:
        size = _value(self.node).shape[dim]
        if isinstance(size, int):
            return size
        node = graph.call_method("size", (self.node, dim))
        node.meta["example_value"] = size
        return node


def _is_bounded(length: torch.SymInt) -> bool:
    """Whether a length is known to stay below some number."""
    bounds = length.node.shape_env.bound_sympy(length.node.expr)
    return bool(bounds.upper < 1 << 31)


@dataclass(frozen=True)
class _Plan:
    """How a call of attention is made without its mask."""

    mask: _Mask
    arguments: dict[str, Any]
    softcap: float | None = None
    sinks: fx.Node | None = None


def _known(
    root: fx.Node, written: bool, outside: dict[fx.Node, fx.Node], graphs: list[fx.Graph]
) -> _Mask | Unproven:
    """What a mask means, one that attention which is written out adds among them."""
    node = root
    if written:
        seen = additive(root)
        if seen is None and root.op == "placeholder":
            return Unproven(MADE_OUTSIDE)
        if seen is None:
            return Unproven("the mask that is added is not made by torch.where of a boolean one")
        if by := written_to({root}, outside, graphs):
            return Unproven(f"the mask, or what it is made of, is written to by {by}")
        node = _root(seen, outside)
    meaning = read(node, outside, graphs)
    return meaning if isinstance(meaning, Unproven) else _Mask.of(node, meaning, written=written)


def _kept(mask: _Mask, context: Context) -> str:
    """Why a mask stays that is more than causal; empty if it goes."""
    if not mask.shares:
        return ""
    if mask.written and context.numerics == "strict":
        return "strict numerics keep attention as it is written out"
    if not mask.in_blocks and context.numerics == "strict":
        return "strict numerics keep what rows of padding see"
    least = context.threshold("causal_attention.min_positions")
    count = hint(mask.length)
    varies = not isinstance(mask.length, int) and not _is_bounded(mask.length)
    if (likely(mask.length) if varies else count) >= least:
        return ""
    if varies:
        below = bool(mask.length < least)  # a guard: longer batches get a graph without the mask
        assert below, f"{mask.length=} {least=}"
    return f"{count} positions, fewer than causal_attention.min_positions={least}: the mask is kept"


def _given_to(body: fx.Graph, graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """`nodes` of Dynamo's graph as `body` sees them: new operands, where it is of a checkpoint."""
    if body is graph:
        return list(nodes)
    module = graph.owning_module
    assert module is not None, "a graph with checkpoints has a module"
    calls = [call for call, called in _checkpoints(module) if called.graph is body]
    inner = body.find_nodes(op="placeholder")
    places = []
    for call in calls:
        given = _given_to(call.graph, graph, nodes)
        if not all(node in call.args[1:] for node in given):
            call.args = (*call.args, *given)
        places = [call.args.index(node) - 1 for node in given]
    for place, node in zip(places, nodes, strict=True):
        if place == len(inner):
            with body.inserting_after(inner[-1]):
                inner.append(body.placeholder(f"{node.name}_given"))
            inner[-1].meta = dict(node.meta)
    return [inner[place] for place in places]


def _move(x: fx.Node, order: fx.Node, inverse: fx.Node, before: fx.Node) -> fx.Node:
    node = before.graph.call_function(QFUSE.reorder.default, (x, order, inverse))
    node.meta = {**before.meta, "example_value": x.meta["example_value"]}
    return node


_PARAMETERS: dict[str, Any] = {
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def _causal(node: fx.Node, arguments: dict[str, Any], graphs: list[fx.Graph], mask: _Mask) -> Site:
    without = {**arguments, "attn_mask": None, "is_causal": True}
    padded = "" if mask.meaning.valid is None else ", valid first"
    found = before_repeat(node, arguments, graphs)
    if isinstance(found, str):
        provider = f"sdpa{padded}, repeated keys: {found}" if found else f"sdpa{padded}"
        return Site(node, plan=_Plan(mask, without), provider=provider)
    key, value = found
    without |= {"key": key, "value": value, "enable_gqa": True}
    return Site(node, plan=_Plan(mask, without), provider=f"sdpa{padded}, grouped keys")


def _blocks(
    node: fx.Node,
    arguments: dict[str, Any],
    graphs: list[fx.Graph],
    mask: _Mask,
    written: Written | None,
) -> Site:
    if dropout := arguments["dropout_p"]:
        reason = f"attention drops scores out (dropout_p={dropout}), and FlexAttention drops none"
        return Site(node, rejected=reason, by_choice=True)
    result = node.meta["example_value"]
    if result.device.type == "cuda" and result.shape[-1] < LEAST_FEATURES:
        reason = f"FlexAttention takes no heads of fewer than {LEAST_FEATURES} features"
        return Site(node, rejected=reason, by_choice=True)
    found = before_repeat(node, arguments, graphs) if written is None else ""
    repeated = ""
    if not isinstance(found, str):
        arguments |= dict(zip(("key", "value"), found, strict=True))
    elif found:
        repeated = f", repeated keys: {found}"
    meaning = mask.meaning
    parts: dict[str, Any] = {
        "documents": meaning.positions,
        "sequence ids": meaning.sequences,
        "a window": meaning.window,
        "valid keys": meaning.valid,
    }
    softcap, sinks = (None, None) if written is None else (written.softcap, written.sinks)
    parts |= {"a softcap": softcap, "sinks": sinks}
    named = ", ".join(name for name, part in parts.items() if part is not None) or "all keys"
    plan = _Plan(mask, arguments, softcap, sinks)
    return Site(node, plan=plan, provider=f"FlexAttention of {named}{repeated}")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of attention by name, with the defaults of those left out."""
    given = {**_PARAMETERS, **dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
    return {**given, "dropout_p": fixed(given["dropout_p"])}


def _checkpoints(module: torch.nn.Module) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """The calls of activation checkpoints, in whichever graph of `module`, and their bodies."""
    for owner in module.modules():
        if not isinstance(owner, fx.GraphModule):
            continue
        for call in owner.graph.nodes:
            if getattr(call.target, "__name__", "") == CHECKPOINT:
                body = getattr(owner, str(call.args[0].target), None)
                if isinstance(body, fx.GraphModule):
                    yield call, body


def _checkpointed(module: torch.nn.Module) -> dict[fx.Node, fx.Node]:
    """Placeholders of the bodies of activation checkpoints -> what each is given, outermost; itself
    where a body is called with one thing and another."""
    found: dict[fx.Node, fx.Node] = {}
    for call, body in _checkpoints(module):
        inner = body.graph.find_nodes(op="placeholder")
        for placeholder, given in zip(inner, call.args[1:], strict=False):
            if isinstance(given, fx.Node):
                root = found.get(given, given)
                same = found.setdefault(placeholder, root) is root
                found[placeholder] = root if same else placeholder
    return found


def _root(mask: fx.Node, outside: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node in Dynamo's graph that a mask is, or is a slice of which leaves nothing out: layers
    of transformers 4 take the first keys of it, as many as there are."""
    while True:
        mask = outside.get(mask, mask)
        index = mask.args[1] if mask.target is operator.getitem else None
        if not isinstance(index, tuple) or not all(isinstance(i, slice) for i in index):
            return mask
        whole, value = mask.args[0], _value(mask)
        starts = all(i.start is None and i.step is None for i in index)
        if not starts or not isinstance(whole, fx.Node) or _value(whole) is None:
            return mask
        if not all(map(same_size, _value(whole).shape, value.shape)):
            return mask
        mask = whole


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _of_other_sizes(arguments: dict[str, Any], mask: fx.Node) -> str:
    shape = _value(mask).shape
    for name in ("query", "key"):
        value = _value(arguments[name])
        if not isinstance(value, torch.Tensor) or not same_size(value.shape[-2], shape[-1]):
            return f"the mask has not the {name}'s length"
    return ""
