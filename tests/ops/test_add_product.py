"""`qfuse::add_product`, by itself and in compiled graphs: where it may take the base's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from inductor_q import lowerings
from inductor_q.exc import WrongShape
from inductor_q.kernels import add_product_triton
from inductor_q.kernels.calls import AddProduct
from inductor_q.kernels.dispatch import served_by
from inductor_q.lowerings.calls import qfuse_add_product
from inductor_q.ops.registry import define_ops
from inductor_q.testing import relative_error

define_ops()
ADD_PRODUCT: Any = torch.ops.qfuse.add_product
IN_PLACE = "add_product_"


def operands(
    rows: int = 8, inner: int = 4, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> list[Tensor]:
    """A weight's two factors, and an adapter's."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 16), (16, 24), (rows, inner), (inner, 24))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize("rows", [0, 1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_ops(rows: int, dtype: torch.dtype, alpha: float, device: str) -> None:
    x, w, a, b = operands(rows, dtype=dtype, device=device)
    base = x @ w
    for args in ((base, a, b), (base, a, b.t().contiguous().t())):
        opcheck(ADD_PRODUCT.default, (*args, alpha))
        expected = torch.addmm(*args, alpha=alpha)
        assert torch.equal(ADD_PRODUCT(*args, alpha), expected)
        into = base.clone()
        qfuse_add_product(into, *args[1:], alpha)
        exact = torch.addmm(*[arg.double() for arg in args], alpha=alpha)
        limit = 1.25 * relative_error(expected, exact)
        assert relative_error(into, exact) <= max(limit, 1e-15)
        assert device == "cuda" or torch.equal(into, expected)
    opcheck(torch.ops.qfuse.add_product_.default, (base.clone(), a, b, alpha))


def test_the_factor_costs_no_rounding(device: str) -> None:
    """Which it does where it is multiplied into an adapter's B."""
    x, w, a, b = operands(64, 16, device=device)
    base, alpha = x @ w, 1.7
    exact = torch.addmm(base.double(), a.double(), b.double(), alpha=alpha)
    into = base.clone()
    qfuse_add_product(into, a, b, alpha)
    of_b = ADD_PRODUCT(base, a, b * alpha)
    assert relative_error(into, exact) < relative_error(of_b, exact)
    assert relative_error(into, exact) < torch.finfo(base.dtype).eps / 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inner", [1, 8, 16, 48, 64, 65])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_on_a_gpu(alpha: float, inner: int, dtype: torch.dtype) -> None:
    """Rows and columns that fill no tile, factors that are parts of wider matrices, and launches
    after the first, which skip Triton's own."""
    generator = torch.Generator("cuda").manual_seed(inner)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    for rows, columns in ((1, 1), (300, 136), (1000, 4096)):
        wide = random(rows, inner + 16)
        for b in (random(inner, columns), random(columns, inner).t()):
            for a in (wide[:, 16:], wide[:, :inner], wide[:, 16:].contiguous()):
                base = random(rows, columns)
                expected = torch.addmm(base, a, b, alpha=alpha)
                exact = torch.addmm(base.double(), a.double(), b.double(), alpha=alpha)
                qfuse_add_product(base, a, b, alpha)
                limit = 1.25 * relative_error(expected, exact)
                assert relative_error(base, exact) <= max(limit, torch.finfo(dtype).eps / 2)


@pytest.mark.gpu
def test_the_kernel_serves_few_ranks() -> None:
    for inner, provider in ((16, "triton"), (add_product_triton.MOST + 1, "reference")):
        base, a, b = (
            torch.empty(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((64, 128), (64, inner), (inner, 128))
        )
        assert served_by("add_product", AddProduct(base, a, b)) == provider


@pytest.mark.parametrize(("rows", "inner"), [(0, 4), (8, 0)])
def test_nothing_to_add(rows: int, inner: int, device: str) -> None:
    x, w, a, b = operands(rows, inner, device=device)
    base = x @ w
    expected = base.clone()
    qfuse_add_product(base, a, b)
    assert torch.equal(base, expected)


def test_what_the_kernel_refuses() -> None:
    """Each with a reason; cuBLAS serves them."""
    _, _, a, b = operands()
    base = torch.zeros(8, 24, dtype=torch.bfloat16)
    wide, high = base.new_empty(8, 65), base.new_empty(65, 24)
    far = torch.empty_strided((4, 24), (2**30, 1), dtype=base.dtype, device="meta")
    for call, reason in (
        (AddProduct(base.float(), a, b), "bfloat16"),
        (AddProduct(base.to(torch.int16), a.to(torch.int16), b.to(torch.int16)), "bfloat16"),
        (AddProduct(base, wide, high), "65 ranks"),
        (AddProduct(base.t().contiguous().t(), a, b), "not contiguous"),
        (AddProduct(base, a.t().contiguous().t(), b), "lie apart"),
        (AddProduct(base, a, far), "32 bits"),
        (AddProduct(base.new_empty((1 << 23, 1), device="meta"), a, b), "65535 tiles"),
    ):
        assert reason in add_product_triton.KERNEL.refuses(call)
    assert not add_product_triton.KERNEL.refuses(AddProduct(base, a, b))


def test_shapes_that_do_not_fit_are_refused() -> None:
    _, _, a, b = operands()
    meta = [torch.empty(8, 23, device="meta"), a.to("meta"), b.to("meta")]
    with pytest.raises(RuntimeError, match=r"shape|size"):
        ADD_PRODUCT(*meta)
    base = torch.zeros(8, 24, dtype=a.dtype)
    for args in ((base[:, 1:], a, b), (base, a[:7], b), (base, a[:, 1:], b), (base[None], a, b)):
        with pytest.raises(WrongShape):
            torch.ops.qfuse.add_product_(*args)


def alone(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    return ADD_PRODUCT(x @ w, a, b).relu()


def scaled(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    return ADD_PRODUCT(x @ w, a, b, alpha=0.3).relu()


def read_beside(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    base = x @ w
    return ADD_PRODUCT(base, a, b), base.relu()


def returned(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    base = x @ w
    return ADD_PRODUCT(base, a, b), base


def of_an_input(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    return ADD_PRODUCT(w, w[:, :4], b)


def read_twice(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    """The base is a factor of what is added to it."""
    base = x @ w
    return ADD_PRODUCT(base, base, w.t() @ w)


def twice(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    """Two sums that begin with the same product."""
    return ADD_PRODUCT(x @ w, a, b) * ADD_PRODUCT(x @ w, a * 2, b)


@pytest.mark.parametrize("fn, in_place", [
    (alone, True),
    (scaled, True),
    (read_beside, False),
    (returned, False),
    (of_an_input, False),
    (read_twice, False),
    (twice, True),
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_compiled(fn: Any, in_place: bool, dynamic: bool, device: str) -> None:
    lowerings.register()
    args = operands(device=device)
    before, expected = [arg.clone() for arg in args], fn(*args)
    with config.patch(fx_graph_cache=False):
        compiled = torch.compile(fn, dynamic=dynamic, fullgraph=True)
        actual, (code,) = run_and_get_code(compiled, *args)
    torch.testing.assert_close(actual, expected)
    assert (IN_PLACE in code) is in_place
    for arg, was in zip(args, before, strict=True):
        assert torch.equal(arg, was)


@pytest.mark.parametrize("fn", [alone, scaled])
def test_cpp_wrapper_code_adds_out_of_place(fn: Any) -> None:
    lowerings.register()
    args = operands()
    options: Any = {"cpp_wrapper": True, "fx_graph_cache": False}
    actual, (code,) = run_and_get_code(torch.compile(fn, options=options), *args)
    torch.testing.assert_close(actual, fn(*args))
    assert IN_PLACE not in code
