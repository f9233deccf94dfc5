"""Find each library's quantized weights as they appear in module state and as nodes of a graph.

`LIBRARIES` holds all that is known of libraries; the functions here try each of them in turn.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, fx, nn

from inductor_q.capture.bitsandbytes import BITSANDBYTES
from inductor_q.capture.expert_layers import ExpertLayer
from inductor_q.capture.library import (
    STATE_IS_NOTED,
    Block,
    Damage,
    ExpertLayers,
    Layout,
    Library,
    Match,
    Packed,
    Refused,
)
from inductor_q.capture.own import OWN
from inductor_q.capture.torchao import TORCHAO
from inductor_q.capture.transformers import TRANSFORMERS

LIBRARIES: tuple[Library, ...] = (OWN, BITSANDBYTES, TRANSFORMERS, TORCHAO)


def match(node: fx.Node) -> Match:
    """Return what a node computes with a packed weight, or why it is left alone; else None."""
    if node.op != "call_function":
        return None
    for library in LIBRARIES:
        found = library.match(node)
        if found is not None:
            return found
    return None


def is_product(node: fx.Node) -> bool:
    """Whether a node is a library's own product with a packed weight."""
    return any(library.is_product(node) for library in LIBRARIES)


def packs_anew(graph: fx.Graph) -> list[Refused]:
    """Find the calls of Dynamo's graph whose weights the same graph packs for the next calls."""
    return [refused for library in LIBRARIES for refused in library.packs_anew(graph)]


def stops_gradients(graph: fx.Graph) -> list[fx.Node]:
    """Find the calls through which Dynamo's graph needs gradients, and whose kernel has none."""
    return [node for library in LIBRARIES for node in library.stops_gradients(graph)]


def trace_gathered() -> None:
    """Tell Dynamo how layers find the states of weights that FSDP2 has gathered. A process needs it
    once, before it traces such a layer."""
    for library in LIBRARIES:
        library.trace_gathered()


def packed_weight(module: nn.Module, name: str) -> Packed | None:
    """Find the packed weight that a module holds under a name, as its library describes it."""
    for library in LIBRARIES:
        found = library.packed(module, name)
        if found is not None:
            return replace(found, library=library.name)
    return None


def damaged(model: nn.Module) -> list[Damage]:
    """Find the modules of a model whose packed weights nobody can decode, and what they lack."""
    return [damage for library in LIBRARIES for damage in library.damaged(model)]


def layout(tensor: Tensor) -> Layout | None:
    """Return how a subclass of some library's stores the weight that it stands for, or None."""
    if type(tensor) in (Tensor, nn.Parameter):
        return None
    for library in LIBRARIES:
        found = library.layout(tensor)
        if found is not None:
            return found
    return None


def is_written(tensor: Tensor) -> bool:
    """Whether the library of such a subclass has a form of it for safetensors."""
    return all(library.is_written(tensor) for library in LIBRARIES if library.layout(tensor))


def is_decoder(method: object) -> bool:
    """Whether a method of that name returns the values of such a subclass."""
    return any(method in library.decoders for library in LIBRARIES)


def holds_experts(module: nn.Module) -> bool:
    """Whether a module is a layer of experts with fused weights."""
    return any(library.holds_experts(module) for library in LIBRARIES)


def expert_blocks(model: nn.Module) -> list[Block]:
    """Find the blocks of a model whose experts a library packs in a layer of a class of its own."""
    return [block for library in LIBRARIES for block in library.expert_blocks(model)]


def find_experts(graph: fx.Graph) -> ExpertLayers:
    """Find the expert layers of a graph, and say why other products with experts are in none."""
    layers: list[ExpertLayer] = []
    refused: dict[fx.Node, str] = {}
    for library in LIBRARIES:
        found, reasons = library.find_experts(graph)
        layers += found
        refused |= reasons
    return layers, refused


__all__ = [
    "LIBRARIES",
    "STATE_IS_NOTED",
    "damaged",
    "expert_blocks",
    "find_experts",
    "holds_experts",
    "is_decoder",
    "is_product",
    "is_written",
    "layout",
    "match",
    "packed_weight",
    "packs_anew",
    "stops_gradients",
    "trace_gathered",
]
