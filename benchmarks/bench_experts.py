"""Time the experts of one layer, whole: forward, and the gradients a fine-tuning step needs.

Each is a module of transformers in the shapes of a model, on seeded tokens and the choices of a
random router: both projections, the activation between them, and the biases of models that have
them.

``LoRA on`` "nothing": frozen experts, gradients of the hidden states and of the routing weights, as
with LoRA on attention. "experts": also those of LoRA (r = 16) on both projections.

``eager`` is transformers' loop over experts and ``grouped_mm`` its grouped product, experts in bf16
under PEFT's ``target_parameters``; ``packed`` is the module after ``experts.quantize`` to NF4 and
``experts.add_lora``. These run in eager torch; ``qfuse`` is the packed module compiled.

``--format mxfp4`` packs as gpt-oss ships its experts.

``weight`` is what the experts' own values take, ``static`` the module, adapters included; ``peak``
is beyond modules, inputs and what is returned. ``error`` is that of the output, ``grad_error`` that
of the gradient of the hidden states: both are against float64 on the weights that the peer holds,
relative to those of eager on its own.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import harness
from inductor_q import experts, testing
from inductor_q.experts.model import stacks
from inductor_q.experts.modules import expert_layers
from inductor_q.experts.stack import ExpertStack

# name: (family, experts, hidden size, intermediate size, experts per token)
MODELS = {
    "gpt-oss-20b": ("gpt_oss", 32, 2880, 2880, 4),
    "gpt-oss-120b": ("gpt_oss", 128, 2880, 2880, 4),
    "qwen3-30b-a3b": ("qwen3_moe", 128, 2048, 768, 8),
    "E32 2048": ("qwen3_moe", 32, 2048, 768, 8),
    "tiny": ("gpt_oss", 4, 64, 96, 2),
}
CASES = {
    "cuda": [("gpt-oss-20b", 2048), ("gpt-oss-20b", 8192), ("gpt-oss-120b", 4096)],
    "cpu": [("tiny", 64)],
}
TOKENS = 2048  # for a model that is in no list
PEERS = ("eager", "grouped_mm", "packed", "qfuse")
ADAPT = ("nothing", "experts")
FORMATS = ("nf4_b64", "mxfp4")
PROJECTIONS = ("gate_up_proj", "down_proj")
RANK, ALPHA = 16, 32


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [tokens, H]
    ids: Tensor  # [tokens, top_k]
    gates: Tensor  # [tokens, top_k]
    grad: Tensor  # [tokens, H], of the output
    adapters: dict[str, tuple[Tensor, Tensor]]  # A [E, r, K], B [E, N, r] of adapted projections


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, help=f"(default: by case, or {TOKENS})")
    parser.add_argument("--adapt", nargs="+", choices=ADAPT, default=list(ADAPT))
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of packed experts")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.backends) - set(PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    is_default = arguments.format == FORMATS[0]
    name = "bench_experts" if is_default else f"bench_experts_{arguments.format}"
    suite = harness.start(name, arguments)
    suite.settings |= {"format": arguments.format, "dtype": "bf16", "rank": RANK}
    listed = CASES[suite.device.type][: 1 if arguments.quick else None]
    for name in arguments.models or dict.fromkeys(name for name, _ in listed):
        known = [tokens for model, tokens in listed if model == name]
        for tokens in arguments.tokens or known or [TOKENS]:
            for adapted in arguments.adapt:
                _run_case(suite, arguments, name, tokens, adapted)
    shown = ("peak_bytes", "weight_bytes", "static_bytes", "error_to_eager", "breaks")
    harness.finish(suite, arguments, extras=shown)
    return suite


def _run_case(
    suite: harness.Suite, arguments: argparse.Namespace, name: str, tokens: int, adapted: str
) -> None:
    torch.compiler.reset()
    inputs = _inputs(name, tokens, adapted, suite.device, arguments.seed)
    modules: dict[str, nn.Module] = {}
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    extra: dict[str, dict[str, Any]] = {}
    for peer in [peer for peer in PEERS if peer in arguments.backends]:
        held = "packed" if peer == "qfuse" else peer
        if held not in modules:
            modules[held] = _module(name, held, inputs, arguments.format)
        module = modules[held]
        gc.collect()
        before = harness.held_bytes(suite.device)
        call = harness.compile_as("qfuse" if peer == "qfuse" else "eager", module)
        steps[peer] = functools.partial(_step, call, module, inputs)
        with testing.CompileTrace() as trace:
            results = steps[peer]()
        static = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
        adapters = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        extra[peer] = {"weight_bytes": static - adapters, "static_bytes": static}
        extra[peer]["breaks"] = len(trace.breaks)
        returned = sum(t.nbytes for t in results)
        for key, got, exact in zip(
            ("error", "grad_error"), results[:2], _exact(module, inputs), strict=True
        ):
            extra[peer][key] = float((got - exact).norm() / exact.norm())
            if "eager" in extra:
                extra[peer][f"{key}_to_eager"] = extra[peer][key] / extra["eager"][key]
        del results, got, exact
        peak = harness.peak_bytes(steps[peer], suite.device)
        if peak is not None and before is not None:
            extra[peer]["peak_bytes"] = peak - before - returned
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    timings = harness.time_steps(steps, suite.device, rounds=rounds)
    case = {"model": name, "tokens": tokens, "LoRA on": adapted}
    suite.add(case, timings, roof=_roof(suite, name, tokens), extra=extra)


def _step(call: Callable[..., Tensor], module: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return the output, then the gradients of hidden states, routing weights and adapters."""
    y = call(inputs.hidden, inputs.ids, inputs.gates)
    adapters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    leaves = (inputs.hidden, inputs.gates, *adapters)
    return [y.detach(), *torch.autograd.grad(y, leaves, inputs.grad)]


def _inputs(name: str, tokens: int, adapted: str, device: torch.device, seed: int) -> Inputs:
    _, count, hidden, inner, top_k = MODELS[name]
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).mul_(scale).bfloat16()

    logits, ids = random(tokens, count).topk(top_k)
    adapters = {}
    if adapted == "experts":
        for projection, n, k in zip(PROJECTIONS, (2 * inner, hidden), (hidden, inner), strict=True):
            a, b = random(count, RANK, k, scale=k**-0.5), random(count, n, RANK, scale=0.02)
            adapters[projection] = a, b
    return Inputs(
        hidden=random(tokens, hidden).requires_grad_(),
        ids=ids,
        gates=logits.softmax(-1).requires_grad_(),
        grad=random(tokens, hidden),
        adapters=adapters,
    )


def _module(name: str, peer: str, inputs: Inputs, format: str = FORMATS[0]) -> nn.Module:
    """Make the experts as `peer` has them: packed, or in bf16; all have the same weights and
    adapters.
    """
    import peft
    import transformers
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    family, count, hidden, inner, _ = MODELS[name]
    known: Any = transformers  # typed in parts
    gpt_oss: Any = modeling_gpt_oss
    qwen3_moe: Any = modeling_qwen3_moe
    with inputs.hidden.device:
        if family == "gpt_oss":
            sizes = {"num_local_experts": count, "intermediate_size": inner}
            layer = gpt_oss.GptOssExperts(known.GptOssConfig(hidden_size=hidden, **sizes))
        else:
            sizes = {"num_experts": count, "moe_intermediate_size": inner}
            layer = qwen3_moe.Qwen3MoeExperts(known.Qwen3MoeConfig(hidden_size=hidden, **sizes))
    layer.bfloat16().config._experts_implementation = "eager" if peer == "packed" else peer
    generator = torch.Generator(inputs.hidden.device).manual_seed(0)
    for weight in layer.parameters():
        weight.data.normal_(std=hidden**-0.5, generator=generator)
    # PEFT replaces what has the parameters, so they get a module of their own.
    model: Any = nn.ModuleDict({"experts": layer}).requires_grad_(False)
    if peer == "packed":
        experts.quantize(model, format)
    if inputs.adapters and peer == "packed":
        experts.add_lora(model, r=RANK, alpha=ALPHA, dtype=torch.bfloat16)
        for projection, stack in stacks(model):
            a, b = inputs.adapters[projection.removeprefix("experts.")]
            stack.get_parameter("lora_A").data.copy_(a)
            stack.get_parameter("lora_B").data.copy_(b)
    elif inputs.adapters:
        targets = [f"experts.{projection}" for projection in PROJECTIONS]
        lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_parameters=targets)
        peft.inject_adapter_in_model(lora, model)
        for wrapper in [m for m in model.modules() if hasattr(m, "parameter_name")]:
            a, b = inputs.adapters[wrapper.parameter_name]
            wrapper.lora_A["default"].weight.data.copy_(a.flatten(0, 1))
            wrapper.lora_B["default"].weight.data.copy_(b.permute(1, 2, 0).flatten(1))
    module: nn.Module = model["experts"]
    return module


def _exact(module: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute the output and the gradient of the hidden states in float64, an expert at a time."""
    layer = next(iter(expert_layers(module).values()))
    weights: dict[str, Tensor] = {}
    for name in PROJECTIONS:
        own = layer._modules.get(name, layer._parameters.get(name))
        weights[name] = own.dequantize(torch.float32) if isinstance(own, ExpertStack) else own
        if isinstance(own, ExpertStack) and own.transposed != layer.is_transposed:
            weights[name] = weights[name].transpose(1, 2)

    def product(name: str, x: Tensor, e: int) -> Tensor:
        weight = weights[name][e].double()
        y = x @ (weight if layer.is_transposed else weight.t())
        if name in inputs.adapters:
            a, b = (factor[e].double() for factor in inputs.adapters[name])
            y = y + ALPHA / RANK * (x @ a.t()) @ b.t()
        if layer.has_bias:
            y = y + getattr(layer, f"{name}_bias")[e].double()
        return y

    out, grad = (torch.zeros_like(inputs.grad, dtype=torch.float64) for _ in range(2))
    for e in range(layer.num_experts):
        tokens, choice = torch.where(inputs.ids == e)
        x = inputs.hidden.detach()[tokens].double().requires_grad_()
        y = product("down_proj", layer._apply_gate(product("gate_up_proj", x, e)), e)
        y = y * inputs.gates.detach()[tokens, choice, None]
        out.index_add_(0, tokens, y.detach())
        (dx,) = torch.autograd.grad(y, x, inputs.grad[tokens].double())
        grad.index_add_(0, tokens, dx)
    return out, grad


def _roof(suite: harness.Suite, name: str, tokens: int) -> float:
    """Count products of forward and input gradient; both move the packed weights and the tokens."""
    _, count, hidden, inner, top_k = MODELS[name]
    expert, rows = 3 * hidden * inner, tokens * top_k
    packed = min(count, rows) * expert * (0.5 + 4 / 64)
    return suite.ceilings.roof(
        flops=2 * 2.0 * rows * expert, bytes=2 * (packed + 2 * 2 * tokens * hidden)
    )


if __name__ == "__main__":
    main()
