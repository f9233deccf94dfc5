"""A trainer reads what it would set and count again for each batch, and trains as it did."""

from __future__ import annotations

import copy
import operator
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import testing
from inductor_q.integrations.facts import facts_of
from inductor_q.integrations.methods import BETWEEN_FORWARDS
from inductor_q.integrations.walks import Status, spare_walks, walk_again
from inductor_q.modules import modules_of
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


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each count of a model of transformers."""
    from transformers import PreTrainedModel

    asked, count = [], PreTrainedModel.num_parameters

    def note(self: Any, *args: Any, **kwargs: Any) -> int:
        asked.append((args, kwargs))
        return count(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "num_parameters", note)
    return asked


def test_modules_that_train_are_left_alone(walked: list[bool]) -> None:
    net: Any = model(1)
    walked.clear()
    spare_walks(net)
    assert walked == [True]
    assert net.train() is net and net.train(True) is net and walked == [True]
    assert net.eval() is net and not any(m.training for m in net.modules())
    net.train()
    assert walked == [True, False, True] and all(m.training for m in net.modules())


class Frozen(nn.Sequential):
    """Keep the second part in evaluation, as models with frozen normalization do."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize("inside", [False, True], ids=["root", "part"])
def test_a_part_that_stays_in_evaluation(inside: bool) -> None:
    frozen = Frozen(nn.Linear(2, 2), nn.Dropout())
    net: Any = nn.Sequential(frozen) if inside else frozen
    spare_walks(net)
    for _ in range(2):
        assert net.train() is net and frozen[0].training and not frozen[1].training


def test_a_module_in_evaluation_is_found() -> None:
    """That holds for one that was put in the place of another, too."""
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout()))
    spare_walks(net)
    net[1][0].eval()
    assert net.train()[1][0].training
    net[1][0] = nn.Dropout().eval()
    assert net.train()[1][0].training


def test_counts_are_those_of_the_model(counted: list[Any]) -> None:
    from peft import LoraConfig

    net: Any = model(1)
    whole, every = net.num_parameters(), net.num_parameters(exclude_embeddings=True)
    spare_walks(net)
    counted.clear()
    for _ in range(3):
        assert net.num_parameters() == whole
        assert net.num_parameters(exclude_embeddings=True) == every
    assert len(counted) == 2
    net.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    assert net.num_parameters() > whole and len(counted) == 3
    assert net.num_parameters(only_trainable=True) > 0
    net.requires_grad_(False)
    assert net.num_parameters(only_trainable=True) == 0


def test_nothing_of_it_is_written_or_stays() -> None:
    """A copy is a model of its own, what is pickled has the methods of its class, and decoding sees
    the same model."""
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    before = facts_of(net)
    spare_walks(net)
    assert facts_of(net) == before
    other = copy.deepcopy(net)
    assert other.eval() is other and not other[1].training and net[1].training
    assert other.train() is other and other[1].training
    assert b"inductor_q" not in pickle.dumps(net)
    spare_walks(net)  # as after a training that was cut short
    walk_again(net)
    assert "train" not in vars(net)
    own = net.train = lambda mode=True: net  # a method that the user has put there stays
    spare_walks(net)
    walk_again(net)
    assert vars(net)["train"] is own


def test_modules_are_listed_in_order() -> None:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(nn.Sequential(shared, nn.ReLU()), shared, nn.Sequential(nn.Dropout()))
    net.register_module("nothing", None)
    assert modules_of(net) == list(net.modules())
    net = model(1)
    assert modules_of(net) == list(net.modules())


def test_parameters_are_listed_as_torch_does() -> None:
    """That holds for one that two modules share, too."""
    net: Any = testing.qlora_model(testing.tiny_qwen3_config(num_hidden_layers=1))
    net.base_model.model.tied = nn.ParameterList([net.get_input_embeddings().weight])
    listed = list(net.parameters())
    spare_walks(net)
    assert "parameters" in vars(net)
    mine = list(net.parameters())
    assert len(mine) == len(listed) == len({*mine}) and all(map(operator.is_, mine, listed))
    assert list(net.parameters(recurse=False)) == [] == list(nn.Module.parameters(net, False))


def test_gradients_are_dropped_as_torch_does() -> None:
    net: Any = testing.qlora_model(testing.tiny_qwen3_config(num_hidden_layers=1))
    spare_walks(net)
    frozen, trained = net.get_input_embeddings().weight, adapters_of(net)[0].lora_A.default.weight

    def fill() -> None:
        frozen.grad, trained.grad = torch.ones_like(frozen), torch.ones_like(trained)

    fill()
    net.zero_grad(set_to_none=False)
    assert not frozen.grad.any() and not trained.grad.any()
    fill()
    net.zero_grad()
    assert frozen.grad is None and trained.grad is None


class Listed(nn.Module):
    """List no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Linear(2, 2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())


def test_parameters_that_a_model_lists_itself() -> None:
    """A model without PEFT lists its own in forward, where transformers asks for its dtype."""
    whole = testing.qlora_model(testing.tiny_qwen3_config(num_hidden_layers=1)).get_base_model()
    for net in (Listed(), whole):
        spare_walks(net)
        assert "train" in vars(net) and "parameters" not in vars(net)
        assert "zero_grad" not in vars(net)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models of which PEFT describes every adapter."""
    from peft import PeftModel

    seen, method = [], PeftModel.get_model_status

    def note(self: Any) -> Any:
        seen.append(self)
        return method(self)

    monkeypatch.setattr(PeftModel, "get_model_status", note)
    return seen


def adapters_of(net: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in net.modules() if isinstance(module, BaseTunerLayer)]


def test_adapters_are_disabled_and_not_described(described: list[Any]) -> None:
    net: Any = model(1)
    spare_walks(net)
    before = net.get_model_status()
    described.clear()
    with net.disable_adapter():
        assert all(layer.disable_adapters for layer in adapters_of(net))
        assert not any(p.requires_grad for p in net.parameters())
        with net.disable_adapter():
            pass
        assert all(layer.disable_adapters for layer in adapters_of(net))  # as before it
    with pytest.raises(KeyError), net.disable_adapter():
        raise KeyError
    assert not described
    assert net.get_model_status() == before and len(described) == 1
    adapters_of(net)[0].enable_adapters(False)
    told = pytest.warns(UserWarning, match="some adapter layers that are enabled")
    with told, net.disable_adapter():
        pass
    assert net.get_model_status().enabled is True


def test_a_status_is_that_of_peft() -> None:
    """That holds for wrappers of `modules_to_save` and of trainable tokens, too."""
    lora = {"modules_to_save": ["lm_head"], "trainable_token_indices": [1, 2]}
    net: Any = testing.qlora_model(testing.tiny_qwen3_config(num_hidden_layers=1), lora=lora)
    first, *_, last = adapters_of(net)
    found = []
    for layers, enabled in (([], True), ([first], False), ([last], False), ([first, last], True)):
        for layer in layers:
            layer.enable_adapters(enabled)
        found.append(Status(net).enabled)
        assert found[-1] == net.get_model_status().enabled
    assert found == [True, "irregular", "irregular", True]
    net.disable_adapter_layers()
    status = Status(net)
    assert status.enabled is net.get_model_status().enabled is False
    assert status.num_adapter_layers == net.get_model_status().num_adapter_layers > 0
    with pytest.raises(AttributeError, match="no_such"):
        _ = status.no_such
    assert copy.copy(status).enabled is False
    spare_walks(net)
    net.unload()
    with pytest.raises(ValueError, match="No adapter layers found"), net.disable_adapter():
        pass


def test_a_status_of_the_user_stays(described: list[Any]) -> None:
    net: Any = model(1)
    own = net.get_model_status = lambda: type(net).get_model_status(net)
    spare_walks(net)
    with net.disable_adapter():
        assert described == [net]
    walk_again(net)
    assert vars(net)["get_model_status"] is own
    assert not set(BETWEEN_FORWARDS) & {*vars(net), *vars(net.get_base_model())}


def test_a_trainer_walks_once(tmp_path: Path, walked: list[bool], counted: list[Any]) -> None:
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    from examples.common import byte_tokenizer

    nets: list[Any] = []

    def make() -> Any:
        arguments: Any = TrainingArguments(output_dir=str(tmp_path), **{**COMMON, "max_steps": 4})
        pad: Any = DataCollatorForLanguageModeling(byte_tokenizer(), mlm=False)
        data: Any = rows(40)
        nets.append(model(1))
        trainer = Trainer(nets[-1], arguments, pad, data)
        walked.clear()
        counted.clear()
        return trainer

    eager = train(make, compiled=False)
    assert len(walked) == len(counted) == 4
    compiled = train(make, compiled=True)
    assert len(walked) == len(counted) == 1 and "train" not in vars(nets[-1])
    assert compiled.logged("total_flos") == eager.logged("total_flos")
    assert compiled.logged("loss") == pytest.approx(eager.logged("loss"), rel=1e-3)
