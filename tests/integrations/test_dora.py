"""DoRA in one graph: its norm from parts of the weight, which is decoded once."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.integrations import prepare_dora
from inductor_q.integrations.dora import row_norms
from tests.support.compiling import SMALL, compile_step, no_codegen, step
from tests.support.dora import assert_one_graph

for extra in ("bitsandbytes", "transformers"):
    pytest.importorskip(extra)
pytest.importorskip("peft")

N, K, R = 64, 128, 4


def layer(*, bias: bool = False, dropout: float = 0.0, adapter: Any = torch.bfloat16) -> nn.Module:
    """One DoRA layer whose magnitudes have left the norms that they start as."""
    model = testing.lora_linear(
        N, K, r=R, bias=bias, dropout=dropout, adapter_dtype=adapter, dora=True
    )
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            generator = torch.Generator().manual_seed(5)
            parameter.data *= 1 + torch.rand(parameter.shape, generator=generator)
    return model


def rows(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(32, K, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_as_near_as_those_of_the_sum(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    w, a, b = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((N, K), (R, K), (N, R))
    )
    w, a = w * K**-0.5, a * K**-0.5
    exact = torch.linalg.norm(w.double() + 2 * (b.double() @ a.double()), dim=1)
    dense = torch.linalg.norm(w + 2 * (b @ a), dim=1)  # as PEFT has it
    ours = row_norms(w, a, b, 2.0)
    assert ours.dtype is torch.float32
    assert testing.relative_error(ours, exact) <= max(
        testing.relative_error(dense, exact), 2 * torch.finfo(torch.float32).eps
    )


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_eager_values_and_gradients(bias: bool, adapter: torch.dtype) -> None:
    model, x = layer(bias=bias, adapter=adapter), rows()
    exact, exact_grads = step(testing.reference_model(model), x.detach().double().requires_grad_())
    theirs, their_grads = step(model, x, module=model)
    prepare_dora(model)
    ours, grads = step(model, x, module=model)
    assert grads.keys() == their_grads.keys() >= {"x0"}
    assert any("magnitude" in name for name in grads)
    assert testing.relative_error(ours, exact) <= 1.25 * testing.relative_error(theirs, exact)
    for name, gradient in grads.items():
        assert testing.relative_error(gradient, their_grads[name]) < 0.02, name
    assert testing.relative_error(grads["x0"], exact_grads["x0"]) < 0.02


def test_one_graph_that_decodes_the_weight_once() -> None:
    compiled, graphs = assert_one_graph(layer(), rows())
    assert not compiled.reasons.get("fold_lora")
    largest = [
        node
        for node in graphs[0].nodes
        if isinstance(node.meta.get("val"), Tensor)
        and node.meta["val"].shape == (N, K)
        and "dequantize" not in str(node.target)
    ]
    assert {str(node.target) for node in largest} <= {
        "prims.convert_element_type.default",
        "aten.pow.Tensor_Scalar",
    }  # of the square that the sum over a row reads: no product has the weight's size


def test_dropout_reads_the_weight_itself() -> None:
    model, x = layer(dropout=0.5), rows()
    prepare_dora(model)
    with testing.CompileTrace() as trace:
        compiled = compile_step(model, x, context=no_codegen(), fullgraph=True)
    assert (trace.graphs, trace.breaks) == (1, [])
    assert compiled.ops["qfuse.dequantize"]
    assert not compiled.ops["bitsandbytes.gemm_4bit"]


def test_adapters_that_come_later_are_prepared_too() -> None:
    import peft

    model = testing.qlora_model(
        testing.tiny_llama_config(num_hidden_layers=1), targets=["q_proj"], r=R, dora=True
    )
    inductor_q.compile(model, options=SMALL)
    lora = peft.LoraConfig(r=R, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    with no_codegen(), testing.CompileTrace() as trace:
        model(input_ids=torch.arange(32).reshape(2, 16))
        model.add_adapter("b", copy.copy(lora))
        model.set_adapter("b")
        model(input_ids=torch.arange(32).reshape(2, 16))
    assert (trace.graphs, trace.breaks) == (2, [])


def test_a_layer_that_was_saved_whole_can_be_prepared_again() -> None:
    """It comes back with PEFT's forward (which cannot read a weight that torch has loaded so: it is
    no `Params4bit` any more). A copy is prepared itself."""
    model, x = layer(), rows()
    prepare_dora(model)
    ours, _ = step(model, x, module=model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    prepare_dora(back)
    assert torch.equal(step(back, x, module=back)[0], ours)
    [norm] = [m for m in copy.deepcopy(model).modules() if type(m).__name__ == "DoraLinearLayer"]
    assert vars(norm)["forward"].__self__ is norm


def test_without_it_the_graph_breaks() -> None:
    """PEFT's own forward: what this is for. It can go when this fails."""
    torch._dynamo.reset()
    with testing.CompileTrace() as trace:
        torch.compile(layer(), backend=qfuse, options=SMALL)(rows())
    assert any("peft/utils/integrations.py" in reason for reason in trace.breaks)
