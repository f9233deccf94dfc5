"""Fine-tune a mixture of experts: packed experts, LoRA on attention and on every expert, one graph.

The weights are random, from a configuration, and packed a projection at a time, so a model of 30
billion parameters never exists in 16 bits. It learns the text that ships with this repository for a
few steps, and prints the loss, the time of a step, tokens per second and the peak of memory.

    python -m examples.moe_qlora                      # a toy, on a CPU too
    python -m examples.moe_qlora --size qwen3-30b-a3b # one GPU of 80 GB
    python -m examples.moe_qlora --size gpt-oss-20b --format mxfp4 --steps 20 --json out.json

With `--format mxfp4` experts lie as gpt-oss ships them; `inductor_q.load_checkpoint` has its own.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import origin, place
from inductor_q import experts
from inductor_q.experts.modules import expert_layers, projections, put_stack
from inductor_q.kbit import meta_parameters

TEXT = Path(__file__).parent / "data" / "harbour.txt"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def configuration(size: str) -> Any:
    """Make the model's configuration, of transformers."""
    import transformers

    known: Any = transformers  # its types lack fields that configurations have
    if size == "gpt-oss-20b":
        return known.GptOssConfig(num_local_experts=32, num_hidden_layers=24)
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
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )


def build(size: str, format: str, r: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Build the model with packed experts, and LoRA on attention and experts."""
    import peft
    import transformers

    def values(name: str, parameter: nn.Parameter) -> Tensor:
        """Return random weights of a size that keeps activations about as large as they are."""
        fan_in = parameter.shape[-1]
        return torch.randn(parameter.shape, device=device, dtype=dtype) / math.sqrt(fan_in)

    with meta_parameters():
        auto: Any = transformers.AutoModelForCausalLM
        model: Any = auto.from_config(configuration(size), dtype=dtype)
    if format == "mxfp4":
        pack_as_shipped(model, device)
    else:
        experts.quantize(model, format, weights=values)
    for name, parameter in list(model.named_parameters()):
        parent, _, leaf = name.rpartition(".")
        norm = "norm" in name
        new = torch.ones_like(parameter, device=device) if norm else values(name, parameter)
        setattr(model.get_submodule(parent), leaf, nn.Parameter(new, requires_grad=False))
    model.tie_weights()
    model.to(device)
    config = peft.LoraConfig(r=r, lora_alpha=2 * r, target_modules=ATTENTION)
    model = peft.get_peft_model(model, config)
    experts.add_lora(model, r=r, alpha=2 * r)
    return model


def pack_as_shipped(model: Any, device: torch.device) -> None:
    """Give every projection random codes in MXFP4, which are [experts, out, in]."""
    for layer in expert_layers(model).values():
        for name in projections(layer):
            shape = list(getattr(layer, name).shape)
            if layer.is_transposed:
                shape[1:] = shape[:0:-1]
            codes = torch.randint(256, (math.prod(shape) // 2,), dtype=torch.uint8, device=device)
            scale = 127 - round(math.log2(3 * math.sqrt(shape[2])))  # 3: the numbers' deviation
            scales = torch.full((math.prod(shape) // 32,), scale, dtype=torch.uint8, device=device)
            operands = {"qweight": codes, "scale": scales}
            put_stack(layer, name, operands, "mxfp4", shape, transposed=False)
    experts.use_qfuse(model)


def batches(vocabulary: int, batch: int, length: int, device: torch.device) -> Tensor:
    """Return the text's bytes as [n, batch, length]."""
    text = torch.tensor(list(TEXT.read_bytes()), device=device) % vocabulary
    need = batch * length
    repeated = text.repeat(max(1, -(-need // text.numel())))
    return repeated[: repeated.numel() // need * need].view(-1, batch, length)


def train(model: Any, data: Tensor, steps: int, backend: str) -> dict[str, Any]:
    """Return losses, and the median time of a step without the first two, which compile."""
    run = model if backend == "eager" else torch.compile(model, backend=backend, fullgraph=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses, times = [], []
    for step in range(steps):
        ids = data[step % len(data)]
        start = time.perf_counter()
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))  # waits for the device
        times.append(time.perf_counter() - start)
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
    parser.add_argument("--size", choices=["toy", "qwen3-30b-a3b", "gpt-oss-20b"], default="toy")
    parser.add_argument("--format", default="nf4_b64", help="of the experts")
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=None, help="tokens a sequence")
    parser.add_argument("--backend", default="qfuse", help='"eager" compiles nothing')
    parser.add_argument("--memory", type=float, help="gigabytes of the GPU that it may take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, help="folder for the adapter, in PEFT's format")
    parser.add_argument("--json", type=Path, help="file for the figures, and where they come from")
    args = parser.parse_args(argv)
    commit = origin.commit()
    if args.json:
        origin.require(commit, args.json.name)
    toy, device = args.size == "toy", torch.device(args.device)
    if args.memory:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1e9 * args.memory / whole, device)
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rank = args.rank or (4 if toy else 16)
    model: Any = build(args.size, args.format, rank, device, dtype)
    length = args.length or (32 if toy else 1024)
    data = batches(model.config.vocab_size, args.batch, length, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any] = {
        "example": "examples.moe_qlora",
        "size": args.size,
        "format": args.format,
        "rank": rank,
        "batch": args.batch,
        "length": length,
        "backend": args.backend,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    result |= train(model, data, args.steps, args.backend)
    if device.type == "cuda":
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    print(f"loss {result['loss'][0]:.3f} -> {result['loss'][-1]:.3f}")
    print(f"{result['step_ms']:.1f} ms a step, {result['tokens_per_s']:.0f} tokens/s")
    if "peak_gb" in result:
        print(f"peak {result['peak_gb']:.2f} GB")
    if args.save:
        experts.save_adapter(model, args.save)
    if args.json:
        result |= {"machine": place.machine(device), "versions": place.versions()}
        origin.write(result | {"commit": commit}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
