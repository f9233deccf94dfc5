"""liveness.py: what a graph holds at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_q import liveness
from inductor_q.liveness import Liveness, simulate, storages

#: A float32 matrix of the tests.
SIDE = 16
SIZE = 4 * SIDE * SIDE


def lived(fn: Callable[..., object], count: int = 1, owned: Collection[str] = ()) -> Liveness:
    """Simulate `fn` of `count` matrices; the names of its inputs are x0_1, x1_1 ..."""
    inputs = [torch.empty(SIDE, SIDE) for _ in range(count)]
    module: fx.GraphModule = make_fx(fn, tracing_mode="fake")(*inputs)
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    return simulate(module.graph, [names[int(i)] for i in owned])


def test_products_one_behind_the_other() -> None:
    """An input ends with its last reader, and so does each product."""

    def chain(x: Tensor) -> Tensor:
        return (x @ x) @ x @ x

    found = lived(chain)
    assert (found.start, found.peak) == (SIZE, 3 * SIZE)
    found = lived(chain, owned=["0"])
    assert (found.start, found.peak) == (0, 2 * SIZE)
    assert found.at is not None and found.at.target is torch.ops.aten.mm.default


def test_what_is_read_late_is_held() -> None:
    def kept(x: Tensor) -> Tensor:
        first = x @ x
        return (x @ x @ x @ x) @ first

    assert lived(kept, owned=["0"]).peak == 3 * SIZE


def test_outputs_are_held_to_the_end() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x @ x, x.t() @ x, x @ x.t()

    assert lived(two, owned=["0"]).peak == 3 * SIZE


def test_elementwise_operations_are_fused() -> None:
    """Between products one tensor is written for all, in the place of the one that it ends."""

    def fused(x: Tensor) -> Tensor:
        return ((x @ x).exp().sin().double().cos().float() + 1) @ x

    assert lived(fused, owned=["0"]).peak == 2 * SIZE


def test_a_product_is_added_where_its_base_ends() -> None:
    def added(x: Tensor) -> Tensor:
        total: Tensor = torch.ops.qfuse.add_product(x @ x, x, x)
        return total

    def held(x: Tensor) -> tuple[Tensor, Tensor]:
        base = x @ x
        return torch.ops.qfuse.add_product(base, x, x), base

    def dropped(x: Tensor) -> Tensor:
        seeds = x[0, :1].long()
        total: Tensor = torch.ops.qfuse.add_dropout_grad_x(x @ x, x, seeds, 0, x, 1, 0.5)
        return total

    assert lived(added, owned=["0"]).peak == SIZE
    assert lived(held, owned=["0"]).peak == 2 * SIZE
    assert SIZE <= lived(dropped, owned=["0"]).peak < 2 * SIZE  # and the seed


def test_what_is_materialized_is_written_once() -> None:
    def materialized(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ x).sin()
        product: Tensor = torch.ops.qfuse.materialize(y) @ x
        return product, y

    assert lived(materialized, owned=["0"]).peak == 2 * SIZE


def test_what_others_may_read_is_not_written_to() -> None:
    """A gradient that autograd hands over, and what forward returned to its caller as well."""

    def given(x: Tensor) -> Tensor:
        return x.sin()

    def gradient(tangents: Tensor) -> Tensor:
        return tangents.sin()

    assert lived(given).peak == SIZE
    assert lived(gradient).peak == 2 * SIZE
    graph = make_fx(given, tracing_mode="fake")(torch.empty(SIDE, SIDE)).graph
    [x] = graph.find_nodes(op="placeholder")
    assert simulate(graph, (), storages(x)).peak == 2 * SIZE


def test_gradients_of_results_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd of old versions of torch until backward is over."""

    def chain(tangents: Tensor) -> Tensor:
        first = tangents @ tangents
        return first @ first @ first

    monkeypatch.setattr(liveness, "_HOLDS_GRADIENTS", False)
    assert lived(chain).peak == 3 * SIZE
    monkeypatch.setattr(liveness, "_HOLDS_GRADIENTS", True)
    assert lived(chain).peak == 4 * SIZE


def test_a_reduction_reads_what_is_not_written() -> None:
    def norm(x: Tensor) -> Tensor:
        wide = x.double()
        return (wide * wide.pow(2).mean(-1, keepdim=True)).float() @ x

    mean = 8 * SIDE
    assert lived(norm, owned=["0"]).peak == max(SIZE + mean, 2 * SIZE)


def test_views_hold_their_storage() -> None:
    def viewed(x: Tensor) -> Tensor:
        part = (x @ x).view(-1)[:SIDE].view(1, SIDE)
        return (x @ x @ x @ x).sum() + part @ x

    # The view's whole matrix beside the two of a product.
    assert lived(viewed, owned=["0"]).peak == 3 * SIZE


def test_parts_are_written_into_a_concatenation() -> None:
    def joined(x: Tensor) -> Tensor:
        return torch.cat([x @ x, x.t() @ x])

    assert lived(joined, owned=["0"]).peak == 2 * SIZE


def test_a_weight_is_decoded_into_each_concatenation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another product would be one for both, held from the first to the second."""

    def widened(x: Tensor) -> list[Tensor]:
        weight = x @ x
        first = torch.cat([weight, x]).sum()
        return [first, torch.cat([weight, x]).sum()]

    assert lived(widened, owned=["0"]).peak == pytest.approx(3 * SIZE, abs=8)
    monkeypatch.setattr(liveness, "DEQUANTIZE", torch.ops.aten.mm.default)
    assert lived(widened, owned=["0"]).peak == pytest.approx(2 * SIZE, abs=8)


def test_what_dropout_reads_beside_its_input_is_written() -> None:
    """The input of a widened product is made in its place there, the adapters are not."""
    rank = 4

    def extended(x: Tensor) -> Tensor:
        seeds, a = torch.zeros(1, dtype=torch.int64), x[:rank] @ x
        wide: Tensor = torch.ops.qfuse.extend_dropped(x @ x, seeds, 0, a, 1, 0.5, 0)
        return wide

    wide, a, seeds = 4 * SIDE * (SIDE + rank), 4 * rank * SIDE, 8
    assert lived(extended, owned=["0"]).peak == wide + a + seeds


@pytest.mark.parametrize("trained", [False, True])
def test_logits_of_a_chunk_are_counted(trained: bool) -> None:
    """Of 512 rows 128 at a time, beside the gradients; a trained head's is summed in float32."""
    rows, wide, vocabulary = 512, SIDE, 4096

    def loss(x: Tensor, head: Tensor, labels: Tensor) -> list[Tensor]:
        result: list[Tensor] = torch.ops.qfuse.linear_cross_entropy_chunks(
            [x, head], 1, labels, None, False, -100, 128 * vocabulary, [True, trained]
        )
        return result

    given = torch.empty(rows, wide), torch.empty(vocabulary, wide), torch.empty(rows).long()
    module = make_fx(loss, tracing_mode="fake")(*given)
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    expected = 4 * (rows * wide + 128 * vocabulary + 2) + 2 * trained * 4 * vocabulary * wide
    assert simulate(module.graph, names).peak == expected


def test_a_float32_head_is_rounded_in_part() -> None:
    """The part is counted, and the gradient of a chunk that is summed over parts in float32."""
    rows, wide, vocabulary = 512, SIDE, 4096

    def loss(x: Tensor, head: Tensor, labels: Tensor) -> list[Tensor]:
        result: list[Tensor] = torch.ops.qfuse.linear_cross_entropy_chunks(
            [x, head], 1, labels, None, False, -100, 128 * vocabulary, [True, False]
        )
        return result

    x, labels = torch.empty(rows, wide, dtype=torch.bfloat16), torch.empty(rows).long()
    module = make_fx(loss, tracing_mode="fake")(x, torch.empty(vocabulary, wide), labels)
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    whole = 2 * (rows * wide + 128 * vocabulary + vocabulary * wide) + 4 * (2 + 128 * wide)
    assert simulate(module.graph, names).peak == whole
