"""What generated code says of a call, by which its plan is found."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from inductor_q import lowerings
from inductor_q.backend import qfuse
from inductor_q.lowerings.kind import kind_of
from inductor_q.ops.registry import define_ops
from tests.support.compiling import ON_ANY_CPU

define_ops()
QFUSE: Any = torch.ops.qfuse
BF16 = torch.bfloat16


def tensor(
    size: Any = (4, 8), stride: Any = (8, 1), dtype: torch.dtype = BF16, device: str = "cpu"
) -> Any:
    """A tensor as Inductor knows it before the call."""
    return SimpleNamespace(
        get_size=lambda: size,
        get_stride=lambda: stride,
        get_dtype=lambda: dtype,
        get_device=lambda: torch.device(device),
    )


def test_a_kind_says_all_that_a_plan_is_chosen_by() -> None:
    calls: list[Any] = [
        ("op", (1.0, "nf4"), [tensor(), tensor()]),
        ("other", (1.0, "nf4"), [tensor(), tensor()]),
        ("op", (0.5, "nf4"), [tensor(), tensor()]),
        ("op", (1.0, "fp4"), [tensor(), tensor()]),
        ("op", (1.0, "nf4"), [tensor()]),
        ("op", (1.0, "nf4"), [tensor((8, 4), (4, 1)), tensor()]),
        ("op", (1.0, "nf4"), [tensor(), tensor((4, 8), (9, 1))]),
        ("op", (1.0, "nf4"), [tensor(), tensor(dtype=torch.float16)]),
        ("op", (1.0, "nf4"), [tensor(device="cuda:0"), tensor(device="cuda:0")]),
    ]
    kinds = [kind_of(*call) for call in calls]
    assert all(kinds) and len({*kinds}) == len(kinds)
    rows, two = sympy.Symbol("s0"), sympy.Integer(2)
    assert kind_of("op", [[two]], [tensor((two, 3), (3, 1))]) == kind_of(
        "op", [[2]], [tensor((2, 3), (3, 1))]
    )
    for settings, given in (
        ([[2, rows]], tensor()),
        ((), tensor((rows, 8))),
        ((), tensor((4, 8), (2 * rows, 1))),
        ((), tensor((0, 8))),  # there is nothing to compute
    ):
        assert kind_of("op", settings, [tensor(), given]) == ""


def drawn(x: Tensor, a: Tensor, b: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
    """Products of adapters in which each op takes part that has plans of generated code."""
    rows = x.sin()
    p = QFUSE.dropout_project(rows, seeds, 1, a, 1, 0.5)
    base = QFUSE.add_product(rows @ a.t() @ b.t(), p, b.t(), alpha=0.5)
    of_p, of_b = QFUSE.adapter_grads(base, p, b, 2.0, 0.5)
    of_a = QFUSE.dropout_grad_a(rows, seeds, 1, of_p, 1, 0.5)
    dropped = (a, seeds, 1, of_p, 1, 0.5)
    total = QFUSE.add_dropout_grad_x(of_p @ a, *dropped)
    return of_a, of_b, QFUSE.dropout_grad_x(*dropped), total


NAMES = (
    *("dropout_project", "add_product", "adapter_grads"),
    *("dropout_grad_a", "dropout_grad_x", "add_dropout_grad_x"),
)


def kinds_in(code: str) -> dict[str, list[str]]:
    """The kind of each call, by the op; an empty text where there is none."""
    calls = re.findall(r"^\s+(?:\w+ = )?qfuse_(\w+)\((.*)\)$", code, re.M)
    found: dict[str, list[str]] = {}
    for name, given in calls:
        (kind,) = re.findall(r"kind=(['\"])(.*?)\1", given) or [("", "")]
        found.setdefault(name, []).append(kind[1])
    return found


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_generated_code_says_what_it_knows(dynamic: bool, device: str) -> None:
    lowerings.register()
    generator = torch.Generator().manual_seed(0)
    x, a, b = (
        torch.randn(shape, generator=generator).to(device, BF16)
        for shape in ((64, 32), (8, 32), (48, 8))
    )
    seeds = torch.arange(3, device=device)
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False):
        compiled = torch.compile(drawn, backend=qfuse, dynamic=dynamic, options={**ON_ANY_CPU})
        found, (code,) = run_and_get_code(compiled, x, a, b, seeds)
    for mine, plain in zip(found, drawn(x, a, b, seeds), strict=True):
        of_size = 1e-2 * float(plain.abs().max())  # what sums of large terms leave is rounded too
        torch.testing.assert_close(mine, plain, rtol=2e-2, atol=of_size)
    kinds = kinds_in(code)
    assert kinds.keys() == {*NAMES}
    for name, of_calls in kinds.items():
        (kind,) = of_calls
        assert bool(kind) is not dynamic
        assert kind.startswith(f"{name}: ") or dynamic
    if not dynamic:
        (kind,) = kinds["adapter_grads"]
        rows, ranks = "bfloat16 [64, 8] [8, 1]", "bfloat16 [48, 8] [8, 1]"
        layouts = f"bfloat16 [64, 48] [48, 1], {rows}, {ranks}, {ranks}, {rows}"
        assert kind == f"adapter_grads: 2.0, 0.5; {device}: {layouts}"
