"""`PackedLinear`: a linear layer that holds its weight in any format, as its library packed it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.formats import FORMATS
from inductor_q.loading.layers import linear_of
from inductor_q.loading.merges import mend_merges
from inductor_q.loading.savers import check_saver


class PackedLinear(nn.Linear):
    """Compute `x @ W.t() + bias` with a frozen W [out_features, in_features] in a format.

    It is an `nn.Linear`, because PEFT and others decide by that type. Its `weight` is the packed
    codes, as bitsandbytes' is: it shows the device, and code that takes it for values fails on
    shape and dtype instead of changing a copy. `dequantize()` gives the values, and PEFT takes them
    for DoRA's norms; `decoded()` and `inductor_q.kbit.dequantize_model` make ordinary layers, and
    so does PEFT's LoRA where it merges adapters (`inductor_q.loading.merges`).

    The state dict has the operands of the format under their names, and the bias. Integers are
    frozen parameters, which DDP, unlike buffers, does not send around in every step; floats are
    buffers, and `to(dtype)`, `half()` and the like leave their dtype alone, but change `dtype`,
    that of decoded values. Where the library has sorted the columns (act-order), `columns` is the
    weight's column of each stored one, and inputs are put in that order.
    """

    columns: Tensor | None

    def __init__(
        self,
        operands: Mapping[str, Tensor],
        format: str,
        shape: tuple[int, int],
        bias: nn.Parameter | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        columns: Tensor | None = None,
    ) -> None:
        mend_merges()
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.format = format
        for name in FORMATS[format].operands:
            values = operands[name]
            if values.is_floating_point():
                self.register_buffer(name, values)
            else:
                setattr(self, name, nn.Parameter(values, requires_grad=False))
        self.register_buffer("columns", columns)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """Return the packed codes."""
        codes: nn.Parameter = self.get_parameter(FORMATS[self.format].operands[0])
        return codes

    @property
    def W_q(self) -> nn.Parameter:
        """Return the packed codes; what has this name, as HQQ's layers, PEFT asks to dequantize."""
        return self.weight

    @property
    def operands(self) -> list[Tensor]:
        """Return the operands that `ops.linear` and `ops.dequantize` take."""
        return [getattr(self, name) for name in FORMATS[self.format].operands]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values [out_features, in_features], by default in the layer's dtype."""
        shape = (self.out_features, self.in_features)
        values = ops.dequantize(self.operands, self.format, shape, dtype or self.dtype)
        if self.columns is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.columns, values)

    def decoded(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return an ordinary layer of the same values, which shares the bias, or has it cast."""
        weight, bias = self.dequantize(dtype), self.bias
        if bias is not None and bias.dtype is not weight.dtype:
            bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=bias.requires_grad)
        return linear_of(weight, bias).train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        if self.columns is not None:
            x = x.index_select(-1, self.columns)
        shape = (self.out_features, self.in_features)
        return ops.linear(x, self.operands, self.format, shape, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        check_saver(f"{prefix[:-1]} ({type(self).__name__})")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        packed = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in packed.items():
            after = self.get_buffer(name)
            if after.dtype != before.dtype:  # a cast of the module: move, do not round
                setattr(self, name, before.to(after.device))
        cast = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        self.dtype = cast if cast.is_floating_point else self.dtype
        return self
