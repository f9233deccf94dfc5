"""The forward pass of an expert layer, as transformers' experts implementation "qfuse".

It needs one routing (`ops/routing.py` has a picture) and two products: rows are sorted once, the
activation runs on grouped rows, and the second product puts them back and adds up each token's
choices. Nothing is gathered, scattered or sorted in between.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.capture.library import Stored
from inductor_q.experts.modules import packed_experts
from inductor_q.experts.stack import ExpertStack, ranks_of
from inductor_q.kernels.calls import DENSE
from inductor_q.ops.exchange import plan_exchange, to_experts, to_tokens
from inductor_q.ops.routing import Routing, route

IMPLEMENTATION = "qfuse"


class Adapter(NamedTuple):
    """What each weight of a stack has added: `scaling * b @ a`, a [E, r, K] and b [E, N, r]."""

    a: Tensor
    b: Tensor
    scaling: float


def register() -> None:
    """Make "qfuse" known to transformers' `set_experts_implementation`, and to experts in FP8."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    fp8 = sys.modules.get("transformers.integrations.finegrained_fp8")
    for known in (ALL_EXPERTS_FUNCTIONS, getattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS", None)):
        if known is not None:
            known.register(IMPLEMENTATION, experts_forward)


def experts_forward(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    adapters: Mapping[str, Adapter] | None = None,
) -> Tensor:
    """Compute [tokens, H] through the experts of each token.

    Args:
        self: the expert layer; what it says of its layout is transformers'.
        top_k_index, top_k_weights: [tokens, top_k]; an index that is none of this device's experts
            is a sentinel of expert parallelism. After `shard` it is one among those of all ranks.
        adapters: those of fused parameters, by their names; an `ExpertStack` holds its own.
    """
    x = hidden_states
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if (ranks := ranks_of(self)) == 1:
        return _compute(self, x, top_k_index, top_k_weights, adapters or {}).to(hidden_states.dtype)
    exchange = plan_exchange(top_k_index, self.num_experts, ranks)
    gates = to_experts(top_k_weights, exchange)
    y = _compute(self, to_experts(x, exchange), exchange.ids, gates, adapters or {})
    return to_tokens(y, exchange, x.shape[0]).to(hidden_states.dtype)


def _compute(
    self: Any,
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    adapters: Mapping[str, Adapter],
) -> Tensor:
    """Compute tokens that are here through the experts that are here."""
    routing = route(top_k_index, self.num_experts)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    hidden = project(self, name, x, routing, adapter=adapters.get(name), grouped_out=True)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    how: Any = {"adapter": adapters.get("down_proj"), "grouped_in": True}
    if not getattr(self, "has_post_expert_norm", False):  # transformers 5.23 and later have it
        return project(self, "down_proj", hidden, routing, gates=top_k_weights, **how)
    rows = project(self, "down_proj", hidden, routing, grouped_out=True, **how)
    rows = self.post_expert_norm(rows)[routing.inverse].reshape(*top_k_index.shape, -1)
    # A norm may make something of a sentinel's zeros.
    ours = ((top_k_index >= 0) & (top_k_index < self.num_experts)).unsqueeze(-1)
    weighted = torch.where(ours, rows * top_k_weights.unsqueeze(-1), 0)
    return weighted.sum(1)


def is_sharded(model: nn.Module) -> bool:
    """Whether some of the model's experts are on other ranks."""
    return any(ranks_of(module) > 1 for module in model.modules())


def project(
    layer: Any, name: str, x: Tensor, routing: Routing, adapter: Adapter | None = None, **how: Any
) -> Tensor:
    """Compute one projection: an `ExpertStack`, or a parameter, packed by its library or not."""
    bias = getattr(layer, f"{name}_bias") if layer.has_bias else None
    stack = layer._modules.get(name)
    if isinstance(stack, ExpertStack):
        result: Tensor = stack(x, routing, bias=bias, **how)
        return result
    packed = packed_experts(layer, name)
    if packed is None:
        weight = getattr(layer, name)
        packed = Stored([weight], DENSE, list(weight.shape))
        x = x.to(weight.dtype)
    operands, format, shape = packed
    if adapter is not None:
        how |= {"lora_a": adapter.a, "lora_b": adapter.b, "scaling": adapter.scaling}
    return ops.scatter2scatter(
        x, operands, format, shape, routing, transposed=layer.is_transposed, bias=bias, **how
    )
