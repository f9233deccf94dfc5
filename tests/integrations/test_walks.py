"""A trainer walks over the modules once, not in every step, and trains as it did."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from inductor_q.integrations.walks import spare_walks, walk_again
from tests.support.trainers import COMMON, model, rows, train

for extra in ("accelerate", "bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The modes to which embeddings are set, one by one."""
    modes: list[bool] = []

    def note(self: nn.Module, mode: bool = True) -> nn.Module:
        modes.append(mode)
        return nn.Module.train(self, mode)

    monkeypatch.setattr(nn.Embedding, "train", note, raising=False)
    return modes


def test_modules_that_train_are_left_alone(walked: list[bool]) -> None:
    net: Any = model(1)
    net.train()
    spare_walks(net)
    walked.clear()
    assert net.train() is net and net.train(True) is net and not walked
    assert net.eval() is net and walked == [False] and not any(m.training for m in net.modules())
    net.train()
    assert walked == [False, True] and all(m.training for m in net.modules())


def test_one_module_in_evaluation_is_found() -> None:
    """Also of an adapter that was added since."""
    from peft import LoraConfig

    net: Any = model(1)
    spare_walks(net)
    net.train()
    next(m for m in net.modules() if isinstance(m, nn.Embedding)).eval()
    assert all(m.training for m in net.train().modules())
    net.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    [added] = [m.lora_A["second"] for m in net.modules() if "second" in getattr(m, "lora_A", ())]
    added.eval()
    assert added.training is False and net.train() is net and added.training


def test_counts_are_those_of_the_model() -> None:
    from peft import LoraConfig

    net: Any = model(1)
    count = net.num_parameters
    spare_walks(net)
    asked: list[dict[str, Any]] = [{}, {"exclude_embeddings": True}, {"only_trainable": True}]
    for _ in range(2):
        assert [net.num_parameters(**kwargs) for kwargs in asked] == [count(**k) for k in asked]
    before = net.num_parameters()
    net.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    assert net.num_parameters() == count() > before
    net.requires_grad_(False)
    assert net.num_parameters(only_trainable=True) == 0


def test_a_model_can_be_copied_and_has_its_methods_back() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    spare_walks(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other.eval() is other and not other[1].training and net[1].training
        assert other.train() is other and other[1].training
    walk_again(net)
    assert not {"train", "num_parameters"} & {*vars(net)}
    own = net.train = net.eval  # a method that the user has put there stays
    spare_walks(net)
    walk_again(net)
    assert vars(net)["train"] == own


def test_a_trainer_walks_in_its_first_step(tmp_path: Path, walked: list[bool]) -> None:
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    from examples.common import byte_tokenizer

    nets: list[Any] = []

    def make() -> Any:
        arguments: Any = TrainingArguments(output_dir=str(tmp_path), **{**COMMON, "max_steps": 4})
        pad: Any = DataCollatorForLanguageModeling(byte_tokenizer(), mlm=False)
        data: Any = rows(40)
        nets.append(model(1))
        return Trainer(nets[-1], arguments, pad, data)

    eager = train(make, compiled=False)
    assert len(walked) >= 4
    walked.clear()
    compiled = train(make, compiled=True)
    assert len(walked) <= 1 and "train" not in vars(nets[-1])
    assert compiled.logged("total_flos") == eager.logged("total_flos")
    assert compiled.logged("loss") == pytest.approx(eager.logged("loss"), rel=1e-3)
