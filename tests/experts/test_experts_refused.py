"""What experts cannot be is an error that says why, and leaves a model that computes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft as peft_package
import pytest
import torch
import transformers as transformers_package
from torch import nn

from inductor_q import exc, experts
from inductor_q.experts.model import stacks
from tests.support.moe_models import model, tokens, unpacked
from tests.support.moe_steps import CLOSE, adapted, step

peft: Any = peft_package  # as shipped, it is typed in parts
transformers: Any = transformers_package
quantization: Any = pytest.importorskip("torchao.quantization")


@pytest.mark.parametrize("format", ["int8", "llm_int8", "int8_row", "nvfp4_tiles", "hqq4_g64_bf16"])
def test_a_format_that_is_only_read(format: str) -> None:
    net = model("olmoe")
    logits, _ = step(net, tokens())
    with pytest.raises(exc.NoQuantizer, match=r"stacks of experts to it\. Quantize to nf4, fp4, "):
        experts.quantize(net, format)
    assert not [*stacks(net)]
    torch.testing.assert_close(step(net, tokens())[0], logits, rtol=0, atol=0)


NOT_OF_STACKS = [
    ({"gguf": {}}, exc.WrongScheme, "'gguf' is none of"),
    (4, exc.WrongScheme, "expected a name, a mapping or"),
    ("nf5", exc.UnknownFormat, "did you mean 'nf4'"),
    ({"torchao": {"format": "int8"}}, exc.NoQuantizer, "int8_row .* stacks of experts to it"),
    ({"torchao": {"format": "nvfp4"}}, exc.NoQuantizer, "nvfp4_tiles .* Quantize to .*nvfp4"),
    (quantization.Int8WeightOnlyConfig(), exc.WrongScheme, "no stacks of experts. Ask for nf4, "),
    ({"bnb": {"quant_storage": "bfloat16"}}, exc.WrongScheme, "Leave it out; .*experts.shard"),
    (
        transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["mlp.experts"]),
        exc.WrongScheme,
        r"it leaves model\.layers\.0\.mlp\.experts alone.* by targets=",
    ),
]


@pytest.mark.parametrize(("asked", "error", "problem"), NOT_OF_STACKS, ids=str)
def test_what_no_stack_can_be(asked: Any, error: Any, problem: str) -> None:
    net = model("olmoe")
    before = dict(net.named_parameters())
    with pytest.raises(error, match=problem):
        experts.quantize(net, asked)
    assert all(parameter is before[name] for name, parameter in net.named_parameters())


def test_tiles_that_no_projection_may_share() -> None:
    """A format that does not fit the last projection changes none."""
    net = model("qwen3_moe")
    config = copy.deepcopy(net.config)
    config.moe_intermediate_size = 64
    config.hidden_size = 64  # so many rows has the second projection, and 128 the first
    net = type(net)(config)
    before = dict(net.named_parameters())
    with pytest.raises(exc.WrongScheme, match="rows to a scale do not divide"):
        experts.quantize(net, "fp8_e4m3_128x128")
    after = dict(net.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in after)


@pytest.mark.parametrize("format", ["kbit4_e4m4", "mxfp4"])
def test_weights_that_cannot_be_packed(format: str) -> None:
    net = model("olmoe")
    net.model.layers[1].mlp.experts.down_proj.data[0, 0] = torch.nan
    with pytest.raises(exc.NotFinite):
        experts.quantize(net, format)
    logits, _ = step(unpacked(net), tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, equal_nan=True, **CLOSE)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(exc.NoExperts, match="Linear"):
        experts.quantize(nn.Linear(2, 2))
    with pytest.raises(exc.UnknownProjection, match="Known: gate_up_proj"):
        experts.quantize(model("olmoe"), targets=["down"])
    net = model("olmoe")
    with pytest.raises(exc.UnknownFormat):
        experts.quantize(net, "nf5")
    assert not [*stacks(net)]
    with pytest.raises(exc.CorruptAdapter, match="no adapters"):
        experts.save_adapter(experts.quantize(model("olmoe")), tmp_path)
    net = adapted("olmoe")
    peft.get_peft_model(
        model("olmoe"),
        peft.LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"]),
    ).save_pretrained(tmp_path)
    with pytest.raises(exc.CorruptAdapter, match="q_proj"):
        experts.load_adapter(net, tmp_path)
    with pytest.raises(exc.CorruptAdapter, match="not"):
        experts.load_adapter(model("olmoe", hidden_size=128), tmp_path)
