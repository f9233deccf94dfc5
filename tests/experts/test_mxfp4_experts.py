"""gpt-oss's experts in transformers' own MXFP4 layer, in memory: taken over byte for byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft as peft_package
import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import mxfp4
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts, convert_moe_packed_tensors
from transformers.quantizers.auto import AutoHfQuantizer

import inductor_q
from inductor_q import exc, experts, kbit
from inductor_q.capture.live import layers_of
from inductor_q.diagnostics.checks.experts import check
from inductor_q.experts.model import stacks
from inductor_q.testing import relative_error
from tests.support.moe_models import EXPERTS, HIDDEN, INTERMEDIATE, model, tokens, transformers

peft: Any = peft_package  # as shipped, it is typed in parts

PROJECTIONS = ("gate_up_proj", "down_proj")

#: What a layer calls its blocks: transformers 4.57, and 5.23, whose layer declares no scales.
LAYOUTS = ("{}_blocks", "{}")

#: Of weights up to 3 / 8, about as large as a model has them.
SCALES = torch.arange(120, 124, dtype=torch.uint8)


def codes(e: int, rows: int, columns: int, *, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Random blocks as a checkpoint has them, and scales that run through the given ones."""
    blocks = torch.randint(256, (e, rows, columns // 32, 16), dtype=torch.uint8)
    count = e * rows * columns // 32
    return blocks, scales[torch.arange(count) % len(scales)].reshape(e, rows, -1)


def fill(layer: Any, name: str, blocks: Tensor, scales: Tensor, layout: str) -> None:
    """Give a layer blocks and scales as it holds them before it is swizzled."""
    declared = layer._parameters.pop(name)
    held = {layout.format(name): blocks, f"{name}_scales": scales}
    if layout == "{}":
        held[name] = blocks.reshape(declared.shape)
    for key, value in held.items():
        layer.register_parameter(key, nn.Parameter(value, requires_grad=False))


def pair(
    layout: str = "{}_blocks",
    *,
    dtype: torch.dtype = torch.float32,
    scales: Tensor = SCALES,
) -> tuple[Any, Any]:
    """A toy with experts in transformers' layer, and the same over their values in `dtype`."""
    net, dense = model("gpt_oss").to(dtype), model("gpt_oss").to(dtype)
    torch.manual_seed(1)
    for here, there in zip(net.model.layers, dense.model.layers, strict=True):
        layer: Any = Mxfp4GptOssExperts(net.config)
        plain = there.mlp.experts
        for name in PROJECTIONS:
            e, rows, *bytes_of = getattr(layer, name).shape
            columns = 2 * math.prod(bytes_of)  # of blocks apart, or together
            blocks, by_block = codes(e, rows, columns, scales=scales)
            fill(layer, name, blocks, by_block, layout)
            values = convert_moe_packed_tensors(blocks, by_block, dtype=dtype)
            getattr(plain, name).data = values
            bias = getattr(plain, f"{name}_bias").detach()
            getattr(layer, f"{name}_bias").data = bias.float()  # as the layer declares it
        if layout == "{}":
            if not hasattr(mxfp4, "Mxfp4GptOssMLP"):
                pytest.skip("this transformers has no block of its own around the layer")
            here.mlp = mxfp4.Mxfp4GptOssMLP(here.mlp.router, layer)
        else:  # transformers 4.57 keeps the block, with another `forward`
            here.mlp.experts, here.mlp.forward = layer, needs_kernels
    return net, dense


def needs_kernels(hidden_states: Tensor) -> Tensor:
    raise AssertionError("this forward calls triton_kernels")


def addresses(net: nn.Module) -> set[int]:
    held = (*net.named_parameters(), *net.named_buffers())
    return {t.data_ptr() for name, t in held if "experts" in name}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("take", [experts.use_qfuse, experts.quantize, experts.add_lora])
def test_the_same_bytes(layout: str, take: Callable[[nn.Module], object]) -> None:
    """Codes under every scale but NaN's: bitwise transformers' values, where they lay."""
    net, dense = pair(layout, scales=torch.arange(255, dtype=torch.uint8))
    before, router = addresses(net), net.model.layers[0].mlp.router
    take(net)
    found = dict(stacks(net))
    assert len(found) == 2 * len(net.model.layers)
    for name, stack in found.items():
        assert stack.format == "mxfp4"
        values = stack.dequantize(torch.float32).transpose(1, 2)
        assert torch.equal(values, dense.get_parameter(name))
    adapters = {t.data_ptr() for name, t in net.named_parameters() if "lora_" in name}
    assert addresses(net) - adapters == before
    assert net.model.layers[0].mlp.router is router
    assert type(net.model.layers[0].mlp) is type(dense.model.layers[0].mlp)


def test_bytes_that_are_not_contiguous_are_copied() -> None:
    net, dense = pair()
    name = "model.layers.0.mlp.experts.down_proj"
    blocks = net.get_parameter(f"{name}_blocks")
    blocks.data = blocks.data.transpose(1, 2).contiguous().transpose(1, 2)
    experts.use_qfuse(net)
    values = dict(stacks(net))[name].dequantize(torch.float32)
    assert torch.equal(values.transpose(1, 2), dense.get_parameter(name))


# Sums in another order. In bfloat16 a rounding apart here and there moves 2^-8 of a value, and
# each of two layers passes it on; measured: 9e-3, and 2.4e-7 in float32.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_forward(dtype: torch.dtype, close: float, layout: str) -> None:
    net, dense = pair(layout, dtype=dtype)
    experts.use_qfuse(net.eval())
    assert not any(module.training for module in net.modules())
    with torch.no_grad():
        expected = dense(tokens()).logits
        assert relative_error(net(tokens()).logits, expected) < close
        compiled: Any = torch.compile(net, backend="qfuse", options={"qfuse.strict": True})
        assert relative_error(compiled(tokens()).logits, expected) < close


def test_a_step_of_lora() -> None:
    """Attention by PEFT, every expert by us: loss and gradients of the decoded model."""
    losses, gradients = [], []
    for each in pair():
        torch.manual_seed(2)
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
        net = peft.get_peft_model(each, config)
        for parameter in experts.add_lora(net, r=2):
            parameter.data.normal_(0, 0.1)
        trained = [p for p in net.parameters() if p.requires_grad]
        out = net(input_ids=tokens(), labels=tokens())
        out.loss.backward()
        losses.append(out.loss.detach())
        gradients.append([p.grad for p in trained])
        old = [p.detach().clone() for p in trained]
        torch.optim.SGD(trained, lr=0.1).step()
        assert all(not torch.equal(a, b) for a, b in zip(old, trained, strict=True))
    assert len(gradients[0]) == 2 * (2 + 2 * 2)
    assert relative_error(losses[0], losses[1]) < 1e-5
    for got, expected in zip(*gradients, strict=True):
        assert expected.any() and relative_error(got, expected) < 1e-4


def test_another_format_is_not_made_of_them(told: list[str]) -> None:
    net, _ = pair()
    assert experts.quantize(net, "nf4_b64") is net
    assert told == ["4 projections of experts are packed already and stay as mxfp4"]
    with pytest.raises(exc.NothingToQuantize, match="packed as mxfp4 already"):
        experts.quantize(net, "nf4_b64")


def test_reports_and_the_doctor_know_them() -> None:
    net, _ = pair()
    shapes = {(EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)}
    for remedy in ("inductor_q.experts.use_qfuse(model)", ""):
        layers = layers_of(net)
        assert {(x.kind, x.format) for x in layers} == {("experts", "mxfp4")}
        assert len(layers) == 4 and {x.shape for x in layers} == shapes
        [found] = check(net)
        assert (found.status, found.remedy) == ("warn" if remedy else "ok", remedy)
        exec(remedy, {"inductor_q": inductor_q, "model": net})
    assert found.found == '"qfuse" in 2 layers (model.layers.0.mlp.experts, ...)'


# --- what is not as a checkpoint has it -----------------------------------------------------------


class Swizzled:
    """Stand in for the tensor of triton_kernels that transformers sets in place of a parameter: its
    storage, and the layout of that, which here has everything backwards."""

    def __init__(self, plain: Tensor) -> None:
        self.data, self.storage, self.layout = plain.transpose(-1, -2).flip(-2), self, self

    def unswizzle_data(self, data: Tensor) -> Tensor:
        return data.flip(-2)


def swizzle(layer: Any) -> None:
    for name in PROJECTIONS:
        blocks, scales = (layer._parameters.pop(f"{name}_{part}") for part in ("blocks", "scales"))
        layer._parameters.pop(name, None)
        setattr(layer, name, Swizzled(blocks.flatten(-2)))
        setattr(layer, f"{name}_precision_config", SimpleNamespace(weight_scale=Swizzled(scales)))


def empty(layer: Any) -> None:
    layer._parameters.update(Mxfp4GptOssExperts(model("gpt_oss").config)._parameters)
    for name in PROJECTIONS:
        delattr(layer, f"{name}_blocks")
        delattr(layer, f"{name}_scales")


def to_meta(layer: Any) -> None:
    layer.to("meta")


def cut(layer: Any) -> None:
    layer.down_proj_scales = nn.Parameter(layer.down_proj_scales[:, 1:], requires_grad=False)


REFUSED: dict[Callable[[Any], None], str] = {
    swizzle: r"gate_up_proj: it is swizzled, in the order of a kernel \(.*\.Swizzled\)",
    empty: "gate_up_proj: its blocks have no scales",
    to_meta: "gate_up_proj: it is on the meta device",
    cut: r"down_proj: its blocks are torch.uint8 .*for values of \(4, 64, 128\)",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_others_are_refused_and_nothing_is_changed(spoil: Callable[[Any], None]) -> None:
    net, _ = pair()
    spoil(net.model.layers[1].mlp.experts)
    before = [*net.modules()]
    for take in (experts.use_qfuse, experts.quantize, experts.add_lora):
        with pytest.raises(exc.UnreadExperts, match=REFUSED[spoil]) as error:
            take(net)
        assert r"model.layers.1.mlp.experts (Mxfp4GptOssExperts)" in str(error.value)
        assert "inductor_q.load_checkpoint" in str(error.value)
        assert "dequantize=True" in str(error.value)
    assert [*net.modules()] == before
    statuses = [(found.status, found.remedy.split("(")[0]) for found in check(net)]
    assert statuses == [
        ("warn", "inductor_q.experts.use_qfuse"),
        ("warn", "inductor_q.load_checkpoint"),
    ]


def test_the_way_out_of_a_swizzled_model(tmp_path: Path) -> None:
    """transformers writes blocks and scales as they were, and we load them."""
    net, dense = pair()
    for layer in net.model.layers:
        swizzle(layer.mlp.experts)
    with pytest.raises(exc.UnreadExperts, match="save_pretrained writes it as it was on disk"):
        experts.use_qfuse(net)
    net.hf_quantizer = AutoHfQuantizer.from_config(transformers.Mxfp4Config(), pre_quantized=True)
    net.config.quantization_config = net.hf_quantizer.quantization_config
    net.save_pretrained(tmp_path)
    with kbit.meta_parameters():
        other = transformers.AutoModelForCausalLM.from_config(net.config, dtype=torch.float32)
    found = dict(stacks(inductor_q.load_checkpoint(other, tmp_path, progress=False)))
    assert {stack.format for stack in found.values()} == {"mxfp4"} and len(found) == 4
    for name, stack in found.items():
        values = stack.dequantize(torch.float32).transpose(1, 2)
        assert torch.equal(values, dense.get_parameter(name))


def test_a_layer_that_nothing_configures() -> None:
    net, _ = pair()
    for alone in (net.model.layers[0].mlp, nn.Sequential(net.model.layers[0].mlp)):
        with pytest.raises(exc.NoExperts):
            experts.use_qfuse(alone)
    layer = net.model.layers[0]  # its attention has a configuration
    assert len([*stacks(experts.use_qfuse(layer))]) == 2
