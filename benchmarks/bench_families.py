"""Take a trainer's step of every family and kind of adapter: what of it qfuse reads, and its time.

The recipe is ``trainer`` of bench_step: an attention_mask with padding, float32 adapters under
autocast, LoRA dropout of 0.05. A GPU gets two layers of each family in its own width with a
vocabulary of 32,000, a CPU gets toys. Mixtures of experts keep their experts in 16 bits and adapt
attention. Variants are of Qwen3: rslora, attention alone, "all-linear", trained biases (a Llama
with biases), ranks of 8 and 128, float16.

Each row says how many quantized layers, adapters and attentions its graph has in qfuse's form, the
graphs and breaks of one step, and by how much the losses of some steps leave eager's: dropout draws
other masks in each peer, so stock's deviation stands beside.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import harness
from benchmarks.bench_step import adamw, full_step
from benchmarks.recipes import TRAINER
from inductor_q import last_report, testing
from inductor_q.graph_report import Report

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TWO_KINDS = ["sliding_attention", "full_attention"]
TOY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

#: The length of a toy's sequences: two of them have more rows than an adapter has columns.
TOY_TOKENS = 96


@dataclass(frozen=True)
class Case:
    """One model with its adapters.

    Args:
        kind: transformers' name of the model.
        sizes: what a GPU's model has, over the defaults of its configuration.
        toy: what a CPU's has, over TOY.
        lora: fields of PEFT's LoraConfig.
        dtype: of the base's norms, embeddings and products.
        tokens: the length of a sequence on a GPU.
    """

    kind: str
    sizes: Mapping[str, Any]
    toy: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 2048

    def config(self, *, on_gpu: bool) -> Any:
        import transformers

        both: dict[str, Any] = {"num_hidden_layers": 2, "use_cache": False, "pad_token_id": 0}
        both |= {"bos_token_id": 1, "eos_token_id": 1}
        sizes = {**self.sizes, "vocab_size": 32_000}
        if not on_gpu:
            sizes = {**self.sizes, **TOY, **self.toy, "vocab_size": 264}
        return transformers.AutoConfig.for_model(self.kind, **both, **sizes)

    def model(self, device: torch.device, seed: int) -> Any:
        import transformers

        config = self.config(on_gpu=device.type == "cuda")
        torch.manual_seed(seed)
        with torch.device(device):
            from_config: Any = transformers.AutoModelForCausalLM.from_config
            base = from_config(config, dtype=self.dtype)
        return testing.qlora_model(
            config,
            base=base,
            compute_dtype=self.dtype,
            dropout=TRAINER.dropout,
            device=device,
            seed=seed,
            lora=self.lora,
        )


def _sizes(hidden: int, inner: int, heads: int, keys: int, head_dim: int = 128) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {**dict(zip(names, (hidden, inner, heads, keys), strict=True)), "head_dim": head_dim}


LLAMA = Case("llama", _sizes(4096, 14_336, 32, 8))
QWEN3 = Case("qwen3", _sizes(4096, 12_288, 32, 8))
_GEMMA = {"layer_types": TWO_KINDS, "sliding_window": 1024}
FAMILIES: dict[str, Case] = {
    "Llama": LLAMA,
    "Mistral": Case(
        "mistral",
        {**_sizes(4096, 14_336, 32, 8), "sliding_window": 1024},
        {"sliding_window": 16},
    ),
    "Gemma 2": Case("gemma2", {**_sizes(2304, 9216, 8, 4, 256), **_GEMMA}, {"sliding_window": 16}),
    "Gemma 3": Case(
        "gemma3_text", {**_sizes(2560, 10_240, 8, 4, 256), **_GEMMA}, {"sliding_window": 16}
    ),
    "Qwen3": QWEN3,
    # Without its own kernels a delta net is a loop over the sequence, which Dynamo unrolls.
    "Qwen3.5": Case(
        "qwen3_5_text",
        {**_sizes(2048, 6144, 8, 2, 256), "layer_types": ["linear_attention", "full_attention"]},
        dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
        | dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
        tokens=512,
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {**_sizes(2880, 2880, 64, 8, 64), "layer_types": TWO_KINDS, "sliding_window": 128},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
        {"target_modules": list(ATTENTION)},
    ),
    "OLMoE": Case(
        "olmoe",
        {**_sizes(2048, 1024, 16, 16), "num_experts": 64, "num_experts_per_tok": 8},
        {"num_experts": 4, "num_experts_per_tok": 2},
        {"target_modules": list(ATTENTION)},
    ),
}
#: An adapter's rank is at most half of what its layer takes and gives.
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
VARIANTS: dict[str, Case] = {
    "Qwen3, rslora": Case("qwen3", QWEN3.sizes, lora={"use_rslora": True}),
    "Qwen3, attention only": Case("qwen3", QWEN3.sizes, lora={"target_modules": list(ATTENTION)}),
    "Qwen3, all-linear": Case("qwen3", QWEN3.sizes, lora={"target_modules": "all-linear"}),
    "Llama with biases, trained": Case(
        "llama",
        {**LLAMA.sizes, "attention_bias": True, "mlp_bias": True},
        lora={"bias": "lora_only"},
    ),
    "Qwen3, r = 8": Case("qwen3", QWEN3.sizes, lora={"r": 8}),
    "Qwen3, r = 128": Case("qwen3", QWEN3.sizes, _WIDE, {"r": 128}),
    "Qwen3, float16": Case("qwen3", QWEN3.sizes, dtype=torch.float16),
}
CASES = {**FAMILIES, **VARIANTS}


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--loss-steps", type=int, default=8)
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_families", arguments)
    on_gpu = suite.device.type == "cuda"
    suite.settings |= {"layers": 2, "loss_steps": arguments.loss_steps, "recipe": "trainer"}
    peers = harness.available(arguments.backends)
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    for name in arguments.only:
        case = CASES[name]
        length = case.tokens if on_gpu else TOY_TOKENS
        _measure(suite, name, case, length, peers, rounds, arguments)
        harness.keep(suite, arguments)
    harness.finish(suite, arguments, extras=("layers", "loss_deviation", "breaks", "graphs"))
    return suite


def step_of(call: Callable[..., Any], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A call of the model as a Trainer makes it."""

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, dtype):
            loss: torch.Tensor = call(**TRAINER.inputs(ids)).loss
        return loss

    return step


def coverage(model: torch.nn.Module, report: Report) -> dict[str, list[int]]:
    """How many of a model's quantized layers, adapters and attentions have qfuse's form, of how
    many; and how many sites were refused for another reason than a better plan."""
    names = dict(model.named_modules())
    quantized = {n for n, m in names.items() if type(m).__module__.startswith("bitsandbytes")}
    adapted = {n for n, m in names.items() if "lora_A" in dict(m.named_children())}
    attention = {n for n in names if n.endswith(".self_attn")}
    applied: dict[str, set[str]] = {}
    for site in report.sites:
        if not site.rejected:
            applied.setdefault(site.pass_name, set()).add(site.module)
    read = applied.get("canonicalize", set())
    forms = applied.get("extend_k", set()) | applied.get("fuse_dropout", set())
    proven = applied.get("causal_attention", set())
    refused = sum(bool(site.rejected) and not site.by_choice for site in report.sites)
    return {
        # a layer under an adapter goes by the name of the adapter's module
        "layers": [sum(n.removesuffix(".base_layer") in read for n in quantized), len(quantized)],
        "adapters": [len(adapted & forms), len(adapted)],
        "attention": [len(attention & proven), len(attention)],
        "refused": [refused, len(report.sites)],
    }


def _measure(
    suite: harness.Suite,
    name: str,
    case: Case,
    length: int,
    peers: Sequence[str],
    rounds: int,
    arguments: Any,
) -> None:
    device = suite.device
    torch.compiler.reset()
    gc.collect()
    model = case.model(device, arguments.seed)
    start = testing.adapter_state(model)
    generator = torch.Generator().manual_seed(arguments.seed)
    data = [
        torch.randint(2, 64, (2, length), generator=generator).to(device)
        for _ in range(max(1, arguments.loss_steps))
    ]
    extra: dict[str, dict[str, Any]] = {peer: {} for peer in peers}
    steps = {}
    for peer in peers:
        steps[peer] = step_of(harness.compile_as(peer, model), case.dtype)
        with testing.CompileTrace() as trace:
            steps[peer](data[0]).backward()
        model.zero_grad(set_to_none=True)
        if peer != "eager":
            extra[peer] |= {"breaks": len(trace.breaks), "graphs": trace.graphs}
        report = last_report() if peer.startswith("qfuse") else None
        if report is not None:
            extra[peer] |= {k: f"{n} of {m}" for k, (n, m) in coverage(model, report).items()}
    losses = {}
    for peer, step in steps.items():
        testing.load_adapter_state(model, start)
        torch.manual_seed(arguments.seed)
        optimizer = adamw(model)
        losses[peer] = [float(full_step(optimizer, step, ids)()) for ids in data]
    for peer, values in losses.items() if "eager" in losses else ():
        pairs = list(zip(values, losses["eager"], strict=True))
        extra[peer]["loss_deviation"] = max(abs(one - other) / abs(other) for one, other in pairs)
    optimizer = adamw(model)
    timings = harness.time_steps(
        {peer: full_step(optimizer, step, data[0]) for peer, step in steps.items()},
        device,
        rounds=rounds,
        per_round=3,
    )
    roof = suite.ceilings.roof(flops=_operations(model, data[0].numel()))
    row = {"case": name, "model": case.kind, "tokens": f"2 x {length}"}
    suite.add(row, timings, roof=roof, extra=extra)


def _operations(model: torch.nn.Module, tokens: int) -> float:
    """Fewest operations: forward and the input's gradient, of all products but experts'."""
    linear = (m for m in model.modules() if hasattr(m, "in_features") and hasattr(m, "weight"))
    sizes: Any = [(m.in_features, m.out_features) for m in linear]
    return 4.0 * tokens * float(sum(n * k for n, k in sizes))


if __name__ == "__main__":
    main()
