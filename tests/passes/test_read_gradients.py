"""read_gradients.py: the products of a layer's gradient with its adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import inductor_q
from inductor_q.backend import qfuse
from inductor_q.kernels.adapter_grads_triton import MOST
from inductor_q.passes.graph import MUL, is_tangent
from inductor_q.passes.read_gradients import ALONE
from inductor_q.testing import relative_error
from tests.support.compiling import no_codegen, partition

SIZE, RANK = 128, 8
#: extend_k puts the projection's gradient beside that of the layer, and makes it there.
APART: Any = {"qfuse.passes": "-extend_k", "fx_graph_cache": False}
BESIDE: Any = {"qfuse.thresholds": "extend_k.min_rows=1", "fx_graph_cache": False}


class Adapted(nn.Module):
    """A packed layer with an adapter."""

    def __init__(self, rank: int = RANK) -> None:
        super().__init__()
        torch.manual_seed(0)
        bf16 = torch.bfloat16
        nets: Any = bitsandbytes.nn
        self.packed = nets.Linear4bit(SIZE, SIZE, bias=False, compute_dtype=bf16).to("cpu")
        self.a, self.b = (
            nn.Parameter(torch.randn(shape).to(bf16) / 8) for shape in ((rank, SIZE), (SIZE, rank))
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.packed(x) + (x @ self.a.t()) @ self.b.t() * 0.7
        return y


def exact(module: Adapted) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The same layer in float64."""
    weight = module.packed.weight
    values = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).double()
    wide = Adapted()
    wide.a, wide.b = (nn.Parameter(t.detach().double()) for t in (module.a, module.b))
    return wide, lambda x: x @ values.t() + (x @ wide.a.t()) @ wide.b.t() * 0.7


def gradients(call: Any, module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, cotangent = (
        torch.randn((2, 256, SIZE), generator=generator).to(torch.bfloat16).to(dtype)
        for _ in range(2)
    )
    parameters = {"x": x.requires_grad_(), "a": module.a, "b": module.b}
    (call(x) * cotangent).sum().backward()
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    module.zero_grad()
    assert len(found) == 3
    return found


@pytest.mark.parametrize("options", [APART, BESIDE], ids=["apart", "beside"])
def test_gradients(options: Any) -> None:
    module = Adapted()
    plain = gradients(module, module, torch.bfloat16)
    compiled = torch.compile(module, backend=qfuse, options=options)
    found, codes = run_and_get_code(lambda: gradients(compiled, module, torch.bfloat16))
    assert "".join(codes).count("qfuse_adapter_grads(") == 1
    report: Any = inductor_q.last_report()
    assert [r.applied for r in report.passes if r.name == "read_gradients"] == [0, 1]
    wide, call = exact(module)
    for name, right in gradients(call, wide, torch.float64).items():
        assert relative_error(found[name], right) <= 1.25 * relative_error(plain[name], right), name


@pytest.mark.parametrize("options", [APART, BESIDE], ids=["apart", "beside"])
def test_it_says_why_not(options: Any) -> None:
    """Many ranks, or a B that does not train."""
    many, frozen = Adapted(MOST + 8), Adapted()
    frozen.b.requires_grad_(False)
    for module, told in (
        (many, f"{MOST + 8} ranks are more than the {MOST} that the kernel takes"),
        (frozen, ALONE),
    ):
        torch._dynamo.reset()
        x = torch.randn((2, 256, SIZE)).bfloat16().requires_grad_()
        with no_codegen():
            torch.compile(module, backend=qfuse, options=options)(x).sum().backward()
        report: Any = inductor_q.last_report()
        (site,) = [s for s in report.sites if s.pass_name == "read_gradients"]
        assert told in site.rejected and site.by_choice


class Added(nn.Module):
    """Two layers whose outputs are added: both have one gradient, and adapters of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Adapted(), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.one(x.sin()) + self.two(x.cos())
        return y


@pytest.mark.parametrize("trains", [True, False])
def test_layers_with_one_gradient(trains: bool) -> None:
    """Each product with a projection is taken once; where one is missing, none is."""
    module = Added()
    module.two.b.requires_grad_(trains)
    x = torch.randn((2, 256, SIZE)).bfloat16().requires_grad_()
    options = {**BESIDE, "qfuse.passes": "-stack_adapters"}
    module(x).sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    torch.compile(module, backend=qfuse, options=options)(x).sum().backward()
    report: Any = inductor_q.last_report()
    sites = [s for s in report.sites if s.pass_name == "read_gradients"]
    assert [s.rejected for s in sites] == ([""] if trains else [ALONE])
    for name, parameter in module.named_parameters():
        if name in expected:
            assert parameter.grad is not None, name
            assert relative_error(parameter.grad, expected[name].double()) < 0.02, name


def test_no_layer_scales_a_gradient_that_two_share() -> None:
    """Each adapter's factor moves, whoever was first."""
    x = torch.randn((2, 256, SIZE)).bfloat16().requires_grad_()
    _, backward = partition(lambda call: call(x).sum().backward(), Added())
    (tangent,) = (n for n in backward.find_nodes(op="placeholder") if is_tangent(n))
    assert not [user for user in tangent.users if user.target is MUL]
