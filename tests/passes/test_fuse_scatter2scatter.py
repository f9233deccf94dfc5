"""fuse_scatter2scatter: transformers' experts, as they are, read packed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import inductor_q
from inductor_q import experts
from inductor_q.experts.modules import expert_layers
from inductor_q.integrations import prepare_checkpointing
from inductor_q.kernels import PROVIDERS
from inductor_q.log import warn_once
from tests.support.autocast import cuda_autocast
from tests.support.compiling import Compiled, compile_step, no_codegen, step
from tests.support.expert_layers import (
    BY_TOKEN,
    CLOSE,
    PASS,
    TO_ROWS,
    TO_TOKENS,
    Experts,
    check_errors,
    compiled,
    in_float64,
    inputs,
    products,
    unpack,
)
from tests.support.moe_models import EXPERTS, HIDDEN, INTERMEDIATE, awaken, model, tokens

AS_STORED = {
    "fuse_scatter2scatter.min_elements_of_large": 1,
    "fuse_scatter2scatter.min_rows_of_large": 1,
}
TRANSPOSED = {
    "fuse_scatter2scatter.min_elements_of_large_transposed": 1,
    "fuse_scatter2scatter.min_rows_of_large_transposed": 1,
}
DECODED_FIRST = AS_STORED | TRANSPOSED


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the providers of scatter2scatter that run, in order; nothing was warned of."""
    names: list[str] = []
    warn_once.cache_clear()
    for provider in PROVIDERS["scatter2scatter"]["cpu"]:

        def run(call: Any, provider: Any = provider, original: Any = provider.run) -> Any:
            names.append(provider.name)
            return original(call)

        monkeypatch.setattr(provider, "run", run, raising=False)
    return names


def saved(result: Compiled) -> int:
    """The largest tensor that the forward graph hands to backward."""
    output: Any = result.partitioned[0].output_node()
    computed = [v for v in output.args[0] if v is not None and v.op != "placeholder"]
    return max(int(v.meta["val"].numel()) for v in computed)


def copies(result: Compiled, slots: int) -> list[str]:
    """What has a row of the hidden size for each slot, which nothing needs."""
    nodes = [n for graph in result.joint for n in graph.nodes]
    return [n.name for n in nodes if [*getattr(n.meta.get("val"), "shape", ())] == [slots, HIDDEN]]


SLOW = pytest.mark.slow
CASES = [
    ("qwen3_moe", "grouped_mm", torch.float32),
    ("gpt_oss", "batched_mm", torch.float32),
    pytest.param("qwen3_moe", "grouped_mm", torch.bfloat16, marks=SLOW),
    pytest.param("qwen3_moe", "batched_mm", torch.float32, marks=SLOW),
    pytest.param("qwen3_moe", "batched_mm", torch.bfloat16, marks=SLOW),
    pytest.param("gpt_oss", "grouped_mm", torch.float32, marks=SLOW),
    pytest.param("gpt_oss", "grouped_mm", torch.bfloat16, marks=SLOW),
    pytest.param("gpt_oss", "batched_mm", torch.bfloat16, marks=SLOW),
]


@pytest.mark.parametrize(("family", "implementation", "dtype"), CASES)
def test_packed_experts_are_read_packed(
    family: str, implementation: str, dtype: torch.dtype
) -> None:
    result = compiled(Experts(family, implementation, dtype), dtype)
    assert result.applied[PASS] == 4  # two projections, forward and input gradient
    assert result.ops["qfuse.scatter2scatter"] == 4
    assert result.ops["qfuse.tile_map"] == 1  # both projections, and backward
    assert not {"_grouped_mm", "bmm", "qfuse.dequantize", "bitsandbytes.dequantize_4bit"} & {
        *result.ops
    }
    assert saved(result) <= 14 * 2 * INTERMEDIATE
    assert result.ops["sort"] <= 1
    if implementation == "grouped_mm":
        assert PASS not in result.reasons
        if family == "gpt_oss":  # a bias between the second product and its gates
            assert products(result) == [TO_ROWS, (1, True, True), TO_ROWS, TO_TOKENS]
        else:
            assert products(result) == BY_TOKEN
            assert not copies(result, 14)


def half_dense(implementation: str) -> Experts:
    """Its first projection in float32, beside a packed one: a model without any is Inductor's."""
    layer = Experts("qwen3_moe", implementation, torch.float32)
    unpack(layer.experts, "gate_up_proj")
    return layer


class Checkpointed(Experts):
    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, ids, gates, use_reentrant=False)
        return result


def test_under_a_checkpoint() -> None:
    result = compiled(Checkpointed("qwen3_moe", "grouped_mm", torch.float32), torch.float32)
    assert PASS not in result.reasons
    assert all(product in BY_TOKEN for product in products(result))
    assert not copies(result, 14)


@pytest.mark.parametrize(
    ("dtype", "kind", "masked"),
    [
        (torch.bfloat16, Experts, False),
        (torch.float32, Checkpointed, True),
        pytest.param(torch.float32, Experts, False, marks=SLOW),
        pytest.param(torch.bfloat16, Checkpointed, True, marks=SLOW),
    ],
)
def test_under_autocast_of_cuda(dtype: torch.dtype, kind: type[Experts], masked: bool) -> None:
    """It takes sums in float32; what flows from layer to layer may be float32, too, and masked."""
    layer = kind("qwen3_moe", "grouped_mm", torch.bfloat16)
    layer.experts._is_expert_parallel = masked
    x, ids, gates = inputs(torch.bfloat16)
    args = x.detach().to(dtype).requires_grad_(), ids, gates
    with cuda_autocast():
        eager = step(layer, *args)
        result = compile_step(layer, *args, fullgraph=True)
    assert result.output.dtype == eager[0].dtype == dtype
    assert products(result) == BY_TOKEN and PASS not in result.reasons
    assert not copies(result, 14)
    check_errors(result, eager, in_float64(layer, args))


@SLOW
def test_gathered_dense_experts_are_not_copied() -> None:
    layer = half_dense("batched_mm")
    result = compiled(layer, torch.float32)
    assert result.applied[PASS] == 4
    assert saved(result) <= 14 * 2 * INTERMEDIATE


def test_grouped_dense_experts_stay() -> None:
    layer = half_dense("grouped_mm")
    result = compiled(layer, torch.float32)
    assert result.applied[PASS] == 2
    assert result.reasons[PASS] == {
        "the experts are dense: torch's grouped product reads them as they are": 2
    }
    assert list(result.report.verdicts()) == ["experts.down_proj"]


def test_dense_experts_are_no_quantized_layers() -> None:
    """Of a model that calls our op, and of one that gathers them: sites, without a verdict."""
    net = model("qwen3_moe").requires_grad_(False)
    experts.quantize(net, "dense")
    layer = Experts("qwen3_moe", "qfuse", torch.float32, packed=False)
    layer.experts = expert_layers(net)["model.layers.0.mlp.experts"]
    with no_codegen():
        result = compile_step(layer, *inputs(torch.float32), fullgraph=True)
        assert result.applied[PASS] == 4
        assert not result.report.verdicts() and "quantized" not in result.report.summary()
        gathered = compile_step(half_dense("batched_mm"), *inputs(torch.float32), fullgraph=True)
    assert gathered.applied[PASS] == 4
    assert list(gathered.report.verdicts()) == ["experts.down_proj"]


@pytest.mark.parametrize("passes", [{}, {PASS: False}], ids=["", "without the pass"])
@pytest.mark.parametrize(
    ("dtype", "wanted", "provider"),
    [
        (torch.bfloat16, "auto", "reference"),
        (torch.bfloat16, "dequantize", "dequantize"),
        (torch.float32, "dequantize", "reference"),  # bfloat16 only
        (torch.float32, "triton", "reference"),  # on a GPU only
    ],
    ids=str,
)
def test_products_of_our_own_are_served_and_reported_as_asked(
    dtype: torch.dtype,
    wanted: str,
    provider: str,
    passes: dict[str, bool],
    launched: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Forward and backward, whether or not a pass looks at them; what is refused is logged."""
    net = model("qwen3_moe").requires_grad_(False)
    experts.quantize(net)
    layer = Experts("qwen3_moe", "qfuse", dtype, packed=False)
    layer.experts = expert_layers(net)["model.layers.0.mlp.experts"]
    awaken(experts.add_lora(layer, r=2))
    layer.to(dtype)
    options = {
        "qfuse.kernels": {"scatter2scatter": wanted},
        "qfuse.passes": passes,
        "fx_graph_cache": False,
    }
    result = compile_step(layer, *inputs(dtype), fullgraph=True, options=options)
    assert launched == [provider] * 4
    assert result.report.providers["scatter2scatter"] == {provider: 4}
    assert ("is not used" in caplog.text) == (wanted not in ("auto", provider))
    sites = [s for s in result.report.sites if s.pass_name == PASS]
    if not passes:
        assert result.applied[PASS] == 4
        assert {s.provider for s in sites} == {provider}
        assert {s.module for s in sites} == {"experts.gate_up_proj", "experts.down_proj"}


@SLOW
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_any_number_of_tokens(implementation: str) -> None:
    layer = Experts("qwen3_moe", implementation, torch.float32)
    result = compiled(layer, torch.float32, dynamic=True)
    assert result.applied[PASS] == 4
    assert result.ops["qfuse.scatter2scatter"] == 4
    if implementation == "grouped_mm":  # of choices too, which is for this layer alone
        assert result.reasons[PASS] == {"rows stay sorted: top_k is no number": 4}


def test_any_number_of_tokens_by_a_fixed_number_of_choices() -> None:
    """How many rows there are is asked of their order: the tokens' copies are not made any more."""
    args = inputs(torch.float32, 9)
    for one in args:
        torch._dynamo.mark_dynamic(one, 0)
    result = compiled(Experts("qwen3_moe", "grouped_mm", torch.float32), torch.float32, args)
    assert products(result)[0] == TO_ROWS
    nodes = [n for graph in result.joint for n in graph.nodes]
    (tiles,) = (n for n in nodes if n.target is torch.ops.qfuse.tile_map.default)
    (asked,) = tiles.args[1].all_input_nodes
    assert asked.meta["val"].dim() == 1


def test_rows_of_sentinels_are_nobodys() -> None:
    """Under expert parallelism transformers masks them around each product; 5.17 always does."""
    layer = Experts("qwen3_moe", "grouped_mm", torch.float32)
    layer.experts._is_expert_parallel = True
    x, ids, gates = inputs(torch.float32)
    elsewhere = ids == 2
    ids = ids.masked_fill(elsewhere, EXPERTS)
    gates = gates.detach().masked_fill(elsewhere, 0.0).requires_grad_()
    result = compiled(layer, torch.float32, (x, ids, gates))
    assert result.ops["ge"] and products(result) == BY_TOKEN
    assert not copies(result, 14) and PASS not in result.reasons


class Twice(Experts):
    """The same layer on its own result."""

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        return super().forward(super().forward(x, ids, gates), ids, gates)


@SLOW
def test_a_layer_on_the_result_of_a_layer() -> None:
    """What is fused first is what the next reads."""
    result = compiled(Twice("qwen3_moe", "grouped_mm", torch.float32), torch.float32)
    assert sorted(products(result)) == sorted(BY_TOKEN * 2)
    assert not copies(result, 14) and not result.ops["transformers.grouped_mm_fallback"]


def untouched(implementation: str, **kwargs: Any) -> Any:
    """A model packed by bitsandbytes, whose embedding trains."""
    net = model("qwen3_moe", implementation).requires_grad_(False).to(**kwargs)
    net.model.embed_tokens.weight.requires_grad_(True)
    for layer in expert_layers(net).values():
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(layer, name)
    return net


@SLOW
@pytest.mark.parametrize("any_length", [False, True])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_an_untouched_model(implementation: str, any_length: bool) -> None:
    net, ids = untouched(implementation), tokens()

    def logits(ids: Tensor) -> Tensor:
        result: Tensor = net(input_ids=ids, use_cache=False).logits
        return result

    expected, expected_grads = step(logits, ids, module=net)
    if any_length:
        torch._dynamo.mark_dynamic(ids, 1)
    result = compile_step(logits, ids, module=net, fullgraph=True)
    assert result.applied[PASS] == 8
    if implementation == "grouped_mm":
        assert sorted(products(result)) == sorted(BY_TOKEN * 2)
        assert PASS not in result.reasons
        assert any_length or not copies(result, 28)
    torch.testing.assert_close(result.output, expected, **CLOSE)
    assert result.gradients.keys() == expected_grads.keys()
    for name, grad in result.gradients.items():
        torch.testing.assert_close(grad, expected_grads[name], **CLOSE)


def test_no_expert_of_an_untouched_model_is_decoded_for_a_cache() -> None:
    """Of the first layer, the hooks around packed experts would return decoded ones."""
    net, ids = untouched("grouped_mm", dtype=torch.bfloat16), tokens()
    prepare_checkpointing(net)

    def logits(ids: Tensor) -> Tensor:
        result: Tensor = net(input_ids=ids, use_cache=False).logits
        return result

    with no_codegen():
        result = compile_step(logits, ids, module=net, fullgraph=True)
    assert sorted(products(result)) == sorted(BY_TOKEN * 2)
    assert not result.ops["qfuse.dequantize"]
    told = inductor_q.report(net)  # under the names that the model has for them
    assert (told.fused, len(told.layers)) == (4, 4)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
@SLOW
def test_an_untouched_model_in_bfloat16(device: str) -> None:
    """The dtype in which transformers calls torch's grouped product on a GPU, in every version."""
    net = untouched("grouped_mm", dtype=torch.bfloat16, device=device)
    ids = tokens().to(device)

    def logits(ids: Tensor) -> Tensor:
        result: Tensor = net(input_ids=ids, use_cache=False).logits
        return result

    expected = step(logits, ids, module=net)
    result = compile_step(logits, ids, module=net, fullgraph=True)
    assert sorted(products(result)) == sorted(BY_TOKEN * 2)
    assert not copies(result, 28) and PASS not in result.reasons
    for layer in expert_layers(net).values():
        for name in ("gate_up_proj", "down_proj"):
            unpack(layer, name)
    net.double().set_experts_implementation("eager")
    check_errors(result, expected, step(logits, ids, module=net))


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({}, {"reference": 4}),
        ({"qfuse.thresholds": DECODED_FIRST}, {"dequantize": 4}),
        ({"qfuse.thresholds": AS_STORED}, {"dequantize": 2, "reference": 2}),
        ({"qfuse.thresholds": TRANSPOSED}, {"dequantize": 2, "reference": 2}),
        ({"qfuse.thresholds": DECODED_FIRST, "qfuse.memory": "16GB"}, {"reference": 4}),
    ],
    ids=["", "large", "large as stored", "large transposed", "under a budget"],
)
def test_large_experts_are_decoded_first(
    options: dict[str, Any], served: dict[str, int], launched: list[str]
) -> None:
    """Compiled code finds it at each call, and the report says it; gradients of x read the weight
    transposed."""
    layer = Experts("qwen3_moe", "grouped_mm", torch.bfloat16)
    result = compiled(layer, torch.bfloat16, options={**options, "fx_graph_cache": False})
    assert Counter(launched) == served
    assert result.report.providers["scatter2scatter"] == served
    assert {s.provider for s in result.report.sites if s.pass_name == PASS} == set(served)


@pytest.mark.gpu
@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_large_experts_are_decoded_first_on_a_gpu(large: bool) -> None:
    """By either route a step is no further from float64 than one and a quarter of eager's error."""
    layer = Experts("qwen3_moe", "grouped_mm", torch.bfloat16, device="cuda")
    x, ids, gates = inputs(torch.bfloat16, n=64)
    args = (
        x.detach().cuda().requires_grad_(),
        ids.cuda(),
        gates.detach().cuda().requires_grad_(),
    )
    thresholds = {"qfuse.thresholds": DECODED_FIRST} if large else {}
    result = compiled(layer, torch.bfloat16, args, options={**thresholds, "fx_graph_cache": False})
    served = result.report.providers["scatter2scatter"]
    assert sum(served.values()) == 4 and ("dequantize" in served) == large, served
