"""Training after an evaluation on a CPU for which bitsandbytes packs weights anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.capture.bnb_graph import overload, stops_gradients
from inductor_q.exc import PackedForInference
from inductor_q.integrations import keep_unpacked
from tests.support.compiling import SMALL, no_codegen
from tests.support.quantized import QUANT_TYPES, bnb, packs_on_cpu

BF16 = torch.bfloat16
N = K = 64


def packed(layer: Any) -> Any:
    """A layer as its first inference call leaves it, on any CPU."""
    state = layer.weight.quant_state
    layer.weight.data, _ = bnb._convert_weight_packed_for_cpu(layer.weight.data, state)
    return layer


def layer(quant_type: str, nested: bool, storage: torch.dtype) -> Any:
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(BF16)
    return testing.quantized_linear(
        weight, quant_type=quant_type, nested=nested, quant_storage=storage
    )


@pytest.mark.parametrize("storage", [torch.uint8, BF16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("saved", [False, True], ids=["packed", "unpacked by state_dict"])
def test_a_packed_weight_is_repaired(
    saved: bool, quant_type: str, nested: bool, storage: torch.dtype
) -> None:
    """Codes and layout are those from before; scales are rounded to bfloat16. state_dict() leaves
    an offset, or scales, with which bitsandbytes' ops fail."""
    expected, mended = (layer(quant_type, nested, storage) for _ in range(2))
    packed(mended)
    if not saved:
        kept = inductor_q.dequantize(mended.weight.data, mended.weight.quant_state)
    else:
        mended.state_dict()
    keep_unpacked(mended)
    assert not mended.support_avx512bf16_for_cpu
    bytes_, before = (x.weight.data.view(torch.uint8) for x in (mended, expected))
    assert torch.equal(bytes_, before) and mended.weight.dtype == storage
    found = bnb.dequantize_4bit(mended.weight.data, mended.weight.quant_state)
    whole = bnb.dequantize_4bit(expected.weight.data, expected.weight.quant_state)
    assert found.dtype == whole.dtype and testing.relative_error(found, whole) < 0.01
    assert torch.equal(inductor_q.dequantize(mended.weight.data, mended.weight.quant_state), found)
    if not saved:
        assert torch.equal(kept, found)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).to(BF16)
    assert testing.relative_error(mended(x.requires_grad_()), expected(x)) < 0.01


def test_a_layer_that_was_never_packed_is_left_alone() -> None:
    plain = layer("nf4", True, torch.uint8)
    state, before = plain.weight.quant_state, dict(vars(plain.weight.quant_state))
    keep_unpacked(nn.Sequential(plain, nn.Linear(4, 4)))
    assert plain.weight.quant_state is state and vars(state) == before


def test_layers_on_other_devices_are_left_alone() -> None:
    layers: list[Any] = [nn.Linear(2, 2, device=device) for device in ("meta", "cpu")]
    for one in layers:
        one.support_avx512bf16_for_cpu = True
    keep_unpacked(nn.ModuleList(layers))
    assert [one.support_avx512bf16_for_cpu for one in layers] == [True, False]


def gradients(call: Any, model: nn.Module) -> list[Tensor]:
    """Train one step, and return the gradients."""
    model.train()
    x = torch.randn(8, K, generator=torch.Generator().manual_seed(2)).to(BF16)
    call(x.requires_grad_()).float().pow(2).sum().backward()
    assert x.grad is not None
    found = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def evaluate(call: Any, model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        call(torch.ones(8, K, dtype=BF16))


def two_layers(**quantization: Any) -> nn.Sequential:
    layers = (testing.lora_linear(N, K, seed=seed, **quantization) for seed in (0, 1))
    return nn.Sequential(*layers)


@packs_on_cpu
def test_training_after_an_evaluation() -> None:
    """Eager mode goes on without the layers' gradients. Compiled, that is an error; repaired, also
    after `state_dict()`, from which Dynamo's trace of bitsandbytes failed, training is right."""
    model = two_layers(cpu_packing=True, adapter_dtype=BF16)
    expected = gradients(model, model)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=qfuse, options=SMALL)
    with no_codegen():
        evaluate(compiled, model)
        with pytest.raises(Exception, match=r"has packed 0\.proj, 1\.proj") as raised:
            gradients(compiled, model)
        assert isinstance(getattr(raised.value, "inner_exception", None), PackedForInference)
        model.state_dict()
        keep_unpacked(model)
        for _ in range(2):
            for found, wanted in zip(gradients(compiled, model), expected, strict=True):
                assert testing.relative_error(found, wanted) < 0.02
            evaluate(compiled, model)
    report = inductor_q.last_report()
    assert report is not None and report.applied()["canonicalize"] == 2


@packs_on_cpu
def test_backward_of_the_call_that_packs() -> None:
    """In evaluation mode with gradients, computed in float32 under autocast: bodies that mix dtypes
    are only cast by AOTAutograd, and what Dynamo captured failed as it was."""
    model = two_layers(cpu_packing=True, compute_dtype=torch.float32).eval()
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=qfuse, options=SMALL)
    x = torch.randn(8, K, generator=torch.Generator().manual_seed(2)).to(BF16)
    steps = []
    with no_codegen():
        for call in (compiled, compiled, model):
            with torch.autocast("cpu", BF16):
                loss = call(x).float().pow(2).sum()
            loss.backward()
            steps.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
    *both, eager = steps
    for step in both:
        for found, wanted in zip(step, eager, strict=True):
            assert testing.relative_error(found, wanted) < 0.02


@pytest.mark.parametrize("needed", [True, False], ids=["needed", "constant"])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "no_grad"])
def test_a_packed_product_that_stops_gradients(needed: bool, enabled: bool) -> None:
    """On any CPU: the graph as Dynamo has it. What needs no gradient may be packed."""
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["example_value"] = torch.ones(4, 4).requires_grad_(needed)
    graph.call_function(torch._C._set_grad_enabled, (enabled,))
    gemv = graph.call_function(overload("gemv_4bit"), (x, weight))
    graph.output(gemv)
    assert stops_gradients(graph) == ([gemv] if needed and enabled else [])
