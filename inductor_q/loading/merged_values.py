"""Hold what merges into layers and experts share: where packed weights are kept, and dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from inductor_q.log import warn_once

#: The name under which PEFT's layer keeps what was below it before the first merge, and a layer of
#: experts its stacks: by name, with the dtype of the values in the place of each.
KEPT = "inductor_q.kept"


def dtype_of_inputs(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of a model's embedding, which that of the inputs of its layers follows."""
    find: Any = getattr(model, "get_input_embeddings", None)
    try:
        weight: Any = getattr(find(), "weight", None) if find else None
    except NotImplementedError:  # transformers raises it for a model without an embedding
        return None
    dtype: torch.dtype | None = getattr(weight, "dtype", None)
    return dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else None


def dtype_of_values(model: nn.Module) -> torch.dtype:
    """Return the dtype for values of layers that do not know their own: that of the embedding, or
    what the configuration says, or bfloat16."""
    said = str(getattr(getattr(model, "config", None), "dtype", None)).removeprefix("torch.")
    # A configuration may have a text, and no cast of the model changes it.
    of_config: torch.dtype = getattr(torch, said, torch.bfloat16)
    return dtype_of_inputs(model) or of_config


def tell_of_values(dtype: torch.dtype, format: str, *, kept: bool) -> None:
    beside = (
        ". What was packed is kept beside them until the adapters are unmerged, or unloaded, as "
        "merge_and_unload() does at its end"
    )
    warn_once(
        "merging adapters makes values of packed weights: "
        f"{dtype} takes {dtype.itemsize} bytes an element, more than {format} did"
        f"{beside if kept else ''}"
    )


@contextlib.contextmanager
def exactly(layer: nn.Module) -> Iterator[None]:
    """Have what is made here train later, and no product be rounded to autocast's dtype."""
    device_type = next(layer.parameters()).device.type
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
