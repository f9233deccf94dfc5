"""`qfuse::materialize`, by itself and under Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from inductor_q import lowerings
from inductor_q.ops.registry import define_ops

define_ops()
MATERIALIZE = torch.ops.qfuse.materialize.default


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_by_inductor(dynamic: bool) -> None:
    """Other backends know the op too."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        table = torch.ops.qfuse.materialize(x.cos().T)
        result: Tensor = y * table + y[:1] * table
        return result

    x, y = torch.randn(10, 8), torch.randn(3, 8, 10)
    got = torch.compile(run, dynamic=dynamic)(x, y)
    torch.testing.assert_close(got, y * x.cos().T + y[:1] * x.cos().T)


@pytest.mark.parametrize(
    "x",
    [torch.randn(3, 5), torch.randn(3, 5).T, torch.randn(0, 4), torch.ones((), dtype=torch.int64)],
    ids=["matrix", "transposed", "empty", "scalar"],
)
def test_op(x: Tensor) -> None:
    got = torch.ops.qfuse.materialize(x)
    assert torch.equal(got, x) and got.is_contiguous()
    torch.library.opcheck(MATERIALIZE, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_op_of_several(dtype: torch.dtype) -> None:
    xs = [torch.randn(3, 5).to(dtype), torch.randn(6, 4).to(dtype).T, torch.randn(0, 2).to(dtype)]
    got = torch.ops.qfuse.materialize_all(xs)
    for one, x in zip(got, xs, strict=True):
        assert torch.equal(one, x) and one.stride() == x.stride() and one is not x
    torch.library.opcheck(torch.ops.qfuse.materialize_all.default, (xs,))


@pytest.fixture
def strides() -> Iterator[Any]:
    """An op that tells which strides its input has in a compiled graph, which may be any."""
    with torch.library._scoped_library("qfuse_test", "DEF") as library:
        library.define("strides(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,))
        made: Any = lambda x: x.new_tensor(x.stride())  # noqa: E731
        library.impl("strides", made, "CompositeExplicitAutograd")
        fake: Any = lambda x: x.new_empty(x.dim())  # noqa: E731
        torch.library.register_fake("qfuse_test::strides", fake, lib=library)
        yield torch.ops.qfuse_test.strides


@pytest.mark.parametrize("shape", [(2, 3000), (2, 1, 41, 41), (3, 1, 5), (1, 1, 7)], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_strides_under_inductor(strides: Any, shape: tuple[int, ...], transposed: bool) -> None:
    """A buffer has eager mode's strides although Inductor pads wide rows, as it does on a GPU, and
    may choose the stride of a dimension of size one. FlexAttention's kernels rely on that."""
    lowerings.register()

    def read(x: Tensor) -> tuple[Tensor, ...]:
        made = (x.cumsum(0) * 2).expand(len(x), *[-1] * (x.dim() - 1))
        product = made.mT @ made  # has a layout from here on
        table = torch.ops.qfuse.materialize(made.mT if transposed else made)
        return table, strides(table), strides(made), product

    x = torch.arange(torch.Size(shape).numel()).view(shape) % 100 / 128
    with config.patch(disable_padding_cpu=False):
        table, got, padded, _ = torch.compile(read, dynamic=False)(x)
    expected, contiguous, _, _ = read(x)
    assert torch.equal(table, expected)
    assert got.tolist() == contiguous.tolist()
    if shape == (2, 3000):
        assert padded.tolist() == [3008, 1]


def test_of_a_slice_only_the_slice_is_made() -> None:
    lowerings.register()

    def read(x: Tensor) -> Tensor:
        table: Tensor = torch.ops.qfuse.materialize(x.cos()[:1])
        return table * 2

    x = torch.randn(64, 128)
    got, codes = run_and_get_code(torch.compile(read, dynamic=False), x)
    torch.testing.assert_close(got, x.cos()[:1] * 2)
    assert not [line for line in codes[0].splitlines() if " = empty_strided_cpu((64, 128)" in line]
