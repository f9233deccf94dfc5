"""`qfuse::adapter_grads`, by itself, in compiled graphs, and where the pass emits it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from inductor_q import lowerings
from inductor_q.exc import WrongShape
from inductor_q.kernels import adapter_grads_triton
from inductor_q.kernels.calls import AdapterGrads
from inductor_q.kernels.dispatch import served_by
from inductor_q.lowerings.calls import qfuse_adapter_grads
from inductor_q.ops.registry import define_ops
from inductor_q.testing import relative_error

define_ops()
ADAPTER_GRADS: Any = torch.ops.qfuse.adapter_grads
CALL = "qfuse_adapter_grads"
FACTORS = (2.0, 0.7)


def operands(
    rows: int = 8,
    columns: int = 24,
    rank: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> list[Tensor]:
    """A layer's gradient, the projection of its input, and B."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, columns), (rows, rank), (columns, rank))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def written_out(
    grad: Tensor, p: Tensor, b: Tensor, factor_p: float, factor_b: float
) -> tuple[Tensor, Tensor]:
    """What backward computes without the pass."""
    return grad @ (b * factor_p), (grad.t() @ p) * factor_b


def assert_as_exact(found: tuple[Tensor, Tensor], *args: Any) -> None:
    """Assert that neither result is further from float64 than what is written out."""
    wide: Any = [a.double() if isinstance(a, Tensor) else a for a in args]
    exact = written_out(*wide)
    for mine, plain, right in zip(found, written_out(*args), exact, strict=True):
        assert mine.dtype == plain.dtype
        assert mine.shape == plain.shape
        if right.numel():
            limit = max(1.25 * relative_error(plain, right), torch.finfo(mine.dtype).eps / 2)
            assert relative_error(mine, right) <= limit


@pytest.mark.parametrize("rows", [0, 1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("factors", [(1.0, 1.0), FACTORS], ids=str)
def test_op(rows: int, dtype: torch.dtype, factors: tuple[float, float], device: str) -> None:
    grad, p, b = operands(rows, dtype=dtype, device=device)
    apart = [t.t().contiguous().t() for t in (grad, p, b)]  # the numbers of a row lie apart
    for args in ((grad, p, b, *factors), (*apart, *factors)):
        opcheck(ADAPTER_GRADS.default, args)
        assert_as_exact(ADAPTER_GRADS(*args), *args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 8, 16, 24, 32, 33])
def test_on_a_gpu(rank: int, dtype: torch.dtype) -> None:
    """Rows and columns that fill no tile, factors that are parts of wider matrices, results in
    columns of one, and launches after the first, which skip Triton's own."""
    generator = torch.Generator("cuda").manual_seed(rank)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    for rows, columns in ((1, 1 << 19), (1025, 1030), (1500, 4104), (4096, 12288)):
        wide = random(rows, rank + 16)
        beside = random(rows, columns + 8)
        b = random(columns, rank)
        for grad, p in ((random(rows, columns), wide[:, 16:]), (beside[:, 8:], wide[:, :rank])):
            into = torch.full((rows, rank + 51), 7.0, device="cuda", dtype=dtype)
            for behind in (0, 0, 48):
                of_b = torch.full_like(b, torch.nan)
                into[:, 1:-2] = torch.nan
                of_p = into[:, 1 : 1 + rank + behind]
                call = AdapterGrads(grad, p, b, *FACTORS, of_p, of_b)
                expected = "triton" if rank <= adapter_grads_triton.MOST else "reference"
                assert served_by("adapter_grads", call) == expected
                qfuse_adapter_grads(grad, p, b, of_b, *FACTORS, out=of_p)
                assert_as_exact((of_p[:, :rank], of_b), grad, p, b, *FACTORS)
                assert not of_p[:, rank:].any()
            assert bool((into[:, [0, -2, -1]] == 7.0).all()), "wrote beside its columns"


def test_zeros_behind_the_projection() -> None:
    grad, p, b = operands()
    of_p, of_b = torch.full((8, 7), torch.nan).bfloat16(), torch.empty_like(b)
    qfuse_adapter_grads(grad, p, b, of_b, *FACTORS, out=of_p)
    assert_as_exact((of_p[:, :4], of_b), grad, p, b, *FACTORS)
    assert not of_p[:, 4:].any()


def test_what_the_kernel_refuses() -> None:
    """Each with a reason; cuBLAS serves them."""
    grad, p, b = operands(1024, 1024)
    of_p, of_b = torch.empty_like(p), torch.empty_like(b)
    call = AdapterGrads(grad, p, b, 1.0, 1.0, of_p, of_b)
    high = grad[:, : adapter_grads_triton.MOST + 1]
    cases: Any = (
        ({"p": p.float()}, "bfloat16"),
        ({"p": high, "b": high}, "33 ranks"),
        ({"grad": grad[:500]}, "fewer than 524288 elements"),
        ({"grad": grad.t()}, "lie apart"),
        ({"of_b": of_b.t().contiguous().t()}, "lie apart"),
        ({"grad": grad[:1].expand(1 << 27, -1)}, "32 bits"),
    )
    for changed, reason in cases:
        assert reason in adapter_grads_triton.KERNEL.refuses(replace(call, **changed))
    assert not adapter_grads_triton.KERNEL.refuses(call)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_shapes_that_do_not_fit_are_refused(place: str) -> None:
    """The kernel would read beyond the end of a matrix that is too small."""
    grad, p, b = (t.to(place) for t in operands())
    for args in ((grad, p[:7], b), (grad, p, b[:23]), (grad[:, 1:], p, b), (grad[None], p, b)):
        with pytest.raises(RuntimeError if place == "meta" else WrongShape):
            ADAPTER_GRADS(*args, *FACTORS)
    if place == "cpu":
        with pytest.raises(WrongShape, match="projection"):
            ADAPTER_GRADS(grad, p[:, :3], b, *FACTORS)


def beside_another(grad: Tensor, p: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the projection goes beside another one, that of B is cast and returned."""
    ones = ADAPTER_GRADS(grad.relu(), p, b, *FACTORS)
    twos = ADAPTER_GRADS(grad.sigmoid(), p, b, 1.0, 1.0)
    return torch.cat([ones[0], twos[0]], 1) @ torch.cat([b, b], 1).t(), ones[1].float(), twos[1]


def of_what_is_dropped(grad: Tensor, p: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The gradient of a projection is read for a product alone that nothing reads."""
    ones = ADAPTER_GRADS(grad.relu(), p, b, *FACTORS)
    twos = ADAPTER_GRADS(grad.sigmoid(), ones[0], b, 1.0, 1.0)
    return twos[0], ones[1]


def of_one_alone(grad: Tensor, p: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Nothing reads the gradient of the projection."""
    return (ADAPTER_GRADS(grad.sin(), p, b, *FACTORS)[1] + 1,)


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@pytest.mark.parametrize("fn", [beside_another, of_what_is_dropped, of_one_alone])
@pytest.mark.parametrize("cpp_wrapper", [False, True], ids=["", "cpp_wrapper"])
def test_compiled(fn: Any, cpp_wrapper: bool, dynamic: bool, device: str) -> None:
    lowerings.register()
    args = operands(64, device=device)
    before, expected = [arg.clone() for arg in args], fn(*args)
    with config.patch(fx_graph_cache=False, cpp_wrapper=cpp_wrapper):
        compiled = torch.compile(fn, dynamic=dynamic, fullgraph=True)
        actual, codes = run_and_get_code(compiled, *args)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert (CALL in codes[0]) is (fn is not of_one_alone and not cpp_wrapper)
    for arg, was in zip(args, before, strict=True):
        assert torch.equal(arg, was)
