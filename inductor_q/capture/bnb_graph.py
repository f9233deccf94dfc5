"""bitsandbytes' ops and decodes as they appear in a joint or inference graph.

0.50 emits one opaque `gemm_4bit` forward; its backward, and 0.49 in both directions, emit
`dequantize_4bit` after `dequantize_blockwise + offset` when the absmax is nested. The decode of
LLM.int8 is written out, `codes * (absmax * (1 / 127))`; where activations are quantized as well,
its products are ops of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from inductor_q.capture.calls import call
from inductor_q.capture.library import Decoded, Linear, Match, Refused, Weight
from inductor_q.formats.bnb import (
    BLOCKSIZES,
    BNB_QUANT_TYPES,
    INT8,
    INT8_FACTOR,
    NESTED_BLOCKSIZE,
    bnb_format_name,
)

aten = torch.ops.aten
prims = torch.ops.prims

#: Among them what `weight.data` becomes.
_VIEWS = frozenset(
    {torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.alias.default}
)

CPU_PACKED = (
    "bitsandbytes packed this weight again for its inference kernel on CPUs with AVX512-BF16, a "
    "layout that only that kernel reads and no gradient goes through; to have the layer fused, "
    "call inductor_q.integrations.keep_unpacked(model)"
)
INT8_PRODUCT = (
    "LLM.int8 quantizes its input as well, and its kernel multiplies codes with codes; only where "
    "the weight is decoded, as in backward, is it read here"
)

#: The products of LLM.int8, and which argument is the weight.
INT8_PRODUCTS = {"int8_scaled_mm": 1, "int8_mixed_scaled_mm": 2, "int8_linear_matmul": 1}

GEMV = "gemv_4bit: its codebook is a tensor value, and bitsandbytes' kernel is right for one row"


def overload(name: str) -> Any:
    """Return `torch.ops.bitsandbytes.<name>.default`; None where bitsandbytes has no such op."""
    packet = getattr(torch.ops.bitsandbytes, name, None)
    return None if packet is None else packet.default


def match(node: fx.Node) -> Match:
    """Return what a call of one of these ops computes, or why it cannot be expressed."""
    if node.target is overload("gemm_4bit"):
        return _match_gemm(node)
    if node.target is overload("dequantize_4bit"):
        return _match_dequantize(node)
    if node.target is overload("gemv_4bit"):
        # On a CPU, matmul_4bit calls it for packed weights alone.
        is_packed = node.meta["val"].device.type == "cpu"
        return _refused(node, CPU_PACKED if is_packed else GEMV)
    for name, weight in INT8_PRODUCTS.items():
        if node.target is not None and node.target is overload(name):
            packed = node.args[weight]
            assert isinstance(packed, fx.Node), f"{node=}"
            return Refused(node, _below_views(packed), INT8_PRODUCT)
    return _match_int8(node)


def is_product(node: fx.Node) -> bool:
    return node.target is overload("gemm_4bit")


def packs_anew(graph: fx.Graph) -> list[Refused]:
    """Find the `gemv_4bit` calls of Dynamo's graph whose weight the same graph packs for the CPU.

    Linear4bit does that in its first inference call, by giving the parameter other memory of
    another shape: `set_` on an input.
    """
    gemv = overload("gemv_4bit")
    return [
        Refused(user, node, CPU_PACKED)
        for node in graph.find_nodes(op="placeholder")
        if any(user.target is torch.Tensor.set_ for user in node.users)
        for user in node.users
        if user.target is gemv
    ]


def stops_gradients(graph: fx.Graph) -> list[fx.Node]:
    """Find the `gemv_4bit` calls on a CPU through which Dynamo's graph needs gradients: the op has
    no backward, and torch would take its result for a constant.
    """
    gemv, has_gradients = overload("gemv_4bit"), torch.is_grad_enabled()
    found = []
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            has_gradients = bool(node.args[0])
        elif node.target is gemv and has_gradients:
            x = _named(node, "A B")["A"].meta.get("example_value")
            if isinstance(x, Tensor) and x.requires_grad and x.device.type == "cpu":
                found.append(node)
    return found


def _match_int8(node: fx.Node) -> Decoded | None:
    """Match the product of 8-bit codes and a 127th of each row's absmax, in the dtype it is cast
    to; the input's dtype is that of the codes as well."""
    product, dtype = node, torch.float32
    match call(node):
        case (prims.convert_element_type.default, fx.Node() as product, torch.dtype() as dtype):
            pass
    match call(product):
        case (aten.mul.Tensor, fx.Node() as codes, fx.Node() as scale):
            pass
        case _:
            return None
    match call(codes), call(scale):
        case (
            (prims.convert_element_type.default, fx.Node() as packed, own),
            (aten.mul.Tensor, fx.Node() as rows, factor),
        ) if own is dtype and factor == INT8_FACTOR:
            pass
        case _:
            return None
    match call(rows):
        case (aten.unsqueeze.default, fx.Node() as absmax, 1 | -1):
            pass
        case _:
            return None
    packed = _below_views(packed)
    codes_of, absmax_of = packed.meta["val"], absmax.meta["val"]
    is_row = codes_of.dim() == 2 and absmax_of.shape == codes_of.shape[:1]
    if codes_of.dtype is not torch.int8 or absmax_of.dtype is not torch.float32 or not is_row:
        return None
    return Decoded(Weight((packed, absmax), INT8.name, tuple(codes_of.shape)), dtype)


def _match_gemm(node: fx.Node) -> Linear | Refused:
    a = _named(
        node, "A B shapeB absmax blocksize quant_type bias absmax_8bit absmax_code absmax_offset"
    )
    scales: tuple[fx.Node, ...] = (a["absmax"],)
    if a["absmax_8bit"] is not None:
        scales = (a["absmax_8bit"], a["absmax_code"], a["absmax"], a["absmax_offset"])
    weight = _weight(node, a, a["B"], scales, a["shapeB"])
    if isinstance(weight, Refused):
        return weight
    return Linear(a["A"], weight, a["bias"], kernel="bitsandbytes' kernel")


def _match_dequantize(node: fx.Node) -> Decoded | Refused:
    a = _named(node, "A absmax blocksize quant_type shape dtype")
    scales = _nested_absmax(a["absmax"]) or (a["absmax"],)
    weight = _weight(node, a, a["A"], scales, a["shape"])
    return weight if isinstance(weight, Refused) else Decoded(weight, a["dtype"])


def _weight(
    node: fx.Node, named: dict[str, Any], packed: fx.Node, scales: tuple[fx.Node, ...], shape: Any
) -> Weight | Refused:
    """Describe the weight that a call reads by our format for it; nested scales are four nodes."""
    quant_type, blocksize = named["quant_type"], named["blocksize"]
    if quant_type not in BNB_QUANT_TYPES:
        return _refused(node, f"unknown quant_type {quant_type!r}")
    if blocksize not in BLOCKSIZES:
        return _refused(node, f"unsupported blocksize {blocksize}")
    name = bnb_format_name(quant_type, blocksize, nested=len(scales) > 1)
    return Weight((_below_views(packed), *scales), name, tuple(shape))


def _refused(node: fx.Node, reason: str) -> Refused:
    named = _named(node, "A B")
    packed = named["A" if node.target is overload("dequantize_4bit") else "B"]
    return Refused(node, _below_views(packed), reason)


def _nested_absmax(absmax: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the operands of `dequantize_blockwise(codes, absmax2, codebook, 256) + offset`."""
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


def _below_views(node: fx.Node) -> fx.Node:
    """Return the packed bytes below views that only change their shape."""
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
