"""What a reader says of a packed weight that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from inductor_q.exc import CorruptQuantState
from inductor_q.formats.layout import LOW_FIRST, Order

#: The shapes of a checkpoint's tensors by name, from its headers.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
#: Returns one of them by name, on the device where the model is to lie.
Read: TypeAlias = Callable[[str], Tensor]


@dataclass(frozen=True)
class Found:
    """A packed weight that a checkpoint holds.

    shape: is [rows, columns], or [experts, rows, columns] of a stack; [elements] where the headers
        do not say how they are cut into rows.
    read: returns the operands of the format by name; codes and scales that are bytes as uint8.
        Where the columns are in another order (act-order), `columns` among them has the weight's
        column of each stored one.
    """

    format: str
    shape: tuple[int, ...]
    read: Callable[[Read], dict[str, Tensor]]

    def in_rows(self, columns: int) -> Found:
        """Cut elements into rows of `columns`, where that is not known yet and they fill some."""
        if len(self.shape) > 1 or self.shape[0] % columns:
            return self
        return replace(self, shape=(self.shape[0] // columns, columns))


#: Finds the packed weight that stands for a parameter of the model, by the parameter's name. It
#: returns None where the file has none, and where it has one that is not read, the reason.
Find: TypeAlias = Callable[[Shapes, str], "Found | str | None"]


def finds_nothing(shapes: Shapes, name: str) -> None:
    """Find no packed weight: of checkpoints that hold values."""


def e4m3_of(tensor: Tensor) -> Tensor:
    """Return the bytes of codes in E4M3, row by row.

    Raises:
        CorruptQuantState: they are in another dtype, which may have as many bytes.
    """
    if tensor.dtype != torch.float8_e4m3fn:
        raise CorruptQuantState(
            what="dtype of a weight in FP8",
            expected="torch.float8_e4m3fn",
            got=str(tensor.dtype),
            remedy="The checkpoint's quantization_config says FP8, its tensors are other codes.",
        )
    return bytes_of(tensor).reshape(-1)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of codes or coded scales."""
    return tensor.contiguous().view(torch.uint8)


def nibbles_of(words: Tensor, order: Order = LOW_FIRST) -> Tensor:
    """Unpack int32 [..., n] to the 8 codes of each word: uint8 [..., 8 n]."""
    codes = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for lane, place in enumerate(order.places(8)):
        codes[..., lane] = words >> 4 * place & 15
    return codes.flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes of 4 bits, uint8 [..., 2 n], in bytes [..., n], the first one of a pair low."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def per_row(scale: Tensor, rows: int) -> Tensor:
    """Repeat the one scale of a weight for its rows, so that weights can be stacked."""
    return scale.reshape(-1).float().expand(rows).contiguous()


def grouped(qweight: Tensor, scale: Tensor, zero_point: Tensor, columns: int) -> dict[str, Tensor]:
    """Return the operands of `int4_name`'s format: scales and zero points are [rows, groups].

    Scales of groups that are longer than the format's are repeated.
    """
    repeats = columns // scale.shape[1] // _unit(columns // scale.shape[1])
    spread = (t.repeat_interleave(repeats, 1).reshape(-1) for t in (scale, zero_point))
    return {
        "qweight": qweight.reshape(-1),
        **dict(zip(("scale", "zero_point"), spread, strict=True)),
    }


def not_a_matrix(shapes: Shapes, *names: str) -> str:
    """Return which tensor does not have two dimensions, or has no elements; empty where all do."""
    for name in names:
        if len(shapes[name]) != 2 or 0 in shapes[name]:
            return f"{name} is {shapes[name]}; what is read is a matrix"
    return ""


def misshapen(shapes: Shapes, wanted: Mapping[str, tuple[int, ...]]) -> str:
    """Return which tensor is not there, or not in the wanted shape; empty where all are."""
    for name, shape in wanted.items():
        if name not in shapes:
            return f"{name} is not in it"
        if shapes[name] != shape:
            return f"{name} is {shapes[name]}; what is read is {shape}, by the configuration"
    return ""


def int4_name(columns: int, group: int) -> str | None:
    """Name the format of 4-bit integers with a scale per `group`, which -1 says is a whole row.

    None where there is no such format, since 32 does not divide it.
    """
    group = columns if group == -1 else group
    unit = _unit(group)
    return f"int4_g{unit}" if unit >= 32 and columns % group == 0 else None


def _unit(group: int) -> int:
    return min(group & -group, 128)
