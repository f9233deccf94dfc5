"""Adapters of experts: those of PEFT in values, gradients and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft as peft_package
import pytest
import torch
from safetensors.torch import load_file, save_file

from inductor_q import exc, experts, kbit
from inductor_q.experts.model import stacks
from inductor_q.log import warn_once
from inductor_q.testing import relative_error
from tests.support.moe_models import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    INTERMEDIATE,
    awaken,
    model,
    tokens,
    unpacked,
)
from tests.support.moe_steps import CLOSE, EXACT, adapted, step

peft: Any = peft_package  # as shipped, it is typed in parts


@pytest.mark.parametrize("format", ["nf4_b64", "mxfp4", "dense"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_peft_adapters(family: str, format: str, tmp_path: Path) -> None:
    """Saved by us and loaded by PEFT over the same weights: the same model, the same gradients."""
    net = adapted(family, format)
    experts.save_adapter(net, tmp_path)
    plain = peft.PeftModel.from_pretrained(unpacked(net), tmp_path, is_trainable=True)
    logits, grads = step(plain, tokens())
    got, got_grads = step(net, tokens())
    assert relative_error(got, logits) < EXACT
    assert len(got_grads) == 2 * 2 * 2  # layers, projections, A and B
    assert len(grads) == len(got_grads)
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
        for name, above in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
            mine = f"model.layers.{layer}.mlp.experts.{name}"
            a = grads[f"{prefix}{above}.lora_A.default.weight"].unflatten(0, (EXPERTS, -1))
            b = grads[f"{prefix}{above}.lora_B.default.weight"].unflatten(1, (-1, EXPERTS))
            assert relative_error(got_grads[f"{mine}.lora_A"], a) < EXACT, mine
            assert relative_error(got_grads[f"{mine}.lora_B"], b.permute(2, 0, 1)) < EXACT, mine


def test_a_new_adapter_changes_nothing() -> None:
    net = experts.quantize(model("olmoe").requires_grad_(False))
    before, _ = step(net, tokens())
    added = experts.add_lora(net, r=3, alpha=6, targets=["down_proj"])
    assert [tuple(p.shape) for p in added] == [(EXPERTS, 3, INTERMEDIATE), (EXPERTS, HIDDEN, 3)] * 2
    assert all(p.requires_grad for p in added)
    assert {n for n, p in net.named_parameters() if p.requires_grad} == {
        f"model.layers.{i}.mlp.experts.down_proj.lora_{ab}" for i in range(2) for ab in "AB"
    }
    torch.testing.assert_close(step(net, tokens())[0], before)
    (_, stack), *_ = stacks(net)
    assert all(s.scaling == 2.0 for n, s in stacks(net) if n.endswith("down_proj"))
    assert stack.lora_A is None


def test_rank_stabilized_adapters() -> None:
    net = model("olmoe").requires_grad_(False)
    experts.add_lora(net, r=4, alpha=6, rslora=True)
    assert {s.scaling for _, s in stacks(net)} == {6 / 4**0.5}


def test_a_second_adapter_does_not_discard_the_first() -> None:
    net = model("olmoe").requires_grad_(False)
    first = experts.add_lora(net, targets=["down_proj"])
    with pytest.raises(exc.AlreadyAdapted, match=r"layers\.0\.mlp\.experts\.down_proj has an"):
        experts.add_lora(net)
    assert all(any(p is q for q in net.parameters()) for p in first)
    assert len([*stacks(net)]) == 2
    experts.add_lora(net, targets=["gate_up_proj"])
    assert len([*stacks(net)]) == 4


# --- saved and loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "wrapped"), [("all-linear", ["gate"] * 2), (["q_proj", "v_proj"], [])]
)
def test_peft_adapts_a_router_unasked(targets: Any, wrapped: list[str]) -> None:
    """Of a model with experts it wraps the router's parameter, unless projections are named."""
    net = experts.quantize(model("qwen3_moe").requires_grad_(False), "nf4_b64")
    net = peft.get_peft_model(net, peft.LoraConfig(target_modules=targets))
    found = [n for n, m in net.named_modules() if type(m).__name__ == "ParamWrapper"]
    assert [name.rsplit(".", 1)[1] for name in found] == wrapped


def test_an_adapter_of_peft_is_loaded(tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={"experts.down_proj": 2},
        alpha_pattern={"experts.down_proj": 5},
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(model("mixtral"), config)
    logits, _ = step(theirs, tokens())
    theirs.save_pretrained(tmp_path)
    ours: Any = peft.get_peft_model(
        model("mixtral"),
        peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj"]),
    )
    experts.load_adapter(ours, tmp_path)
    torch.testing.assert_close(step(ours, tokens())[0], logits, **CLOSE)
    experts.save_adapter(ours, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(model("mixtral"), tmp_path / "again")
    torch.testing.assert_close(step(again, tokens())[0], logits, **CLOSE)


def test_an_alpha_and_a_rank_of_one_layer(tmp_path: Path) -> None:
    """The adapter of a PEFT model that is called otherwise than "default"."""
    name = "layers.0.mlp.experts.gate_up_proj"
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={name: 2},
        alpha_pattern={name: 64},
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(model("mixtral"), config)
    logits, _ = step(theirs, tokens())
    theirs.save_pretrained(tmp_path)
    attention = peft.LoraConfig(r=4, target_modules=["q_proj"])
    ours: Any = peft.get_peft_model(model("mixtral"), attention, adapter_name="mine")
    experts.load_adapter(ours, tmp_path)
    torch.testing.assert_close(step(ours, tokens())[0], logits, **CLOSE)
    experts.save_adapter(ours, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(model("mixtral"), tmp_path / "again")
    torch.testing.assert_close(step(again, tokens())[0], logits, **CLOSE)
    both: Any = peft.get_peft_model(model("mixtral"), attention)
    experts.load_adapter(both, tmp_path / "again")
    torch.testing.assert_close(step(both, tokens())[0], logits, **CLOSE)


def test_an_adapter_comes_back(tmp_path: Path) -> None:
    net = adapted("gpt_oss", "nf4_b64_nested")
    experts.save_adapter(net, tmp_path)
    other = experts.quantize(model("gpt_oss").requires_grad_(False), "nf4_b64_nested")
    loaded = experts.load_adapter(other, tmp_path)
    assert len(loaded) == 8 and all(p.requires_grad for p in loaded)
    torch.testing.assert_close(step(other, tokens())[0], step(net, tokens())[0], rtol=0, atol=0)
    short = experts.load_adapter(model("gpt_oss"), tmp_path, dtype=torch.bfloat16)
    assert [p.tolist() for p in short] == [p.bfloat16().tolist() for p in loaded]


def test_only_one_projection_adapted(tmp_path: Path) -> None:
    """PEFT then wraps once, and its names are others."""
    net = model("qwen3_moe").requires_grad_(False)
    awaken(experts.add_lora(net, r=2, targets=["gate_up_proj"]))
    experts.save_adapter(net, tmp_path)
    plain = peft.PeftModel.from_pretrained(unpacked(net), tmp_path)
    torch.testing.assert_close(step(plain, tokens())[0], step(net, tokens())[0], **CLOSE)


def test_an_adapter_that_lacks_a_tensor(tmp_path: Path) -> None:
    experts.save_adapter(adapted("olmoe", "dense"), tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    del state[sorted(state)[-1]]
    save_file(state, tmp_path / "adapter_model.safetensors")
    net = model("olmoe")
    logits, _ = step(net, tokens())
    with pytest.raises(exc.CorruptAdapter, match=r"layers\.1\..*is missing"):
        experts.load_adapter(net, tmp_path)
    assert not [*stacks(net)]
    torch.testing.assert_close(step(net, tokens())[0], logits, rtol=0, atol=0)


def test_peft_saves_no_adapters_of_experts(told: list[str], tmp_path: Path) -> None:
    warn_once.cache_clear()
    net: Any = kbit.quantize_model(model("olmoe"), {"model.layers.0.self_attn.q_proj": 4})
    net = peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj"]))
    net.save_pretrained(tmp_path)
    assert not told
    experts.add_lora(net)
    net.save_pretrained(tmp_path)
    (warning,) = told
    assert "experts.save_adapter" in warning
    experts.save_adapter(net, tmp_path)
    assert len(told) == 1
