"""Train compiled, merge the adapter into the quantized weights with PEFT, generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import testing
from inductor_q.backend import qfuse
from tests.support.compiling import SMALL

bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("transformers")

PROMPT, LENGTH = 4, 20


def token_ids() -> Tensor:
    return torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(0))


def train(model: Any) -> list[float]:
    """Learn one text by heart; the loss of every step."""
    compiled: Any = torch.compile(model, backend=qfuse, options=SMALL, fullgraph=True)
    optimizer = torch.optim.AdamW(testing.adapter_parameters(model), lr=5e-3)
    losses = []
    for _ in range(30):
        loss = compiled(input_ids=token_ids(), labels=token_ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model(input_ids=token_ids()).logits
    return result


def generate(model: Any) -> Tensor:
    """The greedy continuation of the text's first tokens, to its length."""
    prompt = token_ids()[:, :PROMPT]
    result: Tensor = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=LENGTH - PROMPT,
        do_sample=False,
        pad_token_id=testing.ByteTokenizer.pad_id,
    )
    return result


def requantized(exact: nn.Module) -> nn.Module:
    """`exact` with `nf4(W + s B A)` in every layer, added in float64 and rounded to NF4 alone."""
    for layer in list(exact.modules()):
        if not isinstance(getattr(layer, "base_layer", None), nn.Linear):
            continue
        module: Any = layer
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        merged = module.base_layer.weight + module.scaling["default"] * b @ a
        packed, state = bnb.functional.quantize_4bit(
            merged.detach().float(), quant_type="nf4", compress_statistics=True
        )
        module.base_layer.weight.data = bnb.functional.dequantize_4bit(packed, state).double()
        module.scaling["default"] = 0.0
    return exact


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit linear")
def test_train_merge_generate() -> None:
    """The merged model says what was learned, and is off by what rounding `W + s B A` to NF4 costs.

    That cost is measured apart from PEFT, in float64. What 16 bits cost on top of it is what they
    cost the model before the merge.
    """
    torch._dynamo.reset()
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = testing.qlora_model(config, adapter_dtype=torch.bfloat16)
    losses = train(model)
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0]
    model.eval()
    exact = logits(testing.reference_model(model))
    with model.disable_adapter():
        untrained = testing.relative_error(logits(model), exact)
    before = logits(model)
    rounding = testing.relative_error(before, exact)
    requantization = testing.relative_error(
        logits(requantized(testing.reference_model(model))), exact
    )
    assert torch.equal(generate(model), token_ids())

    merged = model.merge_and_unload()
    assert not [name for name, _ in merged.named_modules() if "lora" in name]
    assert merged.model.layers[0].mlp.up_proj.weight.quant_state is not None  # still packed
    after = logits(merged)
    # Sums of 16-bit values may round to NF4's other neighbour: the same cost, by other roundings.
    limit = 1.25 * requantization + rounding
    assert rounding < requantization < untrained / 4  # each of them tells something
    assert testing.relative_error(after, exact) <= limit
    assert testing.relative_error(after, before) <= limit + rounding
    assert torch.equal(generate(merged), token_ids())
