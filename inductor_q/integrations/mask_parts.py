"""Give layers that are compiled one by one what transformers made their mask of.

A layer's graph has the mask as an input, and cannot tell what a matrix of booleans means. Its parts
are small, and the graph makes the mask of them as transformers does, so that `causal_attention`
reads there what it reads in the graph of a whole model.

transformers is imported only where layers of its models are compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

#: What a mask of transformers notes its parts as.
_PARTS = "_qfuse_parts"


@dataclass(frozen=True)
class MaskParts:
    """Hold what a causal mask of B sequences of length S is made of.

    Args:
        padding: which keys are valid, bool [B, S]; None where all are.
        sequences: of which document each position is, int64 [B, S]; None where there is only one.
        positions: of each position, its place in its document, int64 [B, S]; None where
            transformers does not ask for it.
        window: how many keys before it a query sees, itself included; None where it sees all.
    """

    padding: Tensor | None = None
    sequences: Tensor | None = None
    positions: Tensor | None = None
    window: int | None = None

    def mask(self, x: Tensor) -> Tensor:
        """Make the mask, bool [B, 1, S, S], for a layer's input `x` [B, S, features]."""
        from transformers import masking_utils

        function: Any = masking_utils.causal_mask_function
        if self.window is not None:
            function = masking_utils.sliding_window_causal_mask_function(self.window)
        if self.positions is not None:
            # In a graph these are numbers that only grow, which is what makes the rest provable.
            sequences = masking_utils.find_packed_sequence_indices(self.positions)
            assert sequences is not None, "positions are noted where there are several documents"
            function = masking_utils.packed_sequence_compatibility_function(
                function, self.positions, sequences
            )
        elif self.sequences is not None:
            apart = masking_utils.packed_sequence_mask_function(self.sequences)
            function = masking_utils.and_masks(function, apart)
        rows, length = x.shape[:2]
        made: Tensor | None = masking_utils.sdpa_mask(
            batch_size=rows,
            q_length=length,
            kv_length=length,
            mask_function=function,
            attention_mask=self.padding,
            allow_is_causal_skip=False,
            device=x.device,
        )
        assert made is not None, "only those that may be skipped are"
        return made


def note_parts(model: nn.Module) -> bool:
    """Let masks for scaled_dot_product_attention note what they are made of, and say whether they
    do: those of transformers' models, from the version on that has a registry of masks (4.53).

    The masks are what they were, in every model of the process.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None or not any(
        type(m).__module__.startswith("transformers.") for m in model.modules()
    ):
        return False
    makers = masks.ALL_MASK_ATTENTION_FUNCTIONS
    if not isinstance(makers["sdpa"], _Noting):
        makers["sdpa"] = _Noting(makers["sdpa"])
    return True


def _is_theirs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


class _Noting:
    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *args: Any, **given: Any) -> Any:
        mask = self.make(*args, **given)
        notes = isinstance(mask, Tensor) and not args and not torch.compiler.is_compiling()
        if notes and not mask.is_inference():
            setattr(mask, _PARTS, (mask._version, _parts(given)))
        return mask


def parts_of(mask: object) -> MaskParts | None:
    """Return what a mask is made of; None where that is not known, or the mask was written to."""
    noted: tuple[int, MaskParts | None] | None = getattr(mask, _PARTS, None)
    if noted is None or not isinstance(mask, Tensor) or mask._version != noted[0]:
        return None
    return noted[1]


def with_mask(args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return what a layer is called with, the mask made of its parts."""
    parts = given.get("attention_mask")
    return (
        {**given, "attention_mask": parts.mask(args[0])} if isinstance(parts, MaskParts) else given
    )


def make_mask_inside(layer: nn.Module) -> None:
    """Let a layer make its mask in `forward`: its hooks, as of FSDP, stay outside of its graph."""
    if "forward" not in vars(layer):
        layer.forward = MethodType(_forward, layer)


def takes_parts(layer: nn.Module) -> bool:
    """Whether no hook that may read the mask comes before the graph that makes it."""
    if layer._forward_pre_hooks or layer._forward_hooks:
        return getattr(vars(layer).get("forward"), "__func__", None) is _forward
    return True


def _forward(layer: nn.Module, *args: Any, **given: Any) -> Any:
    return type(layer).forward(layer, *args, **with_mask(args, given))


_forward.__name__ = "forward"  # by which pickle finds the class's


def _parts(given: dict[str, Any]) -> MaskParts | None:
    same = given["q_length"] == given["kv_length"]
    if not same or given.get("q_offset") or given.get("kv_offset") or given.get("use_vmap"):
        return None
    found: dict[str, Any] = {"padding": given.get("attention_mask")}
    is_causal = False
    for name, value in _conditions(given["mask_function"]):
        is_causal |= name == "causal"
        if name == "unknown" or name in found:
            return None
        if name != "causal":
            found[name] = value
    return MaskParts(**found) if is_causal else None


def _conditions(function: Any) -> Iterator[tuple[str, Any]]:
    """Take a function of transformers' masks apart into conditions that all hold."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        yield "causal", None
        return
    name = getattr(function, "__qualname__", "").partition(".<locals>")[0]
    is_theirs = getattr(function, "__module__", "") == masking_utils.__name__
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {cell: content.cell_contents for cell, content in cells} if is_theirs else {}
    match name, held:
        case "and_masks", {"mask_functions": functions}:
            for each in functions:
                yield from _conditions(each)
        case "sliding_window_overlay", {"sliding_window": int(window)}:
            yield "window", window
        case "packed_sequence_mask_function", {"packed_sequence_mask": sequences}:
            yield "sequences", sequences
        case "remap_positions_for_packed_sequence", {
            "mask_function": inner,
            "position_ids": positions,
        }:
            yield "positions", positions
            yield from _conditions(inner)
        case _:
            yield "unknown", None
