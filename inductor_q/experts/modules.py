"""The expert layers of a model: which modules they are and how their weights lie.

transformers (v5) decorates them with `use_experts_implementation`. They have fused parameters [E, 2
I, H] and [E, H, I], or transposed, and flags that say which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from inductor_q.capture import expert_blocks, holds_experts, packed_weight
from inductor_q.capture.caching import caching_hooks
from inductor_q.capture.library import Stored
from inductor_q.exc import (
    AdaptedByPeft,
    NoExperts,
    StillMerged,
    UnknownProjection,
    UnreadExperts,
)
from inductor_q.experts.packing import expert_shape, operand_names
from inductor_q.experts.stack import ExpertStack
from inductor_q.kernels.calls import DENSE
from inductor_q.loading.layers import replace_layers
from inductor_q.loading.merged_values import KEPT
from inductor_q.loading.sources import PROJECTIONS as PROJECTIONS


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """Return the expert layers by name.

    Raises:
        NoExperts: the model has none that transformers' experts interface knows.
    """
    found = {name: module for name, module in model.named_modules() if holds_experts(module)}
    if not found:
        raise NoExperts(model=type(model).__name__)
    return found


def check_not_wrapped(model: nn.Module, asked: str, targets: Collection[str] = PROJECTIONS) -> None:
    """Raise where PEFT has a layer over a targeted parameter, which `asked` would replace.

    Raises:
        AdaptedByPeft: it has.
    """
    for path, wrapper in model.named_modules():
        name: Any = getattr(wrapper, "parameter_name", None)
        base_of: Any = getattr(wrapper, "get_base_layer", None)
        if name in targets and base_of is not None and holds_experts(base_of()):
            raise AdaptedByPeft(what=path_of(path.replace(".base_layer", ""), name), asked=asked)


def check_not_merged(model: nn.Module, asked: str, targets: Collection[str] = PROJECTIONS) -> None:
    """Raise where PEFT's `merge_adapter` has put values in the place of targeted stacks, since a
    stack of those could not be unmerged.

    Raises:
        StillMerged: it has; `asked` names the call that takes none.
    """
    for path, layer in model.named_modules():
        for name in vars(layer).get(KEPT, {}):
            if name in targets:
                raise StillMerged(what=path_of(path, name), asked=asked)


def path_of(layer: str, name: str) -> str:
    """Return the path of a projection; that of its layer is "" where it is the model itself."""
    return f"{layer}.{name}" if layer else name


def take_over(model: nn.Module) -> bool:
    """Put stacks in the place of experts that a library packs in a layer of a class of its own.

    Codes and scales stay where they are in memory, and so does whatever else the layer has, but for
    hooks on it and on the block around it. Says whether there were any. Where the layer is one that
    transformers' experts interface knows, it stays, and its codes and scales are frozen.

    Raises:
        UnreadExperts: codes do not lie as they do on disk. Nothing is changed then.
    """
    blocks = expert_blocks(model)
    for block in blocks:
        if block.reason:
            what = f"{block.name}.{block.layer} ({block.kind})"
            raise UnreadExperts(what=what, found=block.reason)
    codes: list[nn.Parameter] = []
    for layer_name, layer in model.named_modules():
        for name in PROJECTIONS if holds_experts(layer) else ():
            held = packed_weight(layer, name)
            if held is None or not held.quantizes_input:
                continue
            if held.reason:
                what = f"{layer_name} ({type(layer).__name__})"
                raise UnreadExperts(what=what, found=f"{name}: {held.reason}")
            codes += (layer.get_parameter(each) for each in (name, *held.beside))
    for each in codes:
        each.requires_grad_(False)
    for block in blocks:
        new = block.plain()
        layer = new.get_submodule(block.layer)
        for name, held in block.weights.items():
            assert held.read is not None, f"{name} of {block.name} has neither a reason nor values"
            operands, format, shape = held.read()
            named = dict(zip(operand_names(format), operands, strict=True))
            put_stack(layer, name, named, format, shape, transposed=False)
        replace_layers(model, {block.name: new})
    return bool(blocks)


def projections(layer: nn.Module, targets: Collection[str] = PROJECTIONS) -> Iterator[str]:
    """Return the names of a layer's projections that are among `targets`."""
    for name in targets:
        if name not in PROJECTIONS:
            raise UnknownProjection(name=name, known=PROJECTIONS, source="targets")
    parametrized: Any = layer._modules.get("parametrizations") or ()
    for name in PROJECTIONS:
        here = name in layer._parameters or name in layer._modules or name in parametrized
        if name in targets and here:
            yield name


def packed_experts(layer: Any, name: str) -> Stored | None:
    """Return a projection that a library packed in one of our formats; None for any other."""
    weight = layer._parameters.get(name)
    if (
        type(weight) in (Tensor, nn.Parameter)
        and weight.is_floating_point()
        and weight.itemsize > 1
    ):
        return None  # values: Dynamo, which traces this, need not ask the list, nor guard on it
    found = packed_weight(layer, name)
    if found is None or found.read is None:
        return None
    stored = found.read()
    return stored._replace(shape=expert_shape(stored.shape, layer.num_experts))


def sizes(layer: Any, name: str) -> tuple[int, int, int]:
    """Return E, N and K of a projection, which stays what it is."""
    held = layer._modules.get(name)
    if isinstance(held, ExpertStack):
        return held.num_experts, held.out_features, held.in_features
    packed = packed_experts(layer, name)
    e, n, k = layer._parameters[name].shape if packed is None else packed.shape
    return (e, k, n) if layer.is_transposed else (e, n, k)


def as_stack(layer: Any, name: str) -> ExpertStack:
    """Return the projection as an `ExpertStack`, which replaces a parameter where it was one."""
    current = layer._modules.get(name)
    if isinstance(current, ExpertStack):
        return current
    packed = packed_experts(layer, name)
    if packed is None:
        weight = layer._parameters[name]
        return put_stack(layer, name, {"weight": weight}, DENSE, weight.shape)
    operands, format, shape = [part.detach() for part in packed.operands], *packed[1:]
    held = packed_weight(layer, name)
    for beside in held.beside if held else ():
        del layer._parameters[beside]
    if name not in layer._parameters:
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
        if not parametrize.is_parametrized(layer):
            for hooks, key in caching_hooks(layer):  # nothing is left that they could keep
                del hooks[key]
                layer._forward_hooks_always_called.pop(key, None)
    named = dict(zip(operand_names(format), operands, strict=True))
    return put_stack(layer, name, named, format, shape)


def put_stack(
    layer: Any,
    name: str,
    operands: Mapping[str, Tensor],
    format: str,
    shape: Sequence[int],
    *,
    transposed: bool | None = None,
) -> ExpertStack:
    """Put a stack in the place of a layer's parameter, or of its stack, whose adapter it takes.

    transposed: whether `shape` is [E, K, N]; by default as the layer's parameters are.
    """
    if transposed is None:
        transposed = layer.is_transposed
    stack = ExpertStack(operands, format, tuple(shape), transposed=transposed)
    old = layer._modules.get(name)
    if isinstance(old, ExpertStack):
        stack._share_adapter(old)
        for adapter in (stack.lora_A, stack.lora_B):
            if adapter is not None:  # in place: an optimizer may hold it
                adapter.data = adapter.data.to(stack.operands[0].device)
    layer._parameters.pop(name, None)
    setattr(layer, name, stack)
    return stack
