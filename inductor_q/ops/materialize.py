"""`qfuse::materialize`: a value that is computed once, whatever reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_q.ops.library import define


def materialize(x: Tensor) -> Tensor:
    """Copy `x`, any shape and dtype, into a contiguous tensor.

    Inductor makes this tensor in place of `x`. Otherwise it would compute `x` again in each kernel
    that reads it, or choose its strides. So in a compiled graph both may be one tensor, and whoever
    emits this op writes to neither.
    """
    return x.clone(memory_format=torch.contiguous_format)


def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def define_materialize() -> None:
    define("materialize(Tensor x) -> Tensor", materialize, _fake)
