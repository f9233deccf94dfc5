"""Find what a checkpoint holds that nothing in a model takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator

from torch import nn

from inductor_q.loading.files import Checkpoint
from inductor_q.log import warn_once

#: Names of buffers that transformers' models saved once: it passes them over as well.
_OLD = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")


def check_unused(
    model: nn.Module,
    checkpoint: Checkpoint,
    taken: Collection[str],
    packed: Collection[str],
    passed: Collection[str],
) -> None:
    """Warn of tensors that nothing in the model takes, with a few of their names.

    No word is said of what lies beside a packed weight (scales of inputs, shapes), of what
    transformers passes over too, and of biases of zeros, which AutoGPTQ writes for every layer.

    Args:
        taken: the names of tensors, or of packed weights, that the model takes.
        packed: those of them that are packed.
        passed: modules that keep what they have, so that nothing is read for them.

    Raises:
        WrongCheckpoint: a bias that is not zero belongs to a weight that has none in the model.
    """
    ignored = (*_OLD, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    known = {*taken, *(name for name, _ in model.named_buffers())}
    stems = {name.removesuffix("weight").removesuffix(".") for name in packed}
    under = tuple(f"{module}." for module in passed)
    unused, biases = [], []
    for name in checkpoint.names():
        if name in known or name.startswith(under) or any(re.search(p, name) for p in ignored):
            continue
        if not name.endswith("bias"):
            if stems.isdisjoint(_starts(name)):
                unused.append(name)
        elif known.isdisjoint((name.removesuffix("bias") + "weight", name.removesuffix("_bias"))):
            unused.append(name)
        elif checkpoint.read(name).any():
            biases.append(name)
    if biases:
        raise checkpoint.wrong(
            f"{name} is not zero in it, and its layer has no bias here: make the model with one "
            "(attention_bias or the like in its configuration)"
            for name in biases
        )
    if unused:
        some = ", ".join(itertools.islice(unused, 3)) + (", ..." if len(unused) > 3 else "")
        warn_once(
            f"{checkpoint.path}: {len(unused)} of its tensors are not loaded, since nothing in "
            f"{type(model).__name__} takes them ({some})"
        )


def _starts(name: str) -> Iterator[str]:
    """Yield the module of a tensor, and what is before each "_" of its own name."""
    module, _, leaf = name.rpartition(".")
    yield module
    start = f"{module}." if module else ""
    yield from (start + leaf[:i] for i, character in enumerate(leaf) if character == "_")
