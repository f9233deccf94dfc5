"""`KBitLinear`: a linear layer that holds its weight in k bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.exc import CorruptQuantState
from inductor_q.formats import FORMATS
from inductor_q.formats.kbit import kbit_format_name
from inductor_q.kbit.tensor import KBitTensor
from inductor_q.loading.linear import PackedLinear

PACKED = ("qweight", "absmax", "codebook")


class KBitLinear(PackedLinear):
    """A `PackedLinear` in k bits; `inductor_q.kbit.dequantize_model` makes ordinary layers of it.

    The state dict consists of qweight (int32), absmax (uint8 or float16), codebook (float32) and
    the bias.
    """

    qweight: nn.Parameter
    absmax: Tensor
    codebook: Tensor

    def __init__(self, weight: KBitTensor, bias: nn.Parameter | None = None) -> None:
        operands = dict(zip(PACKED, weight.operands, strict=True))
        operands["codebook"] = weight.codebook.clone()  # a state dict shares no memory
        rows, columns = weight.shape
        super().__init__(operands, weight.format, (rows, columns), bias, dtype=weight.dtype)

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        format: str,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "meta",
    ) -> KBitLinear:
        """Make an uninitialized layer of that format, into which a checkpoint is loaded."""
        shape = (out_features, in_features)
        tensors = {
            spec.name: torch.empty(spec.numel, dtype=getattr(torch, spec.dtypes[0]), device=device)
            for spec in FORMATS[format].requirements(shape)
        }
        weight = KBitTensor(shape=shape, dtype=dtype, **tensors)
        values = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        return cls(weight, None if values is None else nn.Parameter(values, requires_grad=False))

    @property
    def kbit_weight(self) -> KBitTensor:
        """Return the weight as it is held."""
        shape = (self.out_features, self.in_features)
        qweight, absmax = self.qweight.detach(), self.absmax.detach()
        return KBitTensor(qweight, absmax, self.codebook, shape, self.dtype)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse the packed tensors of another K, kind of scale or shape, before any is copied."""
        check_packed(self, {name: state_dict.get(prefix + name) for name in PACKED}, prefix[:-1])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def check_packed(layer: KBitLinear, tensors: Mapping[str, Tensor | None], name: str) -> None:
    """Raise unless `tensors` fit `layer`, called `name`. Those that are None are not checked."""
    codebook, absmax = tensors.get("codebook"), tensors.get("absmax")
    if codebook is not None and absmax is not None:
        k = codebook.numel().bit_length() - 1
        found = kbit_format_name(k, "e4m4" if absmax.dtype == torch.uint8 else "fp16")
        if found != layer.format:
            raise CorruptQuantState(
                what=f"format of {name}",
                expected=layer.format,
                got=found,
                remedy="Quantize the model with the k and absmax of the state dict.",
            )
    for leaf, tensor in tensors.items():
        own: Tensor = getattr(layer, leaf)
        if tensor is not None and (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            raise CorruptQuantState(
                what=f"{name}.{leaf}",
                expected=f"{own.dtype} {tuple(own.shape)}",
                got=f"{tensor.dtype} {tuple(tensor.shape)}",
                remedy="The state dict belongs to a layer of another size, or is damaged.",
            )
