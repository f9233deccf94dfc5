"""PEFT merges adapters into the decoded values of FP8 layers of transformers, or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import experts, kbit
from inductor_q.exc import CannotMerge
from inductor_q.experts.model import stacks
from inductor_q.integrations import prepare_fp8
from inductor_q.loading.merges import mend_merges
from inductor_q.testing import relative_error
from tests.loading.test_merges import peft_as_it_comes as peft_as_it_comes

pytest.importorskip("transformers.integrations.finegrained_fp8")
peft: Any = pytest.importorskip("peft")

from tests.support.fp8_models import (  # noqa: E402
    CLOSE,
    LINEARS,
    PROJECTIONS,
    TOKENS,
    addresses,
    layers,
    lora,
    net,
    values,
)
from tests.support.merged import merged_by_hand  # noqa: E402
from tests.support.moe_models import awaken  # noqa: E402

BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("default_options", "fresh_compiler")


def loras(model: nn.Module) -> list[Any]:
    """The layers of PEFT's that merge adapters."""
    return [m for m in model.modules() if isinstance(m, peft.tuners.lora.layer.LoraLayer)]


def test_an_adapter_is_merged_over_decoded_weights() -> None:
    model = net()
    model.config.dtype = torch.float32
    adapted = lora(model, "q_proj", "down_proj")
    prepare_fp8(adapted)
    with torch.no_grad():
        expected = adapted(TOKENS).logits
    whole: Any = kbit.dequantize_model(adapted)
    merged = whole.merge_and_unload()
    assert not layers(merged)
    assert merged.model.layers[0].mlp.up_proj.weight.dtype is torch.float32
    with torch.no_grad():
        assert relative_error(merged(TOKENS).logits, expected) < CLOSE
    merged.hf_quantizer.remove_quantization_config(merged)
    assert not hasattr(merged.config, "quantization_config")


@pytest.fixture
def mended(peft_as_it_comes: None) -> None:
    """PEFT's merges are ours for this test, as whatever packs a layer has them."""
    mend_merges()


@pytest.mark.parametrize(
    "how",
    [{}, {"scale_fmt": "ue8m0"}, {"weight_block_size": None}],
    ids=["tiles", "e8m0", "tensor"],
)
def test_an_adapter_merges_into_the_values(how: dict[str, Any]) -> None:
    """An ordinary layer stands in the place of transformers' while it is merged; unmerging puts
    that back, and all its bytes are where they were."""
    adapted = lora(net(**how), "q_proj", "down_proj")
    prepare_fp8(adapted)
    layer = adapted.base_model.model.model.layers[0].mlp.down_proj
    below, before = layer.base_layer, addresses(adapted)
    held = values(below.weight, below.weight_scale_inv, below.block_size)
    total = merged_by_hand(layer, held, dora=False)
    with torch.no_grad():
        expected = adapted(TOKENS).logits
        for safe in (False, True):
            adapted.merge_adapter(safe_merge=safe)
            assert type(layer.base_layer) is nn.Linear
            assert layer.base_layer.weight.dtype is torch.float32
            assert relative_error(layer.base_layer.weight, total) < 1e-6
            assert relative_error(adapted(TOKENS).logits, expected) < CLOSE
            adapted.unmerge_adapter()
            assert layer.base_layer is below and addresses(adapted) == before
            assert not any(hasattr(linear, "dtype") for linear in layers(adapted))
            assert torch.equal(adapted(TOKENS).logits, expected)
        whole = adapted.merge_and_unload()
        assert relative_error(whole(TOKENS).logits, expected) < CLOSE
    assert len(layers(whole)) == LINEARS - 2  # what has no adapter stays packed


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_a_layer_that_was_not_merged_has_no_dtype(merge: str, mended: None) -> None:
    """Where a later layer fails: transformers gives its layer none."""
    adapted = lora(net(), "q_proj", "down_proj")
    first = adapted.base_model.model.model.layers[0].self_attn.q_proj
    last = adapted.base_model.model.model.layers[-1].mlp.down_proj
    last.lora_B["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        getattr(adapted, merge)(safe_merge=True)
    if merge == "merge_adapter":
        assert type(first.base_layer) is nn.Linear
    assert last.base_layer in layers(adapted)
    assert not any(hasattr(linear, "dtype") for linear in layers(adapted))
    if merge == "merge_adapter":
        adapted.unmerge_adapter()
        assert first.base_layer in layers(adapted)
        assert not any(hasattr(linear, "dtype") for linear in layers(adapted))


def test_16_bit_models_are_merged_in_16_bits(mended: None) -> None:
    model = net()
    for parameter in model.parameters():
        if parameter.dtype is torch.float32 and parameter.dim() == 2 and parameter.shape[0] > 2:
            parameter.data = parameter.data.to(BF16)
    adapted = lora(model, "q_proj")
    adapted.merge_adapter()
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.base_layer.weight.dtype is BF16


def test_codes_that_are_not_read_are_no_values(mended: None) -> None:
    adapted = lora(net(weight_block_size=(64, 64)), "q_proj")
    with pytest.raises(CannotMerge, match=r"a FP8Linear.* blocks of \(64, 64\).*Merge in 16 bits"):
        adapted.merge_adapter()


def test_pefts_adapters_of_codes_of_experts_are_refused(mended: None) -> None:
    """What is below is codes, to which PEFT would add; `experts.load_adapter` takes its file.

    No other layer is merged then, though PEFT comes to those first.
    """
    names = [f"mlp.experts.{name}" for name in PROJECTIONS]
    config = peft.LoraConfig(r=4, target_modules=["o_proj"], target_parameters=names)
    adapted = peft.get_peft_model(net("qwen3_moe"), config)
    before = loras(adapted)
    for merge in (adapted.merge_adapter, adapted.merge_and_unload):
        with pytest.raises(CannotMerge, match=r"of FP8Experts.*float8_e4m3fn.*load_adapter"):
            merge()
        assert loras(adapted) == before and not any(layer.merged for layer in before)


@pytest.mark.parametrize("how", ["merge_adapter", "merge_and_unload"])
def test_one_layer_that_is_not_read_keeps_all_unmerged(how: str, mended: None) -> None:
    adapted = lora(net(), "q_proj", "down_proj")
    before = loras(adapted)
    before[-1].base_layer.block_size = (64, 64)
    with pytest.raises(CannotMerge, match=r"a FP8Linear.* blocks of \(64, 64\)"):
        getattr(adapted, how)()
    assert loras(adapted) == before and not any(layer.merged for layer in before)


def test_adapters_of_fp8_experts_merge() -> None:
    adapted = lora(net("qwen3_moe"), "q_proj")
    awaken(experts.add_lora(adapted, r=4))
    prepare_fp8(adapted)
    with torch.no_grad():
        expected = adapted(TOKENS).logits
        whole = adapted.merge_and_unload()
        assert not any(stacks(whole))
        assert relative_error(whole(TOKENS).logits, expected) < CLOSE
