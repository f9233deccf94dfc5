"""varying_lengths: where lengths vary, attention is not cuDNN's, which plans for each of them."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

import inductor_q
from inductor_q.backend import qfuse
from inductor_q.passes.grouped_keys import keeps_kernels
from inductor_q.passes.varying_lengths import (
    CUDNN,
    CUDNN_BACKWARD,
    FLASH,
    FLASH_BACKWARD,
    VaryingLengths,
)

HEADS, FEATURES = 4, 64
SIZE, ZEROS = torch.ops.aten.sym_size.int, torch.ops.aten.zeros.default


def step(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **given: Any) -> list[Tensor]:
    """Run forward and backward of a call of cuDNN's, as AOTAutograd writes them."""
    dropout, causal = given.get("dropout", 0.0), given.get("causal", True)
    out = CUDNN(q, k, v, bias, True, dropout, causal, False, scale=0.3)
    none = torch.ops.aten.empty.memory_format([0], dtype=q.dtype, device=q.device)
    kept = torch.ops.aten.alias(torch.ops.aten.alias(out[0]))
    read = (kept, out[1], out[6], out[7], none if bias is None else bias, *out[2:6])
    gradients = CUDNN_BACKWARD(q.cos(), q, k, v, *read, dropout, causal, scale=0.3)
    sums = [out[1]] if given.get("sums") else []
    return [out[0].sin(), *gradients, *sums]


class Traced:
    """`step` as it is traced on a GPU, which is a pretended one; and what the pass finds in it."""

    def __init__(
        self,
        *,
        varies: bool = True,
        groups: int = HEADS,
        groups_of_values: int | None = None,
        features: int = FEATURES,
        of_values: int | None = None,
        more: int = 0,
        biased: bool = False,
        expanded: bool = False,
        apart: bool = False,
        **given: Any,
    ) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        length: Any = 300
        if varies:
            length = self.mode.from_tensor(torch.empty(300, device="meta"), static_shapes=False)
            length = length.shape[0]
        with self.mode, torch.no_grad():

            def empty(*sizes: Any) -> Tensor:
                return torch.empty(*sizes, dtype=torch.bfloat16, device="cuda")

            query = empty(2, HEADS, length, features)
            key = empty(2, groups, length + more, features)
            value = empty(2, groups_of_values or groups, length + more, of_values or features)
            if expanded:
                key = key.expand(-1, HEADS, -1, -1)
            if apart:
                query = empty(2, HEADS, features, length).mT
            bias = empty(2, 1, length, length + more) if biased else None
            inputs = [query, key, value, *([bias] if biased else [])]

            def run(inputs: list[Tensor]) -> list[Tensor]:
                query, key, value, *biases = inputs
                return step(query, key, value, biases[0] if biased else None, **given)

            self.graph = make_fx(run, tracing_mode="symbolic")(inputs).graph
        self.match()

    def match(self, attention: str = "") -> None:
        context: Any = SimpleNamespace(attention=attention)
        self.sites = list(VaryingLengths().match(self.graph, context))

    def apply(self) -> None:
        context: Any = None
        with V.set_fake_mode(self.mode):
            for site in self.sites:
                VaryingLengths().apply(self.graph, site, context)
        self.graph.lint()

    def calls(self, target: Any) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.target is target]


def test_without_a_mask_it_is_flash_attention() -> None:
    traced = Traced(groups=2)
    (site,) = traced.sites
    assert (site.rejected, site.provider) == ("", "FlashAttention")
    traced.apply()
    assert not traced.calls(CUDNN)
    assert not traced.calls(CUDNN_BACKWARD)
    (forward,), (backward,) = traced.calls(FLASH), traced.calls(FLASH_BACKWARD)
    operands = forward.all_input_nodes
    assert forward.args[3:] == (0.0, True)
    results = {item.args[1]: item for item in forward.users}
    assert results.keys() == {0, 1}
    assert backward.args[1:] == (*operands, results[0], results[1], True)
    assert forward.kwargs == backward.kwargs == {"scale": 0.3}
    assert [item.args[1] for item in returned(traced)] == [0, 1, 2]


def test_lengths_that_the_graph_reads_of_its_results_are_read_of_its_operands() -> None:
    traced = Traced()
    (forward,) = traced.calls(CUDNN)
    (length,) = (item for item in forward.users if item.args[1] == 4)
    with traced.graph.inserting_after(length):
        reader = traced.graph.call_function(ZEROS, ([length],))
    traced.match()
    traced.apply()
    (read,) = (node for node in reader.all_input_nodes if node.target is SIZE)
    assert read.args == (traced.calls(FLASH)[0].args[0], 2)


def returned(traced: Traced) -> list[fx.Node]:
    """Return the gradients among the graph's results."""
    (output,) = traced.graph.find_nodes(op="output")
    return [node for node in output.all_input_nodes if node.target is operator.getitem]


def test_a_fixed_length_stays_with_cudnn() -> None:
    assert not Traced(varies=False).sites


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dropout": 0.1}, "attention drops scores out"),
        ({"features": 320}, "up to 256 features"),
        ({"features": 60}, "in groups of 8"),
        ({"of_values": 32}, "values differ from queries in features"),
        ({"groups_of_values": 2}, "keys and values differ in heads"),
        ({"expanded": True, "groups": 1}, "one head is shown several times"),
        ({"apart": True}, "features do not lie side by side"),
        ({"more": 5}, "queries and keys differ in length"),
        ({"biased": True, "causal": False}, "attention has a mask"),
        ({"sums": True}, "more of it than its output and lengths"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_stays_with_cudnn_says_why(given: dict[str, Any], reason: str) -> None:
    traced = Traced(**given)
    (site,) = traced.sites
    assert reason in site.rejected
    assert site.by_choice


def test_what_keeps_attention_as_it_is() -> None:
    traced = Traced()
    traced.match(attention="the program chooses the kernel")
    assert [site.rejected for site in traced.sites] == ["the program chooses the kernel"]


def chooses(x: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH]):
        return attend(x, x, x)


def test_a_program_that_chooses_the_kernel_keeps_it() -> None:
    found: list[str] = []

    def look(gm: fx.GraphModule, example_inputs: Any) -> Any:
        found.append(keeps_kernels(gm))
        return gm.forward

    x = torch.randn(1, 1, 4, 8)
    for run in (chooses, lambda x: attend(x, x, x)):
        torch._dynamo.reset()
        torch.compile(run, backend=look)(x)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        found.append(keeps_kernels(fx.symbolic_trace(nn.Identity())))
    assert found == ["the program chooses the kernel", "", "flash attention is turned off"]


def attended(qkv: Tensor) -> Tensor:
    q, k, v = qkv.split([HEADS, HEADS // 2, HEADS // 2], dim=1)
    return attend(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_results_and_gradients_on_a_gpu(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    planned: Any = {"qfuse.memory": "40GB"}  # without a packed weight or a plan no pass runs
    compiled = torch.compile(attended, backend=qfuse, fullgraph=True, options=planned)
    preferred = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    generator = torch.Generator("cuda").manual_seed(0)
    for length in (300, 64, 17, 129):
        shape = (2, 2 * HEADS, length, FEATURES)
        qkv = torch.randn(shape, device="cuda", generator=generator).to(dtype)
        exact = gradients(attended, qkv.double())
        eager = [rms(a - b) for a, b in zip(gradients(attended, qkv), exact, strict=True)]
        with sdpa_kernel(preferred, set_priority=True):
            found = gradients(compiled, qkv)
        own = [rms(a - b) for a, b in zip(found, exact, strict=True)]
        assert all(one <= 1.25 * other for one, other in zip(own, eager, strict=True))
    assert inductor_q.report().graphs == 1
    report = inductor_q.last_report()
    assert report is not None
    sites = [site for site in report.sites if site.pass_name == "varying_lengths"]
    if torch.cuda.get_device_capability()[0] in (9, 10):
        assert [(site.rejected, site.provider) for site in sites] == [("", "FlashAttention")]


def gradients(run: Any, qkv: Tensor) -> list[Tensor]:
    """Return the result and the gradient, in float64."""
    given = qkv.clone().requires_grad_()
    torch._dynamo.mark_dynamic(given, 2)
    out = run(given)
    weight = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view_as(out)
    (out.double() * weight).sum().backward()
    assert given.grad is not None
    return [out.detach().double(), given.grad.double()]


def rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())
