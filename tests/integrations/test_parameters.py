"""PEFT's LoRA on parameters in one graph: the adapted weight is PEFT's, and experts need none."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import inductor_q
from inductor_q import exc, experts, testing
from inductor_q.capture.experts_graph import ADAPTED_EXPERTS
from inductor_q.integrations import prepare_parameters
from inductor_q.integrations.methods import has_own_forward
from inductor_q.integrations.parameters import is_plain
from inductor_q.kernels.dispatch import preferring
from tests.support.compiling import no_codegen, partition
from tests.support.moe_models import EXPERTS, HIDDEN, INTERMEDIATE, model, tokens
from tests.support.moe_steps import EXACT, step
from tests.support.ranks import leave, on_two_ranks

peft = pytest.importorskip("peft")
parametrize: Any = pytest.importorskip("bitsandbytes.nn.parametrize")
transformers: Any = pytest.importorskip("transformers")

FUSED = ["experts.gate_up_proj", "experts.down_proj"]
BF16 = torch.bfloat16
#: A prepared layer, in eager mode or compiled, against PEFT's own.
CASES = [
    pytest.param("qwen3_moe", {"target_modules": "all-linear"}, id="all-linear"),
    pytest.param("qwen3_moe", {"target_parameters": FUSED}, id="experts"),
    pytest.param("mixtral", {"target_parameters": ["1.mlp.experts.down_proj"]}, id="one"),
    pytest.param("gpt_oss", {"target_parameters": FUSED}, id="transposed"),
    # As recipes for gpt-oss have it: experts of some layers.
    pytest.param(
        "gpt_oss",
        {
            "target_modules": "all-linear",
            "target_parameters": [f"1.mlp.{name}" for name in FUSED],
        },
        id="some-layers",
    ),
]

#: The same where each takes ten seconds: the first and the last have every kind of layer.
GRAPHS = [
    case
    if case in (CASES[0], CASES[-1])
    else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
    for case in CASES
]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def lora(**settings: Any) -> Any:
    given = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**given | settings)


def wrapped(family: str, implementation: str = "grouped_mm", **settings: Any) -> Any:
    net = peft.get_peft_model(model(family, implementation), lora(**settings))
    assert list(wrappers(net))
    return net


def wrappers(net: nn.Module) -> Iterator[Any]:
    kind = peft.tuners.lora.layer.ParamWrapper
    return (module for module in net.modules() if isinstance(module, kind))


def assert_equal(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert any("experts" in name or "gate" in name for name in expected[1])


# --- the adapted weight ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_values_and_gradients_are_those_of_peft(
    family: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Adapters are in float32. Weights are too, or in 16 bits and under autocast."""
    net = wrapped(family, **settings)
    for name, parameter in net.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else dtype)
    ids = tokens()
    with torch.autocast("cpu", BF16, enabled=dtype is BF16):
        expected = step(net, ids)
        prepare_parameters(net)
        assert not any(has_own_forward(wrapper) for wrapper in wrappers(net))
        assert_equal(step(net, ids), expected)


@pytest.mark.parametrize(("family", "settings"), GRAPHS)
def test_one_graph(family: str, settings: dict[str, Any]) -> None:
    net = wrapped(family, **settings)
    expected = step(net, tokens())
    with no_codegen(), testing.CompileTrace() as trace:
        assert_equal_but_order(step(net, tokens(), inductor_q.compile(net)), expected)
    assert (trace.graphs, trace.breaks) == (1, [])


def assert_equal_but_order(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    assert testing.relative_error(found[0], expected[0]) < EXACT
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert testing.relative_error(found[1][name], gradient) < EXACT, name


def test_the_graph_of_a_compile_of_ones_own() -> None:
    """It breaks at PEFT's forward, and not once the model is prepared."""
    net = wrapped("qwen3_moe", target_modules="all-linear")
    breaks = []
    for prepared in (False, True):
        if prepared:
            prepare_parameters(net)
        torch._dynamo.reset()
        with testing.CompileTrace() as trace:
            step(net, tokens(), torch.compile(net, backend="eager"))
        breaks.append(len(trace.breaks))
    assert breaks[0] > 4
    assert breaks[1] == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    net = wrapped("qwen3_moe", target_parameters=FUSED)
    net.train()
    expected = step(net, tokens())
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with no_codegen(), testing.CompileTrace() as trace:
        found = step(net, tokens(), inductor_q.compile(net))
    assert_equal_but_order(found, expected)
    assert trace.breaks == []


# --- the life of adapters -------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [False, True])
def test_each_state_of_adapters(ours: bool) -> None:
    """Off, another one, both, merged and unmerged: as PEFT computes them in eager mode."""
    theirs = wrapped("qwen3_moe", target_parameters=FUSED)
    theirs.add_adapter("other", lora(target_parameters=FUSED))
    net = copy.deepcopy(theirs)
    if ours:
        experts.use_qfuse(net)
    prepare_parameters(net)

    def agree() -> Tensor:
        expected, found = (step(each, tokens()) for each in (theirs, net))
        assert_equal_but_order(found, expected)
        return expected[0]

    seen = [agree()]
    with theirs.disable_adapter(), net.disable_adapter():
        seen.append(agree())
    changes: tuple[Callable[[Any], None], ...] = (
        lambda each: each.set_adapter("other"),
        lambda each: each.base_model.set_adapter(["default", "other"]),
    )
    for change in changes:
        for each in (theirs, net):
            change(each)
        seen.append(agree())
    for each in (theirs, net):
        each.merge_adapter()
    merged = agree()
    torch.testing.assert_close(merged, seen[-1], rtol=1e-3, atol=1e-4)
    for each in (theirs, net):
        each.unmerge_adapter()
    agree()
    for index, logits in enumerate(seen):
        assert all(testing.relative_error(logits, other) > 1e-3 for other in seen[:index])


@pytest.mark.parametrize("ours", [False, True])
def test_each_state_is_one_graph_and_a_known_one_none(ours: bool) -> None:
    net = wrapped("qwen3_moe", target_parameters=FUSED)
    if ours:
        experts.use_qfuse(net)
    inductor_q.compile(net)

    def graphs() -> tuple[int, Tensor]:
        with no_codegen(), testing.CompileTrace() as trace:
            logits = step(net, tokens())[0]
        assert (trace.breaks, trace.recompiles) == ([], [])
        return trace.graphs, logits

    first, adapted = graphs()
    with net.disable_adapter():
        off, plain = graphs()
    net.merge_adapter()
    merged, as_before = graphs()
    net.unmerge_adapter()
    assert (first, off, merged, graphs()[0]) == (1, 1, 1, 0)
    assert testing.relative_error(as_before, adapted) < EXACT
    assert testing.relative_error(plain, adapted) > 1e-3


def test_an_adapter_that_comes_later_is_prepared_by_the_next_call() -> None:
    net = peft.get_peft_model(model("qwen3_moe", "grouped_mm"), lora())
    call = inductor_q.compile(net)
    with no_codegen():
        step(net, tokens(), call)
        net.add_adapter("other", lora(target_parameters=FUSED))
        net.set_adapter("other")
        with testing.CompileTrace() as trace:
            found = step(net, tokens(), call)
    assert trace.breaks == []
    for wrapper in wrappers(net):
        del wrapper.forward
    assert_equal_but_order(found, step(net, tokens()))


def test_a_model_that_is_pickled_comes_back_with_the_forward_of_peft() -> None:
    net = wrapped("qwen3_moe", target_parameters=FUSED)
    prepare_parameters(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    assert all(has_own_forward(wrapper) for wrapper in wrappers(back))
    assert_equal(step(back, tokens()), step(net, tokens()))


# --- experts that are computed here ---------------------------------------------------------------


@pytest.mark.parametrize(("family", "settings"), GRAPHS)
def test_experts_of_ours_take_the_adapters_of_peft(family: str, settings: dict[str, Any]) -> None:
    net = experts.use_qfuse(wrapped(family, **settings))
    expected = step(net, tokens())
    with no_codegen(), testing.CompileTrace() as trace:
        assert_equal_but_order(step(net, tokens(), inductor_q.compile(net)), expected)
    assert (trace.graphs, trace.breaks) == (1, [])
    report = inductor_q.last_report()
    assert report is not None
    assert report.applied()["fuse_scatter2scatter"] == 8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_their_products_are_as_near_as_with_an_adapted_weight(family: str, device: str) -> None:
    """In bfloat16, with one routing for all, since another would be an error of another kind."""
    net = wrapped(family, r=8, target_parameters=FUSED).to(device)
    layer = next(wrappers(net))  # the outer one of the first layer
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, HIDDEN, generator=generator)
    ids = torch.rand(32, EXPERTS, generator=generator).argsort(1)[:, :2].to(device)
    gates = torch.rand(32, 2, generator=generator)

    def outcome(dtype: torch.dtype) -> list[Tensor]:
        rows, weights = (t.to(device, dtype).requires_grad_() for t in (x, gates))
        factors = [p for n, p in layer.named_parameters() if "lora_" in n]
        total = layer(rows, ids, weights)
        return [total, *torch.autograd.grad(total.square().sum(), [rows, weights, *factors])]

    layer.double()
    net.get_base_model().set_experts_implementation("eager")
    exact = outcome(torch.float64)
    layer.to(BF16)
    net.get_base_model().set_experts_implementation("grouped_mm")
    theirs = outcome(BF16)
    prepare_parameters(experts.use_qfuse(net))
    ours = outcome(BF16)
    assert len(ours) == 7
    for found, other, right in zip(ours, theirs, exact, strict=True):
        error = testing.relative_error(found, right)
        assert 0 < error <= 1.25 * testing.relative_error(other, right)


def partitioned(net: Any) -> list[Any]:
    def run(call: Any) -> None:
        step(net, tokens(), call)

    return partition(run, net)


def of_that_size(graphs: list[Any]) -> int:
    """Count the tensors that graphs make, and that are as large as the fused parameters."""
    sizes = {EXPERTS * HIDDEN * INTERMEDIATE, 2 * EXPERTS * HIDDEN * INTERMEDIATE}
    made = (n.meta["val"] for graph in graphs for n in graph.nodes if n.op == "call_function")
    return sum(isinstance(value, Tensor) and value.numel() in sizes for value in made)


def test_no_weight_is_adapted_and_none_gets_a_gradient() -> None:
    net = wrapped("qwen3_moe", target_parameters=FUSED)
    prepare_parameters(net)
    assert of_that_size(partitioned(net)) > 4
    experts.use_qfuse(net)
    assert of_that_size(partitioned(net)) == 0


def test_a_report_names_the_way_out_of_adapted_weights() -> None:
    config = testing.tiny_qwen3_moe_config(num_hidden_layers=1)
    net = testing.qlora_model(config, targets=["q_proj"], target_parameters=FUSED)
    prepare_parameters(net)
    partitioned(net)
    report = inductor_q.last_report()
    assert report is not None
    assert report.rejections()["fuse_scatter2scatter"] == {ADAPTED_EXPERTS: 4}


def test_a_hook_on_the_experts_is_called() -> None:
    """What happens around their own forward would be left out, so the weight is adapted."""
    net = experts.use_qfuse(wrapped("qwen3_moe", target_parameters=FUSED))
    expected = step(net, tokens())
    prepare_parameters(net)
    seen: list[Any] = []
    for wrapper in wrappers(net):
        wrapper.get_base_layer().register_forward_hook(lambda *given: seen.append(given))
    assert_equal(step(net, tokens()), expected)
    assert len(seen) == 4  # each of the two wrappers of a layer has put one there


@pytest.mark.parametrize(
    "names",
    [
        ["experts.gate_up_proj_bias", "experts.down_proj"],
        ["experts.down_proj_bias"],
        ["experts.gate_up_proj", "experts.down_proj_bias"],
    ],
)
def test_adapters_of_biases_are_added(names: list[str]) -> None:
    net = wrapped("gpt_oss", target_parameters=names)
    expected = step(net, tokens())
    prepare_parameters(experts.use_qfuse(net))
    assert_equal_but_order(step(net, tokens()), expected)


def test_one_of_two_nested_adapters_is_merged() -> None:
    net = experts.use_qfuse(wrapped("qwen3_moe", target_parameters=FUSED))
    expected = step(net, tokens())[0]
    prepare_parameters(net)
    for index, wrapper in enumerate(list(wrappers(net))[:2]):
        wrapper.merge()
        assert testing.relative_error(step(net, tokens())[0], expected) < EXACT, index
        wrapper.unmerge()


@pytest.mark.parametrize("factors", [True, False])
def test_adapters_that_become_a_weight_under_experts_of_ours(
    factors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once, and those of an older PEFT."""
    net = wrapped("qwen3_moe", target_parameters=FUSED)
    experts.use_qfuse(net)
    if factors:
        net.add_adapter("other", lora(target_parameters=FUSED))
        net.base_model.set_adapter(["default", "other"])
    expected = step(net, tokens())
    if not factors:
        monkeypatch.delattr(peft.tuners.lora.layer.ParamWrapper, "get_delta_factors")
    with no_codegen(), testing.CompileTrace() as trace:
        assert_equal_but_order(step(net, tokens(), inductor_q.compile(net)), expected)
    assert (trace.graphs, trace.breaks) == (1, [])


def test_no_adapter_is_active() -> None:
    net = peft.get_peft_model(model("qwen3_moe", "grouped_mm"), lora())
    net.add_adapter("other", lora(target_parameters=FUSED))
    expected = step(net, tokens())
    with no_codegen(), testing.CompileTrace() as trace:
        assert_equal_but_order(step(net, tokens(), inductor_q.compile(net)), expected)
    assert trace.breaks == []


def test_an_input_without_a_gradient_and_a_grouped_product() -> None:
    """PEFT keeps the factors of experts innermost, which torch's product does not read."""
    net = wrapped("qwen3_moe", r=8, target_modules=[], target_parameters=FUSED).to(BF16)
    experts.use_qfuse(net)
    prepare_parameters(net)
    with preferring("scatter2scatter", "grouped_mm"):
        grads = step(net, tokens())[1]
    expected = step(net, tokens())[1]
    for name, gradient in expected.items():
        assert testing.relative_error(grads[name], gradient) < 0.05, name


def test_a_hook_of_accelerate_stays() -> None:
    hooks: Any = pytest.importorskip("accelerate.hooks")
    net = wrapped("qwen3_moe", target_parameters=FUSED)
    expected = step(net, tokens())
    called: list[str] = []

    class Note(hooks.ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(module.parameter_name)
            return args, kwargs

    for wrapper in wrappers(net):
        hooks.add_hook_to_module(wrapper, Note())
    prepare_parameters(net)
    assert not any(has_own_forward(wrapper) for wrapper in wrappers(net))
    assert_equal(step(net, tokens()), expected)
    assert len(called) == 4


@pytest.mark.slow
@pytest.mark.parametrize("ours", ["", "ours"])
def test_layers_that_fsdp2_shards(tmp_path: Path, ours: str) -> None:
    on_two_ranks(tmp_path, sharded, ours)


def sharded(rank: int, port: int, ours: str) -> None:
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    net = wrapped("qwen3_moe", target_parameters=FUSED)
    expected = step(net, tokens())
    if ours:
        experts.use_qfuse(net)
    for layer in net.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(net)
    inductor_q.compile(net)
    with no_codegen(), testing.CompileTrace() as trace:
        logits, grads = step(net, tokens())
    assert (trace.graphs, trace.breaks) == (1, [])
    parts: dict[str, Any] = {**grads}
    whole = {name: gradient.full_tensor() for name, gradient in parts.items()}
    assert_equal_but_order((logits, whole), expected)
    leave()


# --- what is left to PEFT -------------------------------------------------------------------------


def test_parameters_that_are_left_to_peft() -> None:
    net = wrapped("qwen3_moe", target_parameters=FUSED)
    in_eight_bits, on_meta, *others = wrappers(net)
    held = in_eight_bits.get_base_layer()
    held.down_proj = nn.Parameter(held.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    held.gate_up_proj = nn.Parameter(held.gate_up_proj.to("meta"))
    assert not is_plain(in_eight_bits) and not is_plain(on_meta)
    assert all(map(is_plain, others))


def test_experts_in_four_bits_are_left_to_peft() -> None:
    base = model("qwen3_moe", "grouped_mm")
    for layer in base.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(layer.mlp.experts, name)
    names = [f"model.layers.{i}.mlp.{name}" for i in range(2) for name in FUSED]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        net = peft.get_peft_model(base, lora(target_parameters=names))
    assert list(wrappers(net)) and not any(map(is_plain, wrappers(net)))


@pytest.mark.parametrize(
    "replace",
    [
        lambda net: experts.add_lora(net, targets=["gate_up_proj"]),
        lambda net: experts.quantize(net, "nf4_b64"),
        experts.shard,
        lambda net: experts.load_adapter(net, "nowhere"),
    ],
    ids=["add_lora", "quantize", "shard", "load_adapter"],
)
def test_a_parameter_that_peft_adapts_is_not_replaced(replace: Callable[[Any], object]) -> None:
    net = experts.use_qfuse(wrapped("qwen3_moe", target_parameters=FUSED))
    expected = step(net, tokens())
    with pytest.raises(exc.AdaptedByPeft, match=r"\.0\.mlp\.experts\.(down|gate_up)_proj, which"):
        replace(net)
    assert_equal(step(net, tokens()), expected)
