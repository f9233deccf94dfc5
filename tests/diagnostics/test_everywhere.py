"""What `qfuse run` and `qfuse explain --backend` put under a program, and what they leave to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_q
from examples.common import byte_tokenizer
from inductor_q.backend import qfuse
from inductor_q.diagnostics.everywhere import qfuse_everywhere
from inductor_q.diagnostics.observation import observe
from inductor_q.diagnostics.torchrun import run_ranks
from inductor_q.integrations import QfuseCallback, compile_trainer
from tests.support.compiling import no_codegen
from tests.support.trainers import COMMON, model, rows

for extra in ("accelerate", "bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments  # noqa: E402

STRICT = {"qfuse.numerics": "strict"}


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def explained() -> AbstractContextManager[object]:
    """What `qfuse explain --backend qfuse` puts around a program."""
    return observe(backend="qfuse", whole_process=True)


@pytest.mark.parametrize("around", [qfuse_everywhere, explained])
@pytest.mark.parametrize(
    ("backend", "options", "numerics"),
    [
        ("qfuse", STRICT, "strict"),
        (qfuse, STRICT, "strict"),
        ("inductor", STRICT, "strict"),
        ("inductor", None, "default"),
        ("eager", {"of": "its own"}, "default"),
        (lambda gm, inputs, **_: gm.forward, {"of": "its own"}, "default"),
    ],
)
def test_options_stay_with_those_who_understand_them(
    around: Callable[[], AbstractContextManager[object]], backend: Any, options: Any, numerics: str
) -> None:
    torch.compiler.reset()
    before = torch.compile
    with around(), no_codegen():
        torch.compile(double, backend=backend, options=options)(torch.ones(3))
    assert torch.compile is before
    report = inductor_q.last_report()
    assert report is not None and report.numerics == numerics
    assert inductor_q.report().graphs == 1


@pytest.mark.parametrize(
    ("forced", "named", "kept"),
    [
        ("inductor", {}, True),
        ("inductor", {"backend": "inductor"}, True),
        ("inductor", {"backend": "qfuse"}, False),
        ("eager", {}, False),
    ],
)
def test_options_under_another_backend(
    forced: str, named: dict[str, str], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **given: given)
    options = {"max_autotune": True}
    with observe(backend=forced, whole_process=True):
        given: Any = torch.compile(double, options=options, **named)  # type: ignore[call-overload]
    assert (given["backend"], given["options"]) == (forced, options if kept else None)


@pytest.mark.parametrize("later", [False, True], ids=["callbacks=", "compile_trainer"])
def test_a_callback_of_the_program_wins(
    later: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It compiles, with its options, and one of the two says what came of it."""
    torch.compiler.reset()
    arguments: Any = TrainingArguments(output_dir=str(tmp_path), max_steps=1, **COMMON)
    pad: Any = DataCollatorForLanguageModeling(byte_tokenizer(), mlm=False)
    data: Any = rows(4)
    given: list[Any] = [] if later else [QfuseCallback(options=STRICT)]
    with qfuse_everywhere(), no_codegen():
        trainer: Any = Trainer(model(), arguments, pad, data, callbacks=given)
        assert len(trainer.callback_handler.callbacks) - len(given) == 3
        if later:
            compile_trainer(trainer, options=STRICT)
        trainer.train()
    report = inductor_q.last_report()
    assert report is not None and report.numerics == "strict"
    assert inductor_q.report(trainer.model).graphs == 1
    assert capsys.readouterr().out.count("qfuse: 7 of 7 quantized layers fused") == 1
    assert "there is already one" not in caplog.text


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        (
            "accelerate launch --dynamo_backend qfuse t.py --dynamo_backend qfuse",
            "-m accelerate.commands.launch -m inductor_q run t.py --dynamo_backend qfuse",
        ),
        (
            "accelerate launch --num_processes 2 --dynamo-backend=qfuse -m pkg.train -x",
            "-m accelerate.commands.launch --num_processes 2 -m inductor_q run -m pkg.train -x",
        ),
        (
            "-m accelerate.commands.launch --dynamo_backend inductor t.py",
            "-m accelerate.commands.launch --dynamo_backend inductor -m inductor_q run t.py",
        ),
        (
            "torchrun --nproc-per-node 2 t.py --epochs 1",
            "-m torch.distributed.run --nproc-per-node 2 -m inductor_q run t.py --epochs 1",
        ),
        ("train.py launch", ""),
        ("-m package.train", ""),
    ],
)
def test_the_ranks_of_a_launcher_run_with_qfuse(command: str, ranks: str) -> None:
    assert run_ranks(command.split()) == ranks.split()
