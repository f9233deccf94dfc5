"""`qfuse::materialize`: a value that is computed once, whatever reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.ops.library import define


def materialize(x: Tensor) -> Tensor:
    """Copy `x`, any shape and dtype, into a contiguous tensor, with the strides of one in each of
    its dimensions. Inductor makes it in place of `x`, which it would otherwise compute again in
    each kernel that reads it, and lay out as it likes."""
    return x.clone(memory_format=torch.contiguous_format)


def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def define_materialize() -> None:
    define("materialize(Tensor x) -> Tensor", materialize, _fake)
