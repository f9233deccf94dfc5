"""`KBitLinear`: a linear layer that holds its weight in k bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.exc import CorruptQuantState
from inductor_q.formats import FORMATS
from inductor_q.formats.kbit import kbit_format_name
from inductor_q.kbit.tensor import KBitTensor, dequantize

PACKED = ("qweight", "absmax", "codebook")


class KBitLinear(nn.Linear):
    """Compute `x @ W.t() + bias` with a frozen W [out_features, in_features] in k bits.

    It is an `nn.Linear`, because PEFT and others decide by that type. Its `weight` is the packed
    words, as bitsandbytes' is: it shows the device, and code that takes it for values (merging an
    adapter, DoRA) fails on shape and dtype instead of changing a copy. `dequantize()`
    gives the values, `inductor_q.kbit.dequantize_model` ordinary layers.

    The state dict consists of qweight (int32), absmax (uint8 or float16), codebook (float32) and
    the bias. Integers are frozen parameters, which DDP, unlike buffers, does not send around in
    every step; floats are buffers, and `to(dtype)`, `half()` and the like leave their dtype alone.
    """

    qweight: nn.Parameter
    absmax: Tensor
    codebook: Tensor

    def __init__(self, weight: KBitTensor, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.format = weight.format
        self.qweight = nn.Parameter(weight.qweight, requires_grad=False)
        if weight.absmax.is_floating_point():
            self.register_buffer("absmax", weight.absmax)
        else:
            self.absmax = nn.Parameter(weight.absmax, requires_grad=False)
        self.register_buffer("codebook", weight.codebook.clone())  # a state dict shares no memory
        self.register_parameter("bias", bias)

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
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """Return the packed words, int32 [blocks * k]."""
        return self.qweight

    @property
    def kbit_weight(self) -> KBitTensor:
        """Return the weight as it is held."""
        shape = (self.out_features, self.in_features)
        qweight, absmax = self.qweight.detach(), self.absmax.detach()
        return KBitTensor(qweight, absmax, self.codebook, shape, self.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values [out_features, in_features], by default in the original dtype."""
        return dequantize(self.kbit_weight, dtype)

    def forward(self, x: Tensor) -> Tensor:
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        operands = [self.qweight, self.absmax, self.codebook]
        shape = (self.out_features, self.in_features)
        return ops.linear(x, operands, self.format, shape, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KBitLinear:
        packed = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in packed.items():
            after = self.get_buffer(name)
            if after.dtype != before.dtype:  # a cast of the module: move, do not round
                setattr(self, name, before.to(after.device))
        return self

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
