"""Logits of a chunked loss are computed when they are read, and are then as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q.exc import UnreadableLogits
from inductor_q.logits import Logits
from tests.support.captured import CapturedStage
from tests.support.chunked import (
    CHUNKS,
    PASS,
    RETURNED,
    Adapted,
    Model,
    Tied,
    assert_same,
    batch,
    compiled,
    found,
)


def test_logits_are_computed_when_they_are_read() -> None:
    model = Model(trains=True, bias=True)
    call, _ = compiled(model)
    (loss, logits), (_, expected) = call(*batch()), model(*batch())
    assert isinstance(logits, Logits) and isinstance(logits.float(), Logits)
    assert not logits._read
    assert logits.shape == expected.shape and logits.dtype == expected.dtype
    assert logits.requires_grad and logits.device == expected.device and len(logits) == 3
    assert not logits._read
    torch.testing.assert_close(logits.detach(), expected.detach())
    torch.testing.assert_close(torch.argmax(logits, -1), expected.argmax(-1))
    torch.testing.assert_close(copy.deepcopy(logits.detach()), expected.detach())
    assert torch.equal(logits[..., :-1, :], logits[:, :-1])
    # Gradients go through what is read, beside those of the loss.
    regularized = loss + logits.float().square().mean()
    eager_loss, eager_logits = model(*batch())
    assert_same(model, regularized, eager_loss + eager_logits.square().mean())


def test_what_was_computed_without_logits_cannot_be_asked_of_them() -> None:
    call, _ = compiled(Model())
    _, logits = call(*batch())
    for ask in (logits.retain_grad, lambda: logits.grad):
        with pytest.raises(UnreadableLogits, match=r"'qfuse\.loss': 'whole'"):
            ask()


@pytest.mark.parametrize("first", [False, True], ids=["hooked first", "read first"])
def test_hooks_of_logits_are_called_once_these_are_read(first: bool) -> None:
    """FSDP gives every output one, and nobody reads the logits."""
    call, _ = compiled(Model())
    (loss, logits), seen = call(*batch()), []
    if first:
        logits.detach()
        assert logits.sum().requires_grad
    logits.register_hook(lambda gradient: seen.append(gradient.shape))
    removed = logits.register_hook(lambda gradient: seen.append(None))
    loss.backward(retain_graph=True)
    assert not seen and first == bool(logits._read)
    removed.remove()
    logits.square().mean().backward()
    assert seen == [logits.shape]


def test_logits_without_gradients_take_no_hook() -> None:
    call, _ = compiled(Model())
    _, logits = call(*batch())
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        logits.detach().register_hook(print)


def test_logits_of_weights_that_are_freed_are_refused() -> None:
    """As FSDP frees those that it has gathered."""
    model = Model()
    call, _ = compiled(model)
    _, logits = call(*batch())
    model.head.weight.untyped_storage().resize_(0)
    with pytest.raises(UnreadableLogits, match=r"FSDP has freed.*'qfuse\.loss': 'whole'"):
        logits.sum()


def written(optimizer: str, parameters: list[nn.Parameter]) -> None:
    """Change parameters as an optimizer does; fused ones leave a tensor's version as it is."""
    if optimizer == "in-place":
        with torch.no_grad():
            parameters[-1][0].mul_(2)  # a row alone
        return
    adam: Any = torch.optim.AdamW(parameters, lr=1e-2, fused=optimizer == "fused")
    adam.step()


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "in-place"])
@pytest.mark.parametrize("model", [Model(trains=True, bias=True), Tied(), Adapted()])
def test_logits_of_a_head_that_has_changed_are_refused(model: Any, optimizer: str) -> None:
    """Those that were read before are what they were, and those of the next step can be read."""
    model = copy.deepcopy(model)
    call, _ = compiled(model)
    (loss, early), (_, late) = call(*batch()), call(*batch())
    values = early.detach().clone()
    loss.backward()
    assert late[0, 0, 0].isfinite()  # backward changes nothing
    _, late = call(*batch())
    written(optimizer, [p for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(early.detach(), values)
    for read in (torch.argmax, torch.detach):
        with pytest.raises(UnreadableLogits, match=r"head was changed.*'qfuse\.loss': 'whole'"):
            read(late.float())
    _, logits = call(*batch())
    torch.testing.assert_close(logits.detach(), model(*batch())[1].detach())


def test_what_is_written_to_logits_is_read_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients or without: they are computed once, and never again without the change."""
    call, _ = compiled(Model(trains=True))
    (_, early), (_, late) = call(*batch()), call(*batch())
    assert early.requires_grad and early.max().requires_grad  # computed with gradients
    monkeypatch.setattr(early, "_product", None)
    with torch.no_grad():
        early.fill_(3.0)
    assert bool((early == 3.0).all())
    with torch.no_grad():
        late.fill_(3.0)
        assert bool((late == 3.0).all())
    with pytest.raises(UnreadableLogits, match=r"written to under torch\.no_grad.*'whole'"):
        late.max()


def test_logits_of_a_frozen_head_are_read_behind_a_step() -> None:
    """The model below has changed, and what the head has read of it is kept."""
    model = Model()
    call, _ = compiled(model)
    loss, logits = call(*batch())
    expected = model(*batch())[1]
    loss.backward()
    written("fused", [p for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(logits.detach(), expected.detach())


def test_a_graph_behind_a_break_reads_logits_too() -> None:
    class Breaks(Model):
        def forward(self, x: Tensor, labels: Tensor, **given: Any) -> Any:
            loss, logits = super().forward(x, labels)
            torch._dynamo.graph_break()
            return loss + logits.square().mean()

    torch.compiler.reset()
    model, backend = Breaks(), CapturedStage(PASS, **CHUNKS)
    assert_same(model, torch.compile(model, backend=backend)(*batch()), model(*batch()))
    assert ("", RETURNED) in found(backend)
