"""Models with experts, compiled: one graph without a break, and the same step every time."""

from __future__ import annotations

from typing import Any

import peft as peft_package
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from inductor_q import experts
from inductor_q.backend import qfuse
from tests.support.gpu_experts import waits_are_errors
from tests.support.moe_models import FAMILIES, awaken, model, tokens
from tests.support.moe_steps import CLOSE, adapted, step
from tests.support.quantized import assert_same_bits

peft: Any = peft_package  # as shipped, it is typed in parts


def compile_and_step(net: Any, backend: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.compiler.reset()
    counters.clear()
    run = torch.compile(net, backend=backend, fullgraph=True, **kwargs)
    result = step(net, tokens(), run)
    assert not counters["graph_break"]
    return result


def test_dense_experts_are_one_graph() -> None:
    """What a parameter holds is asked while Dynamo traces."""
    net = experts.use_qfuse(model("qwen3_moe"))
    logits, grads = step(net, tokens())
    got, got_grads = compile_and_step(net, "aot_eager")
    torch.testing.assert_close(got, logits, **CLOSE)
    assert grads and grads.keys() == got_grads.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_are_one_graph(family: str) -> None:
    net = adapted(family)
    logits, grads = step(net, tokens())
    got, got_grads = compile_and_step(net, "aot_eager")
    torch.testing.assert_close(got, logits, **CLOSE)
    assert len(grads) == len(got_grads) == 8
    for name, grad in got_grads.items():
        assert grad.any(), name
        torch.testing.assert_close(grad, grads[name], **CLOSE)
    assert counters["stats"]["unique_graphs"] == 1


BACKENDS = ["aot_eager", pytest.param(qfuse, id="qfuse", marks=pytest.mark.slow)]


def with_adapters(net: Any) -> Any:
    """PEFT's on attention, ours on experts, and no gradient of theirs zero."""
    net = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    experts.add_lora(net, r=2)
    awaken([parameter for parameter in net.parameters() if parameter.requires_grad])
    return net


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_peft_on_attention(backend: Any) -> None:
    net: Any = experts.quantize(model("qwen3_moe"))
    net = with_adapters(net)
    logits, grads = step(net, tokens())
    assert len(grads) == 8 + 8
    got, got_grads = compile_and_step(net, backend)
    torch.testing.assert_close(got, logits, **CLOSE)
    assert got_grads.keys() == grads.keys()
    for name, grad in got_grads.items():
        assert grad.any(), name
        torch.testing.assert_close(grad, grads[name], **CLOSE)


@pytest.mark.slow
def test_a_compiled_step_is_the_same_every_time(device: str) -> None:
    """Bit by bit: no sum in it depends on which of its terms is ready first. Nor does the host wait
    for a GPU in it, to know where tokens go or for anything else."""
    net = with_adapters(experts.quantize(model("qwen3_moe", num_hidden_layers=1)))
    net.to(device, torch.bfloat16)
    torch.compiler.reset()
    run: Any = torch.compile(net, backend=qfuse, fullgraph=True, options={"fx_graph_cache": False})
    ids = tokens(4, 16).to(device)
    first, grads = step(net, ids, run)
    assert len(grads) == 4 + 4
    for _ in range(3):
        again, same = step(net, ids, run)
        assert_same_bits(again, first)
        for name, grad in grads.items():
            assert grad.any(), name
            assert_same_bits(same[name], grad)
    if device == "cuda":
        with waits_are_errors():
            step(net, ids, run)
