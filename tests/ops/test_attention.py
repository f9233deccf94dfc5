"""The ops of attention under padding and packed documents, against torch's own with a mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
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


def same_document(positions: Tensor) -> Tensor:
    """[B, S, S], written out pair by pair."""
    batch, length = positions.shape
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    for b, q in itertools.product(range(batch), range(length)):
        for k in range(q, -1, -1):
            mask[b, q, k] = True
            if k and positions[b, k] != positions[b, k - 1] + 1:
                break
    return mask


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


@pytest.mark.parametrize(
    "lengths",
    [(1,), (5,), (128,), (128, 128), (100, 28, 1, 255), (300, 1, 83), (1,) * 130, (40, 400)],
    ids=str,
)
def test_tables_name_the_blocks_that_documents_share(lengths: tuple[int, ...]) -> None:
    positions = packed(*lengths, first=3)
    documents, *tables = attention.document_tables(positions, 2)
    length, blocks = sum(lengths), -(-sum(lengths) // BLOCK)
    number = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    assert torch.equal(documents, number.expand(2, length))
    padded = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    padded[:length, :length] = same_document(positions)[0]
    pairs = padded.view(blocks, BLOCK, blocks, BLOCK).sum((1, 3))
    for side, (count, index) in enumerate(zip(tables[::2], tables[1::2], strict=True)):
        assert count.shape == (2, 1, blocks) and index.shape == (2, 1, blocks, blocks)
        assert count.is_contiguous() and index.is_contiguous()
        assert count.dtype == index.dtype == torch.int32
        whole = pairs == BLOCK * BLOCK
        expected = whole if side % 2 else (pairs > 0) & ~whole
        expected = expected.t() if side > 1 else expected
        for q in range(blocks):
            assert index[1, 0, q, : count[1, 0, q]].tolist() == expected[q].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("form", ["mask", "flex"])
@pytest.mark.parametrize("lengths", [(40, 1, 23), (100, 60)], ids=str)
def test_attention_stays_in_its_document(form: str, lengths: tuple[int, ...]) -> None:
    """As torch's own attention under the mask written out; "flex" is what a GPU compiles, run here
    by the operator's eager definition."""
    positions = packed(*lengths)
    length = sum(lengths)
    query, key, value = rows(2, 4, length, 16), rows(2, 2, length, 16), rows(2, 2, length, 16)
    tables = attention.document_tables(positions, 2)
    if form == "mask":
        got = attention.document_attention(query, key, value, tables, None)
    else:
        got = attention._flex(query, key, value, tables[0], tables[1:], None)
    mask = same_document(positions)[:, None]
    expected = attend(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(got, expected)
    weight = rows(2, 4, length, 16).detach() + 1
    leaves = (query, key, value)
    for one, other in zip(
        torch.autograd.grad((got * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_attention_is_scaled_as_asked() -> None:
    query, key, value = (rows(1, 2, 12, 8) for _ in range(3))
    tables = attention.document_tables(packed(12), 1)
    for form in (
        attention.document_attention(query, key, value, tables, 0.5),
        attention._flex(query, key, value, tables[0], tables[1:], 0.5),
    ):
        expected = attend(query, key, value, is_causal=True, scale=0.5)
        torch.testing.assert_close(form, expected)


@pytest.mark.parametrize("length", [5, 200])
def test_opcheck(length: int) -> None:
    x, valid = rows(2, 2, length, 8), torch.arange(length).expand(2, length) % 3
    qfuse = torch.ops.qfuse
    made = attention.valid_first(valid)
    tables = attention.document_tables(packed(2, length - 2), 2)
    for op, args in (
        (qfuse.valid_first.default, (valid,)),
        (qfuse.reorder.default, (x, *made[:2])),
        (qfuse.restore.default, (x, *made)),
        (qfuse.document_tables.default, (packed(2, length - 2), 2)),
        (qfuse.document_attention.default, (x, x, x, tables, None)),
    ):
        # A composite op has no fake and no gradient of its own to check, only what it traces to.
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(op, args, test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [130, 1000, 1024, 3000])
def test_gpu_documents_against_float64(length: int) -> None:
    """Error no larger than 1.25 times that of torch's attention with the mask; a document's rows do
    not move a bit when another document changes."""
    first = length // 3
    positions = packed(first, 1, length - first - 1).cuda()
    leaves = [rows(2, h, length, 128, dtype=torch.bfloat16, device="cuda") for h in (8, 2, 2)]

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tables = attention.document_tables(positions, query.shape[0])
        return attention.document_attention(query, key, value, tables, None)

    mask = same_document(positions.cpu())[:, None].cuda()
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
        for x in leaves[:2]:
            x[:, :, :first] += 1
        assert torch.equal(compiled(*leaves)[:, :, first:], before[:, :, first:])
