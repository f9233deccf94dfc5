"""`ExpertStack`: one projection of all experts of a layer, dense or packed, with its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.exc import CannotMerge
from inductor_q.experts.packing import operand_names
from inductor_q.formats import get_format
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_calls import Stack
from inductor_q.kernels.expert_weights import ExpertWeights
from inductor_q.loading.savers import check_saver
from inductor_q.ops.routing import Routing

_RANKS = "_qfuse_ranks"  # what `shard` notes on a layer


def ranks_of(layer: Any) -> int:
    """Return how many ranks share a layer's experts."""
    ranks: int = getattr(layer, _RANKS, 1)
    return ranks


def note_ranks(layer: Any, ranks: int) -> None:
    setattr(layer, _RANKS, ranks)


class ExpertStack(nn.Module, Stack):
    """Hold the experts of one projection, in the place and under the name of a fused parameter.

    `shape` is [E, N, K], or [E, K, N] where `transposed`.
    Packed weights are buffers named as the format's operands, which casts of the module leave in
    their dtypes; a dense one is the parameter `weight`. `lora_A` [E, r, K] and `lora_B` [E, N, r]
    are parameters, or None (`inductor_q.experts.add_lora`). PEFT's `disable_adapter()` sets
    `disabled`, and forward leaves them out.
    """

    lora_A: nn.Parameter | None
    lora_B: nn.Parameter | None

    def __init__(
        self,
        operands: Mapping[str, Tensor],
        format: str,
        shape: tuple[int, ...],
        *,
        transposed: bool,
    ) -> None:
        super().__init__()
        self.format = format
        self.shape = tuple(shape)
        self.transposed = transposed
        self.scaling = 1.0
        self.disabled = False  # which Dynamo guards on, so a graph is of the one or the other
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        for name in operand_names(format):
            if format == DENSE:
                value = operands[name]
                trains = isinstance(value, nn.Parameter) and value.requires_grad
                self.register_parameter(name, nn.Parameter(value.detach(), requires_grad=trains))
            else:
                self.register_buffer(name, operands[name])

    @property
    def operands(self) -> list[Tensor]:
        """Return the operands that `ops.scatter2scatter` takes."""
        return [getattr(self, name) for name in operand_names(self.format)]

    def forward(self, x: Tensor, routing: Routing, **how: Any) -> Tensor:
        """Multiply rows with their experts; `how` is what else `ops.scatter2scatter` takes."""
        lora_a, lora_b = (None, None) if self.disabled else (self.lora_A, self.lora_B)
        return ops.scatter2scatter(
            x,
            self.operands,
            self.format,
            self.shape,
            routing,
            transposed=self.transposed,
            lora_a=lora_a,
            lora_b=lora_b,
            scaling=self.scaling,
            **how,
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the base weights, in `shape`."""
        if self.format == DENSE:
            return self.operands[0].detach().to(dtype)
        return ops.dequantize(self.operands, self.format, self.shape, dtype)

    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return the base weights plus the adapter's, in `shape`.

        Each expert is added up in float32 and rounded once, so no more than one is held in that.
        """
        assert self.lora_A is not None and self.lora_B is not None
        fmt = None if self.format == DENSE else get_format(self.format)
        weights = ExpertWeights(self.operands, fmt, self.shape, torch.float32)
        out = torch.empty(self.shape, dtype=dtype, device=self.operands[0].device)
        for expert, (a, b) in enumerate(zip(self.lora_A.float(), self.lora_B.float(), strict=True)):
            added = self.scaling * (b @ a)
            out[expert] = weights[expert] + (added.mT if self.transposed else added)
        return out

    def _check_merge(self, layer: Any, what: str) -> None:
        """Raise where an adapter cannot be merged here.

        Raises:
            CannotMerge: other ranks have the layer's other experts, or FSDP2 has cut tensors.
        """
        if any(type(tensor).__name__ == "DTensor" for tensor in self.parameters()):
            raise CannotMerge(
                what=what,
                problem="fully_shard has cut its tensors, and one process has to have them whole",
                remedy=(
                    "Load the trained tensors into a model that is not sharded, and merge there: "
                    "get_model_state_dict of torch.distributed.checkpoint.state_dict returns them "
                    "whole with StateDictOptions(full_state_dict=True)"
                ),
            )
        if (ranks := ranks_of(layer)) > 1:
            raise CannotMerge(
                what=what,
                problem=f"its experts are shared by {ranks} ranks, and one process has to have all",
                remedy=(
                    "Save the adapter by inductor_q.experts.save_adapter, load it in one process "
                    "into a model that is not sharded by inductor_q.experts.load_adapter, and "
                    "merge there"
                ),
            )

    def unpack(self, layer: Any, name: str, dtype: torch.dtype) -> None:
        """Put values in the place of this stack: a parameter, or a dense stack with its adapter."""
        if self.lora_A is None:
            self._put_values(layer, name, self.dequantize(dtype))
        else:
            setattr(layer, name, self._dense(dtype))

    def _dense(self, dtype: torch.dtype) -> ExpertStack:
        """Return a dense stack of the same values, which has the same adapter."""
        values = {"weight": self.dequantize(dtype)}
        dense = ExpertStack(values, DENSE, self.shape, transposed=self.transposed)
        dense._share_adapter(self)
        return dense

    def _share_adapter(self, other: ExpertStack) -> None:
        self.lora_A, self.lora_B, self.scaling = other.lora_A, other.lora_B, other.scaling
        self.disabled = other.disabled

    def _put_values(self, layer: Any, name: str, weight: Tensor) -> None:
        """Put a parameter in the place of this stack, of values in its `shape`."""
        if self.transposed != layer.is_transposed:
            weight = weight.mT.contiguous()
        delattr(layer, name)
        layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        check_saver(
            f"{prefix[:-1]} (ExpertStack)",
            resumes=self.format == DENSE,
            adapted=self.lora_A is not None,
        )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertStack:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            after = self.get_buffer(name)
            if after.dtype != buffer.dtype:  # a cast of the model: move, do not round scales
                setattr(self, name, buffer.to(after.device))
        return self

    def extra_repr(self) -> str:
        rank = "" if self.lora_A is None else f", r={self.lora_A.shape[1]}"
        return f"{self.format}, {list(self.shape)}, transposed={self.transposed}{rank}"
