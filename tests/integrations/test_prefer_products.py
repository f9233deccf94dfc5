"""A compile has experts that PEFT adapts computed here, where that is faster, and says so."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inductor_q
from inductor_q import testing
from inductor_q.integrations import QfuseCallback, parameters, prepare_parameters, regions
from inductor_q.integrations.parameters import DEFAULT, gains
from tests.support.adapted_parameters import FUSED, lora, wrapped, wrappers
from tests.support.compiling import no_codegen
from tests.support.moe_models import model, tokens
from tests.support.moe_steps import step
from tests.support.trainers import COMMON, train

peft = pytest.importorskip("peft")
parametrize: Any = pytest.importorskip("bitsandbytes.nn.parametrize")
transformers: Any = pytest.importorskip("transformers")

BF16 = torch.bfloat16
OURS = "qfuse"
#: Norm-relative, in bfloat16 through two layers, of logits and of each gradient. Both sides deviate
#: from float64 by up to 0.03. Measured between them: up to 0.034.
NEAR = 0.06

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def gaining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this CPU for a device that gains."""
    monkeypatch.setattr(parameters, "gains", lambda device: True)


def adapted(family: str = "qwen3_moe", implementation: str = DEFAULT, **settings: Any) -> Any:
    return wrapped(family, implementation, **{"target_parameters": FUSED} | settings).to(BF16)


def computed_by(net: nn.Module) -> set[str]:
    layers: Any = (wrapper.get_base_layer() for wrapper in wrappers(net))
    return {layer.config._experts_implementation for layer in layers}


def compiled(net: Any, **settings: Any) -> set[str]:
    """Compile a model, and say who computes its experts then."""
    return computed_by(inductor_q.compile(net, **settings))


def assert_near(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    assert testing.relative_error(found[0], expected[0]) < NEAR
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert testing.relative_error(found[1][name], gradient) < NEAR, name


# --- layers that are computed here ----------------------------------------------------------------


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_graph_of_products(
    family: str, autocast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its values and gradients are PEFT's, and a second compile changes nothing."""
    net = adapted(family)
    for name, parameter in net.named_parameters():
        if autocast and "lora_" in name:
            parameter.data = parameter.data.float()
    caplog.set_level(logging.INFO, "inductor_q")
    graphs = []
    with torch.autocast("cpu", BF16, enabled=autocast), no_codegen():
        expected = step(net, tokens())
        for _ in range(2):
            with testing.CompileTrace() as trace:
                assert_near(step(net, tokens(), inductor_q.compile(net)), expected)
            assert trace.breaks == []
            graphs.append(trace.graphs)
    assert graphs == [1, 0]
    report = inductor_q.last_report()
    assert report is not None
    assert report.applied()["fuse_scatter2scatter"] == 8
    told = [line for line in caplog.messages if "layers of experts" in line]
    assert [line[:19] for line in told] == ["2 layers of experts"]


#: What makes another state of adapters of a model that has two.
CHANGES: dict[str, Callable[[Any], None]] = {
    "another": lambda net: net.set_adapter("other"),
    "both": lambda net: net.base_model.set_adapter(["default", "other"]),
    "the first": lambda net: net.set_adapter("default"),
    "merged": lambda net: net.merge_adapter(),
    "unmerged": lambda net: net.unmerge_adapter(),
}


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize(
    "names", [[], pytest.param([*CHANGES], marks=pytest.mark.slow)], ids=["on-and-off", "every"]
)
def test_each_state_of_adapters(names: list[str]) -> None:
    """Each is one graph, whose values and gradients are those of PEFT in eager mode."""
    theirs = adapted()
    theirs.add_adapter("other", lora(target_parameters=FUSED))
    theirs.to(BF16)
    net = copy.deepcopy(theirs)
    assert (compiled(net), computed_by(theirs)) == ({OURS}, {DEFAULT})
    seen = []

    def agree() -> None:
        expected = step(theirs, tokens())
        with no_codegen(), testing.CompileTrace() as trace:
            assert_near(step(net, tokens()), expected)
        assert (trace.breaks, trace.recompiles) == ([], [])
        seen.append(expected[0])

    agree()
    with theirs.disable_adapter(), net.disable_adapter():
        agree()
    for name in names:
        for each in (theirs, net):
            CHANGES[name](each)
        agree()
    for index, logits in enumerate(seen[:4]):
        assert all(testing.relative_error(logits, other) > 2 * NEAR for other in seen[:index])


@pytest.mark.usefixtures("gaining")
def test_what_is_saved_does_not_name_us(tmp_path: Path) -> None:
    """Neither with the adapter nor merged, and who loads it has transformers' default."""
    net = adapted()
    assert compiled(net) == {OURS}
    net.save_pretrained(tmp_path / "adapter")
    net.get_base_model().config.save_pretrained(tmp_path / "config")
    merged = net.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    texts = [file.read_text() for file in tmp_path.rglob("*.json")]
    assert len(texts) >= 3 and not any(OURS in text for text in texts)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert back.config._experts_implementation == DEFAULT
    with no_codegen(), torch.no_grad():
        assert_near(step(merged, tokens()), step(back, tokens()))


def trainer(out: Path) -> Any:
    data = [{"input_ids": row, "labels": row} for row in tokens(8, 12).tolist()]
    arguments = transformers.TrainingArguments(str(out), **{**COMMON, "max_steps": 3})
    return transformers.Trainer(adapted(), arguments, train_dataset=data)


@pytest.mark.usefixtures("gaining")
def test_the_callback_does_so_when_training_begins(tmp_path: Path) -> None:
    given = trainer(tmp_path)
    QfuseCallback().on_train_begin(given.args, given.state, None, model=given.model)
    assert computed_by(given.model) == {OURS}


@pytest.mark.slow
@pytest.mark.usefixtures("gaining")
def test_training_with_the_callback(tmp_path: Path) -> None:
    eager, ours = (train(lambda: trainer(tmp_path), compiled=by) for by in (False, True))
    assert (ours.graphs, ours.breaks) == (1, [])
    assert ours.logged("loss") == pytest.approx(eager.logged("loss"), rel=0.01)


@pytest.mark.usefixtures("gaining")
def test_a_model_beside_another_is_looked_at_by_itself() -> None:
    """One configuration says who computes the layers that share it, and no others."""
    both = nn.ModuleList([adapted(), model("qwen3_moe", DEFAULT).to(BF16)])
    assert compiled(both) == {OURS}
    teacher: Any = both[1]
    assert teacher.config._experts_implementation == DEFAULT


def test_devices_that_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    found = []
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        found.append(gains(gpu))
    assert found == [False, False, True, True]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not gains(gpu)
    assert not gains(torch.device("cpu")) and not gains(torch.device("meta"))


# --- layers that stay as they are -----------------------------------------------------------------


def test_a_device_that_does_not_gain() -> None:
    assert compiled(adapted()) == {DEFAULT}


@pytest.mark.usefixtures("gaining")
def test_preparing_parameters_leaves_them() -> None:
    net = adapted()
    prepare_parameters(net)
    assert computed_by(net) == {DEFAULT}


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_what_the_user_chose(implementation: str) -> None:
    assert compiled(adapted(implementation=implementation)) == {implementation}


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gpt_oss", ["experts.down_proj_bias"]),
        ("qwen3_moe", [f"1.mlp.{name}" for name in FUSED]),
        ("gpt_oss", ["experts.gate_up_proj_bias", "experts.down_proj"]),
        ("qwen3_moe", ["mlp.gate.weight"]),
    ],
    ids=["biases", "one-layer", "beside-biases", "routers"],
)
def test_adapters_of_other_parameters(family: str, names: list[str]) -> None:
    net = adapted(family, target_parameters=names)
    with net.disable_adapter():  # where nothing is added, and later is
        inductor_q.compile(net)
    inductor_q.compile(net)
    assert net.get_base_model().config._experts_implementation == DEFAULT


def in_float32(net: Any) -> None:
    net.float()


def hooked(net: Any) -> None:
    next(wrappers(net)).get_base_layer().register_forward_hook(lambda *_: None)


def hooked_between(net: Any) -> None:
    [*_, inner] = wrappers(net)
    inner.register_forward_hook(lambda *_: None)


def packed(net: Any) -> None:
    """Half of one layer, as bitsandbytes packs it."""
    layer = next(wrappers(net)).get_base_layer()
    for wrapper in list(wrappers(net))[:2]:
        if wrapper.parameter_name == "gate_up_proj":
            parametrize.replace_parameter_4bit(layer, "gate_up_proj")


def replaced(net: Any) -> None:
    outermost: Any = next(wrappers(net))
    outermost.forward = lambda *given, own=outermost.forward: own(*given)


def several(net: Any) -> None:
    net.add_adapter("other", lora(target_parameters=FUSED))
    net.to(BF16).base_model.set_adapter(["default", "other"])


@pytest.mark.usefixtures("gaining")
@pytest.mark.parametrize("change", [in_float32, hooked, hooked_between, packed, replaced, several])
def test_layers_of_another_kind(change: Callable[[Any], None]) -> None:
    net = adapted()
    change(net)
    assert compiled(net) == {DEFAULT}


@pytest.mark.usefixtures("gaining")
def test_strict_numerics() -> None:
    assert compiled(adapted(), options={"qfuse.numerics": "strict"}) == {DEFAULT}


@pytest.mark.usefixtures("gaining")
def test_a_model_that_fsdp_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "_is_sharded", lambda net: True)
    assert compiled(adapted()) == {DEFAULT}


@pytest.mark.usefixtures("gaining")
def test_a_peft_whose_layers_give_no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(peft.tuners.lora.layer.ParamWrapper, "get_delta_factors")
    assert compiled(adapted()) == {DEFAULT}
