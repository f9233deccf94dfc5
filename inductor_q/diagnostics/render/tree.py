"""Fusion coverage as a tree of module paths, in which what repeats stands once.

Layers 0 to 31 of a model usually fare alike: children with a number for a name become one branch
"0-31" where everything below them is equal, leaves with equal outcomes become "q_proj, k_proj", and
a chain without a fork becomes one dotted name (of which no part stands for several).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from inductor_q.diagnostics.explanation import STATUSES, Layer, LayerStatus
from inductor_q.diagnostics.render import words


@dataclass(frozen=True)
class Branch:
    """Hold a part of the model: `layers` are all quantized layers in it, folded ones included.

    `layer` is the layer that this branch itself is, None where it only holds others.
    """

    name: str
    layers: tuple[Layer, ...]
    children: tuple[Branch, ...] = ()
    layer: Layer | None = None

    @property
    def fused(self) -> int:
        return sum(layer.status == "fused" for layer in self.layers)

    @property
    def status(self) -> LayerStatus:
        """The worst status in the branch."""
        return max((layer.status for layer in self.layers), key=STATUSES.index)

    @property
    def alike(self) -> bool:
        """Whether every layer in it had the same outcome, so that one line says it all."""
        return len({_outcome(layer) for layer in self.layers}) == 1

    @property
    def parts(self) -> tuple[Branch, ...]:
        """What to show below the branch: the layer that it is, where it also holds others."""
        if self.layer is None or not self.children:
            return self.children
        count = len(self.layers) - sum(len(child.layers) for child in self.children)
        return (Branch("(itself)", (self.layer,) * count, (), self.layer), *self.children)


def build(layers: Iterable[Layer]) -> tuple[Branch, ...]:
    """Return the top branches, in the order of the layers."""
    root = _Node()
    for layer in layers:
        node = root
        for part in (layer.module or "(unknown module)").split("."):
            node = node.children.setdefault(part, _Node())
        node.own.append(layer)
    return tuple(_folded(root))


def paths(layers: Iterable[Layer]) -> list[str]:
    """Return the module paths of the layers, folded as the tree folds them."""

    def walk(branches: Iterable[Branch], prefix: str) -> Iterator[str]:
        for branch in branches:
            if branch.layer:
                yield f"{prefix}{branch.name}"
            yield from walk(branch.children, f"{prefix}{branch.name}.")

    return list(walk(build(layers), ""))


@dataclass
class _Node:
    children: dict[str, _Node] = field(default_factory=dict)
    own: list[Layer] = field(default_factory=list)  # several when a module was seen more than once


def _folded(node: _Node) -> Iterator[Branch]:
    """Return the children of a node, equal ones as one."""
    groups: dict[object, list[Branch]] = {}
    for name, child in node.children.items():
        branch = _branch(name, child)
        is_foldable = name.isdigit() or (branch.name == name and not branch.children)
        key = (name.isdigit(), _form(branch)) if is_foldable else name
        groups.setdefault(key, []).append(branch)
    for group in groups.values():
        yield group[0] if len(group) == 1 else _joined(group)


def _branch(name: str, node: _Node) -> Branch:
    children = tuple(_folded(node))
    if len(children) == 1 and not node.own and "," not in children[0].name:
        [only] = children
        return Branch(f"{name}.{only.name}", only.layers, only.children, only.layer)
    layers = (*node.own, *(layer for child in children for layer in child.layers))
    return Branch(name, layers, children, node.own[0] if node.own else None)


def _joined(group: Sequence[Branch]) -> Branch:
    """Join equal branches into one; below it, each child stands for its counterparts."""
    first = group[0]
    return Branch(
        name=_join_names([branch.name for branch in group]),
        layers=tuple(layer for branch in group for layer in branch.layers),
        children=tuple(
            _renamed(_joined(same), same[0].name) if len(same) > 1 else same[0]
            for same in zip(*(branch.children for branch in group), strict=True)
        ),
        layer=first.layer,
    )


def _renamed(branch: Branch, name: str) -> Branch:
    return Branch(name, branch.layers, branch.children, branch.layer)


def _join_names(names: Sequence[str]) -> str:
    """Join names, as 0, 1, 2 to 0-2; a chain below a number ("0.mlp.down_proj") keeps its tail."""
    heads, tails = zip(*(name.partition(".")[::2] for name in names), strict=True)
    if all(head.isdigit() for head in heads):
        tail = f".{tails[0]}" if tails[0] else ""
        return words.numbers(sorted(map(int, heads))) + tail
    return ", ".join(names)


def _form(branch: Branch) -> object:
    """Return what two branches must have equal to fold: all but the name and what counts in it."""
    tail = branch.name.partition(".")[2] if branch.name.partition(".")[0].isdigit() else ""
    own = _outcome(branch.layer) if branch.layer else None
    return tail, own, tuple((child.name, _form(child)) for child in branch.children)


def _outcome(layer: Layer) -> object:
    steps = tuple((s.pass_name, s.provider, s.rejected, s.by_choice) for s in layer.steps)
    return layer.status, layer.reason, layer.kind, layer.format, layer.would, steps
