"""bitsandbytes' 4-bit ops as they appear in a joint or inference graph.

0.50 emits one opaque `gemm_4bit` forward; its backward, and 0.49 in both directions, emit
`dequantize_4bit` after `dequantize_blockwise + offset` when the absmax is nested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inductor_q.formats import BNB_QUANT_TYPES, bnb_format_name
from inductor_q.formats.bnb import BLOCKSIZES, NESTED_BLOCKSIZE

_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten.reshape.default})

CPU_PACKED = (
    "bitsandbytes packed this weight again for its inference kernel on CPUs with AVX512-BF16, a "
    "layout that only that kernel reads and no gradient goes through; to have the layer fused, set "
    "support_avx512bf16_for_cpu = False on it before its first inference call"
)


@dataclass(frozen=True)
class Weight:
    """A quantized weight in a graph: the arguments of `qfuse::dequantize` but for the dtype."""

    operands: tuple[fx.Node, ...]
    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Gemm:
    """`x @ weight.t() + bias`; x keeps its rank."""

    x: fx.Node
    weight: Weight
    bias: fx.Node | None


def overload(name: str) -> Any:
    """`torch.ops.bitsandbytes.<name>.default`, or None where this bitsandbytes has no such op."""
    packet = getattr(torch.ops.bitsandbytes, name, None)
    return None if packet is None else packet.default


def match_gemm(node: fx.Node) -> Gemm | str | None:
    """A `gemm_4bit` call; a reason when it cannot be expressed; None when it is no such call."""
    if node.op != "call_function" or node.target is not overload("gemm_4bit"):
        return None
    a = _named(
        node, "A B shapeB absmax blocksize quant_type bias absmax_8bit absmax_code absmax_offset"
    )
    nested = a["absmax_8bit"] is not None
    name = _format(a["quant_type"], a["blocksize"], nested)
    if not name.startswith(tuple(BNB_QUANT_TYPES)):
        return name
    operands = [_packed(a["B"])]
    if nested:
        operands += [a["absmax_8bit"], a["absmax_code"], a["absmax"], a["absmax_offset"]]
    else:
        operands += [a["absmax"]]
    return Gemm(a["A"], Weight(tuple(operands), name, tuple(a["shapeB"])), a["bias"])


def match_dequantize(node: fx.Node) -> tuple[Weight, torch.dtype] | str | None:
    """A `dequantize_4bit` call and its dtype; a reason; None when it is no such call."""
    if node.op != "call_function" or node.target is not overload("dequantize_4bit"):
        return None
    a = _named(node, "A absmax blocksize quant_type shape dtype")
    inner = _nested_absmax(a["absmax"])
    name = _format(a["quant_type"], a["blocksize"], inner is not None)
    if not name.startswith(tuple(BNB_QUANT_TYPES)):
        return name
    operands = (_packed(a["A"]), *(inner or (a["absmax"],)))
    return Weight(operands, name, tuple(a["shape"])), a["dtype"]


def match_gemv(node: fx.Node) -> str | None:
    """The reason why a `gemv_4bit` call is left alone; None when it is no such call."""
    if node.op != "call_function" or node.target is not overload("gemv_4bit"):
        return None
    if node.meta["val"].device.type == "cpu":  # matmul_4bit calls it for packed weights alone
        return CPU_PACKED
    return (
        "gemv_4bit: its codebook is a tensor value, and bitsandbytes' kernel is right for one row"
    )


def weight_of(node: fx.Node) -> fx.Node:
    """The packed weight that a call of one of these ops reads."""
    named = _named(node, "A B")
    return _packed(named["A" if node.target is overload("dequantize_4bit") else "B"])


def packed_in_forward(graph: fx.Graph) -> list[fx.Node]:
    """The `gemv_4bit` calls of Dynamo's graph whose weight the same graph packs for the CPU.

    Linear4bit does that in its first inference call, by giving the parameter other memory of
    another shape: `set_` on an input.
    """
    gemv = overload("gemv_4bit")
    return [
        user
        for node in graph.find_nodes(op="placeholder")
        if any(user.target is torch.Tensor.set_ for user in node.users)
        for user in node.users
        if user.target is gemv
    ]


def _format(quant_type: str, blocksize: int, nested: bool) -> str:
    """The format's name, or a reason that starts with no quant type's name."""
    if quant_type not in BNB_QUANT_TYPES:
        return f"unknown quant_type {quant_type!r}"
    if blocksize not in BLOCKSIZES:
        return f"unsupported blocksize {blocksize}"
    return bnb_format_name(quant_type, blocksize, nested)


def _nested_absmax(absmax: fx.Node) -> tuple[fx.Node, ...] | None:
    """`dequantize_blockwise(codes, absmax2, codebook, 256) + offset` as its operands."""
    if absmax.target is not torch.ops.aten.add.Tensor or absmax.kwargs:
        return None
    inner, offset = absmax.args
    if not isinstance(inner, fx.Node) or inner.target is not overload("dequantize_blockwise"):
        return None
    a = _named(inner, "A absmax code blocksize dtype")
    if a["blocksize"] != NESTED_BLOCKSIZE or a["dtype"] is not torch.float32:
        return None
    assert isinstance(offset, fx.Node)
    return a["A"], a["code"], a["absmax"], offset


def _packed(node: fx.Node) -> fx.Node:
    """The packed bytes below views that only change their shape."""
    while node.target in _VIEWS:
        below = node.args[0]
        assert isinstance(below, fx.Node), f"{node=}"
        node = below
    return node


def _named(node: fx.Node, names: str) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(names.split())
    values.update(zip(names.split(), node.args, strict=False))
    values.update(node.kwargs)
    return values
