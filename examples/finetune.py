"""Fine-tune a small QLoRA model three times: eager, stock Inductor and qfuse.

A small Qwen3 learns the first half of a text that ships with this repository. It is then quantized
to NF4 with bitsandbytes, PEFT adds LoRA to every projection, and the adapters learn the second
half: the same seed, the same batches, step by step in turn under each backend. The table at the end
shows that the losses agree and what each backend took; below it stands what qfuse fused and why,
and a few words that the trained adapter has to say.

    python -m examples.finetune            # the GPU where there is one, else the CPU
    python -m examples.finetune --steps 20 --backends eager qfuse
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inductor_q import testing
from inductor_q.kernels.wide import slow_dtypes

TEXT = Path(__file__).parent / "data" / "harbour.txt"
BACKENDS = ("eager", "inductor", "qfuse")
LEARNING_RATE = 1e-3
# Relative distance of two loss curves that bf16 rounding explains at these sizes.
TOLERANCE = 0.02

console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Size:
    """Hold sizes at which the device is done in a few minutes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    batch_size: int
    seq_len: int
    base_learning_rate: float = 2e-3

    def config(self) -> Any:
        training = ("batch_size", "seq_len", "base_learning_rate")
        shape = {key: value for key, value in asdict(self).items() if key not in training}
        return testing.tiny_qwen3_config(
            **shape,
            head_dim=64,
            vocab_size=testing.ByteTokenizer.vocab_size,
            max_position_embeddings=2048,
        )


SIZES = {
    "tiny": Size(64, 128, 1, 4, 2, 2, 32),
    "cpu": Size(256, 768, 4, 4, 2, 8, 128),
    "cpu-small": Size(256, 768, 2, 4, 2, 2, 32),
    "cuda": Size(1024, 3072, 8, 16, 8, 8, 512, base_learning_rate=5e-4),
}


@dataclass
class Run:
    """Hold one backend's fine-tuning, as it goes along."""

    backend: str
    model: Any
    step: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: int | None = None

    @property
    def step_seconds(self) -> float:
        """Return the median without the first two: the first compiles, the second may allocate."""
        return statistics.median(self.seconds[2:] or self.seconds)

    @property
    def compile_seconds(self) -> float:
        return max(0.0, self.seconds[0] - self.step_seconds)

    def summary(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "losses": self.losses,
            "step_seconds": self.step_seconds,
            "compile_seconds": self.compile_seconds,
            "memory_bytes": self.memory,
        }


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    _quiet()
    device = torch.device(arguments.device)
    size = SIZES[arguments.size or _size(device)]
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = testing.ByteTokenizer()
    first, second = text[: len(text) // 2], text[len(text) // 2 :]
    console.print(
        f"[bold]qfuse demo[/bold] on {_device_name(device)}, torch {torch.__version__}: "
        f"{size.num_hidden_layers} layers x {size.hidden_size}, "
        f"batches of {size.batch_size} x {size.seq_len} tokens"
    )

    progress = Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    )
    with progress:
        base = _train_base(arguments, size, first, tokenizer, device, progress)
        runs = [_prepare(name, base, size, arguments, device) for name in _usable(arguments)]
        data = list(
            testing.batches(
                second,
                tokenizer,
                batch_size=size.batch_size,
                seq_len=size.seq_len,
                steps=arguments.steps,
                seed=arguments.seed,
                device=device,
            )
        )
        _fine_tune(runs, data, device, progress)
    for run in runs:
        run.memory = _memory(run, data[0], device)

    console.print(_table(runs, device))
    report = _print_report() if any(run.backend == "qfuse" for run in runs) else None
    sample = _generate(runs[-1], tokenizer, arguments, device)
    console.print(f"\n[bold]The adapter trained with {runs[-1].backend} writes:[/bold]")
    console.print(sample, markup=False, highlight=False)
    deviation = max(_deviation(run, runs[0]) for run in runs)
    if arguments.json is not None:
        result = {
            "runs": [run.summary() for run in runs],
            "deviation": deviation,
            "report": report,
            "sample": sample,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if deviation > TOLERANCE:
        console.print(f"[red]The losses differ by {deviation:.2%}, more than {TOLERANCE:.0%}.")
        return 1
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="finetune", description="Fine-tune a small QLoRA model: eager, stock Inductor, qfuse."
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--steps", type=int, default=60, help="fine-tuning steps a backend")
    parser.add_argument("--base-steps", type=int, default=250, help="steps to train the base")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapter-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--size", choices=SIZES, help="default: what suits the device")
    parser.add_argument("--tokens", type=int, default=160, help="tokens to generate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args(argv)


def _quiet() -> None:
    """Silence what the libraries log about optional parts that nothing here uses."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Failed to load CPU gemm_4bit_forward")
    for name in ("torchao", "torch.utils._pytree", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _usable(arguments: argparse.Namespace) -> list[str]:
    names = list(arguments.backends)
    if "qfuse" in names:
        try:
            testing.qfuse_backend()
        except ImportError as error:
            console.print(f"[yellow]without qfuse: {error}")
            names.remove("qfuse")
    if not names:
        sys.exit("no backend to run")
    return names


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"


# --- the four stages ------------------------------------------------------------------


def _size(device: torch.device) -> str:
    """Return the name of the sizes for a device: a CPU may be slow in bfloat16, in eager mode and
    under Inductor."""
    is_slow = device.type == "cpu" and torch.bfloat16 in slow_dtypes()
    return "cpu-small" if is_slow else device.type


def _train_base(
    arguments: argparse.Namespace,
    size: Size,
    text: str,
    tokenizer: testing.ByteTokenizer,
    device: torch.device,
    progress: Progress,
) -> torch.nn.Module:
    """Train a base worth fine-tuning: all parameters, fp32, on the first half of the text."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(arguments.seed)
    from_config: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        model = from_config(size.config(), dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.base_learning_rate)
    task = progress.add_task("training a base model", total=arguments.base_steps, status="")
    for ids in testing.batches(
        text,
        tokenizer,
        batch_size=size.batch_size,
        seq_len=size.seq_len,
        steps=arguments.base_steps,
        seed=arguments.seed + 1,
        device=device,
    ):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.update(task, advance=1, status=f"loss {loss.item():.3f}")
    trained: torch.nn.Module = model
    return trained


def _prepare(
    backend: str,
    base: torch.nn.Module,
    size: Size,
    arguments: argparse.Namespace,
    device: torch.device,
) -> Run:
    model = testing.qlora_model(
        size.config(),
        base=copy.deepcopy(base),
        r=arguments.rank,
        adapter_dtype=torch.bfloat16 if arguments.adapter_dtype == "bf16" else None,
        device=device,
        seed=arguments.seed,
    )
    call = model
    if backend == "inductor":
        call = torch.compile(model, backend="inductor", dynamic=False)
    elif backend == "qfuse":
        # The only line a user adds: torch.compile(model, backend="qfuse").
        call = torch.compile(model, backend=testing.qfuse_backend(), dynamic=False)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = call(input_ids=ids, labels=ids).loss
        return loss

    parameters = testing.adapter_parameters(model)
    return Run(backend, model, step, torch.optim.AdamW(parameters, lr=LEARNING_RATE))


def _fine_tune(
    runs: Sequence[Run], data: Sequence[torch.Tensor], device: torch.device, progress: Progress
) -> None:
    """Let the backends take turns at each batch, so that a busy machine is busy for all of them."""
    tasks = {
        run.backend: progress.add_task(
            f"fine-tuning with {run.backend}", total=len(data), status=""
        )
        for run in runs
    }
    if any(run.backend != "eager" for run in runs):
        # The first compilation in a process costs more; no backend should be charged for that.
        torch.compile(torch.nn.functional.silu, dynamic=False)(torch.ones(8, device=device))
    for index, ids in enumerate(data):
        for run in runs:
            compiling = index == 0 and run.backend != "eager"
            if compiling:
                progress.update(tasks[run.backend], status="compiling")
                with testing.fresh_cache():
                    _step(run, ids, device)
            else:
                _step(run, ids, device)
            progress.update(tasks[run.backend], advance=1, status=f"loss {run.losses[-1]:.3f}")


def _step(run: Run, ids: torch.Tensor, device: torch.device) -> None:
    _synchronize(device)
    start = time.perf_counter()
    loss: Any = run.step(ids)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    _synchronize(device)
    run.seconds.append(time.perf_counter() - start)
    run.losses.append(float(loss.detach()))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(run: Run, ids: torch.Tensor, device: torch.device) -> int:
    """Measure the memory of a step.

    On a GPU this is the peak above what is held between steps, on a CPU the bytes saved for
    backward.
    """
    if device.type != "cuda":
        return testing.count_saved_bytes(lambda: run.step(ids), run.model).total
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    loss: Any = run.step(ids)
    loss.backward()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    run.model.zero_grad(set_to_none=True)
    return peak


def _generate(
    run: Run, tokenizer: testing.ByteTokenizer, arguments: argparse.Namespace, device: torch.device
) -> str:
    prompt = "In the morning "
    ids = torch.tensor([tokenizer.encode(prompt)], device=device)
    torch.manual_seed(arguments.seed)
    run.model.eval()
    out = run.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=arguments.tokens,
        do_sample=True,
        temperature=0.5,
        use_cache=True,
        pad_token_id=tokenizer.pad_id,
    )
    run.model.train()
    return tokenizer.decode(out[0])


# --- what is shown --------------------------------------------------------------------


def _deviation(run: Run, against: Run) -> float:
    pairs = zip(run.losses, against.losses, strict=True)
    return max(abs(one - other) / abs(other) for one, other in pairs)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw a curve in one line of text: each bar is the mean of one of ``width`` stretches."""
    width = min(width, len(values))
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    bars = "▁▂▃▄▅▆▇█"
    span = (high - low) or 1.0
    return "".join(bars[round((value - low) / span * (len(bars) - 1))] for value in means)


def _table(runs: Sequence[Run], device: torch.device) -> Table:
    # A GPU counts its memory. A CPU does not: there it is what the forward saves for the backward.
    memory = "peak of a step" if device.type == "cuda" else "for backward"
    table = Table(title="Fine-tuning, the same seed and batches", title_justify="left")
    table.add_column("backend", no_wrap=True)
    table.add_column("loss", no_wrap=True)
    for header in ("first", "last", "off eager", "step", "speed", memory, "compile"):
        table.add_column(header, justify="right", no_wrap=True)
    first = runs[0]
    for run in runs:
        table.add_row(
            run.backend,
            sparkline(run.losses),
            f"{run.losses[0]:.3f}",
            f"{run.losses[-1]:.3f}",
            f"{_deviation(run, runs[0]):.2%}" if run is not first else "",
            f"{run.step_seconds * 1e3:.1f} ms",
            f"{first.step_seconds / run.step_seconds:.2f}x",
            f"{(run.memory or 0) / 1e6:.1f} MB",
            f"{run.compile_seconds:.1f} s" if run.backend != "eager" else "",
        )
    return table


def _print_report() -> dict[str, Any] | None:
    """Print qfuse's own account of the last compile: what was fused by what, or why not."""
    import inductor_q

    report: Any = getattr(inductor_q, "last_report", lambda: None)()
    if report is None:
        console.print("qfuse left no report")
        return None
    console.print("\n[bold]What qfuse did[/bold]")
    console.print(report.summary(), highlight=False)
    sites = Table()
    for header in ("pass", "outcome", "sites", "not saved for backward"):
        sites.add_column(header, justify="left" if header in ("pass", "outcome") else "right")
    counts: Counter[tuple[str, str]] = Counter()
    saved: Counter[tuple[str, str]] = Counter()
    for site in report.sites:
        # Reasons name graph nodes; without their numbers, equal reasons count as one.
        reason = re.sub(r"\b([a-z_]+?)_\d+\b", r"\1", site.rejected or "")
        outcome = f"not applied: {reason}" if reason else str(site.provider or "done")
        counts[site.pass_name, outcome] += 1
        saved[site.pass_name, outcome] += site.bytes_saved or 0
    for key, count in counts.items():
        avoided = f"{saved[key] / 1e6:.1f} MB" if saved[key] else ""
        sites.add_row(*key, str(count), avoided)
    console.print(sites)
    return {"summary": report.summary(), "sites": len(report.sites)}


if __name__ == "__main__":
    sys.exit(main())
