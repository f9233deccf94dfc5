"""Models with experts: packed while a checkpoint is read, and saved by kbit or dequantized."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inductor_q import exc, experts, kbit
from inductor_q.experts.model import stacks
from inductor_q.kbit import meta_parameters
from inductor_q.loading.files import Checkpoint
from inductor_q.testing import relative_error
from tests.support.moe_models import FAMILIES, awaken, model, tokens
from tests.support.moe_steps import CLOSE, adapted, step
from tests.support.quantized import two_devices
from tests.support.shipped import noted_reads


@pytest.mark.parametrize("shard", ["100KB", "5GB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_straight_from_a_checkpoint(
    family: str, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused or expert by expert, one file or shards; each tensor is read once."""
    whole = model(family)
    whole.save_pretrained(tmp_path, max_shard_size=shard)
    with meta_parameters():
        net = model(family)
    read = noted_reads(monkeypatch)
    experts.quantize(net, checkpoint=tmp_path)
    assert sorted(read) == sorted(Checkpoint(tmp_path).shapes())
    logits, _ = step(experts.quantize(whole), tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, rtol=0, atol=0)


def test_a_checkpoint_of_which_a_part_is_packed(tmp_path: Path) -> None:
    whole = model("qwen3_moe")
    whole.save_pretrained(tmp_path)
    with meta_parameters():
        net = model("qwen3_moe")
    awaken(experts.add_lora(net, r=2, targets=["gate_up_proj"]))
    experts.quantize(net, checkpoint=tmp_path, targets=["gate_up_proj"])
    assert {name.rpartition(".")[2] for name, _ in stacks(net)} == {"gate_up_proj"}
    awaken(experts.add_lora(whole, r=2, targets=["gate_up_proj"]))
    experts.quantize(whole, targets=["gate_up_proj"])
    logits, _ = step(whole, tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:1", marks=[pytest.mark.gpu, two_devices])]
)
def test_everything_lies_on_the_device_asked_for(device: str, tmp_path: Path) -> None:
    """Another than the current one, as a rank may: a step there is what it is here."""
    model("qwen3_moe").save_pretrained(tmp_path)
    with meta_parameters():
        net = model("qwen3_moe")
    experts.quantize(net, checkpoint=tmp_path, device=device)
    awaken(experts.add_lora(net.requires_grad_(False), r=4))
    assert {p.device for p in net.parameters()} == {torch.device(device)}
    packed = {t.device for _, stack in stacks(net) for t in (*stack.operands, *stack.parameters())}
    assert packed == {torch.device(device)}
    net.to(device, torch.bfloat16)  # rotary frequencies are in no checkpoint
    logits, grads = step(net, tokens().to(device))
    assert {t.device for t in (logits, *grads.values())} == {torch.device(device)}
    with meta_parameters():
        other = model("qwen3_moe")
    experts.quantize(other, checkpoint=tmp_path)
    awaken(experts.add_lora(other.requires_grad_(False), r=4))
    expected, expected_grads = step(other.to("cpu", torch.bfloat16), tokens())
    logits, grads = logits.cpu(), {name: grad.cpu() for name, grad in grads.items()}
    close = 2e-2  # bfloat16 rounds apart in each layer here and there
    assert relative_error(logits, expected) < close
    assert len(grads) == 8
    for name, grad in grads.items():
        assert grad.any() and relative_error(grad, expected_grads[name]) < close, name


def test_another_models_checkpoint(tmp_path: Path) -> None:
    model("olmoe", intermediate_size=64).save_pretrained(tmp_path)
    net = model("olmoe")
    with pytest.raises(exc.WrongCheckpoint, match=r"gate_up_proj is \(4, 128, 64\) in it"):
        experts.quantize(net, checkpoint=tmp_path)
    with pytest.raises(exc.WrongCheckpoint, match=r"router\.weight is not in it"):
        experts.quantize(model("gpt_oss"), checkpoint=tmp_path)
    assert not [*stacks(net)]


def test_a_checkpoint_that_cannot_be_read_to_its_end_changes_nothing(tmp_path: Path) -> None:
    """Its last projection is in codes without a scale, which shows when it is read."""
    state = {name: tensor.clone() for name, tensor in model("qwen3_moe").state_dict().items()}
    last = "model.layers.1.mlp.experts.down_proj"
    save_file({**state, last: state[last].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    net = model("qwen3_moe")
    with pytest.raises(exc.WrongCheckpoint, match=f"left as it was:\n  {last} is torch.float8"):
        experts.quantize(net, checkpoint=tmp_path)
    assert not [*stacks(net)]
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("method", ["mxfp4", "awq", "gptq", "bitsandbytes", "fp8"])
def test_a_quantized_checkpoint_is_refused(method: str, tmp_path: Path) -> None:
    """Its tensors are codes, some in the shape of what they stand for."""
    model("olmoe").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({**said, "quantization_config": {"quant_method": method}}))
    net = model("olmoe")
    for checkpoint in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(exc.AlreadyQuantized, match=f"quant_method='{method}'") as error:
            experts.quantize(net, checkpoint=checkpoint)
        assert ("dequantize=True" in str(error.value)) == (method in ("mxfp4", "fp8"))
    assert not [*stacks(net)]


# --- saved ----------------------------------------------------------------------------------------


def test_kbit_saves_how_experts_are_packed(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    net = adapted("gpt_oss", "nf4_b64")
    kbit.save(net, path)
    other = experts.quantize(model("gpt_oss").requires_grad_(False), "nf4_b64")
    experts.add_lora(other, r=4, alpha=64)
    kbit.load(other, path)
    torch.testing.assert_close(step(other, tokens())[0], step(net, tokens())[0], rtol=0, atol=0)
    fp4 = adapted("gpt_oss", "fp4_b64")
    before, _ = step(fp4, tokens())
    with pytest.raises(exc.CorruptQuantState, match=r"format of .* should be fp4_b64, is nf4_b64"):
        kbit.load(fp4, path)
    torch.testing.assert_close(step(fp4, tokens())[0], before, rtol=0, atol=0)
    with pytest.raises(exc.WrongCheckpoint, match="packed as nf4_b64 in it"):
        kbit.load(model("gpt_oss"), path)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_dequantize_model_unpacks_experts(family: str, tmp_path: Path) -> None:
    net: Any = experts.quantize(model(family))
    logits, _ = step(net, tokens())
    kbit.dequantize_model(net)
    assert not [*stacks(net)]
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)
    net.save_pretrained(tmp_path)
    again: Any = type(net).from_pretrained(tmp_path)
    torch.testing.assert_close(step(again, tokens())[0], logits, **CLOSE)
    net = adapted(family)
    logits, _ = step(net, tokens())
    kbit.dequantize_model(net)
    assert {stack.format for _, stack in stacks(net)} == {"dense"}
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)


def test_save_pretrained_writes_nothing_that_does_not_load(tmp_path: Path) -> None:
    packed: Any = kbit.quantize_model(model("olmoe"), 4, progress=False)
    net: Any
    for net in (experts.quantize(model("olmoe")), adapted("olmoe", "dense"), packed):
        with pytest.raises(exc.CannotSave, match=r"layers\.0.*kbit\.save.*save_adapter"):
            net.save_pretrained(tmp_path)
        copy.deepcopy(net).load_state_dict(net.state_dict())
    assert not [*tmp_path.glob("*.safetensors")]

    def _save_checkpoint() -> None:  # as a trainer's, which resumes from it
        packed.save_pretrained(tmp_path)

    _save_checkpoint()
    assert [*tmp_path.glob("*.safetensors")]
