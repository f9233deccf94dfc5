"""NEFTune's noise is made in the graph, as large as transformers has it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import inductor_q
from inductor_q import testing
from inductor_q.integrations.neftune import add_noise, prepare_neftune

neftune = pytest.importorskip("transformers.integrations.neftune")
for extra in ("bitsandbytes", "peft"):
    pytest.importorskip(extra)

ALPHA = 5.0


def embeddings() -> tuple[Any, Any]:
    made: Any = nn.Embedding(64, 48)
    made.neftune_noise_alpha = ALPHA
    return made, made.register_forward_hook(neftune.neftune_post_forward_hook)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_noise_is_as_large_as_that_of_transformers(dtype: torch.dtype) -> None:
    made, handle = embeddings()
    made.to(dtype)
    ids = torch.arange(64).repeat(2, 4)
    exact, largest = made.weight[ids], ALPHA / math.sqrt(ids.shape[1] * 48)
    prepare_neftune(made.modules())
    assert list(made._forward_hooks.values()) == [add_noise]
    noise = (made(ids) - exact).float()
    assert noise.abs().max() <= 1.01 * largest + exact.abs().max() * torch.finfo(dtype).eps
    assert math.isclose(noise.std(), largest / math.sqrt(3), rel_tol=0.05)
    assert abs(noise.mean()) < 0.05 * largest
    assert not torch.equal(made(ids), made(ids))
    made.eval()
    assert torch.equal(made(ids), exact)
    handle.remove()
    made.train()
    assert not made._forward_hooks and torch.equal(made(ids), exact)


@pytest.mark.parametrize("regions", ["model", "layers"])
def test_one_graph(regions: Any) -> None:
    """Two lengths, of which the second makes the length dynamic; new noise in each step."""
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    model = testing.qlora_model(config, randomize_adapters=True)
    handle = neftune.activate_neftune(model, ALPHA)
    inductor_q.compile(model, regions=regions)
    torch._dynamo.reset()
    with testing.CompileTrace() as trace:
        for length in (16, 24, 32):
            ids = torch.randint(0, 256, (2, length))
            losses = [model(input_ids=ids, labels=ids).loss for _ in range(2)]
            losses[0].backward()
            assert losses[0] != losses[1]
        neftune.deactivate_neftune(model, handle)
        assert not model.get_input_embeddings()._forward_hooks
        # A Trainer whose `train` is called again has a new hook, in the state that was the last.
        handle = neftune.activate_neftune(model, ALPHA)
        inductor_q.compile(model, regions=regions)
        losses = [model(input_ids=ids, labels=ids).loss for _ in range(2)]
        assert losses[0] != losses[1]
    assert trace.breaks == [] and trace.graphs <= 2
    neftune.deactivate_neftune(model, handle)
    assert not model.get_input_embeddings()._forward_hooks
