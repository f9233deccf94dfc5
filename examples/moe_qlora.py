"""Fine-tune a mixture of experts: packed experts, LoRA on attention and on every expert, one graph.

The weights are random, from a configuration, and packed a projection at a time, so a model of 30
billion parameters never exists in 16 bits. It learns the text that ships with this repository for a
few steps, and prints the loss, the time of a step, tokens per second and the peak of memory.

    python -m examples.moe_qlora                      # a toy, on a CPU too
    python -m examples.moe_qlora --size qwen3-30b-a3b # one GPU of 80 GB
    python -m examples.moe_qlora --size gpt-oss-20b --memory 16 --json out.json

gpt-oss-20b's experts are random codes and scales in MXFP4, as its checkpoint has them (which
`inductor_q.load_checkpoint` reads). `--format nf4_b64_nested` quantizes the values of the same
codes again, a projection at a time. In gigabytes, of 10^9 bytes, its model takes

    experts in MXFP4 10.2, embeddings and head in bf16 2.3, attention in NF4 0.4; and for 185 M
    parameters of adapters in bf16: themselves 0.4, their gradients 0.4, AdamW's states 0.7,

14.3 together. With checkpointing 4 x 512 tokens take 0.3 for what enters the layers, and about 0.7
for what one of them needs at a time (1.1 for 2 x 1024: a layer compiled by itself keeps its scores
of attention). Adapters in float32 would take 1.5 more, attention in bf16 0.9. So a budget,
`--memory`, also changes what is not asked for: checkpointing, layers compiled by themselves, the
loss in chunks, attention in NF4, adapters in bf16, sequences of 512.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import inductor_q
from benchmarks import origin, place
from benchmarks.alone import alone
from inductor_q import experts, ops
from inductor_q.experts.modules import expert_layers, projections, put_stack
from inductor_q.integrations import prepare_checkpointing
from inductor_q.kbit import meta_parameters

TEXT = Path(__file__).parent / "data" / "harbour.txt"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def configuration(size: str) -> Any:
    """Make the model's configuration, of transformers."""
    import transformers

    known: Any = transformers  # its types lack fields that configurations have
    if size == "gpt-oss-20b":
        return known.GptOssConfig(num_local_experts=32, num_hidden_layers=24)
    toy = {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts_per_tok": 2,
    }
    if size == "gpt-oss-toy":
        return known.GptOssConfig(
            **toy, num_hidden_layers=2, num_local_experts=4, intermediate_size=64, sliding_window=16
        )
    if size == "qwen3-30b-a3b":
        return known.Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
        )
    return known.Qwen3MoeConfig(
        **toy, num_hidden_layers=1, num_experts=4, intermediate_size=128, moe_intermediate_size=64
    )


def build(
    config: Any,
    format: str,
    r: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    attention: str | None = None,
    adapters: torch.dtype = torch.float32,
) -> Any:
    """Build the model with packed experts, and LoRA on attention and experts.

    Attention stays in `dtype`, or is quantized layer by layer to what `inductor_q.quantize` knows.
    """
    import peft
    import transformers

    def values(name: str, parameter: nn.Parameter) -> Tensor:
        """Return random weights of a size that keeps activations about as large as they are."""
        made = torch.randn(parameter.shape, device=device, dtype=dtype)
        return made.div_(math.sqrt(parameter.shape[-1]))

    def requantized(name: str, parameter: nn.Parameter) -> Tensor:
        """Return what the codes that gpt-oss would have here mean; they are [experts, out, in]."""
        shape = [parameter.shape[0], parameter.shape[2], parameter.shape[1]]
        codes = [*shipped(shape, device).values()]
        return ops.dequantize(codes, "mxfp4", shape, dtype).transpose(1, 2).contiguous()

    def fill(module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters()):
            if not parameter.is_meta:
                continue
            parent, _, leaf = name.rpartition(".")
            norm = "norm" in name
            new = torch.ones_like(parameter, device=device) if norm else values(name, parameter)
            setattr(module.get_submodule(parent), leaf, nn.Parameter(new, requires_grad=False))

    with meta_parameters():
        auto: Any = transformers.AutoModelForCausalLM
        model: Any = auto.from_config(config, dtype=dtype)
    if format == "mxfp4":
        pack_as_shipped(model, device)
    else:
        ships = config.model_type == "gpt_oss"
        experts.quantize(model, format, weights=requantized if ships else values)
    if attention is not None:
        for layer in model.model.layers:
            fill(layer.self_attn)
            inductor_q.quantize(layer.self_attn, attention, progress=False)
    fill(model)
    model.tie_weights()
    model.to(device)
    model.is_loaded_in_4bit = attention == "nf4"  # for PEFT
    lora = peft.LoraConfig(r=r, lora_alpha=2 * r, target_modules=ATTENTION)
    model = peft.get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(adapters)
    experts.add_lora(model, r=r, alpha=2 * r, dtype=adapters)
    return model.train()


def shipped(shape: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return random codes in MXFP4 of [experts, out, in], and a scale for each 32 of them."""
    codes = torch.randint(256, (math.prod(shape) // 2,), dtype=torch.uint8, device=device)
    scale = 127 - round(math.log2(3 * math.sqrt(shape[2])))  # 3: the numbers' deviation
    scales = torch.full((math.prod(shape) // 32,), scale, dtype=torch.uint8, device=device)
    return {"qweight": codes, "scale": scales}


def pack_as_shipped(model: Any, device: torch.device) -> None:
    """Give every projection random codes in MXFP4, which are [experts, out, in]."""
    for layer in expert_layers(model).values():
        for name in projections(layer):
            shape = list(getattr(layer, name).shape)
            if layer.is_transposed:
                shape[1:] = shape[:0:-1]
            put_stack(layer, name, shipped(shape, device), "mxfp4", shape, transposed=False)
    experts.use_qfuse(model)


def batches(vocabulary: int, batch: int, length: int, device: torch.device) -> Tensor:
    """Return the text's bytes as [n, batch, length]."""
    text = torch.tensor(list(TEXT.read_bytes()), device=device) % vocabulary
    need = batch * length
    repeated = text.repeat(max(1, -(-need // text.numel())))
    return repeated[: repeated.numel() // need * need].view(-1, batch, length)


def loss_of(model: Any, backend: str, regions: str) -> Callable[[Tensor], Tensor]:
    """Return a function from ids to the loss: one graph, or one of layers and one of the loss."""
    if backend == "eager":
        return lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss
    if regions == "model":
        prepare_checkpointing(model)
        run: Any = torch.compile(model, backend=backend, fullgraph=True)
        return lambda ids: run(input_ids=ids, labels=ids, use_cache=False).loss
    inductor_q.compile(model, regions="layers")
    base = model.get_base_model()

    def loss(hidden: Tensor, ids: Tensor) -> Tensor:
        made: Tensor = base.loss_function(base.lm_head(hidden), ids, base.config.vocab_size)
        return made

    chunked: dict[str, Any] = {"qfuse.loss": "chunked"}
    head: Any = torch.compile(loss, backend=backend, fullgraph=True, options=chunked)
    return lambda ids: head(base.model(input_ids=ids, use_cache=False).last_hidden_state, ids)


def train(model: Any, data: Tensor, steps: int, loss_of_ids: Callable[..., Any]) -> dict[str, Any]:
    """Return losses, and the median time of a step without the first two, which compile."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # Fused, it makes nothing of the size of the adapters but its states.
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    losses, times = [], []
    measured = contextlib.ExitStack()
    for step in range(steps):
        if step == 2:  # all is compiled
            measured.enter_context(alone())
        start = time.perf_counter()
        loss = loss_of_ids(data[step % len(data)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))  # waits for the device
        times.append(time.perf_counter() - start)
        print(f"step {step}: loss {losses[-1]:.3f}, {times[-1]:.3f} s", flush=True)
    measured.close()
    seconds = sorted(times[2:] or times)[len(times[2:] or times) // 2]
    return {
        "loss": losses,
        "step_ms": 1e3 * seconds,
        "tokens_per_s": data[0].numel() / seconds,
        "trained_parameters": sum(p.numel() for p in trained),
        "first_step_s": times[0],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sizes = ["toy", "gpt-oss-toy", "qwen3-30b-a3b", "gpt-oss-20b"]
    parser.add_argument("--size", choices=sizes, default="toy")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--format", help="of the experts (default: as shipped, or nf4_b64)")
    parser.add_argument("--attention", help='"nf4", or "16-bit" to leave it as it is')
    parser.add_argument("--adapters", choices=ADAPTERS, help="their dtype")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction)
    parser.add_argument("--regions", choices=["model", "layers"], help="what a graph has")
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--length", type=int, help="tokens a sequence")
    parser.add_argument("--backend", default="qfuse", help='"eager" compiles nothing')
    parser.add_argument("--memory", type=float, help="gigabytes of the GPU that it may take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, help="folder for the adapter, in PEFT's format")
    parser.add_argument("--json", type=Path, help="file for the figures, and where they come from")
    args = parser.parse_args(argv)
    commit = origin.commit()
    if args.json:
        origin.require(commit, args.json.name)
    toy, device = args.size.endswith("toy"), torch.device(args.device)
    small = args.memory is not None
    settings: dict[str, Any] = {
        "format": args.format or ("mxfp4" if "gpt-oss" in args.size else "nf4_b64"),
        "attention": args.attention or ("nf4" if small else "16-bit"),
        "adapters": args.adapters or ("bf16" if small else "fp32"),
        "checkpointing": small if args.checkpointing is None else args.checkpointing,
        "regions": args.regions or ("layers" if small else "model"),
        "rank": args.rank or (4 if toy else 16),
        "batch": args.batch or (4 if small and not toy else 2),
        "length": args.length or (32 if toy else 512 if small else 1024),
        "backend": args.backend,
    }
    if small and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1e9 * args.memory / whole)  # of this device
        settings["memory_gb"] = args.memory
    torch.manual_seed(0)
    config = configuration(args.size)
    if args.layers:
        config.num_hidden_layers = settings["layers"] = args.layers
    start = time.perf_counter()
    model = build(
        config,
        settings["format"],
        settings["rank"],
        device,
        torch.float32 if device.type == "cpu" else torch.bfloat16,
        attention=None if settings["attention"] == "16-bit" else settings["attention"],
        adapters=ADAPTERS[settings["adapters"]],
    )
    data = batches(config.vocab_size, settings["batch"], settings["length"], device)
    if settings["checkpointing"]:
        model.gradient_checkpointing_enable()
    result: dict[str, Any] = {
        "example": "examples.moe_qlora",
        "size": args.size,
        **settings,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "build_s": time.perf_counter() - start,
    }
    if device.type == "cuda":
        result["static_gb"] = torch.cuda.memory_allocated() / 1e9
        print(f"{result['static_gb']:.2f} GB, built in {result['build_s']:.1f} s", flush=True)
        torch.cuda.reset_peak_memory_stats()
    result |= train(model, data, args.steps, loss_of(model, args.backend, settings["regions"]))
    if device.type == "cuda":
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        result["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    print(f"loss {result['loss'][0]:.3f} -> {result['loss'][-1]:.3f}")
    print(f"{result['step_ms']:.1f} ms a step, {result['tokens_per_s']:.0f} tokens/s")
    if "peak_gb" in result:
        print(f"peak {result['peak_gb']:.2f} GB, {result['reserved_gb']:.2f} GB reserved")
    if args.save:
        experts.save_adapter(model, args.save)
    if args.json:
        result |= {"machine": place.machine(device), "versions": place.versions()}
        origin.write(result | {"commit": commit}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
