"""Products with frozen weights in eight bits: what is rewritten, what is refused, which values."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._inductor.utils import run_and_get_code

from inductor_q import testing
from inductor_q.context import Context
from inductor_q.exclusions import excluded_by
from inductor_q.graph_report import Report
from inductor_q.ops import eight_bits
from inductor_q.passes import emit_eight_bits, quantize_products
from inductor_q.passes.fold_lora import STRICT
from inductor_q.passes.graph import CAST, MUL, VIEWS, tensor
from tests.support.compiling import (
    Between,
    Compiled,
    compile_step,
    gradients,
    no_codegen,
    op_name,
    partition,
    step,
)
from tests.support.resolving import on_cpu
from tests.support.thresholds import ANY_PRODUCT

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

BF16, FP32 = torch.bfloat16, torch.float32
EVERY_ROW = {**ANY_PRODUCT, "extend_k.min_rows": 1}


def compiled(
    layer: nn.Module,
    x: Tensor,
    compute: str = "fp8",
    options: dict[str, Any] | None = None,
    *,
    codegen: bool = False,
) -> Compiled:
    given = {"qfuse.compute": compute, "qfuse.thresholds": EVERY_ROW, **(options or {})}
    context = None if codegen else no_codegen()
    return compile_step(layer, x, options=given, context=context)


def layer(n: int = 128, k: int = 64, **settings: Any) -> nn.Module:
    return Between(testing.lora_linear(n, k, **{"adapter_dtype": BF16, **settings}))


def tokens(k: int = 64, dtype: torch.dtype = BF16) -> Tensor:
    x = torch.randn(2, 32, k, generator=torch.Generator().manual_seed(3)).to(dtype)
    return x.requires_grad_()


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def refusals(outcome: Compiled) -> dict[str, int]:
    return outcome.reasons.get("quantize_products", {})


def test_by_default_nothing_is_in_eight_bits() -> None:
    outcome = compile_step(layer(), tokens(), context=no_codegen())
    assert "quantize_products" not in {s.pass_name for s in outcome.report.sites}
    assert outcome.report.in_eight_bits() == (0, 0)
    assert outcome.report.compute == "bf16"


@pytest.mark.parametrize("compute", ["fp8", "int8"])
def test_forward_and_gradient_of_the_input(compute: str) -> None:
    """The six products of the adapter stay in bfloat16, and none rides in eight bits. In FP8 two of
    them are added where the weight's products lie."""
    block, x = layer(), tokens()
    expected, grads = step(block, x, module=block)
    outcome = compiled(block, x, compute, codegen=True)
    assert outcome.applied["quantize_products"] == 2
    assert "extend_k" not in outcome.applied
    assert outcome.ops["qfuse.requantize"] == 2
    assert outcome.ops["qfuse.dequantize"] == 0
    assert outcome.ops["qfuse.extend"] == 0
    assert outcome.ops["mm"] == 6  # in FP8 four, and two that a CPU emulates
    assert outcome.ops["qfuse.add_product"] == (2 if compute == "fp8" else 0)
    assert outcome.ops["_int_mm"] == (2 if compute == "int8" else 0)
    assert 1e-3 < error(outcome.output, expected) < 0.04
    assert grads.keys() == outcome.gradients.keys()
    for name, grad in grads.items():
        assert error(outcome.gradients[name], grad) < 0.05, name


def test_the_gradient_takes_the_weight_transposed() -> None:
    outcome = compiled(layer(), tokens())
    (joint,) = outcome.joint
    decodes = joint.find_nodes(op="call_function", target=emit_eight_bits.REQUANTIZE)
    assert [node.args[-1] for node in decodes] == [False, True]
    for node in decodes:
        (columns,) = node.users
        assert columns.meta["val"].stride(0) == 1  # as tensor cores want their second operand


def test_the_report_says_how_many() -> None:
    outcome = compiled(layer(), tokens())
    assert outcome.report.in_eight_bits() == (2, 2)
    assert "2 of 2 products with frozen weights in fp8" in outcome.report.summary()
    assert outcome.report.to_dict()["in_eight_bits"] == [2, 2]
    assert type(outcome.report).from_dict(outcome.report.to_dict()).in_eight_bits() == (2, 2)


class Shared(nn.Module):
    """Two layers over one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q = testing.lora_linear(64, 64, adapter_dtype=BF16)
        self.k = testing.lora_linear(64, 64, adapter_dtype=BF16, seed=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return torch.tanh(self.q(x) * self.k(x))


def test_products_of_one_input_share_its_cast() -> None:
    outcome = compiled(Shared(), tokens())
    assert outcome.applied["quantize_products"] == 4
    assert outcome.ops["amax"] == 1 + 2  # of x, and of each gradient
    assert outcome.ops["qfuse.requantize"] == 2 + 1


def casts_read(outcome: Compiled) -> list[str]:
    """Name what each cast of an input to eight bits reads, below views and its own cast."""
    (joint,) = outcome.joint
    found = []
    for largest in joint.find_nodes(op="call_function", target=torch.ops.aten.amax.default):
        x = largest.args[0].args[0]  # below abs
        while x.target in (MUL, CAST, *VIEWS):
            x = x.args[0]
        found.append(op_name(x))
    return found


def test_a_cast_reads_what_an_adapter_has_written() -> None:
    """Else Inductor computes the input for the cast, and again for the adapter."""
    assert casts_read(compiled(layer(), tokens())) == ["qfuse.materialize"] * 2
    assert casts_read(compiled(Shared(), tokens())) == ["qfuse.materialize"] * 3


class Scaled(nn.Module):
    """A layer with dropout whose input is cast to 16 bits from what flows between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = testing.lora_linear(128, 64, adapter_dtype=BF16, dropout=0.05)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            result: Tensor = self.inner(x.relu() * (x + 1))
            return torch.tanh(result)


def test_an_input_is_written_once_for_the_cast_and_the_adapter() -> None:
    every_row = {**EVERY_ROW, "fuse_dropout.min_rows": 1}
    options = {"qfuse.thresholds": every_row}
    run = functools.partial(compiled, Scaled(), tokens(dtype=FP32), "fp8", options, codegen=True)
    outcome, codes = run_and_get_code(run)
    assert outcome.applied["fuse_dropout"]
    made = re.findall(r"= empty_strided_cpu\(\((.*?)\), .*torch.bfloat16\)", codes[0])
    assert sum(shape in ("2, 32, 64", "64, 64") for shape in made) == 1, made


def test_a_cast_that_reads_alone_is_computed_with_its_input() -> None:
    """In 16 bits the input would be a tensor that nobody else needs."""
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(4), dtype=BF16)
    alone = Between(testing.quantized_linear(weight))
    outcome = compiled(alone, tokens())
    assert outcome.applied["quantize_products"] == 2
    assert outcome.ops["qfuse.materialize"] == 0
    assert casts_read(outcome)[0] == "tanh"


def test_no_decoded_weight_is_saved() -> None:
    def run(call: Any) -> None:
        call(tokens()).sum().backward()

    options = {"qfuse.compute": "fp8", "qfuse.thresholds": EVERY_ROW}
    forward, backward = partition(run, layer(), options)
    for graph in (forward, backward):
        (decode,) = graph.find_nodes(op="call_function", target=emit_eight_bits.REQUANTIZE)
        assert decode.args[-1] is (graph is backward)
    given = [n.meta["val"] for n in backward.find_nodes(op="placeholder")]
    assert {v.dtype for v in given} == {BF16, torch.uint8, FP32}
    assert max(v.numel() for v in given if v.dtype is FP32) < 512  # scales, and their tables


class Gated(nn.Module):
    """A layer whose input is the product of two tensors that backward reads anyway."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = layer(k=192, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        result: Tensor = self.layer(nn.functional.silu(gate) * up)
        return result


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_a_pointwise_input_is_computed_again(dropout: float) -> None:
    def run(call: Any) -> None:
        call(tokens(384)).sum().backward()

    every_row = {**EVERY_ROW, "fuse_dropout.min_rows": 1}
    options = {"qfuse.compute": "fp8", "qfuse.thresholds": every_row}
    _, backward = partition(run, Gated(dropout), options)
    (silu_of_backward,) = backward.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    assert silu_of_backward.users
    given = [n.meta["val"] for n in backward.find_nodes(op="placeholder")]
    wide = [v.shape for v in given if v.dtype is BF16 and v.numel() == 64 * 192]
    assert not wide  # the halves are views of x


def test_under_a_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    block, x = layer(), tokens()

    def run(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(block, x, use_reentrant=False)
        return result

    plain = compiled(block, x)
    options = {"qfuse.compute": "fp8", "qfuse.thresholds": EVERY_ROW}
    again = compile_step(run, x, module=block, options=options, context=no_codegen())
    assert again.report.in_eight_bits() == (2, 2)
    torch.testing.assert_close(again.output, plain.output)
    for name, grad in plain.gradients.items():
        torch.testing.assert_close(again.gradients[name], grad)


# --- refusals -----------------------------------------------------------------------------------


def test_few_rows() -> None:
    thresholds = {"extend_k.min_rows": 1, "quantize_products.min_elements": 1}
    outcome = compiled(layer(), tokens(), options={"qfuse.thresholds": thresholds})
    reason = "64 rows, fewer than quantize_products.min_rows=1024 of the preset"
    assert refusals(outcome) == {reason: 2}
    assert outcome.report.in_eight_bits() == (0, 2)
    assert outcome.applied["extend_k"] == 2  # as in bf16


def test_a_small_weight() -> None:
    options = {"qfuse.thresholds": {"quantize_products.min_rows": 1}}
    outcome = compiled(layer(), tokens(), options=options)
    (reason,) = refusals(outcome)
    assert reason.startswith("a weight of 8192 elements, fewer than quantize_products.min_elements")
    assert outcome.report.in_eight_bits() == (0, 2)


def test_strict_numerics() -> None:
    assert refusals(compiled(layer(), tokens(), options={"qfuse.numerics": "strict"})) == {
        STRICT: 2
    }


def test_dtypes() -> None:
    block = Between(testing.lora_linear(128, 64, adapter_dtype=FP32, compute_dtype=FP32))
    outcome = compiled(block, tokens(dtype=FP32))
    reason = "the product is in torch.float32; qfuse.compute='fp8' is for bfloat16"
    assert refusals(outcome) == {reason: 2}


def test_sizes() -> None:
    outcome = compiled(layer(n=72), tokens())
    reason = "the weight's sizes are no multiples of 16, as eight-bit products need"
    assert refusals(outcome) == {reason: 2}


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("compute", ["fp8", "int8"])
def test_devices(
    compute: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without e4m3 is offered int8, in the report of each layer."""
    original, gpu = eight_bits.unable, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(eight_bits, "unable", lambda compute, _: original(compute, gpu))
    outcome = compiled(layer(), tokens(), compute)
    if compute == "int8" or capability >= (8, 9):
        assert outcome.report.in_eight_bits() == (2, 2)
        return
    major, minor = capability
    reason = (
        f"sm_{major}{minor} has no FP8 (sm_89 is the first): qfuse.compute='int8' computes in "
        "eight bits there"
    )
    assert refusals(outcome) == {reason: 2}
    assert outcome.report.in_eight_bits() == (0, 2)
    assert outcome.applied["extend_k"] == 2  # as in bf16


def test_few_rows_in_int8_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused, also where dynamic shapes were compiled with more of them."""
    original, asked = quantize_products._refused, list[str]()

    def as_on_a_gpu(product: Any, context: Any) -> str:
        value = tensor(product.node)
        many = quantize_products._has_more_rows(value, quantize_products.FEW_ROWS)
        asked.append("" if many else "few")
        return original(product, context) or asked[-1]

    monkeypatch.setattr(quantize_products, "_refused", as_on_a_gpu)
    options: dict[str, Any] = {"qfuse.compute": "int8", "qfuse.thresholds": EVERY_ROW}
    torch._dynamo.reset()
    block = layer()
    with no_codegen():
        call: Any = torch.compile(
            block, backend=testing.qfuse_backend(), options=options, dynamic=True
        )
        for rows, expected in ((48, {""}), (24, set()), (8, {"few"})):
            asked.clear()
            call(torch.randn(rows, 64, dtype=BF16, requires_grad=True))
            assert set(asked) == expected, rows


# --- exclusions ---------------------------------------------------------------------------------


def test_layers_are_excluded_by_name() -> None:
    outcome = compiled(Shared(), tokens(), options={"qfuse.compute.exclude": "q.*, nothing.*"})
    assert refusals(outcome) == {"qfuse.compute.exclude has 'q.*'": 2}
    assert outcome.report.in_eight_bits() == (2, 4)
    excluded = {s.module for s in outcome.report.sites if "exclude" in s.rejected}
    assert excluded == {"q.proj"}
    assert not outcome.report.nothing_fused()


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("base_model.model.layers.0.mlp.down_proj", "*.down_proj"),
        ("base_model.model.layers.0.mlp.down_proj", "down_proj"),
        ("base_model.model.layers.0.mlp.down_proj", "layers.0.*"),
        ("base_model.model.layers.0.mlp.down_proj", "base_model.*"),
        ("down_proj", "down_*"),
    ],
)
def test_patterns_of_a_path_or_its_end(path: str, pattern: str) -> None:
    assert excluded_by(path, ["up", pattern]) == pattern
    assert excluded_by(path, ["own_proj", "layers.0", "model.layers.1.*"]) == ""


def test_one_graph_of_several_layers() -> None:
    """What runs by one graph is excluded together, and the reason names the layer."""
    given = {"qfuse.compute": "fp8", "qfuse.compute.exclude": "layers.1.*"}
    resolved = on_cpu(given)
    context = Context(resolved, Report(), ["L['self']._modules['layers']._modules['0'].q"])
    context.counterparts = {"layers.0": ("layers.1.q",)}
    node = fx.Graph().placeholder("weight")
    node.meta["desc"] = PlainAOTInput(idx=0)
    said = quantize_products._excluded(node, context)
    wanted = "has 'layers.1.*', for layers.1.q, which runs by the same graph"
    assert said == f"qfuse.compute.exclude {wanted}"


def test_a_pattern_that_matches_nothing_is_told(told: list[str]) -> None:
    compiled(Shared(), tokens(), options={"qfuse.compute.exclude": ["k.*", "*.down_proj"]})
    (said,) = told
    assert said.startswith("qfuse.compute.exclude: '*.down_proj': no such layer may be")
    assert said.endswith("where these may: k.proj, q.proj")


# --- a model ------------------------------------------------------------------------------------


def test_a_training_in_eight_bits_follows_that_in_bf16() -> None:
    """Under the recipe of trainers: float32 adapters, autocast, dropout of no element."""
    losses: dict[str, list[float]] = {}
    optimizer: Any
    for compute in ("bf16", "fp8", "int8"):
        model = testing.qlora_model(testing.tiny_qwen3_config(), seed=0)
        optimizer = torch.optim.AdamW(testing.adapter_parameters(model), lr=5e-3)
        ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
        options: Any = {"qfuse.compute": compute, "qfuse.thresholds": EVERY_ROW}
        torch._dynamo.reset()
        with no_codegen():
            call: Any = torch.compile(model, backend=testing.qfuse_backend(), options=options)
            losses[compute] = []
            for _ in range(6):
                with torch.autocast("cpu", BF16):
                    loss = call(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[compute].append(float(loss))
        gradients({}, model)
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.05
    for compute in ("fp8", "int8"):
        assert losses[compute] != losses["bf16"]
        assert losses[compute] == pytest.approx(losses["bf16"], rel=0.02)
