"""Attention under the masks that batches of text bring: padding, and documents packed in a row.

Each op here is composed of torch's own and its gradient: AOTAutograd traces through it, so kernels
and fusions are Inductor's. What a mask needs is made once from its input and shared by all layers.

- Padding. `valid_first` orders the positions of each sequence so that the valid ones come first and
  keep their order. Under a causal mask a valid query then sees exactly the valid keys before it, so
  attention needs no mask; `reorder` takes queries, keys and values there, `restore` takes the
  result back.
- Documents. `document_tables` says which blocks of 128 x 128 scores two documents can share;
  `document_attention` is FlexAttention over these, on a CUDA device, and a mask elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.ops.library import define_composite

#: Queries and keys of one block of FlexAttention, its default.
BLOCK = 128


def valid_first(valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order the positions of each sequence with the valid ones first, else unchanged.

    Args:
        valid: [B, S], any dtype; what is not zero is valid.

    Returns:
        `order` [B, S] int64, the old position of each new one, and `inverse`, the new position of
        each old one; and which are valid, bool. Nothing waits for the device.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.qfuse.valid_first(valid)
    return result


def _valid_first(valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    is_valid = valid != 0
    return *_partition(is_valid), is_valid


def _partition(first: Tensor) -> tuple[Tensor, Tensor]:
    """(order, inverse) of the last dimension with the places where `first` is True in front.

    Counted, not sorted: a place moves behind all that come before it.
    """
    before = first.cumsum(-1)
    count = before[..., -1:]
    places = torch.arange(first.shape[-1], device=first.device)
    inverse = torch.where(first, before - 1, count + places - before)
    order = torch.empty_like(inverse).scatter(-1, inverse, places.expand(inverse.shape))
    return order, inverse


def reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """`out[b, h, s] = x[b, h, order[b, s]]`.

    Args:
        x: [B, H, S, D].
        order, inverse: [B, S] of `valid_first`. The gradient is read in the order `inverse`, so
            nothing is added up.
    """
    result: Tensor = torch.ops.qfuse.reorder(x, order, inverse)
    return result


def restore(x: Tensor, order: Tensor, inverse: Tensor, valid: Tensor) -> Tensor:
    """Take rows back to where `reorder` took them from; rows that are not valid become zero.

    Args:
        x: [B, H, S, D], the result of attention.
        order, inverse, valid: [B, S] of `valid_first`.
    """
    result: Tensor = torch.ops.qfuse.restore(x, order, inverse, valid)
    return result


def _restore(x: Tensor, order: Tensor, inverse: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid[:, None, :, None], _reorder(x, inverse, order), 0.0)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return _take(x, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return _take(grad, inverse), None, None


def _take(x: Tensor, order: Tensor) -> Tensor:
    sequence = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x.transpose(1, 2)[sequence, order].transpose(1, 2)


def _reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    result: Tensor = _Reorder.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return result


def document_tables(positions: Tensor, batch: int) -> list[Tensor]:
    """The documents that positions count through, and which blocks of scores they can share.

    Args:
        positions: [B, S] or [1, S], any integer dtype; a document goes on as long as they rise by
            one. So transformers reads `position_ids` where no attention_mask is given.
        batch: B.

    Returns:
        The document of each position, [B, S] int64, ascending; then FlexAttention's eight tables,
        int32, n = ceil(S / 128): for queries and again for keys, how many blocks of the other side
        hold some pairs (by [B, 1, n]) and which these are ([B, 1, n, n]), and likewise the blocks
        that hold nothing else.
    """
    result: list[Tensor] = torch.ops.qfuse.document_tables(positions, batch)
    return result


def _document_tables(positions: Tensor, batch: int) -> list[Tensor]:
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    documents = (steps != 1).cumsum(-1).expand(batch, -1)
    length = documents.shape[-1]
    blocks = (length + BLOCK - 1) // BLOCK
    # The last block is filled up with its last document, so that it meets no others for that.
    index = torch.arange(blocks * BLOCK, device=documents.device).clamp(max=length - 1)
    in_blocks = documents[:, index].view(batch, blocks, BLOCK)
    low, high = in_blocks.amin(-1), in_blocks.amax(-1)
    place = torch.arange(blocks, device=documents.device)
    before = place[:, None] > place[None]
    # Documents ascend: two blocks share one where their ranges overlap, and the later block's first
    # is then the earlier one's last.
    meet = (low[:, :, None] <= high[:, None, :]) & (before | (place[:, None] == place[None]))
    one = (low == high) & (place < length // BLOCK)
    whole = meet & before & one[:, :, None] & one[:, None, :]
    some = meet & ~whole
    tables: list[Tensor] = []
    for blocks_of in (some, whole, some.transpose(1, 2), whole.transpose(1, 2)):
        order, _ = _partition(blocks_of)
        tables.append(blocks_of.sum(-1, dtype=torch.int32).unsqueeze(1).contiguous())
        tables.append(order.to(torch.int32).unsqueeze(1).contiguous())
    return [documents.contiguous(), *tables]


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, tables: Sequence[Tensor], scale: float | None
) -> Tensor:
    """Causal attention inside of each document.

    Args:
        query: [B, H, S, D].
        key, value: [B, G, S, D], H a multiple of G.
        tables: of `document_tables`.
        scale: of the scores; None: D ** -0.5.

    Returns:
        [B, H, S, D]. A document's rows do not depend on its neighbours, to the bit.
    """
    result: Tensor = torch.ops.qfuse.document_attention(query, key, value, list(tables), scale)
    return result


def _document_attention(
    query: Tensor, key: Tensor, value: Tensor, tables: Sequence[Tensor], scale: float | None
) -> Tensor:
    documents, *blocks = tables
    if query.device.type == "cuda":
        return _flex(query, key, value, documents, blocks, scale)
    place = torch.arange(documents.shape[-1], device=documents.device)
    mask = documents[:, :, None] == documents[:, None, :]
    mask = (mask & (place[:, None] >= place[None])).unsqueeze(1)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    blocks: Sequence[Tensor],
    scale: float | None,
) -> Tensor:
    """The operator behind `torch.nn.attention.flex_attention`, which Dynamo would trace for it."""
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    # Without annotations: as text they would keep Inductor from caching the graph.
    unchanged = lambda score, b, h, q, k: score  # noqa: E731
    same_document = lambda b, h, q, k, documents: (  # noqa: E731
        (q >= k) & (documents[b, q] == documents[b, k])
    )
    length = query.shape[-2]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    options = {
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,  # of each block of keys, not of all
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": trains,
        "OUTPUT_MAX": False,
    }
    # Versions of torch differ in what lies between the tables and the function, which comes last.
    *block_mask, _ = BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=blocks[0],
        kv_indices=blocks[1],
        full_kv_num_blocks=blocks[2],
        full_kv_indices=blocks[3],
        q_num_blocks=blocks[4],
        q_indices=blocks[5],
        full_q_num_blocks=blocks[6],
        full_q_indices=blocks[7],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=noop_mask,
    ).as_tuple()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = flex_attention(
        query, key, value, unchanged, (*block_mask, same_document), scale, options, (), (documents,)
    )[0]
    return result


def define_attention() -> None:
    define_composite("valid_first(Tensor valid) -> (Tensor, Tensor, Tensor)", _valid_first)
    define_composite("reorder(Tensor x, Tensor order, Tensor inverse) -> Tensor", _reorder)
    define_composite(
        "restore(Tensor x, Tensor order, Tensor inverse, Tensor valid) -> Tensor", _restore
    )
    define_composite(
        "document_tables(Tensor positions, SymInt batch) -> Tensor[]", _document_tables
    )
    define_composite(
        "document_attention(Tensor query, Tensor key, Tensor value, Tensor[] tables, "
        "float? scale) -> Tensor",
        _document_attention,
    )
