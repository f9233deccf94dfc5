"""Measure what k-bit weights cost in quality: of normal numbers, and of a small language model.

The first table has bits per element and signal to quantization noise for normally distributed
numbers, the second the rounding of E4M4 scales. Then the demo's model learns the first half of the
demo's text, is quantized in each format, and is fine-tuned with LoRA, compiled with qfuse, on the
next third. The last table has the loss on the rest, which nobody trained on, before and after. All
have the same seed, batches and initial adapters.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from benchmarks import harness, origin, plots
from examples.finetune import TEXT, Size
from inductor_q import kbit, testing
from inductor_q.formats.kbit import KBIT_SCALES, KBITS
from inductor_q.loading.layers import linear_layers, replace_layers

NAME = "bench_kbit_quality"
BF16 = torch.bfloat16
SIZES = {
    "tiny": Size(64, 128, 1, 4, 2, 2, 32),
    "cpu": Size(128, 384, 2, 4, 2, 8, 128),
    "cuda": Size(512, 1536, 6, 8, 4, 16, 256, base_learning_rate=1e-3),
}
#: Shares of the text: for the base, for the adapters; the rest is held out.
SPLITS = (0.5, 0.85)

Quantize = Callable[[nn.Module], nn.Module]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = _arguments(argv)
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    commit = origin.commit()
    origin.require(commit, _path(arguments, device).name)
    result: dict[str, Any] = {
        **harness.heading(NAME, device, commit),
        "numbers": numbers(arguments.numel, device),
        "scales": scales(arguments.numel, device),
        "model": model(arguments, device),
    }
    for table in (_numbers_table(result["numbers"]), _model_table(result["model"])):
        harness.console.print(table)
    errors = ", ".join(f"{key} {value:.2%}" for key, value in result["scales"].items())
    harness.console.print(f"E4M4 scales, relative error: {errors}", highlight=False)
    path = origin.write(result, _path(arguments, device))
    harness.console.print(f"wrote {path}")
    if picture := plots.draw(result, path.with_suffix(".png")):
        harness.console.print(f"wrote {picture}")
    return result


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, help="default: what suits the device")
    parser.add_argument("--numel", type=int, default=1 << 20, help="normal numbers to quantize")
    parser.add_argument("--base-steps", type=int, default=150, help="steps to train the base")
    parser.add_argument("--steps", type=int, default=40, help="fine-tuning steps a format")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of the adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--formats", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/)")
    return parser.parse_args(argv)


# --- numbers ----------------------------------------------------------------------------


def numbers(numel: int, device: torch.device) -> list[dict[str, Any]]:
    """Return bits per element and SQNR in dB of every format, over normals of deviation 0.02."""
    x = torch.randn(numel, device=device) * 0.02
    rows = []
    for k in KBITS:
        for absmax in KBIT_SCALES:
            quantized = kbit.quantize(x, k, absmax=absmax)
            back = kbit.dequantize(quantized)
            rows.append(_row(quantized.format, quantized.bits_per_element, x, back))
    functional = testing.bitsandbytes().functional
    for nested in (False, True):
        packed, state = functional.quantize_4bit(
            x, blocksize=64, quant_type="nf4", compress_statistics=nested
        )
        nbytes = packed.nbytes + state.absmax.nbytes
        nbytes += state.state2.absmax.nbytes if nested else 0
        name = "nf4_b64" + ("_nested" if nested else "")
        rows.append(
            _row(name, 8 * nbytes / numel, x, functional.dequantize_4bit(packed, state).reshape(-1))
        )
    return rows


def _row(name: str, bits: float, x: Tensor, back: Tensor) -> dict[str, Any]:
    error = (x - back).double()
    return {
        "format": name,
        "bits_per_element": bits,
        "smaller_than_bf16": 16 / bits,
        "sqnr_db": float(10 * torch.log10(x.double().square().sum() / error.square().sum())),
        "max_error_of_absmax": float(
            (error.reshape(-1, 32).abs() / x.reshape(-1, 32).abs().amax(1, keepdim=True)).max()
        ),
    }


def scales(numel: int, device: torch.device) -> dict[str, float]:
    """Return the relative error of E4M4 over its normal range, evenly in the logarithm."""
    octaves = math.log2(31.0) + 10
    absmax = (torch.rand(numel, device=device) * octaves - 10).exp2()
    relative = (kbit.decode_absmax_e4m4(kbit.encode_absmax_e4m4(absmax)) / absmax - 1).abs()
    ordered = relative.sort().values
    return {
        "mean": float(relative.mean()),
        "p95": float(ordered[int(0.95 * (numel - 1))]),
        "max": float(ordered[-1]),
    }


# --- a model ----------------------------------------------------------------------------


def _nf4(base: nn.Module) -> nn.Module:
    layers = {
        name: testing.quantized_linear(layer.weight, nested=False)
        for name, layer in linear_layers(base, ["lm_head"]).items()
    }
    base.is_loaded_in_4bit = True  # type: ignore[assignment]  # PEFT chooses its layers by it
    return replace_layers(base, layers)


def _in_bits(k: int | None = None, bits: float | None = None) -> Quantize:
    return lambda base: kbit.quantize_model(base, k, bits=bits, progress=False)


VARIANTS: dict[str, Quantize] = {
    "bf16": lambda base: base,
    "nf4_b64": _nf4,
    **{f"kbit{k}_e4m4": _in_bits(k) for k in KBITS},
    "3.5 bits": _in_bits(bits=3.5),
}


def model(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    size = SIZES[arguments.size or device.type]
    text, tokenizer = TEXT.read_text(encoding="utf-8"), testing.ByteTokenizer()
    first, second = (int(share * len(text)) for share in SPLITS)
    ids = torch.tensor(tokenizer.encode(text[second:]), device=device)
    count = len(ids) // size.seq_len
    held_out = ids[: count * size.seq_len].view(count, size.seq_len)

    def batches(part: str, steps: int, seed: int) -> list[Tensor]:
        drawn = testing.batches(
            part,
            tokenizer,
            batch_size=size.batch_size,
            seq_len=size.seq_len,
            steps=steps,
            seed=seed,
            device=device,
        )
        return list(drawn)

    base = _train_base(size, batches(text[:first], arguments.base_steps, 1), device)
    data = batches(text[first:second], arguments.steps, 2)
    rows = []
    for name in arguments.formats:
        quantized = VARIANTS[name](copy.deepcopy(base).to(BF16).requires_grad_(False))
        bits = _bits(quantized)
        before = _loss(quantized, held_out)
        losses, after = _fine_tune(quantized, data, held_out, arguments, name)
        rows.append(
            {
                "format": name,
                "bits_per_element": bits,
                "before": before,
                "after": after,
                "fine_tuning": losses,
            }
        )
    settings = {
        "size": arguments.size or device.type,
        "base_steps": arguments.base_steps,
        "steps": arguments.steps,
        "learning_rate": arguments.learning_rate,
        "rank": arguments.rank,
        "seed": arguments.seed,
        "held_out_tokens": held_out.numel(),
    }
    return {"settings": settings, "rows": rows}


def _train_base(size: Size, data: Sequence[Tensor], device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from_config: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        base = from_config(size.config(), dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(base.parameters(), lr=size.base_learning_rate)
    for ids in track(data, "training a base model", console=harness.console):
        base(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained: nn.Module = base
    return trained


def _bits(quantized: nn.Module) -> float:
    """Return the bits per element of the projections, scales included."""
    nbytes, numel = 0, 0
    for name, layer in quantized.named_modules():
        if not isinstance(layer, nn.Linear) or name == "lm_head":
            continue
        numel += layer.in_features * layer.out_features
        if isinstance(layer, kbit.KBitLinear):
            nbytes += layer.kbit_weight.nbytes
        else:
            state = getattr(layer.weight, "quant_state", None)
            nbytes += layer.weight.nbytes + (0 if state is None else state.absmax.nbytes)
    return 8 * nbytes / numel


@torch.no_grad()
def _loss(tested: Any, held_out: Tensor) -> float:
    tested.eval()
    value = float(tested(input_ids=held_out, labels=held_out).loss)
    tested.train()
    return value


def _fine_tune(
    base: nn.Module,
    data: Sequence[Tensor],
    held_out: Tensor,
    arguments: argparse.Namespace,
    name: str,
) -> tuple[list[float], float]:
    """Train LoRA on every projection, compiled with qfuse; return the losses, the held-out one
    last.
    """
    import peft

    torch.manual_seed(arguments.seed)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=arguments.rank,
        lora_alpha=2 * arguments.rank,
        target_modules=list(testing.PROJECTIONS),
    )
    adapted: Any = peft.get_peft_model(base, config)
    parameters = testing.adapter_parameters(adapted)
    for parameter in parameters:
        parameter.data = parameter.data.to(BF16)
    torch.compiler.reset()
    compiled: Any = torch.compile(adapted, backend=testing.qfuse_backend(), dynamic=False)
    optimizer = torch.optim.AdamW(parameters, lr=arguments.learning_rate)
    losses = []
    for ids in track(data, f"fine-tuning {name}", console=harness.console):
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, _loss(adapted, held_out)


# --- what is shown ----------------------------------------------------------------------


def _numbers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Normal numbers", title_justify="left")
    table.add_column("format")
    for header in ("bits / element", "smaller than bf16", "SQNR", "largest error / absmax"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row["format"],
            f"{row['bits_per_element']:.3f}",
            f"{row['smaller_than_bf16']:.1f}x",
            f"{row['sqnr_db']:.2f} dB",
            f"{row['max_error_of_absmax']:.3f}",
        )
    return table


def _model_table(result: Mapping[str, Any]) -> Table:
    table = Table(title="Loss on held-out text", title_justify="left")
    table.add_column("projections in")
    for header in ("bits / element", "quantized", "after LoRA fine-tuning"):
        table.add_column(header, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["format"],
            f"{row['bits_per_element']:.2f}",
            f"{row['before']:.4f}",
            f"{row['after']:.4f}",
        )
    return table


def _path(arguments: argparse.Namespace, device: torch.device) -> Path:
    path: Path | None = arguments.out
    return path or harness.RESULTS / f"kbit-quality-{harness.device_slug(device)}.json"


if __name__ == "__main__":
    main()
