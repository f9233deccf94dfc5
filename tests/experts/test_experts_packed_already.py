"""Experts that are packed already: known packings are taken over as they are, others refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import fx, nn

import inductor_q
from inductor_q import exc, experts, kbit
from inductor_q.experts.model import stacks
from inductor_q.experts.modules import expert_layers
from tests.support.moe_models import awaken, model, tokens
from tests.support.moe_steps import CLOSE, step

quantization: Any = pytest.importorskip("torchao.quantization")


def packed_by_bnb(nested: bool = False) -> Any:
    net = model("qwen3_moe").requires_grad_(False)
    for layer in expert_layers(net).values():
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(layer, name, compress_statistics=nested)
    return net


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_parameters_packed_by_bitsandbytes(nested: bool) -> None:
    net = packed_by_bnb(nested)
    logits, _ = step(net, tokens())
    experts.use_qfuse(net)
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)
    experts.quantize(net)  # taken over as it is
    assert len([*stacks(net)]) == 4
    assert {s.format for _, s in stacks(net)} == {"nf4_b64" + "_nested" * nested}
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)
    awaken(experts.add_lora(net))
    assert len(step(net, tokens())[1]) == 8


def test_no_dequantized_layer_leaves_the_graph() -> None:
    """bitsandbytes' cache hooks make a traced layer's experts an output of the graph."""
    net = packed_by_bnb()
    net.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    experts.use_qfuse(net)
    outputs: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        values: Any = gm.graph.output_node().args[0]
        outputs.append([node.meta["example_value"].shape for node in values])
        return gm

    torch.compiler.reset()
    run: Any = torch.compile(net, backend=backend, fullgraph=True)
    run(input_ids=tokens(), labels=tokens(), use_cache=False)
    assert outputs == [[torch.Size([]), torch.Size([2, 7, 96])]]


def test_kbit_saves_no_layers_of_bitsandbytes(tmp_path: Path) -> None:
    net = inductor_q.quantize(model("olmoe"), "nf4", progress=False)
    for foreign in (net, packed_by_bnb()):
        with pytest.raises(exc.CannotSave, match="keeps more than tensors"):
            kbit.save(foreign, tmp_path / "m.safetensors")
    assert not [*tmp_path.iterdir()]


def test_experts_that_torchao_packs_are_read_as_they_are() -> None:
    net = model("olmoe")
    layer = net.model.layers[1].mlp.experts
    rows = quantization.PerRow()
    packed = quantization.Int8Tensor.from_hp(layer.down_proj.detach(), granularity=rows)
    layer.down_proj = nn.Parameter(packed, requires_grad=False)
    experts.quantize(net)
    assert layer.down_proj.format == "int8_row"
    assert torch.equal(layer.down_proj.dequantize(torch.float32), packed.dequantize())


def test_codes_of_another_library_are_refused() -> None:
    net = model("olmoe")
    layer = net.model.layers[1].mlp.experts
    codes = layer.down_proj.detach().to(torch.float8_e4m3fn)
    layer.down_proj = nn.Parameter(codes, requires_grad=False)
    with pytest.raises(exc.AlreadyQuantized, match=r"layers\.1.*float8_e4m3fn"):
        experts.quantize(net)
    assert not [*stacks(net)]


def test_another_format_over_packed_experts(told: list[str]) -> None:
    net = experts.quantize(model("olmoe"), "nf4_b64", targets=["down_proj"])
    assert experts.quantize(net, "nf4_b64", targets=["down_proj"]) is net  # has what is asked for
    with pytest.raises(exc.NothingToQuantize, match="packed as nf4_b64 already"):
        experts.quantize(net, "kbit3_e4m4", targets=["down_proj"])
    assert not told
    experts.quantize(net, "kbit3_e4m4")
    assert told == ["2 projections of experts are packed already and stay as nf4_b64"]
    assert {name.rpartition(".")[2]: stack.format for name, stack in stacks(net)} == {
        "gate_up_proj": "kbit3_e4m4",
        "down_proj": "nf4_b64",
    }
