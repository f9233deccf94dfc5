"""`qfuse::materialize` and `qfuse::materialize_all`: values that are computed once, whatever reads
them."""

from __future__ import annotations

from collections.abc import Sequence

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


def materialize_all(xs: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one device, each into one with its own strides.

    Inductor makes the copies in place of `xs`, as above, by one kernel where the device has such.
    """
    return [x.clone() for x in xs]


def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_all(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


def define_materialize() -> None:
    define("materialize(Tensor x) -> Tensor", materialize, _fake)
    define("materialize_all(Tensor[] xs) -> Tensor[]", materialize_all, _fake_all)
