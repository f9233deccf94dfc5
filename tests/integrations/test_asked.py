"""What is misspelt, or no module, is an error of the call that it was given to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import inductor_q
from inductor_q import exc
from inductor_q.integrations import compile_decoding
from tests.support.compiling import no_codegen


def by_callback(model: object, **asked: Any) -> object:
    trainer = pytest.importorskip("inductor_q.integrations.trainer")
    return trainer.QfuseCallback(**asked)


CALLS: dict[str, Callable[..., object]] = {
    "compile": inductor_q.compile,
    "compile_decoding": compile_decoding,
    "QfuseCallback": by_callback,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("asked", "error", "hint"),
    [
        ({"mode": "max-autotun"}, exc.UnknownMode, "did you mean 'max-autotune'"),
        ({"options": {"max_autotun": True}}, exc.UnknownOption, "did you mean 'max_autotune'"),
        ({"options": {"qfuse.numerics": "exact"}}, exc.InvalidOptionValue, "strict"),
    ],
)
def test_what_is_misspelt(
    name: str, asked: dict[str, Any], error: type[exc.QfuseError], hint: str
) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(error, match=hint):
        CALLS[name](model, **asked)
    assert model._compiled_call_impl is None  # nothing was changed


@pytest.mark.parametrize("name", ["compile", "compile_decoding"])
@pytest.mark.parametrize("model", ["x", nn.Linear, torch.relu, None])
def test_what_is_no_module(name: str, model: Any) -> None:
    with pytest.raises(exc.NotAModule, match=f"{name} takes a torch.nn.Module.*got a"):
        CALLS[name](model)


def test_what_is_no_trainer() -> None:
    trainer = pytest.importorskip("inductor_q.integrations.trainer")
    with pytest.raises(exc.NotATrainer, match=r"takes a Trainer .*got a Linear"):
        trainer.compile_trainer(nn.Linear(4, 4))


def test_a_mode_beside_options() -> None:
    """torch.compile takes one of them; qfuse's options have a place for the mode."""
    torch.compiler.reset()
    model = nn.Linear(4, 4)
    given = {"qfuse.numerics": "strict"}
    inductor_q.compile(model, mode="max-autotune-no-cudagraphs", options=given)
    with no_codegen():
        model(torch.ones(2, 4))
    report = inductor_q.last_report()
    assert report is not None
    assert (report.numerics, report.options["max_autotune"]["value"]) == ("strict", "True")
    with pytest.raises(exc.ModeConflict):
        inductor_q.compile(model, mode="default", options={"qfuse.mode": "max-autotune"})
