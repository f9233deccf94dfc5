"""Language models of a projection and a head, whose loss `chunk_loss` takes in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.captured import CapturedStage

PASS = "chunk_loss"
HIDDEN, VOCABULARY = 64, 50
CHUNKS: dict[str, Any] = {
    "qfuse.thresholds": {
        "chunk_loss.min_logits": 0,
        "chunk_loss.elements": VOCABULARY * 8,
        "chunk_loss.elements_of_rounded": VOCABULARY * 16,
    }
}
LOSS = torch.ops.qfuse.linear_cross_entropy.default
ALONE = "qfuse.linear_cross_entropy"
RETURNED = f"{ALONE}, logits on demand"


def causal_lm_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """As `transformers.loss.loss_utils.ForCausalLMLoss` has it."""
    items = options.pop("items", None)
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    logits, labels = logits.view(-1, logits.shape[-1]), labels.view(-1)
    reduction = "mean" if items is None else "sum"
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction=reduction, **options)
    return loss if items is None else loss / items


def shifted_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """As loss functions wrote it before: the last position of each sequence is cut off."""
    logits = logits[..., :-1, :].contiguous()
    labels = labels.clamp(min=options.get("ignore_index", -100))
    logits, labels = logits.view(-1, logits.size(-1)), labels[:, 1:].reshape(-1)
    loss: Tensor = nn.CrossEntropyLoss(**options)(logits, labels)
    return loss


class Model(nn.Module):
    """A language model that is a projection and a head."""

    def __init__(self, loss: Callable[..., Tensor] = causal_lm_loss, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(HIDDEN, HIDDEN)
        columns = options.pop("columns", VOCABULARY)
        self.head = nn.Linear(HIDDEN, columns, bias=options.pop("bias", False))
        self.head.requires_grad_(options.pop("trains", False))
        self.loss, self.options = loss, options

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(x)))
        return found

    def forward(self, x: Tensor, labels: Tensor, **given: Any) -> Any:
        logits = self.logits(x)
        return self.loss(logits, labels, **self.options, **given), logits


class LossOnly(Model):
    def forward(self, x: Tensor, labels: Tensor, **given: Any) -> Any:
        return super().forward(x, labels, **given)[0]


class Adapted(Model):
    """LoRA beside the head, as PEFT computes it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Linear(HIDDEN, 4, bias=False, dtype=dtype)
        self.b = nn.Linear(4, VOCABULARY, bias=False, dtype=dtype)

    def logits(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.body(x))
        result: Tensor = self.head(x)
        result = result + self.b(self.a(x.to(self.a.weight.dtype))) * 2.0
        return result.to(x.dtype)


class Scaled(Model):
    """Logits times a number, as Cohere has them, or divided by one, as Granite does."""

    def logits(self, x: Tensor) -> Tensor:
        return 0.3 * super().logits(x) / 8.0


class Tied(Model):
    """The head is the table of embeddings, which trains by both."""

    def __init__(self) -> None:
        super().__init__(trains=True)

    def logits(self, x: Tensor) -> Tensor:
        table = self.head.weight
        seen = F.embedding(x[..., 0].long() % 7, table)
        found: Tensor = self.head(torch.tanh(self.body(x)) + seen)
        return found


def batch(length: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    labels = torch.randint(0, VOCABULARY, (3, length), generator=generator)
    labels[0, :5] = -100
    return torch.randn(3, length, HIDDEN, generator=generator), labels


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def compiled(model: Any, **options: Any) -> tuple[Any, CapturedStage]:
    torch.compiler.reset()
    backend = CapturedStage(PASS, **CHUNKS, **options)
    return torch.compile(model, backend=backend, fullgraph=True), backend


def assert_same(model: nn.Module, got: Any, expected: Any) -> None:
    """The loss of two calls, and the gradients of all that trains."""
    got, expected = (x[0] if isinstance(x, tuple) else x for x in (got, expected))
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    ours, eagers = gradients(model, got), gradients(model, expected)
    for name, exact in eagers.items():
        torch.testing.assert_close(ours[name], exact, rtol=1e-4, atol=1e-5)


def found(backend: CapturedStage) -> list[tuple[str, str]]:
    return [(site.rejected, site.provider) for site in backend.sites]
