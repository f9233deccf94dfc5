"""One projection of a mixture of experts: NF4 experts, a LoRA adapter each (r = 16), top-k routing.

Rows are gathered, multiplied with their experts and left grouped: forward, and forward with the
gradients of x, A and B. ``bitsandbytes`` dequantizes all experts and multiplies with torch's
grouped GEMM (what transformers' "grouped_mm" experts do, and saves them for backward);
``dequantize`` is our op with its provider of that name, ``qfuse`` the op as it chooses.
``error`` is against float64, relative to that of bitsandbytes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from inductor_q import ops
from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.experts.routing import Routing, route

# name: (experts, out features, in features, top-k); gate and up in one projection.
MODELS = {
    "Qwen3-30B-A3B": (128, 1536, 2048, 8),
    "Qwen3.5-35B-A3B": (256, 1024, 2048, 8),
    "OLMoE": (64, 2048, 2048, 8),
    "Mixtral": (8, 28_672, 4096, 2),
    "E128 2880": (128, 5760, 2880, 4),
    "tiny": (4, 128, 64, 2),
}
CASES = {
    "cuda": [
        *(("Qwen3-30B-A3B", tokens) for tokens in (4096, 1024, 512, 64)),
        *((name, 4096) for name in ("Qwen3.5-35B-A3B", "OLMoE", "Mixtral", "E128 2880")),
    ],
    "cpu": [("tiny", 64), ("tiny", 512)],
}
QUICK = {"cuda": [("Qwen3-30B-A3B", 512)], "cpu": [("tiny", 16)]}
PEERS = ("bitsandbytes", "dequantize", "qfuse")
RANK = 16
SCALING = 2.0


@dataclass(frozen=True)
class Layer:
    """The inputs of one case; weights are seeded, quantized by bitsandbytes."""

    name: str
    x: Tensor
    a: Tensor
    b: Tensor
    qweight: Tensor
    state: Any
    shape: tuple[int, int, int]
    routing: Routing
    grad: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.a, self.b]


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--models", nargs="+", choices=MODELS)
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_moe", arguments)
    suite.settings |= {"rank": RANK, "format": "nf4, nested", "dtype": "bf16"}
    for name, tokens in (QUICK if arguments.quick else CASES)[suite.device.type]:
        if name in (arguments.models or MODELS):
            _run_case(suite, arguments, name, tokens)
    harness.finish(suite, arguments, extras=("error_to_bitsandbytes", "peak_bytes"))
    return suite


def _layer(name: str, tokens: int, device: torch.device) -> Layer:
    import bitsandbytes.functional as F

    experts, n, k, top_k = MODELS[name]
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).mul_(scale).bfloat16()

    weight = random(experts * n, k, scale=k**-0.5)
    qweight, state = F.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    logits = torch.randn(tokens, experts, device=device, generator=generator)
    routing = route(logits.topk(top_k).indices, experts)
    return Layer(
        name=name,
        x=random(tokens, k).requires_grad_(),
        a=random(experts, RANK, k, scale=k**-0.5).requires_grad_(),
        b=random(experts, n, RANK, scale=0.02).requires_grad_(),
        qweight=qweight,
        state=state,
        shape=(experts, n, k),
        routing=routing,
        grad=random(tokens * top_k, n),
    )


def _grouped_mm(layer: Layer) -> Tensor:
    import bitsandbytes.functional as F

    weight = F.dequantize_4bit(layer.qweight, layer.state).view(layer.shape)
    offs = layer.routing.offsets[1:]
    x = layer.x[layer.routing.order // layer.routing.top_k]
    y = torch._grouped_mm(x, weight.transpose(1, 2), offs=offs)
    rank = torch._grouped_mm(x, layer.a.transpose(1, 2), offs=offs)
    return y + torch._grouped_mm(rank * SCALING, layer.b.transpose(1, 2), offs=offs)


def _op(layer: Layer, provider: str) -> Tensor:
    operands, name, _ = bnb_operands(layer.qweight, layer.state)
    return ops.scatter2scatter(
        layer.x,
        operands,
        name,
        layer.shape,
        layer.routing,
        grouped_out=True,
        lora_a=layer.a,
        lora_b=layer.b,
        scaling=SCALING,
        provider=provider,
    )


def _exact(layer: Layer) -> Tensor:
    """float64, an expert at a time, from the fp32 values of the weight."""
    operands, name, _ = bnb_operands(layer.qweight, layer.state)
    weight = ops.dequantize(operands, name, layer.shape, torch.float32)
    offsets = layer.routing.offsets.tolist()
    rows = layer.x.detach()[layer.routing.order // layer.routing.top_k]
    parts = []
    for e, (start, end) in enumerate(pairwise(offsets)):
        x, a, b = rows[start:end].double(), layer.a[e].double(), layer.b[e].double()
        parts.append(x @ weight[e].double().t() + SCALING * (x @ a.t()) @ b.t())
    return torch.cat(parts).detach()


def _run_case(suite: harness.Suite, arguments: argparse.Namespace, name: str, tokens: int) -> None:
    layer = _layer(name, tokens, suite.device)
    forwards: dict[str, Callable[[], Tensor]] = {
        "bitsandbytes": functools.partial(_grouped_mm, layer),
        "dequantize": functools.partial(_op, layer, "dequantize"),
        "qfuse": functools.partial(_op, layer, "auto"),
    }
    forwards = {peer: forwards[peer] for peer in arguments.backends}
    exact = _exact(layer)
    errors = {
        peer: float((call().detach() - exact).norm() / exact.norm())
        for peer, call in forwards.items()
    }
    del exact
    for kind in ("fwd", "fwd+bwd"):
        candidates = {
            peer: functools.partial(_run, call, layer, backward=kind != "fwd")
            for peer, call in forwards.items()
        }
        extra: dict[str, dict[str, Any]] = {}
        for peer, call in candidates.items():
            results = sum(t.nbytes for t in call())
            before = harness.held_bytes(suite.device) or 0
            peak = harness.peak_bytes(call, suite.device)
            extra[peer] = {"error": errors[peer]}
            if "bitsandbytes" in errors:
                extra[peer]["error_to_bitsandbytes"] = errors[peer] / errors["bitsandbytes"]
            if peak is not None:  # beyond inputs and what is returned
                extra[peer]["peak_bytes"] = peak - before - results
        timings = harness.time_kernels(candidates, suite.device, rounds=arguments.rounds or 5)
        case = {"model": name, "T": tokens, "pass": kind}
        suite.add(case, timings, roof=_roof(suite, layer, backward=kind != "fwd"), extra=extra)


def _run(call: Callable[[], Tensor], layer: Layer, *, backward: bool) -> list[Tensor]:
    if not backward:
        with torch.no_grad():
            return [call()]
    y = call()
    return [y.detach(), *torch.autograd.grad(y, layer.leaves, layer.grad)]


def _roof(suite: harness.Suite, layer: Layer, *, backward: bool) -> float:
    """The products, or the packed weights and the rows read and written once a direction."""
    _, n, k = layer.shape
    rows, ways = layer.grad.shape[0], 2 if backward else 1
    operands, _, _ = bnb_operands(layer.qweight, layer.state)
    packed = sum(t.nbytes for t in operands)
    return suite.ceilings.roof(
        flops=ways * 2.0 * rows * n * k,
        bytes=ways * (packed + layer.x.nbytes + layer.grad.nbytes),
    )


if __name__ == "__main__":
    main()
