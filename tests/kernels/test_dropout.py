"""The masks of adapters' dropout, and the products that make them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from inductor_q import ops
from inductor_q.exc import WrongDtype, WrongShape
from inductor_q.kernels import dropout_reference, dropout_triton
from inductor_q.kernels.dropout import keep_mask, threshold
from inductor_q.kernels.dropout_calls import (
    AddDropoutGradX,
    DropoutGradA,
    DropoutGradX,
    DropoutProject,
)
from inductor_q.testing import relative_error
from tests.support.interpret_dropout import CASES
from tests.support.processes import interpreted

assert ops  # its import defines the ops
QFUSE = torch.ops.qfuse
ROWS, COLUMNS = 384, 512  # whole calls, and many of them


def masks(count: int, *, p: float = 0.05, adapter: int = 0, seed: int = 0) -> Tensor:
    """Masks [count, ROWS, COLUMNS] of as many seeds."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**63 - 1, [count], generator=generator)
    return torch.stack([keep_mask(s, ROWS, COLUMNS, adapter, p) for s in seeds])


def correlation(one: Tensor, other: Tensor) -> float:
    """The correlation of two masks, in standard deviations of that of independent ones."""
    a, b = one.double().flatten(), other.double().flatten()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).mean() / (a.std() * b.std())) * math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.0, 0.001, 0.05, 0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    """The rate over many seeds is p to within 5 standard deviations, and so is that of each row and
    column to within 6: there are 16 masks of 384 rows."""
    dropped = (~masks(16, p=p)).double()
    deviation = math.sqrt(p * (1 - p))
    for found, count, bound in (
        (dropped.mean(), dropped.numel(), 5),
        (dropped.mean((0, 2)), 16 * COLUMNS, 6),
        (dropped.mean((0, 1)), 16 * ROWS, 6),
        (dropped.mean((1, 2)), ROWS * COLUMNS, 6),
    ):
        assert float((found - p).abs().max()) <= bound * deviation / math.sqrt(count)


def test_each_element_is_dropped_at_the_rate_over_all_shifts() -> None:
    """0.05 is 12.8 / 256: a fifth of the shifts that a key can make has 12, the others 13."""
    least, higher = threshold(0.05)
    assert (least, higher) == (12, 205)
    assert abs((least + higher / 256) / 256 - 0.05) < 2**-17


def test_masks_do_not_depend_on_each_other() -> None:
    """Correlations of adapters, steps, and of neighbouring rows and columns are noise."""
    first = masks(2)
    other = masks(2, adapter=1)
    pairs: list[tuple[Tensor, Tensor]] = [
        (first[0], other[0]),
        (first[0], first[1]),
        *[(first[:, :-n], first[:, n:]) for n in (1, 2, 16, 31, 32, 33, 64, 128)],
        *[(first[..., :-n], first[..., n:]) for n in (1, 2, 3, 4, 7, 8, 9, 16, 64, 256)],
    ]
    assert max(abs(correlation(a, b)) for a, b in pairs) < 4.5


def test_masks_depend_on_place_seed_and_adapter_alone() -> None:
    seed = torch.tensor(-(2**62) + 12345)
    whole = keep_mask(seed, ROWS, COLUMNS, 2, 0.3)
    assert torch.equal(keep_mask(seed, 70, 100, 2, 0.3), whole[:70, :100])
    assert not torch.equal(keep_mask(seed + (1 << 33), ROWS, COLUMNS, 2, 0.3), whole)


def inputs(rows: int = 40, columns: int = 24, count: int = 2) -> tuple[Any, ...]:
    torch.manual_seed(rows)
    x, a = torch.randn(rows, columns), torch.randn(count * 3, columns)
    return x, torch.randint(2**63 - 1, [4]), 2, a, count, 0.25


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_against_what_is_written_out(rows: int) -> None:
    x, seeds, index, a, count, p = inputs(rows)
    low = torch.randn(rows, 6)
    expected = torch.empty(rows, 6, dtype=torch.float64)
    of_a, of_x = torch.zeros(6, 24).double(), torch.zeros(rows, 24).double()
    for i in range(count):
        part = slice(3 * i, 3 * i + 3)
        scaled = keep_mask(seeds[index], rows, 24, i, p).double() / (1 - p)
        expected[:, part] = (x.double() * scaled) @ a[part].double().t()
        of_a[part] = low[:, part].double().t() @ (x.double() * scaled)
        of_x += (low[:, part].double() @ a[part].double()) * scaled
    actual = QFUSE.dropout_project(x, seeds, index, a, count, p)
    rest = (seeds, index, low, count, p)
    grads = QFUSE.dropout_grad_a(x, *rest), QFUSE.dropout_grad_x(a, *rest)
    for mine, right in zip((actual, *grads), (expected, of_a, of_x), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
    base = torch.randn(rows, 24)
    before = base.clone()
    torch.testing.assert_close(QFUSE.add_dropout_grad_x(base, a, *rest), base + grads[1])
    assert torch.equal(base, before)
    assert QFUSE.add_dropout_grad_x_(base, a, *rest) is None
    torch.testing.assert_close(base, before + grads[1])
    wide = QFUSE.extend_dropped(x.view(rows, 1, 24), seeds, index, a, count, p, 2)
    assert torch.equal(wide.view(rows, 32), torch.cat([x, actual, torch.zeros(rows, 2)], 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 2**-6])
def test_what_is_added_is_rounded_with_the_sum_alone(size: float, dtype: torch.dtype) -> None:
    """The sum is the number in the dtype that is nearest to the base and the exact gradient, which
    the sum of a gradient that was rounded is not."""
    _, seeds, index, a, count, p = inputs(200, 96)
    low, base = (torch.randn(shape).to(dtype) for shape in ((200, 6), (200, 96)))
    a = (a * size).to(dtype)
    exact = QFUSE.dropout_grad_x(a.double().float(), seeds, index, low.float(), count, p)
    total = base.double() + exact.double()
    rest = (seeds, index, low, count, p)
    mine = QFUSE.add_dropout_grad_x(base, a, *rest)
    off = (mine.double() - total).abs() > total.abs() * torch.finfo(dtype).eps * 0.501
    assert not off.any()
    apart = base + QFUSE.dropout_grad_x(a, *rest)
    assert relative_error(mine, total) < relative_error(apart, total)


def test_nothing_is_added_to_a_sum() -> None:
    """Adapters of rank 0 leave the base as it is."""
    _, seeds, index, _, count, p = inputs()
    base = torch.randn(40, 24)
    rest = (torch.empty(0, 24), seeds, index, torch.empty(40, 0), count, p)
    assert torch.equal(QFUSE.add_dropout_grad_x(base, *rest), base)


def test_the_kernel_adds_to_whole_rows() -> None:
    """Other sums are the reference's."""
    _, seeds, index, a, count, p = inputs()
    half = torch.float16
    rest = (a.to(half), seeds, index, torch.randn(40, 6).to(half), count, p)
    wide = torch.randn(40, 30).to(half)
    refused = dropout_triton.GRAD_X.refuses(AddDropoutGradX(*rest, wide[:, :24]))
    assert refused == "the sum is not contiguous"
    assert not dropout_triton.GRAD_X.refuses(AddDropoutGradX(*rest, wide[:, :24].contiguous()))
    expected = QFUSE.add_dropout_grad_x(wide[:, :24].contiguous(), *rest)
    beside = wide[:, 24:].clone()
    QFUSE.add_dropout_grad_x_(wide[:, :24], *rest)
    assert torch.equal(wide, torch.cat([expected, beside], 1))


def test_opcheck() -> None:
    x, seeds, index, a, count, p = inputs()
    given = (x, seeds, index, a, count, p)
    opcheck(QFUSE.dropout_project.default, given)
    opcheck(QFUSE.extend_dropped.default, (*given, 5))
    rest = (seeds, index, torch.randn(40, 6), count, p)
    opcheck(QFUSE.dropout_grad_a.default, (x, *rest))
    opcheck(QFUSE.dropout_grad_x.default, (a, *rest))
    for base in (torch.randn(40, 24), torch.randn(40, 30)[:, :24]):
        opcheck(QFUSE.add_dropout_grad_x.default, (base, a, *rest))
        opcheck(QFUSE.add_dropout_grad_x_.default, (base, a, *rest))


def test_wrong_arguments() -> None:
    x, seeds, index, a, count, p = inputs()
    with pytest.raises(WrongShape, match=r"a \[2 \* r, K\] and x \[M, K\]"):
        QFUSE.dropout_project(x, seeds, index, a[:, 1:], count, p)
    with pytest.raises(WrongShape, match="0 <= p < 1"):
        QFUSE.dropout_project(x, seeds, index, a, count, 1.0)
    with pytest.raises(WrongShape, match="10 or more"):
        QFUSE.dropout_project(x, seeds, 9, a, count, p)
    with pytest.raises(WrongDtype, match="float32 and torch"):
        QFUSE.dropout_project(x.double(), seeds, index, a, count, p)
    for op, factor, expected in (
        (QFUSE.dropout_grad_a, x, r"x \[M, K\] and a gradient \[M, 2 \* r\]"),
        (QFUSE.dropout_grad_x, a, r"a \[2 \* r, K\] and a gradient \[M, 2 \* r\]"),
    ):
        with pytest.raises(WrongShape, match=expected):
            op(factor, seeds, index, torch.randn(40, 5), count, p)
        with pytest.raises(WrongDtype, match="float32"):
            op(factor, seeds, index, torch.randn(40, 6).half(), count, p)
    with pytest.raises(WrongDtype, match="seeds"):
        QFUSE.dropout_project(x, seeds.int(), index, a, count, p)
    rest = (a, seeds, index, torch.randn(40, 6), count, p)
    for base, error in ((x[:, 1:], WrongShape), (x[1:], WrongShape), (x.half(), WrongDtype)):
        for op in (QFUSE.add_dropout_grad_x, QFUSE.add_dropout_grad_x_):
            with pytest.raises(error, match="the sum"):
                op(base, *rest)
    with pytest.raises(WrongShape, match="gradient"):
        QFUSE.add_dropout_grad_x(x, a[1:], *rest[1:])


@pytest.mark.parametrize(
    "few",
    [("3", "6", "7", "8"), pytest.param((), marks=pytest.mark.slow)],
    ids=["small", "every case"],
)
def test_in_the_interpreter(few: tuple[str, ...]) -> None:
    """The Triton kernels make the masks and the products of the reference."""
    assert interpreted("interpret_dropout", *few) == [len(few or CASES)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns", "count", "rank"),
    [
        (4096, 4096, 3, 16),
        (300, 4096, 1, 8),
        (257, 600, 2, 17),
        (1000, 12288, 1, 64),
        (600, 11008, 1, 16),
        (1, 128, 1, 16),
        (4096, 4096, 3, 128),
        (300, 4160, 2, 96),
        (600, 1000, 2, 200),
    ],
)
def test_gpu_kernels(rows: int, columns: int, count: int, rank: int, dtype: torch.dtype) -> None:
    """Errors against float64 are no larger than 1.25 times those of the products written out."""
    torch.manual_seed(rows)
    x = torch.randn(rows, columns + 64, device="cuda", dtype=dtype)[:, :columns]
    a = torch.randn(count * rank, columns, device="cuda", dtype=dtype) / columns**0.5
    low = torch.randn(rows, count * rank, device="cuda", dtype=dtype)
    base = torch.randn(rows, columns, device="cuda", dtype=dtype)
    seeds = torch.randint(2**63 - 1, [2], device="cuda")
    results = []
    for provider, cast in (
        (dropout_triton, dtype),
        (dropout_reference, dtype),
        (dropout_reference, torch.float64),
    ):
        out = torch.full((rows, count * rank + 16), 7.0, device="cuda", dtype=cast)
        provider.PROJECT.run(DropoutProject(x.to(cast), seeds, 1, a.to(cast), count, 0.05, out))
        assert not out[:, count * rank :].any()
        rest = (seeds, 1, low.to(cast), count, 0.05)
        of_a = provider.GRAD_A.run(DropoutGradA(x.to(cast), *rest))
        of_x = provider.GRAD_X.run(DropoutGradX(a.to(cast), *rest))
        if provider is dropout_reference:
            total = base.to(cast) + of_x
        else:
            total = provider.GRAD_X.run(AddDropoutGradX(a, *rest, base.clone()))
        results.append((out[:, : count * rank], of_a, of_x, total))
    for mine, eager, exact in zip(*results, strict=True):
        floor = torch.finfo(dtype).eps / 16  # where eager is exact by chance
        assert relative_error(mine, exact) <= max(1.25 * relative_error(eager, exact), floor)
