"""read_gradients.py: the products of a layer's gradient with its adapter."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import inductor_q
from inductor_q.backend import qfuse
from inductor_q.testing import relative_error

SIZE, RANK = 128, 8
#: extend_k would put the projection's gradient beside that of the layer, and make it there.
OPTIONS: Any = {"qfuse.passes": "-extend_k", "fx_graph_cache": False}


class Adapted(nn.Module):
    """A packed layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        bf16 = torch.bfloat16
        nets: Any = bitsandbytes.nn
        self.packed = nets.Linear4bit(SIZE, SIZE, bias=False, compute_dtype=bf16).to("cpu")
        self.a, self.b = (
            nn.Parameter(torch.randn(shape).to(bf16) / 8) for shape in ((RANK, SIZE), (SIZE, RANK))
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.packed(x) + (x @ self.a.t()) @ self.b.t() * 0.7
        return y


def gradients(call: Any, module: nn.Module) -> dict[str, Tensor]:
    module.zero_grad()
    x = torch.linspace(-1, 1, 64 * SIZE).sin().view(2, 32, SIZE).to(torch.bfloat16).requires_grad_()
    (call(x).float().sin() * torch.linspace(-1, 1, SIZE)).sum().backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {**found, "x": x.grad}


def test_gradients() -> None:
    module = Adapted()
    expected = gradients(module, module)
    compiled = torch.compile(module, backend=qfuse, options=OPTIONS)
    found, codes = run_and_get_code(lambda: gradients(compiled, module))
    assert "".join(codes).count("qfuse_adapter_grads(") == 1
    report: Any = inductor_q.last_report()
    assert [r.applied for r in report.passes if r.name == "read_gradients"] == [0, 1]
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.shape == expected[name].shape
        assert relative_error(gradient, expected[name].double()) < 5e-2, (
            name
        )  # each rounds in its own places
