"""Attention that is computed again takes no generator's state where it drops nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch import partitioners
from torch._inductor import config
from torch.utils.checkpoint import CheckpointPolicy

from inductor_q import testing
from inductor_q.integrations import prepare_checkpointing
from inductor_q.seedless import partition_seedless
from tests.support.compiling import count_ops, gradients, partition

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

aten = torch.ops.aten
CPU = "_scaled_dot_product_flash_attention_for_cpu"


def graphs() -> tuple[fx.Graph, fx.Graph, dict[str, torch.Tensor]]:
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = testing.qlora_model(config, randomize_adapters=True)
    prepare_checkpointing(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def step(run: Any) -> None:
        ids = torch.arange(32).view(2, 16)
        run(input_ids=ids, labels=ids).loss.backward()

    forward, backward = partition(step, model)
    return forward, backward, gradients({}, model)


def test_attention_without_dropout_is_called_as_it_is() -> None:
    """Under `fallback_random` it is as torch has it, which knows of dropout since 2.15."""
    forward, backward, found = graphs()
    for graph in (forward, backward):
        assert count_ops(graph)[CPU] == 1
        assert not any("rng" in node.name for node in graph.nodes)
    with config.patch(fallback_random=True):
        forward, backward, as_eager = graphs()
    knows = hasattr(partitioners, "is_nonzero_dropout_sdpa")
    for graph in (forward, backward):
        assert count_ops(graph)[CPU] == int(knows)
        assert knows or any("rng" in node.name for node in graph.nodes)
    assert found.keys() == as_eager.keys() and len(found) == 14
    for name, gradient in found.items():
        assert torch.equal(gradient, as_eager[name])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("op", ["cudnn", "flash", "efficient"])
def test_only_attention_that_drops_is_random(op: str, dropout: float) -> None:
    attention = getattr(aten, f"_scaled_dot_product_{op}_attention").default
    names = [argument.name for argument in attention._schema.arguments]
    graph = fx.Graph()
    given: dict[str, Any] = {"dropout_p": dropout} if dropout else {}
    given |= {name: graph.placeholder(name) for name in ("query", "key", "value")}
    values = [given.get(name, False) for name in names[: names.index("dropout_p") + bool(dropout)]]
    node = graph.call_function(attention, tuple(values))
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    graph.output(node)
    seen = []

    def look(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        found = next(n for n in gm.graph.nodes if n.op == "call_function")
        tags = getattr(found.target, "tags", ())
        seen.append(torch.Tag.nondeterministic_seeded in tags)
        return gm, gm

    gm, _ = partition_seedless(look, fx.GraphModule(torch.nn.Module(), graph))
    assert seen == [dropout > 0]
    assert next(n for n in gm.graph.nodes if n.op == "call_function").target is attention
