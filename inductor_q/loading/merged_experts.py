"""Merge the adapters of experts: a parameter of values stands in the place of each stack.

These adapters are no layers of PEFT's, but a part of whichever adapter the model has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_calls import Stack
from inductor_q.loading.merged_values import KEPT, dtype_of_values, exactly, tell_of_values
from inductor_q.log import log
from inductor_q.modules import modules_of


def merge_experts(model: nn.Module, *, keep: bool, safe: bool = False) -> list[tuple[Any, str]]:
    """Merge the adapters of all experts, and put parameters of the values where their stacks were.

    Where that fails, for want of memory, say, the stacks come back if they were kept. If not, what
    is merged stays so, and a warning says how to go on: the model computes what it did either way.

    Args:
        keep: whether the layers keep their stacks, for `unmerge_experts`. Where they do not, none
            that an earlier merge has kept comes back either.
        safe: whether nothing changes where a sum is not finite, as PEFT's `safe_merge` has it. Each
            is computed twice then.

    Returns:
        What has been merged: layers, and names of projections.

    Raises:
        CannotMerge: the experts are sharded, by `shard` or FSDP2. Nothing is changed then.
    """
    merged: list[tuple[Any, str]] = []
    left = check_experts(model, safe=safe)[::-1]
    count = len(left)
    try:
        while left:
            layer, name, stack, dtype = left[-1]
            with exactly(stack):
                values = stack.merged(dtype)
                if keep:  # before anything is replaced, so that it can be put back
                    vars(layer).setdefault(KEPT, {})[name] = stack, dtype
                    merged.append((layer, name))
                stack._put_values(layer, name, values)
                del values
            left.pop()  # so that a stack which is not kept is freed before the next is merged
            if stack.format != DENSE:
                tell_of_values(dtype, stack.format, kept=keep)
            del stack
    except BaseException:
        unmerge_experts(merged)
        if not keep and len(left) < count:
            log.warning(
                f"merging failed after {count - len(left)} of {count} projections of experts. The "
                "adapters of these are merged for good, the others are unchanged, and the model "
                "computes the same as before. Call it again, for example with more memory free, to "
                "merge the rest"
            )
        raise
    if not keep:
        forget_experts(model)
    return merged


def check_experts(model: nn.Module, *, safe: bool) -> list[tuple[Any, str, Any, torch.dtype]]:
    """Return the layer, name, stack and dtype of the sums of all adapted experts, if their adapters
    can be merged."""
    of_model = dtype_of_values(model)
    found: dict[str, tuple[Any, str, Any, torch.dtype]] = {}
    for path, layer in model.named_modules():
        for name, child in layer.named_children():
            stack: Any = child  # an `ExpertStack`, if one: its package imports this one
            if isinstance(child, Stack) and stack.lora_A is not None:
                where = f"{path}.{name}" if path else name
                stack._check_merge(layer, where)
                dtype = stack.operands[0].dtype if stack.format == DENSE else of_model
                found[where] = layer, name, stack, dtype
    for where, (_, _, stack, dtype) in found.items() if safe else ():
        with exactly(stack):
            # In the dtype of the sum, whose range a sum in float32 may leave.
            if not stack.merged(dtype).isfinite().all():
                raise ValueError(f"NaNs detected in the merged weights: {where}, in {dtype}")
    return [*found.values()]


def unmerge_experts(merged: Sequence[tuple[Any, str]]) -> None:
    """Put back the stacks that layers keep, with what has happened to the values since."""
    for layer, name in merged:
        kept = forget_expert(layer, name)
        assert kept is not None, name
        stack, dtype = kept
        weight = layer._parameters.pop(name)
        stack.to(weight.device)
        if weight.dtype is not dtype:  # a cast of the model, which adapters follow
            stack.to(weight.dtype)
        setattr(layer, name, stack.train(layer.training))


def forget_experts(model: nn.Module) -> None:
    """Leave in the weights of experts what is merged there."""
    for layer in model.modules():
        vars(layer).pop(KEPT, None)


def forget_expert(layer: nn.Module, name: str) -> tuple[Any, torch.dtype] | None:
    """Take what a layer keeps of a merged projection from it, and return it; None for nothing."""
    kept: dict[str, tuple[Any, torch.dtype]] = vars(layer).get(KEPT, {})
    taken = kept.pop(name, None)
    if taken is not None and not kept:
        del vars(layer)[KEPT]
    return taken


def are_disabled(model: nn.Module) -> bool:
    return any(stack.disabled for stack in stacks_of(model))


def disable_experts(model: nn.Module, disabled: bool) -> None:
    for stack in stacks_of(model):
        stack.disabled = disabled


def stacks_of(model: nn.Module) -> list[Any]:
    """Return the model's `ExpertStack`s, whose package imports this one."""
    return [module for module in modules_of(model) if isinstance(module, Stack)]
