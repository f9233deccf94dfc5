"""Write down by what a call's plan is chosen, where that is known when its code is generated.

Otherwise `Call.kind` asks the tensors for it at each call, which takes some of the host's time. The
text says the same, but for the index of the device and for addresses (`dispatch.serve_kind`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree


def kind_argument(function: str, settings: Sequence[Any], tensors: Sequence[Any]) -> list[str]:
    """Write the argument that names the kind; none where it is not known."""
    kind = kind_of(function, settings, tensors)
    return [f"kind={kind!r}"] if kind else []


def kind_of(function: str, settings: Sequence[Any], tensors: Sequence[Any]) -> str:
    """Describe a call of `function`: what it is given besides tensors, and how these lie in memory.

    It is empty where a number is known at the call only, and where a tensor has no elements, since
    plans are of calls that have something to compute.
    """
    layouts = [(str(t.get_dtype()), list(t.get_size()), list(t.get_stride())) for t in tensors]
    if any(map(_varies, pytree.tree_leaves([settings, layouts]))):
        return ""
    if any(0 in size for _, size, _ in layouts):
        return ""
    given = ", ".join(map(repr, settings))
    lie = [f"{dtype.removeprefix('torch.')} {size} {stride}" for dtype, size, stride in layouts]
    where = tensors[0].get_device().type
    return f"{function.removeprefix('qfuse_')}: {given}; {where}: {', '.join(lie)}"


def _varies(number: Any) -> bool:
    symbolic = isinstance(number, (sympy.Basic, torch.SymInt, torch.SymFloat, torch.SymBool))
    return symbolic and not isinstance(number, sympy.Number)
