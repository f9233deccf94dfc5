"""Small Qwen3 models that learn a book byte by byte, from nothing, and the texts around them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks import harness
from examples.finetune import Size
from inductor_q import testing

BOOK = Path(__file__).parent / "text" / "holmes.txt"
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/*.md")
TRAINED_SHARE = 0.85  # of each text; the rest is held out

SIZES = {
    "tiny": Size(64, 128, 1, 4, 2, 2, 32),
    "cpu": Size(128, 384, 2, 4, 2, 8, 128),
    "small": Size(256, 768, 4, 4, 2, 16, 256),
    "medium": Size(512, 1536, 4, 8, 4, 16, 256, base_learning_rate=1e-3),
    "large": Size(1024, 3072, 6, 16, 8, 16, 256, base_learning_rate=5e-4),
}

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Texts:
    """Hold the texts: what the base and the adapters learn, and what nobody does."""

    book: str
    documents: str
    held_out_book: str
    held_out_documents: str

    @classmethod
    def read(cls) -> Texts:
        book = BOOK.read_text(encoding="utf-8")
        paths = [p for pattern in DOCUMENTS for p in sorted(harness.ROOT.glob(pattern))]
        parts = [_split(path.read_text(encoding="utf-8")) for path in paths]
        known, held_out = ("\n".join(part) for part in zip(*parts, strict=True))
        return cls(_split(book)[0], known, _split(book)[1], held_out)

    def as_dict(self) -> dict[str, Any]:
        return {
            name: {
                "bytes": len(text.encode()),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            }
            for name, text in vars(self).items()
        }


def _split(text: str) -> tuple[str, str]:
    end = int(TRAINED_SHARE * len(text))
    return text[:end], text[end:]


def draw_batches(
    text: str, steps: int, *, seed: int, size: Size, device: torch.device
) -> list[Tensor]:
    tokenizer = testing.ByteTokenizer()
    sizes = {"batch_size": size.batch_size, "seq_len": size.seq_len, "steps": steps}
    return list(testing.batches(text, tokenizer, **sizes, seed=seed, device=device))


def windows(text: str, size: Size, device: torch.device) -> Tensor:
    """Cut a text into sequences; what is left at its end is dropped."""
    ids = torch.tensor(testing.ByteTokenizer().encode(text), device=device)
    count = len(ids) // size.seq_len
    return ids[: count * size.seq_len].view(count, size.seq_len)


def train_base(size: Size, data: Sequence[Tensor], name: str) -> tuple[nn.Module, list[float]]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    from_config: Any = AutoModelForCausalLM.from_config
    with data[0].device:
        base = from_config(size.config(), dtype=torch.float32, attn_implementation="sdpa")
    losses, _ = train(
        loss_of(base), [*base.parameters()], data, size.base_learning_rate, f"{name}, base"
    )
    return base.requires_grad_(False), losses


def loss_of(call: Any) -> Step:
    """Return the loss of a model's call, under autocast as trainers have it."""

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss: Tensor = call(input_ids=ids, labels=ids).loss
        return loss

    return step


def train(
    step: Step, parameters: Sequence[nn.Parameter], data: Sequence[Tensor], rate: float, label: str
) -> tuple[list[float], float]:
    """Train with a rate that falls to zero; return the losses and the seconds."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=data[0].is_cuda)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(data))
    losses = []
    began = time.perf_counter()
    for ids in track(data, label, console=harness.console, transient=True):
        loss = step(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.detach())
    values: list[float] = torch.stack(losses).tolist()  # waits for the device
    return values, time.perf_counter() - began
