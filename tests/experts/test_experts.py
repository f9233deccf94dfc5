"""Experts of real models: what they compute dense, packed, adapted, in shards and after a cast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as transformers_package
from torch import nn

from inductor_q import exc, experts, ops
from inductor_q.experts.model import stacks
from inductor_q.experts.modules import expert_layers
from inductor_q.experts.packing import pack
from inductor_q.testing import relative_error
from tests.support.moe_models import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    INTERMEDIATE,
    awaken,
    model,
    model_of_images_and_text,
    tokens,
    unpacked,
)
from tests.support.moe_steps import CLOSE, EXACT, adapted, step
from tests.support.quantized import assert_same_bits

transformers: Any = transformers_package  # as shipped, it is typed in parts

FORMATS = ["nf4_b64", "nf4_b64_nested", "fp4_b64", "kbit3_e4m4", "dense"]


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_experts_are_transformers_experts(family: str) -> None:
    """Values and every gradient, those of the experts' own weights, biases and router included."""
    net = model(family)
    logits, grads = step(net, tokens())
    experts.use_qfuse(net)
    got, got_grads = step(net, tokens())
    assert relative_error(got, logits) < EXACT
    assert got_grads.keys() == grads.keys()
    for name, grad in got_grads.items():
        assert relative_error(grad, grads[name]) < EXACT, name


@pytest.mark.parametrize("format", [*FORMATS[:-1], "mxfp4", "mxfp8", "nvfp4", "fp8_row"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_packed_experts(family: str, format: str) -> None:
    net = experts.quantize(model(family), format)
    names = {name.rpartition(".")[2] for name, _ in stacks(net)}
    assert names == {"gate_up_proj", "down_proj"}
    logits, _ = step(unpacked(net), tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)


ASKED = [
    ("mxfp4", "mxfp4"),
    ({"mxfp4": {}}, "mxfp4"),
    ({"bnb": {"quant_type": "fp4", "blocksize": 128, "nested": False}}, "fp4_b128"),
    ({"kbit": {"k": 3}}, "kbit3_e4m4"),
    ({"fp8": {"of": "row"}}, "fp8_e4m3_row"),
    ({"load_in_4bit": True}, "nf4_b64_nested"),
    (
        transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"]
        ),
        "nf4_b64",
    ),
]


@pytest.mark.parametrize(("asked", "format"), ASKED, ids=str)
def test_experts_are_asked_for_as_linear_layers_are(asked: Any, format: str) -> None:
    net = experts.quantize(model("qwen3_moe"), asked)
    assert {stack.format for _, stack in stacks(net)} == {format}


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_row"])
def test_blocks_run_along_what_is_summed(format: str) -> None:
    """Where the columns of a row share a scale, a row makes an output: as gpt-oss has it on disk,
    though its parameters lie the other way."""
    net: Any = model("gpt_oss")
    before = net.model.layers[0].mlp.experts.down_proj.detach().clone()
    stack = experts.quantize(net, format).model.layers[0].mlp.experts.down_proj  # type: ignore[union-attr, index]
    assert not stack.transposed and stack.shape == (EXPERTS, HIDDEN, INTERMEDIATE)
    for values, expert in zip(stack.dequantize(torch.float32), before, strict=True):
        own = pack(expert.t().contiguous(), stack.format)
        shape = (HIDDEN, INTERMEDIATE)
        assert_same_bits(values, ops.dequantize([*own.values()], stack.format, shape, torch.float))


def test_tiles_are_not_cut_between_experts() -> None:
    w = torch.randn(2, 256, 130, generator=torch.Generator().manual_seed(0))
    codes, scale = pack(w, "fp8_e4m3_128x128").values()
    for n, expert in enumerate(w):
        own_codes, own_scale = pack(expert, "fp8_e4m3_128x128").values()
        assert torch.equal(codes.view(2, -1)[n], own_codes)
        assert torch.equal(scale.view(2, -1)[n], own_scale)
    with pytest.raises(exc.WrongScheme, match="its 128 rows to a scale do not divide the 64 of"):
        pack(w[:, :64], "fp8_e4m3_128x128")


def test_only_the_targets_are_packed() -> None:
    net = experts.quantize(model("qwen3_moe"), targets=["down_proj"])
    assert {name.rpartition(".")[2] for name, _ in stacks(net)} == {"down_proj"}
    logits, _ = step(unpacked(net), tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)


def test_a_text_model_inside_of_another() -> None:
    net = experts.quantize(model_of_images_and_text().requires_grad_(False))
    names = {name.partition(".layers.")[0] for name, _ in stacks(net)}
    assert names == {"model.language_model"}
    logits, _ = step(unpacked(net), tokens())
    assert relative_error(step(net, tokens())[0], logits) < EXACT
    awaken(experts.add_lora(net, r=2))
    _, grads = step(net, tokens())
    assert len(grads) == 2 * 2 * 2 and all(grad.any() for grad in grads.values())


@pytest.mark.parametrize("implementation", ["grouped_mm", "qfuse"])
def test_expert_parallel_shards_add_up(implementation: str) -> None:
    """Each device has half of the experts; the other's are sentinels, and their terms are zero."""
    net = model("qwen3_moe")
    experts.use_qfuse(net)
    layer = expert_layers(net)["model.layers.0.mlp.experts"]
    layer.config._experts_implementation = implementation
    x = torch.randn(9, HIDDEN)
    ids = torch.rand(9, EXPERTS).argsort(-1)[:, :2]
    gates = torch.rand(9, 2)
    whole = layer(x, ids, gates)
    total = torch.zeros_like(whole)
    for rank in range(2):
        shard = copy.deepcopy(layer)
        shard.num_experts, shard._is_expert_parallel = EXPERTS // 2, True
        mine = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
        for name in ("gate_up_proj", "down_proj"):
            setattr(shard, name, nn.Parameter(getattr(layer, name)[mine].detach()))
        local = ids - rank * EXPERTS // 2
        here = (local >= 0) & (local < EXPERTS // 2)
        sentinel = EXPERTS // 2  # transformers'
        total += shard(x, torch.where(here, local, sentinel), torch.where(here, gates, 0.0))
    torch.testing.assert_close(total, whole, **CLOSE)


def test_a_norm_after_each_expert() -> None:
    net = model("qwen3_moe", "grouped_mm")
    layer = expert_layers(net)["model.layers.0.mlp.experts"]
    if not hasattr(layer, "has_post_expert_norm"):
        pytest.skip("this transformers has no norm after experts")
    layer.has_post_expert_norm, layer.post_expert_norm = True, nn.RMSNorm(HIDDEN)
    args = torch.randn(5, HIDDEN), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    expected = layer(*args)
    experts.use_qfuse(net)
    torch.testing.assert_close(layer(*args), expected, **CLOSE)


def test_autocast() -> None:
    net = adapted("qwen3_moe")
    with torch.autocast("cpu", torch.bfloat16):
        out = net(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    exact, _ = step(copy.deepcopy(net), tokens())
    assert float((out.logits - exact).norm() / exact.norm()) < 0.05
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize("format", FORMATS[:-1])
def test_state_dict_round_trip(format: str) -> None:
    net = adapted("qwen3_moe", format)
    other = adapted("qwen3_moe", format)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(step(other, tokens())[0], step(net, tokens())[0], rtol=0, atol=0)


@pytest.mark.parametrize("format", FORMATS[:-1])
def test_a_cast_leaves_packed_weights_alone(format: str) -> None:
    net = adapted("qwen3_moe", format)
    before = {name: b.clone() for name, b in net.named_buffers() if "experts" in name}
    net.to(torch.bfloat16)
    for name, buffer in net.named_buffers():
        if name in before:
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer, before[name])
    (_, stack), *_ = stacks(net)
    assert stack.lora_A is not None and stack.lora_A.dtype is torch.bfloat16
    assert step(net, tokens())[0].dtype is torch.bfloat16
