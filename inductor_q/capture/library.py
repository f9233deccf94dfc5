"""Describe a library that quantizes to the rest of the package.

A `Library` answers two kinds of questions: what a node of a graph computes with a packed weight,
and what a module holds. Each library has one such object, in a file of its own beside this one;
`LIBRARIES` of `inductor_q.capture` lists them. No library is imported for it: ops are looked up by
name where they are registered, and classes are known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn

from inductor_q.capture.expert_layers import ExpertLayer
from inductor_q.exc import CorruptQuantState
from inductor_q.formats import QuantFormat

# --- in a graph ---------------------------------------------------------------------------------


#: The attribute of a layer whose weight has its state already, whenever FSDP2 has gathered it.
STATE_IS_NOTED = "quant_state_is_noted"


@dataclass(frozen=True)
class Weight:
    """A quantized weight in a graph: the arguments of `qfuse::dequantize` but for the dtype."""

    operands: tuple[fx.Node, ...]
    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Linear:
    """`x @ weight.t() + bias`, and `scaling * (x @ a.t()) @ b.t()` for each of the adapters.

    x keeps its rank; an adapter is (a, b, scaling). `kernel` names the library's kernel that reads
    the packed weight, where there is one that a threshold may prefer.
    """

    x: fx.Node
    weight: Weight
    bias: fx.Node | None
    adapters: tuple[tuple[fx.Node, fx.Node, float], ...] = ()
    kernel: str = ""


@dataclass(frozen=True)
class Decoded:
    """The values of a weight in `dtype`."""

    weight: Weight
    dtype: torch.dtype


@dataclass(frozen=True)
class Refused:
    """A call that reads the packed `weight` and is left to its library, for this reason."""

    node: fx.Node
    weight: fx.Node
    reason: str


Match: TypeAlias = Linear | Decoded | Refused | None

#: The expert layers of a graph, and why other products with experts are in none.
ExpertLayers: TypeAlias = tuple[list[ExpertLayer], dict[fx.Node, str]]


# --- in a module --------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A weight as `qfuse::dequantize` takes it: operands, the name of their format, its shape."""

    operands: list[Tensor]
    format: str
    shape: list[int]


@dataclass(frozen=True)
class Packed:
    """A packed weight that a module holds.

    format: its library's name for it; a name of ours where the layer is ours.
    shape: that of its values, as far as the module knows it.
    read: returns the weight in one of our formats, and raises where its state does not fit itself.
    reason: says why it cannot be read, where none of our formats is the library's.
    beside: names the module's other tensors that belong to it.
    quantizes_input: whether the library's own product with it quantizes the input as well.
    layout: the name of our format in which `read` returns it; "" where that is not told.
    parts: the tensors that store it, as they are held.
    library: the name of the `Library` that has packed it, which `packed_weight` fills in.
    """

    format: str
    shape: tuple[int, ...]
    read: Callable[[], Stored] | None = None
    reason: str = ""
    beside: tuple[str, ...] = ()
    quantizes_input: bool = False
    layout: str = ""
    parts: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)
    library: str = ""

    @property
    def kind(self) -> str:
        """The name that reports have for a layer with such a weight."""
        return "experts" if len(self.shape) > 2 else "linear"


#: The path of a module, and the error of its state.
Damage: TypeAlias = tuple[str, CorruptQuantState]


@dataclass(frozen=True)
class Block:
    """A part of a model whose experts a library packs in a layer of a class of its own.

    name: the block's name in the model.
    layer: that of the layer of experts in the block, before and after.
    kind: the name of the library's class.
    weights: the packed projections, by the names that fused parameters have.
    plain: makes the block as it is over fused parameters. These are on the meta device, all else is
        what the block has.
    """

    name: str
    layer: str
    kind: str
    weights: Mapping[str, Packed]
    plain: Callable[[], nn.Module]

    @property
    def reason(self) -> str:
        """Say why the weights cannot be read; "" where they can."""
        return next(
            (f"{name}: {held.reason}" for name, held in self.weights.items() if held.reason), ""
        )


# --- in a tensor subclass -------------------------------------------------------------------------

#: Calls a function with these arguments: at once, or in a graph, where it returns a node.
Call: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """An operand of a format as a subclass holds it: one of its tensors, or a part of one.

    transposed: says that it lies in columns where the format has rows.
    in_bytes: says that its dtype is that of its numbers, and the format takes bytes.
    is_one: says that it is a factor of the format's that the subclass lacks; the tensor is another.
    """

    name: str
    transposed: bool = False
    in_bytes: bool = False
    is_one: bool = False

    def take(self, weight: Any, call: Call) -> Any:
        """Take the operand out of `weight`, which is what `call` takes."""
        part = call(getattr, weight, self.name)
        if self.is_one:
            return call(torch.ops.aten.new_ones.default, part, [1], dtype=torch.float32)
        if self.transposed:
            part = call(torch.t, part)
        return call(torch.ops.aten.view.dtype, part, torch.uint8) if self.in_bytes else part


@dataclass(frozen=True)
class Layout:
    """How a tensor subclass stores a weight: the operands of one of our formats, in their order.

    kind: the library's name for it.
    reason: says why it cannot be read, where none of our formats is the library's.
    rounds: says in which other way the library's own product rounds, where it scales its result
        and not the weight; empty where it multiplies with the values.
    follows_input: says that the values take the dtype of what they are multiplied with.
    """

    kind: str
    format: str = ""
    parts: tuple[Part, ...] = ()
    reason: str = ""
    rounds: str = ""
    follows_input: bool = False

    def take(self, weight: Any, call: Call) -> list[Any]:
        return [part.take(weight, call) for part in self.parts]


# --- a library ----------------------------------------------------------------------------------

#: Quantizes a weight to the operands of a format.
Quantizer: TypeAlias = Callable[[Tensor, QuantFormat], list[Tensor]]


def _matches_nothing(node: fx.Node) -> Match:
    return None


def _is_no_product(node: fx.Node) -> bool:
    return False


def _finds_no_experts(graph: fx.Graph) -> ExpertLayers:
    return [], {}


def _packs_nothing(graph: fx.Graph) -> Sequence[Refused]:
    return ()


def _needs_nothing() -> None:
    """Leave Dynamo as it is."""


def _stops_nothing(graph: fx.Graph) -> Sequence[fx.Node]:
    return ()


def _has_not_packed(module: nn.Module, name: str) -> Packed | None:
    return None


def _damages_nothing(model: nn.Module) -> Iterable[Damage]:
    return ()


def _is_no_subclass(tensor: Tensor) -> Layout | None:
    return None


def _is_written(tensor: Tensor) -> bool:
    return True


def _holds_no_experts(module: nn.Module) -> bool:
    return False


def _has_no_blocks(model: nn.Module) -> Iterable[Block]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library's quantized weights; what this leaves out, the library does not have.

    Attributes:
        name: that of the package that is imported.
        namespaces: those of the operators that read packed weights.
        parameters: the classes of its parameters that hold packed weights, by name. What they store
            may look like values.
        match: returns what a node of a joint or inference graph computes with a packed weight.
        is_product: whether a node that `match` knows, and a pass may leave alone, is a product.
        packs_anew: finds calls of Dynamo's graph whose weights the same graph packs in another way.
            Such a graph runs once.
        layout: returns how a tensor stores its values, if it is of a subclass of this library's.
        decoders: the methods of such tensors that return their values.
        is_written: whether the library writes such a tensor to safetensors.
        stops_gradients: finds calls through which Dynamo's graph needs gradients that their kernel
            does not have.
        packed: returns what a module holds under a name, if this library has packed it. It looks at
            types and plain attributes only, and runs nothing of a module.
        damaged: finds the modules whose packed weights nobody can decode, and what they lack.
        holds_experts: whether a module is a layer of experts, with their weights fused into one
            parameter for each projection.
        expert_blocks: finds the blocks of a model whose experts are packed in no such layer.
        find_experts: finds such layers in a joint or inference graph that decodes their weights.
        quantizers: those of the formats that this library writes.
        trace_gathered: tells Dynamo how layers find the state of a weight that FSDP2 has gathered.
    """

    name: str
    namespaces: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    match: Callable[[fx.Node], Match] = _matches_nothing
    is_product: Callable[[fx.Node], bool] = _is_no_product
    packs_anew: Callable[[fx.Graph], Sequence[Refused]] = _packs_nothing
    layout: Callable[[Tensor], Layout | None] = _is_no_subclass
    decoders: tuple[str, ...] = ()
    is_written: Callable[[Tensor], bool] = _is_written
    stops_gradients: Callable[[fx.Graph], Sequence[fx.Node]] = _stops_nothing
    packed: Callable[[nn.Module, str], Packed | None] = _has_not_packed
    damaged: Callable[[nn.Module], Iterable[Damage]] = _damages_nothing
    holds_experts: Callable[[nn.Module], bool] = _holds_no_experts
    expert_blocks: Callable[[nn.Module], Iterable[Block]] = _has_no_blocks
    find_experts: Callable[[fx.Graph], ExpertLayers] = _finds_no_experts
    quantizers: Mapping[QuantFormat, Quantizer] = field(default_factory=dict)
    trace_gathered: Callable[[], None] = _needs_nothing
