"""The life of adapters under compiled graphs: each state of them is compiled once, and is right."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config

import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.diagnostics import check_model
from inductor_q.integrations.states import States
from tests.support.compiling import SMALL, gradients, no_codegen

pytest.importorskip("bitsandbytes")
transformers: Any = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
hotswap = pytest.importorskip("peft.utils.hotswap")

TARGETS = ("q_proj", "v_proj")
IDS = torch.arange(32).reshape(2, 16)

#: Nothing is rounded to 16 bits, so that the products' order is all that differs from eager.
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def passes_alone() -> Iterator[None]:
    """The passes and the partitioner run, and the graphs as they leave them."""
    torch._dynamo.reset()
    with no_codegen():
        yield
    torch._dynamo.reset()


def lora(**settings: Any) -> Any:
    given = {"r": 4, "target_modules": list(TARGETS), "init_lora_weights": False}
    return peft.LoraConfig(task_type="CAUSAL_LM", **{**given, **settings})


def llama(layers: int = 1, **settings: Any) -> Any:
    given = {"r": 4, "compute_dtype": torch.float32, "randomize_adapters": True}
    config = testing.tiny_llama_config(num_hidden_layers=layers)
    return testing.qlora_model(config, targets=TARGETS, **{**given, **settings})


def qfused(model: nn.Module, **arguments: Any) -> None:
    inductor_q.compile(model, options=SMALL, **arguments)


def step(call: Callable[..., Any], model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    result = call(input_ids=IDS, labels=IDS)
    if result.loss.requires_grad:
        result.loss.backward()
    return result.logits.detach(), gradients({}, model)


class Life:
    """Call a compiled model again and again, and hold each call to eager mode."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seen: list[Tensor] = []

    def graphs(self) -> int:
        """Return how many graphs one step takes, whose values and gradients are eager's."""
        with testing.CompileTrace() as trace:
            logits, grads = step(self.model, self.model)
        assert (trace.breaks, trace.recompiles) == ([], [])
        expected, expected_grads = step(self.model.forward, self.model)  # not what is compiled
        assert testing.relative_error(logits, expected) < CLOSE
        assert grads.keys() == expected_grads.keys()
        for name, gradient in grads.items():
            assert testing.relative_error(gradient, expected_grads[name]) < 10 * CLOSE, name
        self.seen.append(logits)
        return trace.graphs

    def changed(self) -> bool:
        """Return whether the latest values are others than those before."""
        return testing.relative_error(self.seen[-1], self.seen[-2]) > 100 * CLOSE


def test_every_state_is_compiled_once() -> None:
    """With room for no more than one graph of a function."""
    model = llama()
    qfused(model)
    life = Life(model)
    with config.patch(recompile_limit=1):
        assert life.graphs() == 1
        with torch.no_grad():
            assert life.graphs() == 1
            assert not life.changed()
            with model.disable_adapter():
                assert life.graphs() == 1
                assert life.changed()
        assert life.graphs() == 0
        model.add_adapter("b", lora())
        assert life.graphs() == 1  # traced once more: the layers hold another adapter now
        assert not life.changed()
        model.set_adapter("b")
        assert life.graphs() == 1
        assert life.changed()
        for known in ("default", "b"):
            model.set_adapter(known)
            assert life.graphs() == 0, known
            assert life.changed()
    report = inductor_q.last_report()
    assert report is not None and report.applied()["canonicalize"] >= 7


@pytest.mark.slow
def test_more_states_than_graphs_of_a_function() -> None:
    model = llama()
    qfused(model)
    life = Life(model)
    for name in ("b", "c", "d"):
        model.add_adapter(name, lora())
        assert life.graphs() == 1
        model.set_adapter(name)
        assert life.graphs() == 1
    for name, graphs in (("default", 1), ("b", 1), ("c", 0), ("d", 0), ("default", 0)):
        model.set_adapter(name)
        assert life.graphs() == graphs, name
        assert life.changed()
    model.base_model.set_adapter(["b", "d"])
    assert life.graphs() == 1
    assert life.changed()
    model.eval()
    with torch.no_grad(), model.disable_adapter():
        assert life.graphs() == 1
    model.train()
    assert life.graphs() == 0
    model.set_adapter("d")
    model.delete_adapter("b")
    assert life.graphs() == 1


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit linear")
@pytest.mark.filterwarnings("ignore:Unmerge lora module to 4-bit linear")
@pytest.mark.parametrize("asked", ["nf4", "mxfp4"])
def test_merge_and_unmerge(asked: str) -> None:
    """Over mxfp4 each merge puts another ordinary layer below the adapter."""
    if asked == "nf4":
        model = llama().eval()
    else:
        sizes = testing.tiny_llama_config(num_hidden_layers=1)
        plain = transformers.AutoModelForCausalLM.from_config(sizes, dtype=torch.float32)
        inductor_q.quantize(plain, asked, progress=False)
        adapter = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
        model = peft.get_peft_model(plain, adapter).eval()
    qfused(model)
    life = Life(model)
    with torch.no_grad():
        assert life.graphs() == 1
        model.merge_adapter()
        assert life.graphs() == 1
        model.unmerge_adapter()
        assert life.graphs() == 0
        model.merge_adapter()
        assert life.graphs() == 0


def test_adapters_are_swapped_without_another_graph(tmp_path: Path) -> None:
    """The largest rank comes first: PEFT pads no adapter of a 4-bit layer."""
    for rank in (8, 4):
        llama(r=rank, seed=rank).save_pretrained(str(tmp_path / str(rank)))
    model: Any = peft.PeftModel.from_pretrained(llama().unload(), str(tmp_path / "8"))
    hotswap.prepare_model_for_compiled_hotswap(model)
    qfused(model)
    life = Life(model)
    with torch.no_grad():
        assert life.graphs() == 1
        for rank in (4, 8, 4):
            hotswap.hotswap_adapter(model, str(tmp_path / str(rank)), adapter_name="default")
            assert life.graphs() == 0
            assert life.changed()
    report = inductor_q.last_report()
    assert report is not None and report.applied()["canonicalize"] == 7


def test_a_saved_adapter_comes_back_into_its_graph(tmp_path: Path) -> None:
    """Saved and loaded while compiled, as a Trainer resumes; names are the model's own."""
    model = llama()
    names = list(model.state_dict())
    qfused(model)
    assert list(model.state_dict()) == names
    life = Life(model)
    assert life.graphs() == 1
    model.save_pretrained(str(tmp_path))
    with torch.no_grad():
        for parameter in testing.adapter_parameters(model):
            parameter.mul_(2)
    assert life.graphs() == 0
    assert life.changed()
    model.load_adapter(str(tmp_path), "default", is_trainable=True)
    assert life.graphs() == 0
    assert torch.equal(life.seen[-1], life.seen[0])
    other: Any = peft.PeftModel.from_pretrained(llama().unload(), str(tmp_path), is_trainable=True)
    qfused(other)
    second = Life(other)
    assert second.graphs() == 1  # a model of the same class takes nothing of the first one's room
    assert torch.equal(second.seen[-1], life.seen[0])


def test_the_names_of_what_is_copied(tmp_path: Path) -> None:
    model = llama()
    qfused(model)
    copied = copy.deepcopy(model)
    assert copied._compiled_call_impl is None  # as torch does with module.compile()
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    assert not [name for name in torch.load(tmp_path / "whole.pt") if "_orig_mod" in name]


def test_layers_share_the_graphs_of_each_state() -> None:
    model = llama(layers=2)
    qfused(model, regions="layers")
    for adapters in (contextlib.nullcontext(), model.disable_adapter()):
        with testing.CompileTrace() as trace, torch.no_grad(), adapters:
            logits = model(input_ids=IDS).logits
            with torch.compiler.set_stance("force_eager"):
                assert testing.relative_error(logits, model(input_ids=IDS).logits) < CLOSE
        assert (trace.graphs, trace.breaks, trace.recompiles) == (1, [], [])


def test_hooks_stay_outside_of_the_graph() -> None:
    """As those of FSDP have to, which Dynamo cannot trace."""
    model = llama()
    called: list[object] = []
    model.register_forward_pre_hook(torch._dynamo.disable(lambda *given: called.append(given[0])))
    qfused(model)
    with testing.CompileTrace() as trace, torch.no_grad():
        model(input_ids=IDS)
        model(input_ids=IDS)
    assert (trace.graphs, trace.breaks, len(called)) == (1, [], 2)


def test_inside_of_a_function_that_is_compiled() -> None:
    model = llama()
    qfused(model)

    @torch.compile(backend=qfuse, options=SMALL, fullgraph=True)
    def loss(ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    with torch.no_grad():
        assert torch.allclose(loss(IDS), model.forward(input_ids=IDS, labels=IDS).loss)


def test_the_last_graph_of_a_function_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    model.compile(backend=qfuse, options=SMALL)
    with caplog.at_level(logging.WARNING, "inductor_q"), config.patch(recompile_limit=2):
        model(input_ids=IDS)
        assert not caplog.records
        with torch.no_grad():
            model(input_ids=IDS)
    [record] = caplog.records
    assert "graph 2 of forward (" in record.message
    assert "peft_model.py" in record.message and "the last that torch compiles" in record.message


def test_doctor_looks_into_a_wrapped_model() -> None:
    """`torch.compile(model)` is what it wraps, and its states are compiled graphs."""
    plain, wrapped, by_state = llama(), torch.compile(llama(), backend=qfuse), llama()
    qfused(by_state)
    assert check_model(wrapped) == check_model(plain)  # type: ignore[arg-type]
    for model in (wrapped, by_state):
        torch._dynamo.reset()
        model(input_ids=IDS)
        [found] = [f for f in check_model(model) if f.check == "late_adapter"]  # type: ignore[arg-type]
        assert found.found == "every active adapter is in a compiled graph"


def test_merging_is_a_state_also_where_a_saved_module_comes_first() -> None:
    base = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8))
    config = peft.LoraConfig(target_modules=["1"], modules_to_save=["0"])
    model: Any = peft.get_peft_model(base, config)
    states = States(model, {})
    states.enter(states.state())
    before = states.state()
    model.merge_adapter()
    assert states.state() != before
