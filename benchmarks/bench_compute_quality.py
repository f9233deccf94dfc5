"""Measure what products in eight bits cost in quality: losses, held-out loss, adapters' gradients.

A small Qwen3 learns a book byte by byte, from nothing. It is quantized to NF4 with bitsandbytes,
and LoRA on every projection learns this repository's documents: in eager mode, with qfuse in bf16,
and with `qfuse.compute="fp8"`, under three seeds for the adapters and the batches. All variants of
a seed have the same batches and the same start. Afterwards all are judged in eager mode, on the end
of each document, which nobody trained on; and each variant computes the adapters' gradients from
one state on the same batches, whose cosines with those of eager mode are listed by layer and by
product. On a CPU products in FP8 are emulated: the casts are real, the time is not.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import inductor_q
from benchmarks import harness, origin
from benchmarks.byte_models import (
    SIZES,
    Step,
    Texts,
    draw_batches,
    loss_of,
    train,
    train_base,
    windows,
)
from inductor_q import testing

NAME = "bench_compute_quality"
#: By device: sizes, steps for the base, steps for the adapters.
DEFAULTS = {"cpu": (["cpu"], 300, 60), "cuda": (["small", "medium", "large"], 800, 500)}

REFERENCE = "eager"
#: What `torch.compile` is called with; None is eager mode.
VARIANTS: dict[str, dict[str, Any] | None] = {
    REFERENCE: None,
    "bf16": {},
    "fp8": {"qfuse.compute": "fp8"},
    "int8": {"qfuse.compute": "int8"},
}
POINTS = 50  # of a loss curve: each is a mean of neighbouring steps
GRADIENT_BATCHES = 4
BAR = 0.005  # of held-out loss, beside qfuse in bf16

Gradients = list[dict[str, Tensor]]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = _arguments(argv)
    device = torch.device(arguments.device)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    commit = origin.commit()
    path: Path = arguments.out or (
        harness.RESULTS / f"compute_quality-{harness.device_slug(device)}.json"
    )
    origin.require(commit, path.name)
    texts = Texts.read()
    began = time.perf_counter()
    result: dict[str, Any] = {
        **harness.heading(NAME, device, commit),
        "settings": {
            "base_steps": arguments.base_steps,
            "steps": arguments.steps,
            "seeds": arguments.seeds,
            "rank": arguments.rank,
            "learning_rate": arguments.learning_rate,
            "bar": BAR,
        },
        "texts": texts.as_dict(),
        "models": [],
    }
    for size in arguments.sizes:
        found = model(size, texts, arguments, device)
        result["models"].append(found)
        harness.console.print(_table(found))
    result["seconds"] = time.perf_counter() - began
    harness.console.print(f"wrote {origin.write(result, path)} after {result['seconds']:.0f} s")
    return result


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda (default: what is there)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: what suits the device")
    parser.add_argument("--base-steps", type=int, help="steps to train the base")
    parser.add_argument("--steps", type=int, help="fine-tuning steps of a variant and seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["eager", "bf16", "fp8"])
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/)")
    arguments = parser.parse_args(argv)
    sizes, base_steps, steps = DEFAULTS[torch.device(arguments.device).type]
    arguments.sizes = arguments.sizes or sizes
    arguments.base_steps = arguments.base_steps or base_steps
    arguments.steps = arguments.steps or steps
    arguments.variants = list(dict.fromkeys([REFERENCE, *arguments.variants]))
    return arguments


# --- a model of one size ----------------------------------------------------------------


def model(
    name: str, texts: Texts, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Train a base of one size, then its adapters in every variant under every seed."""
    size = SIZES[name]
    draw = functools.partial(draw_batches, size=size, device=device)
    base, losses = train_base(size, draw(texts.book, arguments.base_steps, seed=1), name)
    held_out = windows(texts.held_out_documents, size, device)
    whole = {
        "book": _held_out_loss(base, windows(texts.held_out_book, size, device)),
        "documents": _held_out_loss(base, held_out),
    }
    parameters = sum(parameter.numel() for parameter in base.parameters())
    adapted = testing.qlora_model(size.config(), base=base, r=arguments.rank, device=device)
    before = _held_out_loss(adapted, held_out)
    probes = draw(texts.documents, GRADIENT_BATCHES, seed=1000)
    trained: list[Tensor] = []
    gradients: dict[str, Gradients] = {}
    runs = []
    for variant in arguments.variants:
        step, share = _compile(adapted, variant)
        for seed in range(arguments.seeds):
            data = draw(texts.documents, arguments.steps, seed=seed)
            _start_adapters(adapted, seed)
            label = f"{name}, {variant}, seed {seed}"
            curve, seconds = _fine_tune(step, adapted, data, arguments.learning_rate, label)
            if variant == REFERENCE and seed == 0:
                trained = testing.adapter_state(adapted)
            runs.append(
                {
                    "variant": variant,
                    "seed": seed,
                    "held_out": _held_out_loss(adapted, held_out),
                    "curve": _thinned(curve),
                    "seconds": seconds,
                }
            )
        testing.load_adapter_state(adapted, trained)
        gradients[variant] = [_gradients(step, adapted, ids) for ids in probes]
        for run in runs:
            if run["variant"] == variant:
                run["in_eight_bits"] = share()
    return {
        "size": name,
        "shape": vars(size) | {"parameters": parameters},
        "base": {"curve": _thinned(losses), "held_out": whole},
        "quantized": before,
        "runs": runs,
        "cosines": {
            variant: _cosines(gradients[REFERENCE], found)
            for variant, found in gradients.items()
            if variant != REFERENCE
        },
        "held_out": _compared(runs),
    }


def _compile(adapted: Any, variant: str) -> tuple[Step, Callable[[], list[int] | None]]:
    """Return the step of a variant, and what says how many of its products are in eight bits."""
    options = VARIANTS[variant]
    if options is None:
        return loss_of(adapted), lambda: None
    torch.compiler.reset()
    # Batches are small here, and the question is not what pays.
    every = dict.fromkeys(("quantize_products.min_rows", "quantize_products.min_elements"), 1)
    options = {**options, "qfuse.thresholds": every}
    compiled = torch.compile(
        adapted, backend=testing.qfuse_backend(), options=options, dynamic=False
    )

    def share() -> list[int] | None:
        report = inductor_q.last_report()
        assert report is not None
        return list(report.in_eight_bits())

    return loss_of(compiled), share


def _start_adapters(adapted: nn.Module, seed: int) -> None:
    """Give the adapters the values that PEFT starts with, of a seed."""
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and ".lora_A." in name:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        elif parameter.requires_grad:
            nn.init.zeros_(parameter)


def _fine_tune(
    step: Step, adapted: nn.Module, data: Sequence[Tensor], rate: float, label: str
) -> tuple[list[float], float]:
    return train(step, testing.adapter_parameters(adapted), data, rate, label)


@torch.no_grad()
def _held_out_loss(judged: nn.Module, windows: Tensor) -> float:
    """Return the loss in eager mode, whichever way the model was trained."""
    step = loss_of(judged)
    parts = [(step(part), len(part)) for part in windows.split(16)]
    return float(sum(loss.double() * count for loss, count in parts) / len(windows))


# --- gradients of one state -------------------------------------------------------------


def _gradients(step: Step, adapted: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    step(ids).backward()
    found = {}
    for name, parameter in adapted.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.double().cpu()
            parameter.grad = None
    return found


def _cosines(expected: Gradients, actual: Gradients) -> dict[str, Any]:
    """Return the cosine of the gradients of each layer's adapters, and of each kind of product's;
    means over the batches, and the least of any layer's product and batch."""
    layers: dict[str, list[float]] = defaultdict(list)
    products: dict[str, list[float]] = defaultdict(list)
    least = 1.0
    for one, other in zip(expected, actual, strict=True):
        of_layer, of_product = defaultdict(list), defaultdict(list)
        for name in one:
            layer, product = _place(name)
            of_layer[layer].append(name)
            of_product[product].append(name)
            least = min(least, _cosine(one, other, [name]))
        for found, names in ((layers, of_layer), (products, of_product)):
            for key, members in names.items():
                found[key].append(_cosine(one, other, members))
    return {
        "by_layer": {key: statistics.fmean(values) for key, values in layers.items()},
        "by_product": {key: statistics.fmean(values) for key, values in products.items()},
        "least_of_a_matrix": least,
    }


def _place(name: str) -> tuple[str, str]:
    found = re.search(r"\.layers\.(\d+)\.(?:.*\.)?(\w+)\.lora_", name)
    assert found is not None, f"{name=} is no adapter's"
    return found[1], found[2]


def _cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str]) -> float:
    a = torch.cat([one[name].flatten() for name in names])
    b = torch.cat([other[name].flatten() for name in names])
    return float(a @ b / (a.norm() * b.norm()))


# --- what is shown ----------------------------------------------------------------------


def _thinned(losses: Sequence[float]) -> list[float]:
    """Return a curve of so many points, each the mean of neighbouring steps."""
    width = max(1, len(losses) // POINTS)
    parts = [losses[i : i + width] for i in range(0, len(losses), width)]
    return [round(statistics.fmean(part), 5) for part in parts]


def _compared(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return held-out losses by variant: the mean over seeds, their spread, and how far each seed's
    is from that of qfuse in bf16 (of eager, without it)."""
    by_variant: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_variant[run["variant"]].append(run["held_out"])
    base = by_variant.get("bf16", by_variant[REFERENCE])
    found = {}
    for variant, losses in by_variant.items():
        apart = [loss / other - 1 for loss, other in zip(losses, base, strict=True)]
        found[variant] = {
            "mean": statistics.fmean(losses),
            "spread": max(losses) - min(losses),
            "relative": statistics.fmean(apart),
            "farthest": max(apart, key=abs),
        }
    return found


def _table(found: Mapping[str, Any]) -> Table:
    shape = found["shape"]
    table = Table(
        title=f"{found['size']}: {shape['parameters'] / 1e6:.1f} M parameters; held-out loss "
        f"{found['base']['held_out']['book']:.3f} of the book, {found['quantized']:.3f} of the "
        "documents before fine-tuning",
        title_justify="left",
    )
    table.add_column("variant")
    for header in (
        "in eight bits",
        "last losses",
        "held-out loss",
        "of bf16's",
        "farthest seed",
        "gradient cosine, least layer",
        "least product",
        "seconds",
    ):
        table.add_column(header, justify="right")
    for variant, held_out in found["held_out"].items():
        runs = [run for run in found["runs"] if run["variant"] == variant]
        cosines = found["cosines"].get(variant)
        share = runs[0]["in_eight_bits"]
        table.add_row(
            variant,
            f"{share[0]} of {share[1]}" if share else "",
            f"{statistics.fmean(run['curve'][-1] for run in runs):.4f}",
            f"{held_out['mean']:.4f}",
            f"{held_out['relative']:+.3%}",
            f"{held_out['farthest']:+.3%}",
            f"{min(cosines['by_layer'].values()):.5f}" if cosines else "",
            f"{min(cosines['by_product'].values()):.5f}" if cosines else "",
            f"{sum(run['seconds'] for run in runs):.1f}",
        )
    return table


if __name__ == "__main__":
    main()
