"""The ops of attention under padding, documents and windows, against torch's own with a mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as attend

from inductor_q import ops, testing
from inductor_q.ops import attention
from inductor_q.ops.attention import BLOCK

assert ops  # its import defines them


def rows(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def packed(*lengths: int, first: int = 0) -> Tensor:
    """[1, sum of lengths] positions that begin again with each document."""
    return torch.cat([torch.arange(first, first + n) for n in lengths])[None]


def seen(positions: Tensor | None, valid: Tensor | None, length: int, window: int | None) -> Tensor:
    """[B, S, S], written out query by query: the keys from the first that it sees to itself."""
    batch = max(x.shape[0] for x in (positions, valid, torch.zeros(1)) if x is not None)
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        row = None if positions is None else positions[b % positions.shape[0]].tolist()
        first = 0
        for q in range(length):
            if row is not None and q and row[q] != row[q - 1] + 1:
                first = q
            near = slice(first if window is None else max(first, q - window + 1), q + 1)
            mask[b, q, near] = True if valid is None else valid[b, near] != 0
    return mask


def padding(length: int) -> Tensor:
    """[2, S]: much padding on the left; then padding in between, and on the right."""
    valid = torch.ones(2, length, dtype=torch.int64)
    valid[0, : length * 2 // 3] = 0
    valid[1, length // 3 : length // 2] = 0
    valid[1, -(length // 5) :] = 0
    return valid


def test_valid_positions_come_first_in_their_order() -> None:
    valid = torch.cartesian_prod(*[torch.tensor([0, 1])] * 6) * 7
    order, inverse, is_valid = attention.valid_first(valid)
    assert torch.equal(order, torch.argsort((valid == 0).int(), dim=-1, stable=True))
    assert torch.equal(torch.gather(inverse, 1, order), torch.arange(6).expand(64, 6))
    assert torch.equal(is_valid, valid != 0)


def test_rows_go_there_and_back_with_their_gradients() -> None:
    valid = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 0]])
    order, inverse, is_valid = attention.valid_first(valid)
    x, weight = rows(2, 3, 5, 4), rows(2, 3, 5, 4).detach()
    moved = attention.reorder(x, order, inverse)
    index = order[:, None, :, None].expand_as(x)
    assert torch.equal(moved, x.gather(2, index))
    (got,) = torch.autograd.grad((moved * weight).sum(), x, retain_graph=True)
    (expected,) = torch.autograd.grad((x.gather(2, index) * weight).sum(), x)
    assert torch.equal(got, expected)
    back = attention.restore(moved, order, inverse, is_valid)
    assert torch.equal(back, x * (valid != 0)[:, None, :, None])
    (got,) = torch.autograd.grad((back * weight).sum(), x)
    assert torch.equal(got, weight * (valid != 0)[:, None, :, None])


def test_rows_that_come_back_are_computed_with_heads_side_by_side() -> None:
    """Inductor lays a tensor out in the order of its sizes: in another one merging the heads would
    be a copy."""
    made = attention.valid_first(torch.ones(2, 5))
    traced = make_fx(attention.restore)(rows(2, 3, 5, 4).detach(), *made)
    (where,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    assert where.meta["val"].shape == (2, 5, 3, 4)


CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 1, 2, 128, 129, 130, 200, 5000])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (5,), (128,), (128, 128), (100, 28, 1, 255), (300, 1, 83), (1,) * 130, (40, 400)],
    ids=str,
)
def test_tables_name_the_blocks_that_hold_pairs(
    lengths: tuple[int, ...], window: int | None
) -> None:
    length, positions = sum(lengths), packed(*lengths, first=3)
    documents, *tables = attention.block_tables(positions, None, 2, length, window, CPU)
    number = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    assert torch.equal(documents, number.expand(2, length))
    mask = seen(positions, None, length, window)
    some, whole = blocks_of(mask.expand(2, -1, -1))
    assert_tables(tables, some & ~whole, whole)


def blocks_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks of [B, S, S] hold some pairs, and which hold all."""
    batch, length, _ = mask.shape
    blocks = -(-length // BLOCK)
    padded = torch.zeros(batch, blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    padded[:, :length, :length] = mask
    pairs = padded.view(batch, blocks, BLOCK, blocks, BLOCK).sum((2, 4))
    return pairs > 0, pairs == BLOCK * BLOCK


def assert_tables(tables: list[Tensor], some: Tensor, whole: Tensor) -> None:
    expected = (some, whole, some.transpose(1, 2), whole.transpose(1, 2))
    for pairs, count, index in zip(expected, tables[::2], tables[1::2], strict=True):
        batch, blocks, _ = pairs.shape
        assert count.shape == (batch, 1, blocks) and index.shape == (batch, 1, blocks, blocks)
        assert count.is_contiguous() and index.is_contiguous()
        assert count.dtype == index.dtype == torch.int32
        for b, q in itertools.product(range(batch), range(blocks)):
            assert index[b, 0, q, : count[b, 0, q]].tolist() == pairs[b, q].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("lengths", [None, (200, 1, 399)], ids=str)
def test_tables_of_valid_keys(lengths: tuple[int, ...] | None, window: int | None) -> None:
    """What they call whole is whole, and what they leave out is empty; a block of which only hidden
    keys are near enough, or of its document, may be computed for nothing."""
    length = 600
    valid, positions = padding(length), packed(*lengths) if lengths else None
    documents, keys, *tables = attention.block_tables(positions, valid, 2, length, window, CPU)
    assert torch.equal(keys, documents.masked_fill(valid == 0, -1))
    some, whole = blocks_of(seen(positions, valid, length, window))
    possible, _ = blocks_of(seen(positions, None, length, window).expand(2, -1, -1))
    filled = torch.nn.functional.pad(valid, (0, -length % BLOCK)).view(2, 1, -1, BLOCK).any(-1)
    assert bool((some <= (possible & filled)).all())
    assert_tables(tables, possible & filled & ~whole, whole)


def numbers(order: str, *lengths: int) -> Tensor:
    """[1, sum of lengths] numbers of sequences that lie one behind the other; 0 is padding."""
    kinds = {
        "rising": range(1, 1 + len(lengths)),
        "falling": range(len(lengths), 0, -1),
        "far": [(i * 7919 + 3) * (-1) ** i * 10**9 for i in range(len(lengths))],
        "padded left": range(len(lengths)),
        "padded right": [*range(1, len(lengths)), 0],
        "padded between": [*range(5, 4 + len(lengths)), 9],
    }
    found = torch.tensor([*kinds[order]]).repeat_interleave(torch.tensor(lengths))
    if order == "padded between":
        found[lengths[0] - 3 : lengths[0] + 2] = 0
    return found[None]


def seen_numbers(given: Tensor, valid: Tensor | None, window: int | None, *, all: bool) -> Tensor:
    """[B, S, S]: the keys of the query's number that are no padding."""
    place = torch.arange(given.shape[1])
    behind = place[:, None] - place
    mask = (given[:, :, None] == given[:, None, :]) & (behind >= 0)
    mask = mask & (behind < (window or len(place)))
    mask = mask if all else mask & (given != 0)[:, None, :]
    return mask if valid is None else mask & (valid != 0)[:, None, :]


@pytest.mark.parametrize("window", [None, 100, 200])
@pytest.mark.parametrize(
    "order", ["rising", "falling", "far", "padded left", "padded right", "padded between"]
)
@pytest.mark.parametrize("lengths", [(128, 128), (100, 28, 1, 255), (300, 1, 83), (40, 400)])
def test_tables_of_numbered_sequences(
    lengths: tuple[int, ...], order: str, window: int | None
) -> None:
    """They are exact where no number comes again, whatever the numbers are."""
    given, length = numbers(order, *lengths), sum(lengths)
    real = given != 0 if order.startswith("padded") else None
    made = attention.block_tables(None, None, 2, length, window, CPU, given, real)
    tables = made[-8:]
    mask = seen_numbers(given, None, window, all=real is None)
    some, whole = blocks_of(mask.expand(2, -1, -1))
    assert_tables(tables, some & ~whole, whole)


def test_tables_of_numbers_that_come_again() -> None:
    """No block is left out that holds a pair, and none is whole that does not hold all."""
    generator = torch.Generator().manual_seed(0)
    for spread in (2, 3, 40):
        given = torch.randint(0, spread, (2, 700), generator=generator)
        given[:, 256:520] = 1
        made = attention.block_tables(None, None, 2, 700, None, CPU, given, given != 0)
        some, whole = blocks_of(seen_numbers(given, None, None, all=False))
        counted = torch.zeros_like(some)
        for count, index in zip(made[-8:-4:2], made[-7:-4:2], strict=True):
            for b, q in itertools.product(range(2), range(some.shape[1])):
                counted[b, q, index[b, 0, q, : count[b, 0, q]].long()] = True
        assert bool((some <= counted).all())
        whole_count = made[-6]
        assert torch.equal(whole_count[:, 0].sum(), whole.sum().int())


@pytest.mark.parametrize("length", [100, 600])
def test_tables_are_no_views(length: int) -> None:
    """Inductor lays a result out in its own dimensions, but gives one that a view adds the stride
    0, by which FlexAttention's kernels would find the first sequence's tables for all of them."""

    def make(positions: Tensor, valid: Tensor) -> list[Tensor]:
        return attention.block_tables(positions, valid, 2, length, 200, CPU)[-8:]

    positions, valid = packed(60, length - 60).expand(2, -1).contiguous(), padding(length)
    traced = make_fx(make, decomposition_table=select_decomp_table())(positions, valid)
    (made,) = traced.graph.output_node().args
    assert isinstance(made, (list, tuple)) and len(made) == 8
    for node in made:
        assert isinstance(node, torch.fx.Node) and isinstance(node.target, torch._ops.OpOverload)
        assert not node.target.is_view, node.format_node()
        assert node.meta["val"].is_contiguous()


@pytest.mark.parametrize("length", [100, 600])
def test_the_operator_gets_strides_that_are_written_down(length: int) -> None:
    """Without gradients no table is a result, so Inductor may choose the stride of the dimension of
    heads, by which FlexAttention's kernels find the second sequence's tables; and it may lay out
    what it computes for them so that a row's features are far apart."""

    def compute(x: Tensor, positions: Tensor) -> Tensor:
        tables = attention.block_tables(positions, None, 2, length, None, CPU)
        return attention._flex(x, x, x, tables[:1], tables[1:], None, None)

    positions = packed(60, length - 60).expand(2, -1).contiguous()
    x = rows(2, 1, length, 16).detach()
    traced = make_fx(compute, decomposition_table=select_decomp_table())(x, positions)
    (call,) = traced.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.flex_attention
    )
    for operand in call.args[:3]:
        assert isinstance(operand, torch.fx.Node)
        assert operand.target is torch.ops.prims.inductor_force_stride_order.default
        assert operand.args[1] == list(x.stride())
    tables = [arg for arg in call.args[4] if isinstance(arg, torch.fx.Node)]
    tables = [arg for arg in tables if arg.op != "get_attr"]
    assert len(tables) == 8
    documents = [arg for arg in call.args[-1] if isinstance(arg, torch.fx.Node)]
    assert len(documents) == 1
    for table in [*tables, *documents]:
        assert table.target is torch.ops.qfuse.materialize.default


@pytest.mark.parametrize("form", ["mask", "flex"])
@pytest.mark.parametrize("window", [None, 1, 30, 64], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("lengths", [None, (40, 1, 23), (100, 60)], ids=str)
def test_attention_sees_what_a_mask_lets_through(
    form: str, lengths: tuple[int, ...] | None, padded: bool, window: int | None
) -> None:
    """Against the mask written out, in float64; "flex" is what a GPU compiles, run here by the
    operator's eager definition. Queries that see nothing give zero, and take no gradient."""
    length = sum(lengths or (150,))
    positions = packed(*lengths) if lengths else None
    valid = padding(length) if padded else None
    leaves = [rows(2, h, length, 16) for h in (4, 2, 2)]
    query, key, value = leaves
    tables = attention.block_tables(positions, valid, 2, length, window, CPU)
    if form == "mask":
        got = attention.block_attention(query, key, value, tables, window, None)
    else:
        got = attention._flex(query, key, value, tables[:-8], tables[-8:], window, None)
    mask = seen(positions, valid, length, window)[:, None]
    query, key, value = (x.detach().double().requires_grad_() for x in leaves)
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 4
    weights = scores.masked_fill(~mask, -1e9).softmax(-1) * mask
    expected = weights @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    weight = rows(2, 4, length, 16).detach() + 1
    for one, other in zip(
        torch.autograd.grad((got * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["mask", "flex"])
@pytest.mark.parametrize("window", [None, 30], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("given", ["one behind the other", "again"])
def test_attention_within_numbered_sequences(
    given: str, padded: bool, window: int | None, form: str
) -> None:
    """Against the mask written out, in float64. Rows of padding give zero and take no gradient."""
    length = 300
    generator = torch.Generator().manual_seed(1)
    sequences = torch.cat([numbers("padded right", 90, 1, 140, 69)] * 2)
    if given == "again":
        sequences = torch.randint(-1, 3, (2, length), generator=generator)
    valid = padding(length) if padded else None
    leaves = [rows(2, h, length, 16) for h in (4, 2, 2)]
    query, key, value = leaves
    real = sequences != 0
    tables = attention.block_tables(None, valid, 2, length, window, CPU, sequences, real)
    if form == "mask":
        got = attention.block_attention(query, key, value, tables, window, None)
    else:
        got = attention._flex(query, key, value, tables[:-8], tables[-8:], window, None)
    mask = seen_numbers(sequences, valid, window, all=False)[:, None]
    query, key, value = (x.detach().double().requires_grad_() for x in leaves)
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    weights = scores.masked_fill(~mask, -1e9).softmax(-1) * mask
    expected = weights @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert not got.transpose(1, 2)[~real].any()
    weight = rows(2, 4, length, 16).detach() + 1
    gradients = torch.autograd.grad((got * weight).sum(), leaves)
    exact = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for one, other in zip(gradients, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
        assert not one.transpose(1, 2)[~real].any()


@pytest.mark.parametrize("form", ["mask", "flex"])
@pytest.mark.parametrize("window", [None, 30], ids=str)
@pytest.mark.parametrize("by", ["positions", "sequences"])
def test_documents_do_not_move_each_other_by_a_bit(by: str, form: str, window: int | None) -> None:
    """A document's rows and all its gradients, where those around it are others, and more."""
    own, results = slice(40, 190), []
    for lengths, scale in (((40, 150, 17), 1.0), ((3, 37, 150, 5, 12), 100.0)):
        leaves = []
        for heads in (4, 2, 2, 4):
            x = rows(1, heads, 207, 16).detach() * scale
            x[:, :, own] = rows(1, heads, 150, 16).detach()
            leaves.append(x.requires_grad_())
        *leaves, cotangent = leaves
        query, key, value = leaves
        told: tuple[Tensor | None, ...] = (packed(*lengths), None, None)
        if by == "sequences":  # with padding behind it, or other documents
            given = numbers("padded right" if scale == 1 else "falling", *lengths)
            told = (None, given, given != 0)
        tables = attention.block_tables(told[0], None, 1, 207, window, CPU, *told[1:])
        if form == "mask":
            got = attention.block_attention(query, key, value, tables, window, None)
        else:
            got = attention._flex(query, key, value, tables[:-8], tables[-8:], window, None)
        grads = torch.autograd.grad(got, leaves, cotangent.detach())
        results.append([x[:, :, own].detach() for x in (got, *grads)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_rows_of_padding_are_zero_and_take_gradients_nowhere() -> None:
    """Whatever stands in them, and whatever gradient comes to them."""
    valid = padding(60)
    order, inverse, is_valid = attention.valid_first(valid)
    seen_rows = is_valid[:, None, :, None]
    leaves = [rows(2, 4, 60, 16) for _ in range(3)]
    with torch.no_grad():
        for x in leaves:
            x[(~seen_rows).expand_as(x)] *= 1e4
    query, key, value = (attention.reorder(x, order, inverse) for x in leaves)
    attended = attend(query, key, value, is_causal=True)
    result = attention.restore(attended, order, inverse, is_valid)
    assert not result[(~seen_rows).expand_as(result)].any() and result.isfinite().all()
    cotangent = torch.where(seen_rows, 0.0, 1e4).expand_as(result)
    for grad in torch.autograd.grad(result, leaves, cotangent, retain_graph=True):
        assert not grad.any()
    for grad in torch.autograd.grad(result, leaves, torch.ones_like(result)):
        assert grad.isfinite().all() and not grad[(~seen_rows).expand_as(grad)].any()


def test_attention_is_scaled_as_asked() -> None:
    query, key, value = (rows(1, 2, 12, 8) for _ in range(3))
    tables = attention.block_tables(packed(12), None, 1, 12, None, CPU)
    for form in (
        attention.block_attention(query, key, value, tables, None, 0.5),
        attention._flex(query, key, value, tables[:1], tables[1:], None, 0.5),
    ):
        expected = attend(query, key, value, is_causal=True, scale=0.5)
        torch.testing.assert_close(form, expected)


@pytest.mark.parametrize("form", ["mask", "flex"])
@pytest.mark.parametrize(("softcap", "sunk"), [(0.7, False), (None, True), (0.7, True)])
def test_capped_scores_and_sinks(form: str, softcap: float | None, sunk: bool) -> None:
    """Against float64, gradients of sinks too. Queries that see no key give zero."""
    length, heads = 150, 4
    valid = padding(length)
    leaves = [rows(2, h, length, 16) for h in (heads, 2, 2)]
    sinks = rows(heads) if sunk else None
    leaves += [] if sinks is None else [sinks]
    query, key, value, *_ = leaves
    tables = attention.block_tables(None, valid, 2, length, 30, CPU)
    if form == "mask":
        got = attention.block_attention(query, key, value, tables, 30, None, softcap, sinks)
    else:
        given, blocks = tables[:-8], tables[-8:]
        got = attention._flex(query, key, value, given, blocks, 30, None, softcap, sinks)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    query, key, value, *column = doubles
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    mask = seen(None, valid, length, 30)[:, None]
    scores = scores.masked_fill(~mask, -1e9)
    for one in column:
        scores = torch.cat([scores, one.view(1, -1, 1, 1).expand(2, -1, length, 1)], -1)
    expected = (scores.softmax(-1)[..., :length] * mask) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    weight = rows(2, heads, length, 16).detach() + 1
    for one, other in zip(
        torch.autograd.grad((got * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), doubles),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [5, 200])
def test_opcheck(length: int) -> None:
    x, valid = rows(2, 2, length, 8), torch.arange(length).expand(2, length) % 3
    qfuse = torch.ops.qfuse
    made = attention.valid_first(valid)
    positions = packed(2, length - 2)
    of_documents = (positions, None, 2, length, None, CPU)
    of_a_window = (None, valid, 2, length, 3, CPU)
    of_sequences = (None, valid, 2, length, 3, CPU, valid // 2, valid > 1)
    for op, args in (
        (qfuse.valid_first.default, (valid,)),
        (qfuse.reorder.default, (x, *made[:2])),
        (qfuse.restore.default, (x, *made)),
        (qfuse.block_tables.default, of_documents),
        (qfuse.block_tables.default, of_a_window),
        (qfuse.block_tables.default, of_sequences),
        (qfuse.block_attention.default, (x, x, x, qfuse.block_tables(*of_documents), None, None)),
        (qfuse.block_attention.default, (x, x, x, qfuse.block_tables(*of_a_window), 3, 0.5)),
        (
            qfuse.block_attention.default,
            (x, x, x, qfuse.block_tables(*of_a_window), 3, 0.5, 2.0, rows(2)),
        ),
    ):
        # A composite op has no fake and no gradient of its own to check, only what it traces to.
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(op, args, test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [130, 1000, 1024, 3000])
@pytest.mark.parametrize("case", ["documents", "sequences", "window", "padded window", "all"])
def test_gpu_blocks_against_float64(case: str, length: int) -> None:
    """Error no larger than 1.25 times that of torch's attention with the mask; a document's rows do
    not move a bit when another document changes. The two sequences have other tables."""
    first = length // 3
    rest = length - first
    both = torch.cat([packed(first, 1, rest - 1), packed(first, *(20,) * (rest // 20), rest % 20)])
    positions = both if case in ("documents", "all") else None
    valid = padding(length) if case in ("padded window", "all") else None
    window = None if case == "documents" else length // 4
    leaves = [rows(2, h, length, 128, dtype=torch.bfloat16, device="cuda") for h in (8, 2, 2)]
    given = [None if x is None else x.cuda() for x in (positions, valid)]
    sequences = None
    if case == "sequences":  # the same documents, of which the last is padding
        starts = torch.diff(both, prepend=both[:, :1] - 1, dim=-1) != 1
        sequences = starts.cumsum(-1).cuda()
        sequences = sequences.amax(-1, keepdim=True) - sequences

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # As a pass writes them: Dynamo of torch 2.11 cannot trace the operator behind them.
        told = () if sequences is None else (sequences, sequences != 0)
        made = torch.ops.qfuse.block_tables(*given, 2, length, window, query.device, *told)
        result: Tensor = torch.ops.qfuse.block_attention(query, key, value, made, window, None)
        return result

    mask = seen(positions, valid, length, window)[:, None].cuda()
    if sequences is not None:
        mask = seen_numbers(sequences.cpu(), None, window, all=False)[:, None].cuda()
    query, key, value = leaves
    doubles = query.double(), key.double(), value.double()
    exact = attend(doubles[0], doubles[1], doubles[2], attn_mask=mask, enable_gqa=True)
    cotangent = torch.randn_like(exact)
    expected = [exact, *torch.autograd.grad(exact, leaves, cotangent)]
    compiled = torch.compile(compute, dynamic=False)

    def errors(out: Tensor) -> list[float]:
        gradients = torch.autograd.grad(out, leaves, cotangent.to(out.dtype))
        return [
            testing.relative_error(one, other.double())
            for one, other in zip([out, *gradients], expected, strict=True)
        ]

    ours = errors(compiled(*leaves))
    eager = errors(attend(query, key, value, attn_mask=mask, enable_gqa=True))
    assert all(one <= 1.25 * other for one, other in zip(ours, eager, strict=True)), (ours, eager)
    with torch.no_grad():
        before = compiled(*leaves)
        assert testing.relative_error(before, exact) <= 1.25 * eager[0]
        if positions is None and sequences is None:
            return
        for x in leaves[:2]:
            x[:, :, :first] += 1
        assert torch.equal(compiled(*leaves)[:, :, first:], before[:, :, first:])


@pytest.mark.gpu
@pytest.mark.parametrize(("softcap", "sunk"), [(5.0, False), (None, True)])
def test_gpu_capped_scores_and_sinks(softcap: float | None, sunk: bool) -> None:
    """Errors no larger than 1.25 times those of the same written out, of sinks' gradients too."""
    length, window, heads = 1000, 250, 8
    leaves = [rows(2, h, length, 128, dtype=torch.bfloat16, device="cuda") for h in (heads, 2, 2)]
    sinks = rows(heads, device="cuda") if sunk else None
    leaves += [] if sinks is None else [sinks]
    mask = seen(None, padding(length), length, window)[:, None].cuda()
    valid = padding(length).cuda()

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ops = torch.ops.qfuse
        made = ops.block_tables(None, valid, 2, length, window, query.device)
        result: Tensor = ops.block_attention(query, key, value, made, window, None, softcap, sinks)
        return result

    def written_out(query: Tensor, key: Tensor, value: Tensor, *column: Tensor) -> Tensor:
        given = column[0] if column else None
        return attention._written_out(query, key, value, mask, None, softcap, given)

    # Eight sinks are few numbers to compare the errors of, so there are eight gradients of them.
    generator = torch.Generator().manual_seed(0)
    shape = (8, 2, heads, length, 128)
    cotangents = torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)

    def results(call: Callable[[], Tensor]) -> list[Tensor]:
        made = []
        for cotangent in cotangents:
            out = call()
            made.append((out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))))
        return [torch.stack(each) for each in zip(*made, strict=True)]

    expected = results(lambda: written_out(*(x.double() for x in leaves)))

    def errors(call: Callable[[], Tensor]) -> list[float]:
        return [
            testing.relative_error(one, other.double())
            for one, other in zip(results(call), expected, strict=True)
        ]

    compiled = torch.compile(compute, dynamic=False)
    ours = errors(lambda: compiled(*leaves[:3]))
    eager = errors(lambda: written_out(*leaves))
    assert all(one <= 1.25 * other for one, other in zip(ours, eager, strict=True)), (ours, eager)
