"""Adapt the experts of tiny models and take a step, and how near two of them must be."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inductor_q import experts
from tests.support.moe_models import awaken, model

# Sums in another order, in float32, through two layers.
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}

#: Norm-relative, of logits and of each gradient, biases included. Measured: up to 1.3e-6.
EXACT = 3e-6


def step(net: Any, ids: Tensor, run: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of whatever trains."""
    out = (net if run is None else run)(input_ids=ids, labels=ids, use_cache=False)
    if out.loss.requires_grad:
        out.loss.backward()
    grads = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return out.logits.detach(), grads


def adapted(family: str, format: str = "nf4_b64", r: int = 4) -> Any:
    net = model(family).requires_grad_(False)
    if format != "dense":
        experts.quantize(net, format)
    awaken(experts.add_lora(net, r=r, alpha=8))
    return net
