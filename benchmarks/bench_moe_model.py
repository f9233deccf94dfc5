"""Time one training step of a whole mixture of experts, QLoRA: forward, loss, backward, AdamW.

A GPU gets the shapes of Qwen3-30B-A3B, 4 layers, 2 x 2048 tokens, NF4 attention and experts with
double quantization, and a vocabulary of 32,000. A CPU gets a toy. ``--model mixtral`` has the sizes
of Mixtral 8x7B in layers of Qwen3: few large experts, each with many tokens.

``attention``: LoRA (r = 16) on attention only. Experts are packed by bitsandbytes'
``replace_parameter_4bit`` and run as "grouped_mm": in eager, stock Inductor and qfuse, the model
untouched; ``packed`` is qfuse after ``experts.quantize``, which takes the packed weights over.

``attention + experts``: LoRA on both. The peers are what PEFT offers, ``target_parameters`` on
experts in bf16 (it refuses packed ones), in eager and under stock Inductor, whose graph breaks.
Under qfuse ``prepared`` makes the same adapted weights in one graph, ``dense`` has PEFT's adapters
beside the experts in the products of ``experts.use_qfuse``, and ``packed`` has NF4 experts and
``experts.add_lora``.

``--recipe`` takes a step that people run instead of the bare one (``benchmarks/recipes.py``): with
``checkpointed``, a mask of padding, float32 adapters under autocast, LoRA dropout and gradient
checkpointing. Losses under dropout deviate from eager's by other dropout masks, too. PEFT has none
for ``target_parameters``, so ``attention + experts`` runs without dropout on either, for every
peer; the settings of a result have the dropout of each case. Under a recipe with dropout
``--adapt`` is ``attention`` unless it says otherwise.

A peer may have options (``qfuse[qfuse.compute=fp8]``, ``packed[...]``). How many of its products
are in eight bits, and why others are not, is in its result and in a note.

Each peer has a model of its own from the same seeds; its peak is counted from before it was built.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

import inductor_q
from benchmarks import bench_step, harness
from benchmarks.recipes import BENCHMARK, RECIPES, Recipe
from inductor_q import experts, testing
from inductor_q.integrations import prepare_checkpointing, prepare_parameters

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_up_proj", "down_proj")
#: The peers that can take part, by what is adapted.
CASES = {
    "attention": ("eager", "inductor", "qfuse", "packed"),
    "attention + experts": ("eager", "inductor", "prepared", "dense", "packed"),
}
#: Peers that qfuse compiles.
OURS = ("qfuse", "prepared", "dense", "packed")
RANK, ALPHA = 16, 32

QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40_960,
}

MIXTRAL_8X7B: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "moe_intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32_768,
}

#: What `--model` takes for a GPU.
MODELS = {"qwen3-30b-a3b": QWEN3_30B_A3B, "mixtral": MIXTRAL_8X7B}

Step = Callable[[], torch.Tensor]


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=CASES["attention"])
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b", help="on a GPU")
    parser.add_argument("--layers", type=int, help="default: 4 on a GPU, 1 on CPU")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, help="default: 2048 on a GPU, 32 on CPU")
    default = "default: attention under a recipe with dropout, otherwise both"
    parser.add_argument("--adapt", nargs="+", choices=CASES, help=default)
    parser.add_argument("--loss-steps", type=int, default=10)
    parser.add_argument("--recipe", choices=RECIPES, default="benchmark")
    arguments = parser.parse_args(argv)
    recipe = RECIPES[arguments.recipe]
    adapt = arguments.adapt or (["attention"] if recipe.dropout else list(CASES))
    known = {peer for peers in CASES.values() for peer in peers}
    if unknown := [peer for peer in arguments.backends if _kind(peer) not in known]:
        parser.error(f"--backends {unknown[0]}: known are {', '.join(sorted(known))}, with options")
    name = "bench_moe_model" if recipe == BENCHMARK else f"bench_moe_model_{arguments.recipe}"
    suite = harness.start(name, arguments)
    on_gpu = suite.device.type == "cuda"
    if MODELS[arguments.model] is not QWEN3_30B_A3B and not on_gpu:
        parser.error(f"--model {arguments.model}: a CPU gets a small model of its own")
    layers = arguments.layers or (4 if on_gpu else 1)
    config = _config(layers, on_gpu=on_gpu, shapes=MODELS[arguments.model])
    length = arguments.seq_len or (2048 if on_gpu else 32)
    suite.settings |= {
        "model": arguments.model if on_gpu else "toy",
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "rank": RANK,
        "format": "nf4_b64_nested",
        "adapter_dtype": recipe.adapters if recipe.autocast else "bf16",
        "loss_steps": arguments.loss_steps,
        "recipe": {"name": arguments.recipe, **_without_dropout(recipe)},
        "dropout": {adapted: _recipe(arguments, adapted).dropout for adapted in adapt},
    }
    generator = torch.Generator().manual_seed(arguments.seed)
    ids = torch.randint(
        0, min(64, config.vocab_size), (arguments.batch, length), generator=generator
    )
    for adapted in adapt:
        _run_case(suite, arguments, config, adapted, ids.to(suite.device))
        harness.keep(suite, arguments)
    shown = ("peak_bytes", "static_bytes", "loss_deviation", "breaks", "first_step_s")
    harness.finish(suite, arguments, extras=shown)
    return suite


def _run_case(
    suite: harness.Suite,
    arguments: argparse.Namespace,
    config: Any,
    adapted: str,
    ids: torch.Tensor,
) -> None:
    torch.compiler.reset()
    recipe = _recipe(arguments, adapted)
    possible = CASES[adapted]  # eager comes first, with which losses are compared
    peers = [peer for peer in arguments.backends if _kind(peer) in possible]
    peers.sort(key=lambda peer: possible.index(_kind(peer)))
    extra: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for peer in peers:
        gc.collect()
        before = harness.held_bytes(suite.device) or 0
        adapts_experts = "experts" in adapted
        kind = _kind(peer)
        model = moe_model(
            config, suite.device, recipe, packed=kind == "packed", adapts_experts=adapts_experts
        )
        static = harness.held_bytes(suite.device)
        if kind == "dense":
            experts.use_qfuse(model)
        if kind in ("dense", "prepared"):
            prepare_parameters(model)
        backend = peer.replace(kind, "qfuse", 1) if kind in OURS else peer
        call = harness.compile_as(backend, model)
        optimizer, step = bench_step.adamw(model), bench_step.loss_of(call, recipe)
        steps[peer] = bench_step.full_step(optimizer, step, ids, recipe.accumulated)
        with testing.CompileTrace() as trace:
            first = harness.first_call(steps[peer], suite.device)
        losses = [float(steps[peer]()) for _ in range(arguments.loss_steps)]
        extra[peer] = {"losses": losses, "breaks": len(trace.breaks), "first_step_s": first}
        if kind in OURS:
            extra[peer] |= _eight_bits(suite, peer)
        peak = harness.peak_bytes(steps[peer], suite.device)
        if peak is not None and static is not None:
            extra[peer] |= {"peak_bytes": peak - before, "static_bytes": static - before}
        if "eager" in extra:
            pairs = zip(losses, extra["eager"]["losses"], strict=True)
            extra[peer]["loss_deviation"] = max(abs(one / other - 1) for one, other in pairs)
    timings = harness.time_steps(
        steps,
        suite.device,
        rounds=arguments.rounds or (2 if arguments.quick else 7),
        per_round=5 if suite.device.type == "cuda" else 1,
    )
    tokens = f"{ids.shape[0]} x {ids.shape[1]}"
    if recipe.accumulated > 1:
        tokens += f" x {recipe.accumulated}"
    case = {"LoRA on": adapted, "layers": config.num_hidden_layers, "tokens": tokens}
    suite.add(case, timings, roof=recipe.accumulated * _roof(suite, config, ids), extra=extra)
    bench_step.summarize(suite, peers, extra)


def _without_dropout(recipe: Recipe) -> dict[str, Any]:
    """Describe a recipe but for its dropout, which each case has its own of."""
    return {n: value for n, value in dataclasses.asdict(recipe).items() if n != "dropout"}


def _recipe(arguments: argparse.Namespace, adapted: str) -> Recipe:
    """Return the recipe of a case, without dropout where PEFT has none."""
    recipe = RECIPES[arguments.recipe]
    return dataclasses.replace(recipe, dropout=0.0) if "experts" in adapted else recipe


def _kind(peer: str) -> str:
    """Return a peer's name without its options."""
    return peer.partition("[")[0]


def _eight_bits(suite: harness.Suite, peer: str) -> dict[str, Any]:
    """Say how many products of the last compile are in eight bits, and why the others are not;
    nothing where none was asked for."""
    report = inductor_q.last_report()
    some, products = (0, 0) if report is None else report.in_eight_bits()
    if report is None or not products:
        return {}
    reasons = dict(report.rejections().get("quantize_products", {}))
    note = f"{peer}: {some} of {products} products with frozen weights in eight bits"
    suite.notes.append("; ".join([note, *(f"{n} not: {why}" for why, n in reasons.items())]))
    return {"in_eight_bits": [some, products], "in_16_bits": reasons}


def _config(layers: int, *, on_gpu: bool, shapes: dict[str, Any] = QWEN3_30B_A3B) -> Any:
    if not on_gpu:
        return testing.tiny_qwen3_moe_config(num_hidden_layers=layers)
    return testing.tiny_qwen3_moe_config(num_hidden_layers=layers, **shapes)


def moe_model(
    config: Any,
    device: torch.device,
    recipe: Recipe = BENCHMARK,
    *,
    packed: bool,
    adapts_experts: bool,
) -> Any:
    import transformers
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    torch.manual_seed(0)
    from_config: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device(device):
        base = from_config(config, dtype=torch.bfloat16)
    base.set_experts_implementation("grouped_mm")
    by_peft = adapts_experts and not packed
    if not by_peft:
        for module in list(base.modules()):
            for name in EXPERTS:
                if name in module._parameters:
                    replace_parameter_4bit(module, name, compress_statistics=True)
    model = testing.qlora_model(
        config,
        base=base,
        device=device,
        r=RANK,
        alpha=ALPHA,
        adapter_dtype=recipe.adapter_dtype,
        dropout=recipe.dropout,
        prepare=recipe.prepared,
        targets=ATTENTION,
        target_parameters=[f"mlp.experts.{name}" for name in EXPERTS] if by_peft else (),
    )
    if packed:
        experts.quantize(model)
        if adapts_experts:
            experts.add_lora(model, r=RANK, alpha=ALPHA, dtype=recipe.adapter_dtype)
    bench_step.checkpoint(model, recipe)
    if recipe != BENCHMARK:
        prepare_checkpointing(model)  # as trainers' callback: packed experts are in the graph
    return model


def _roof(suite: harness.Suite, config: Any, ids: torch.Tensor) -> float:
    """Count products of forward and input gradient; the packed weights are read twice."""
    tokens, hidden = ids.numel(), config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    expert = 3 * hidden * config.moe_intermediate_size
    attention = 2 * hidden * (heads + keys)
    used = attention + config.num_experts_per_tok * expert + config.num_experts * hidden
    causal = 7 * tokens * ids.shape[1] * heads
    flops = config.num_hidden_layers * (4 * tokens * used + causal)
    flops += 4 * tokens * config.vocab_size * hidden
    held = config.num_hidden_layers * (attention + config.num_experts * expert)
    return suite.ceilings.roof(flops=flops, bytes=2 * held * (0.5 + 1 / 64))


if __name__ == "__main__":
    main()
