"""torchao: weights in tensor subclasses, which look dense to a graph of Dynamo's.

Each class stores a weight in tensors of its own and says in attributes how. What they are in our
formats is said here, class by class. None is imported: a class is known by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.capture.library import Layout, Library, Packed, Part, Stored
from inductor_q.formats import FORMATS
from inductor_q.formats.nf4_tensor import BLOCK, SCALER_BLOCK

_NUMBERS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

ACTIVATIONS = "torchao quantizes its input as well, and multiplies codes with codes"
PRE_SCALE = "its input is scaled before the product (act_pre_scale)"
NO_ZERO_POINT = "it has no zero points, or has them in floating point, where ours are integers"
TRANSPOSED = "it is a transposed view of a packed weight"
OPAQUE = "only the kernel of a device knows the layout of torchao's {}"
NF4 = (
    f"only bfloat16 in blocks of {BLOCK} with {SCALER_BLOCK} scales to a factor is read: cast the "
    "model, and leave block_size and scaler_block_size at their defaults"
)
STACKED = "it is a stack of weights, each padded for itself"
MX = "its scales are for blocks of another size, in tiles, or for float16, which does not hold them"
ROUNDS = "torchao multiplies with the codes and scales the result, so products round otherwise"


def _layout(tensor: Tensor) -> Layout | None:
    kind = type(tensor)
    # These go first: Dynamo traces this in layers of experts and does not know their module.
    if kind in (Tensor, nn.Parameter) or kind.__module__.partition(".")[0] != "torchao":
        return None
    read = _READERS.get(kind.__name__)
    if read is None:
        reason = f"it is torchao's {kind.__name__}, which none of our formats describes"
        return Layout(kind.__name__, reason=reason)
    if getattr(tensor, "act_pre_scale", None) is not None:
        return Layout(kind.__name__, reason=PRE_SCALE)
    if any(getattr(tensor, name, None) is not None for name in _OF_ACTIVATIONS):
        return Layout(kind.__name__, reason=ACTIVATIONS)
    found = read(tensor)
    return Layout(kind.__name__, reason=found) if isinstance(found, str) else found


#: Attributes that say how an input is quantized.
_OF_ACTIVATIONS = ("act_quant_kwargs", "activation_quantization", "act_mapping_type")


def _granularity(weight: Any) -> str:
    """Name what shares a scale, as our formats name it: "row", "tensor", or a group's size."""
    *rows, columns = weight.block_size
    if [*weight.block_size] == [*weight.shape]:
        return "tensor"
    if any(size != 1 for size in rows):
        return f"blocks of {[*weight.block_size]}"
    return "row" if columns == weight.shape[-1] else f"g{columns}"


def _known(name: str, kind: str, *parts: Part, **more: Any) -> Layout | str:
    """Return the layout in the format of that name, or why there is none."""
    if name in FORMATS:
        return Layout(kind, name, parts, **more)
    return f"it would be {name}, and there is no such format here"


def _int8(weight: Any) -> Layout | str:
    if not _has_integers(weight):
        return NO_ZERO_POINT
    granularity = _granularity(weight)
    rounds = "" if granularity.startswith("g") else ROUNDS
    name, parts = f"int8_{granularity}", (Part("qdata"), Part("scale"), Part("zero_point"))
    return _known(name, "Int8Tensor", *parts, rounds=rounds, follows_input=True)


def _intx(weight: Any) -> Layout | str:
    """Read codes of 2 to 8 bits, of which each has a byte."""
    if not _has_integers(weight):
        return NO_ZERO_POINT
    name, parts = f"int8_{_granularity(weight)}", (Part("qdata"), Part("scale"), Part("zero_point"))
    return _known(name, "IntxUnpackedToInt8Tensor", *parts)


def _has_integers(weight: Any) -> bool:
    return getattr(weight.zero_point, "dtype", None) is torch.int8


def _float8(weight: Any) -> Layout | str:
    number = _NUMBERS.get(weight.qdata.dtype, str(weight.qdata.dtype))
    name = f"fp8_{number}_{_granularity(weight)}"
    return _known(name, "Float8Tensor", Part("qdata"), Part("scale"))


def _nvfp4(weight: Any) -> Layout | str:
    if not weight.qdata.is_contiguous():
        return TRANSPOSED
    name = "nvfp4_tiles" if weight.is_swizzled_scales else "nvfp4"
    has_whole = weight.per_tensor_scale is not None
    whole = Part("per_tensor_scale") if has_whole else Part("scale", is_one=True)
    return _known(name, "NVFP4Tensor", Part("qdata"), Part("scale", in_bytes=True), whole)


def _mx(weight: Any) -> Layout | str:
    if not weight.qdata.is_contiguous():
        return TRANSPOSED
    number = _NUMBERS.get(weight.elem_dtype, "")
    name = f"mxfp8_{number}" if number else "mxfp4"
    if weight.block_size != 32 or weight.is_swizzled_scales or weight.dtype is torch.float16:
        return MX
    if not number and str(weight.elem_dtype) != "torch.float4_e2m1fn_x2":
        return f"its numbers are {weight.elem_dtype}"
    return _known(name, "MXTensor", Part("qdata"), Part("scale", in_bytes=True))


def _int4(weight: Any) -> Layout | str:
    """Read `Int4Tensor`, whose scales lie in columns."""
    if weight.activation_dtype not in (None, torch.bfloat16):
        return ACTIVATIONS
    parts = (Part(name, transposed=True) for name in ("scale", "zero_point"))
    return _known(f"int4_plain_{_granularity(weight)}", "Int4Tensor", Part("qdata"), *parts)


def _int4_tiles(weight: Any) -> Layout | str:
    """Read the weight of torch's tensor-core kernel, padded to what that takes."""
    if weight.dim() != 2:
        return STACKED
    group = f"int4_tiles_g{weight.block_size[-1]}"
    parts = (Part("qdata"), Part("scale_and_zero"))
    return _known(group, "Int4TilePackedTo4dTensor", *parts)


def _nf4(weight: Any) -> Layout | str:
    sizes = (weight.block_size, weight.scaler_block_size)
    if weight.dtype is not torch.bfloat16 or sizes != (BLOCK, SCALER_BLOCK):
        return NF4
    if weight.stride()[-1] != 1:
        return TRANSPOSED
    names = ("quantized_data", "nf4", "quantized_scalers", "quantization_factor", "scaler_mean")
    operands = ("qweight", "codebook", "absmax", "factor", "mean")
    name = f"nf4_tensor_b{BLOCK}"
    by_operand = dict(zip(operands, names, strict=True))
    return _known(name, "NF4Tensor", *(Part(by_operand[n]) for n in FORMATS[name].operands))


def _opaque(weight: Any) -> str:
    return OPAQUE.format(type(weight).__name__)


_READERS: Mapping[str, Callable[[Any], Layout | str]] = {
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Float8Tensor": _float8,
    "NVFP4Tensor": _nvfp4,
    "MXTensor": _mx,
    "NF4Tensor": _nf4,
    "Int4Tensor": _int4,
    "Int4TilePackedTo4dTensor": _int4_tiles,
    **dict.fromkeys(
        (
            *("Int4PreshuffledTensor", "Int4PlainInt32Tensor", "Int4OpaqueTensor"),
            "IntxOpaqueTensor",
        ),
        _opaque,
    ),
}


def _packed(module: nn.Module, name: str) -> Packed | None:
    tensor = module._parameters.get(name)
    layout = None if tensor is None else _layout(tensor)
    if tensor is None or layout is None:
        return None
    shape = tuple(tensor.shape)
    if layout.reason:
        return Packed(layout.kind, shape, reason=layout.reason)
    parts = tuple(getattr(tensor, part.name) for part in layout.parts if not part.is_one)
    read = partial(_read, tensor, layout)
    return Packed(layout.kind, shape, read, layout=layout.format, parts=parts)


def _read(tensor: Tensor, layout: Layout) -> Stored:
    def call(function: Any, *args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return Stored(layout.take(tensor, call), layout.format, [*tensor.shape])


def _is_written(tensor: Tensor) -> bool:
    """Ask the list of classes that torchao's `flatten_tensor_state_dict` goes by."""
    try:
        from torchao.prototype.safetensors.safetensors_utils import ALLOWED_TENSORS_SUBCLASSES
    except ImportError:  # of a torchao that writes none
        return False
    return type(tensor).__name__ in ALLOWED_TENSORS_SUBCLASSES


TORCHAO = Library(
    name="torchao",
    layout=_layout,
    decoders=("dequantize", "get_original_weight"),
    is_written=_is_written,
    packed=_packed,
)
