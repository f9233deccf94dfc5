"""TRL's trainers with their defaults on a QLoRA model: one import, whole graphs, eager's values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.common import byte_tokenizer
from inductor_q import testing
from tests.support.trainers import COMMON, Run, model, texts, train

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TOKENIZER = byte_tokenizer()
Make = Callable[..., Any]


def sft(out: Path, rows: int = 40, **settings: Any) -> Any:
    data = datasets.Dataset.from_dict({"text": texts(rows)})
    arguments = trl.SFTConfig(output_dir=str(out), **{**COMMON, "max_length": 128, **settings})
    return trl.SFTTrainer(
        model(),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=TOKENIZER,
    )


def pairs(rows: int = 40) -> Any:
    columns = {name: texts(rows, seed, 10, 60) for seed, name in enumerate(PAIR)}
    return datasets.Dataset.from_dict(columns)


PAIR = ("prompt", "chosen", "rejected")


def dpo(out: Path, rows: int = 40, **settings: Any) -> Any:
    arguments = trl.DPOConfig(output_dir=str(out), **{**COMMON, "max_length": 128, **settings})
    return trl.DPOTrainer(
        model(), args=arguments, train_dataset=pairs(rows), processing_class=TOKENIZER
    )


def kto(out: Path, **settings: Any) -> Any:
    data = pairs().rename_column("chosen", "completion").remove_columns("rejected")
    data = data.add_column("label", [index % 2 == 0 for index in range(len(data))])
    arguments = trl.KTOConfig(output_dir=str(out), **{**COMMON, "max_length": 128, **settings})
    return trl.KTOTrainer(model(), args=arguments, train_dataset=data, processing_class=TOKENIZER)


def grpo(out: Path, **settings: Any) -> Any:
    def variety(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    own = {"max_completion_length": 12, "num_generations": 2, "beta": 0.1}
    arguments = trl.GRPOConfig(output_dir=str(out), **{**COMMON, **own, **settings})
    return trl.GRPOTrainer(
        model(),
        args=arguments,
        train_dataset=pairs().select_columns(["prompt"]),
        processing_class=TOKENIZER,
        reward_funcs=variety,
    )


def reward(out: Path, **settings: Any) -> Any:
    import peft
    import transformers

    config = testing.tiny_qwen3_config(num_hidden_layers=1, pad_token_id=258, num_labels=1)
    torch.manual_seed(0)
    from_config: Any = transformers.AutoModelForSequenceClassification.from_config
    base = from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    testing.quantize_projections(base, testing.PROJECTIONS)
    adapter = peft.LoraConfig(task_type="SEQ_CLS", target_modules=list(testing.PROJECTIONS))
    arguments = trl.RewardConfig(output_dir=str(out), **{**COMMON, "max_length": 128, **settings})
    return trl.RewardTrainer(
        peft.get_peft_model(base, adapter),
        args=arguments,
        train_dataset=pairs(),
        processing_class=TOKENIZER,
    )


def both(make: Make, out: Path, **settings: Any) -> tuple[Run, Run]:
    """Train in eager mode and with qfuse."""
    eager = train(lambda: make(out, **settings), compiled=False)
    return eager, train(lambda: make(out, **settings), compiled=True)


def test_sft_of_twenty_lengths_is_one_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's defaults: checkpointing, autocast and a loss in chunks that Dynamo cannot trace. An
    epoch's last batch, of one row, takes a second graph."""
    eager, compiled = both(sft, tmp_path, rows=41, max_steps=21)
    assert (compiled.graphs, compiled.breaks) == (2, [])
    assert compiled.logged("loss") == pytest.approx(eager.logged("loss"), rel=1e-3)
    assert eager.logged("loss")[-2] < 0.95 * eager.logged("loss")[0]  # it learns
    first, last = [line for line in capsys.readouterr().out.splitlines() if "qfuse:" in line]
    assert first == "qfuse: 7 of 7 quantized layers fused; 1 graph, 0 breaks"
    assert last == "qfuse: 7 of 7 quantized layers fused; 2 graphs, 0 breaks"


@pytest.mark.slow
def test_dpo_compiles_its_reference_pass_once(tmp_path: Path) -> None:
    """A graph to train and one for the reference adapter; then none, though it is switched."""
    eager, compiled = both(dpo, tmp_path, max_steps=6)
    assert (compiled.graphs, compiled.breaks) == (2, [])
    for key in ("loss", "rewards/margins"):
        assert compiled.logged(key) == pytest.approx(eager.logged(key), rel=0.02, abs=0.01)
    assert any(compiled.logged("rewards/margins"))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "modes"), [(sft, 1), (dpo, 2)])
def test_a_hundred_batches(
    make: Make, modes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = train(lambda: make(tmp_path, rows=41, max_steps=100), compiled=True)
    assert len(compiled.logged("loss")) == 100
    assert compiled.graphs == 2 * modes and compiled.breaks == []
    lines = [line for line in capsys.readouterr().out.splitlines() if "qfuse:" in line]
    assert lines[-1].startswith("qfuse: 7 of 7 quantized layers fused;")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "graphs"), [(kto, 4), (grpo, 6), (reward, 2)])
def test_other_trainers(make: Make, graphs: int, tmp_path: Path) -> None:
    """At most two graphs for each mode that a trainer has; generation by GRPO is eager."""
    eager, compiled = both(make, tmp_path, max_steps=6)
    assert 0 < compiled.graphs <= graphs and compiled.breaks == []
    assert compiled.logged("loss") == pytest.approx(eager.logged("loss"), rel=0.02, abs=1e-4)


@pytest.mark.slow
def test_packing(tmp_path: Path) -> None:
    eager, compiled = both(sft, tmp_path, max_steps=4, packing=True)
    assert compiled.graphs <= 2 and compiled.breaks == []
    assert compiled.logged("loss") == pytest.approx(eager.logged("loss"), rel=1e-3)


@pytest.mark.slow
def test_with_code_and_evaluation(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2}
    eager = train(lambda: sft(tmp_path, **settings), compiled=False)
    compiled = train(lambda: sft(tmp_path, **settings), compiled=True, codegen=True)
    assert compiled.graphs <= 4 and compiled.breaks == []
    for key in ("loss", "eval_loss"):
        assert compiled.logged(key) == pytest.approx(eager.logged(key), rel=1e-3)
