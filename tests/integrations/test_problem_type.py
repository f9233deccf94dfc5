"""A classifier of transformers is compiled once, also where `problem_type` is open before."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import inductor_q
from inductor_q import testing
from inductor_q.integrations.problem_type import Classifier, classifier_of, writes_problem_type
from inductor_q.integrations.regions import base_model
from tests.support.compiling import no_codegen
from tests.support.trainers import COMMON

for extra in ("accelerate", "bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

import transformers  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402
from transformers.loss.loss_utils import ForSequenceClassificationLoss  # noqa: E402

SINGLE, MULTI = "single_label_classification", "multi_label_classification"
#: By problem: how many labels there are, and a batch of them.
PROBLEMS: dict[str, tuple[int, torch.Tensor]] = {
    "regression": (1, torch.tensor([0.5, -1.0])),
    SINGLE: (3, torch.tensor([2, 0])),
    MULTI: (3, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
}
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def qwen3(count: int) -> Any:
    """Make a QLoRA model whose loss is transformers' function."""
    config = testing.tiny_qwen3_config(num_hidden_layers=1, pad_token_id=258, num_labels=count)
    torch.manual_seed(0)
    base = transformers.AutoModelForSequenceClassification.from_config(config)
    lora = {"task_type": "SEQ_CLS"}
    return testing.qlora_model(config, base=base, lora=lora, compute_dtype=torch.float32)


def bert(count: int) -> Any:
    """Make a model that computes its loss itself."""
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**{**SIZES, **dropout, "num_labels": count})
    return transformers.BertForSequenceClassification(config).train()


def deberta(count: int) -> Any:
    """Make a model that has another loss where the problem is open."""
    config = transformers.DebertaV2Config(**{**SIZES, "num_labels": count})
    return transformers.DebertaV2ForSequenceClassification(config)


MAKE = {"qwen3": qwen3, "bert": bert}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", MAKE)
def test_one_graph_over_three_steps(name: str, problem: str) -> None:
    count, labels = PROBLEMS[problem]
    eager = MAKE[name](count)
    model: Any = inductor_q.compile(copy.deepcopy(eager))
    ids = torch.randint(0, 256, (3, 2, 8), generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    losses: list[list[float]] = []
    with testing.CompileTrace() as trace, no_codegen():
        for each in (eager, model):
            assert each.config.problem_type is None
            optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
            losses.append([])
            for batch in ids:
                loss = each(input_ids=batch, labels=labels).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
            assert each.config.problem_type == problem
    assert (trace.graphs, trace.breaks, trace.recompiles) == (1, [], [])
    assert losses[0][0] != losses[0][-1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)  # in float32, in another order


def test_a_trainer_with_a_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from inductor_q.integrations import QfuseCallback

    model = qwen3(3)
    data: Any = [{"input_ids": torch.arange(8) + i, "labels": i % 3} for i in range(6)]
    arguments: Any = TrainingArguments(output_dir=str(tmp_path), **COMMON, max_steps=3)
    trainer: Any = Trainer(model, arguments, train_dataset=data, callbacks=[QfuseCallback()])
    torch.compiler.reset()
    with testing.CompileTrace() as trace, no_codegen():
        trainer.train()
    assert (trace.graphs, trace.breaks, trace.recompiles) == (1, [], [])
    assert "7 of 7 quantized layers fused; 1 graph" in capsys.readouterr().out
    assert model.config.problem_type == SINGLE


def test_labels_without_their_name() -> None:
    """PEFT's model has them in another place than the model inside."""
    model = qwen3(3)
    inner = base_model(model)
    for each, before in ((model, 3), (inner, 5)):
        found = classifier_of(each, inner)
        assert found is not None
        found.write_problem_type((None,) * before, {})
        assert inner.config.problem_type is None
        found.write_problem_type((*(None,) * before, torch.tensor([1])), {})
        assert inner.config.problem_type == SINGLE
        inner.config.problem_type = None


def test_what_is_left_alone() -> None:
    """A problem that is said, calls without labels, and a number that was changed in one place."""
    model = bert(3)
    found, labels = classifier_of(model, model), {"labels": torch.tensor([1])}
    assert found is not None
    for without in ({}, {"labels": None}):
        found.write_problem_type((), without)
    model.num_labels = 1
    found.write_problem_type((), labels)
    assert model.config.problem_type is None
    model.num_labels, model.config.problem_type = 3, MULTI
    found.write_problem_type((), labels)
    assert model.config.problem_type == MULTI


def test_models_that_have_another_rule_or_none() -> None:
    """Of other losses, of replaced ones, and of forwards that are not transformers'."""

    class Own(transformers.BertForSequenceClassification):
        def forward(self, **inputs: Any) -> Any:
            return super().forward(**inputs)

    decoder = testing.tiny_qwen3_config(num_hidden_layers=1, num_labels=3)
    causal = transformers.AutoModelForCausalLM.from_config(decoder)
    tokens = transformers.AutoModelForTokenClassification.from_config(decoder)
    replaced = transformers.AutoModelForSequenceClassification.from_config(decoder)
    assert writes_problem_type(replaced)
    replaced.loss_function = lambda **_: None
    for model in (causal, tokens, replaced, deberta(3), Own(bert(3).config), nn.Linear(2, 2)):
        assert not writes_problem_type(model)


def test_deberta_computes_its_own_loss() -> None:
    eager = deberta(3).eval()
    model: Any = inductor_q.compile(copy.deepcopy(eager))
    inputs = {"input_ids": torch.arange(8)[None], "labels": torch.tensor([2])}
    with no_codegen():
        found, expected = (each(**inputs).loss.item() for each in (model, eager))
    assert found == pytest.approx(expected, rel=1e-4)
    assert model.config.problem_type is eager.config.problem_type is None


def rules() -> set[str]:
    """Read from transformers the text of each `if` that writes `problem_type`."""
    losses = Path(inspect.getfile(ForSequenceClassificationLoss))
    found = set()
    for file in (losses, *losses.parents[1].glob("models/*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if ".problem_type = " in text else ():
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("problem_type is None"):
                found.add(ast.unparse(node))
    return {text for text in found if ".problem_type = " in text}


def test_the_rule_is_that_of_every_model() -> None:
    """Each text that there is in transformers is run."""
    texts = rules()
    assert len(texts) >= 3  # of the loss function, and of models with a number or without
    dtypes = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32)
    for count, dtype, text in itertools.product((1, 2, 3), dtypes, texts):
        names: dict[str, Any] = {"labels": torch.zeros(2).to(dtype), "num_labels": count}
        ours, theirs = (SimpleNamespace(problem_type=None, num_labels=count) for _ in range(2))
        Classifier(SimpleNamespace(config=ours), 0).write_problem_type((names["labels"],), {})
        model = SimpleNamespace(config=theirs, num_labels=count)
        exec(text, {"torch": torch, "self": model, "config": theirs, **names})
        assert ours.problem_type == theirs.problem_type is not None
