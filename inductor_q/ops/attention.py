"""Attention under the masks that texts and models bring: padding, packed documents, windows.

Each op here is composed of torch's own and its gradient: AOTAutograd traces through it, so kernels
and fusions are Inductor's. What a mask needs is made once from its input and shared by all layers.

- Padding. `valid_first` orders the positions of each sequence so that the valid ones come first and
  keep their order. Under a causal mask a valid query then sees exactly the valid keys before it, so
  attention needs no mask; `reorder` takes queries, keys and values there, `restore` takes the
  result back.
- Documents packed in a row, told apart by positions or by numbers of their own, and sliding
  windows, with padding or without. `block_tables` says which blocks of 128 x 128 scores hold pairs
  that see each other; `block_attention` is FlexAttention over these, on a CUDA device, and a mask
  elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.ops.library import define_composite

#: Queries and keys of one block of FlexAttention, its default.
BLOCK = 128

#: The tables of FlexAttention's BlockMask, which come last among those of `block_tables`.
_TABLES = 8


def valid_first(valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order the positions of each sequence with the valid ones first, else unchanged.

    Args:
        valid: [B, S], any dtype; what is not zero is valid.

    Returns:
        `order` [B, S] int64, the old position of each new one, and `inverse`, the new position of
        each old one; and which are valid, bool. Nothing waits for the device.
    """
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
    result: Tensor = _Reorder.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return result


def restore(x: Tensor, order: Tensor, inverse: Tensor, valid: Tensor) -> Tensor:
    """Take rows back to where `reorder` took them from; rows that are not valid become zero.

    Args:
        x: [B, H, S, D], the result of attention.
        order, inverse, valid: [B, S] of `valid_first`.
    """
    # Laid out as attention's result is, where what reads it merges the heads without a copy.
    rows = reorder(x, inverse, order).transpose(1, 2)
    return torch.where(valid[:, :, None, None], rows, 0.0).transpose(1, 2)


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


def block_tables(
    positions: Tensor | None,
    valid: Tensor | None,
    batch: int,
    length: int,
    window: int | None,
    device: torch.device,
    sequences: Tensor | None = None,
    real: Tensor | None = None,
) -> list[Tensor]:
    """Which blocks of scores causal attention computes, given what else hides keys from queries.

    Args:
        positions: [B, S] or [1, S], any integer dtype: keys of other documents are hidden. A
            document goes on as long as its positions rise by one, as transformers reads
            `position_ids` where no attention_mask is given. None: one document, or `sequences`.
        valid: [B, S] or [1, S], any dtype: keys where it is zero are hidden. None: no key is.
        batch, length: B and S.
        window: keys that are so many positions before the query, or more, are hidden.
        device: where the tables are made.
        sequences: [B, S] or [1, S], any dtype of numbers, in place of positions: keys of other
            numbers than the query's are hidden. One that comes again behind others is the same.
        real: [B, S] or [1, S], bool, beside `sequences`: where it is False a position neither sees
            nor is seen. Equal numbers are equally real. None: all are.

    Returns:
        The document of each position, [B, S] int64, ascending but for sequences whose numbers come
        again, and -2 where it is not real; where `valid` or `real` is given the same with -1 for
        hidden keys; then FlexAttention's eight tables, int32, n = ceil(S / 128): for queries
        and again for keys, how many blocks of the other side hold some pairs (by [B, 1, n]) and
        which these are ([B, 1, n, n]), and likewise the blocks that hold nothing else.
    """
    if sequences is not None:
        assert positions is None, "documents are told apart by one thing"
        documents = _numbered(sequences, real).expand(batch, -1).contiguous()
    elif positions is None:
        documents = torch.zeros(batch, length, dtype=torch.int64, device=device)
    else:
        steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        documents = (steps != 1).cumsum(-1).expand(batch, -1).contiguous()
    given = [documents]
    blocks = (length + BLOCK - 1) // BLOCK
    # The last block is filled up with its last position, so that it meets nothing else for that.
    index = torch.arange(blocks * BLOCK, device=device).clamp(max=length - 1)
    # All have FlexAttention's four dimensions from here on. To a dimension that a view adds at the
    # end Inductor gives the stride 0, by which the kernels would find a sequence's tables.
    in_blocks = documents[:, index].view(batch, 1, blocks, BLOCK)
    low, high = in_blocks.amin(-1), in_blocks.amax(-1)
    one = low == high
    if real is not None:
        low = torch.where(in_blocks < 0, length, in_blocks).amin(-1)
    place = torch.arange(blocks, device=device)
    behind = place[:, None] - place[None]
    # Documents ascend: two blocks share one where their ranges overlap, and the later block's first
    # is then the earlier one's last. Where numbers come again, blocks may be computed for nothing.
    meet = (low[..., :, None] <= high[..., None, :]) & (behind >= 0)
    if sequences is not None:
        meet = meet & (low[..., None, :] <= high[..., :, None])
    one = one & (place < length // BLOCK)
    whole = meet & (behind > 0) & one[..., :, None] & one[..., None, :]
    if window is not None:
        nearest = behind * BLOCK - (BLOCK - 1)
        meet, whole = meet & (nearest < window), whole & (behind * BLOCK + (BLOCK - 1) < window)
    if valid is not None or real is not None:
        seen = documents >= 0 if valid is None else (documents >= 0) & (valid != 0)
        given.append(torch.where(seen, documents, -1))
        keys = (given[-1] >= 0)[:, index].view(batch, 1, 1, blocks, BLOCK)
        meet, whole = meet & keys.any(-1), whole & keys.all(-1)
    some = meet & ~whole
    tables: list[Tensor] = []
    for blocks_of in (some, whole, some.mT, whole.mT):
        order, _ = _partition(blocks_of)
        tables.append(blocks_of.sum(-1, dtype=torch.int32))
        tables.append(order.to(torch.int32))
    return [*given, *tables]


def _numbered(sequences: Tensor, real: Tensor | None) -> Tensor:
    """Where the number of each position first comes in its row; -2 where it is not real.

    So numbers rise along a row if sequences lie one behind the other, whichever they were, and none
    of them is that of a hidden key.
    """
    if sequences.dtype is torch.bool:
        sequences = sequences.to(torch.int32)
    sequences = sequences.contiguous()
    ordered, place = sequences.sort(dim=-1, stable=True)
    first = place.gather(-1, torch.searchsorted(ordered, sequences))
    return first if real is None else torch.where(real, first, -2)


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: Sequence[Tensor],
    window: int | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention to the keys of a query's document that are valid and in its window.

    Args:
        query: [B, H, S, D].
        key, value: [B, G, S, D], H a multiple of G.
        tables: of `block_tables`.
        window: as given to it.
        scale: of the scores; None: D ** -0.5.
        softcap: makes of a score `softcap * tanh(score / softcap)`; None: nothing.
        sinks: [H], a score of each head that takes its share of the softmax and has no value.

    Returns:
        [B, H, S, D], zero for queries that see no key. A document's rows do not depend on its
        neighbours, to the bit.
    """
    given, blocks = tables[:-_TABLES], tables[-_TABLES:]
    if query.device.type == "cuda":
        return _flex(query, key, value, given, blocks, window, scale, softcap, sinks)
    place = torch.arange(query.shape[-2], device=query.device)
    behind = place[:, None] - place[None]
    mask = (given[0][:, :, None] == given[-1][:, None, :]) & (behind >= 0)
    if window is not None:
        mask = mask & (behind < window)
    mask = mask.unsqueeze(1)
    if softcap is not None or sinks is not None:
        return _written_out(query, key, value, mask, scale, softcap, sinks)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention as models write it out, with its softmax in float32 at least."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.mT) * _scale(query, scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    dtype = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.to(dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if sinks is not None:
        column = sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : mask.shape[-1]] * mask  # queries that see no key give zero
    return weights.to(value.dtype) @ value


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Sequence[Tensor],
    blocks: Sequence[Tensor],
    window: int | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The operator behind `torch.nn.attention.flex_attention`, which Dynamo would trace for it."""
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    # Without annotations: as text they would keep Inductor from caching the graph.
    unchanged: Any = lambda score, b, h, q, k: score  # noqa: E731
    # The document of the query comes first, that of the key last.
    causal: Any = lambda b, h, q, k, *of: (  # noqa: E731
        (q >= k) & (of[0][b, q] == of[-1][b, k])
    )
    near: Any = lambda b, h, q, k, *of: causal(b, h, q, k, *of) & (q - k < window)  # noqa: E731
    cap = math.inf if softcap is None else softcap
    capped: Any = lambda score, b, h, q, k: torch.tanh(score / cap) * cap  # noqa: E731
    sees = causal if window is None else near
    length = query.shape[-2]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    options = {
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,  # of each block of keys, not of all
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": trains or sinks is not None,
        "OUTPUT_MAX": False,
    }
    query, key, value = (_LaidOut.apply(x) for x in (query, key, value))  # type: ignore[no-untyped-call]
    # FlexAttention's kernels rely on contiguous strides, which Inductor would not keep (torch 2.11,
    # H200 and H100). They take a table's stride from the dimension of heads, and Inductor may give
    # a dimension of size one any stride. It also pads rows of more than 1,024 elements, and would
    # compute a mask's tensors inside the kernels, which fails for what a search has found.
    blocks = [torch.ops.qfuse.materialize(table) for table in blocks]
    given = [torch.ops.qfuse.materialize(documents) for documents in given]
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
    result: tuple[Tensor, Tensor, Tensor] = flex_attention(
        query,
        key,
        value,
        unchanged if softcap is None else capped,
        (*block_mask, sees),
        _scale(query, scale),
        options,
        (),
        tuple(given),
    )
    attended, by_two, _ = result
    if sinks is None:
        return attended
    # The operator gives the logarithm of the softmax's sum to the base 2. A sink is a term more.
    share = torch.sigmoid(by_two * math.log(2) - sinks.to(by_two.dtype)[:, None])
    return (attended * share.unsqueeze(-1)).to(attended.dtype)


class _LaidOut(torch.autograd.Function):
    """`x` laid out as in eager mode, and the features of a row side by side.

    Inductor chooses the layout of what it computes for FlexAttention's kernels, which take any: of
    rotated queries and keys it put the heads side by side, and the kernels took four times as long
    (H200, torch 2.11).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from torch._inductor.inductor_prims import force_stride_order

        if x.stride(-1) != 1:
            x = x.contiguous()
        result: Tensor = force_stride_order(x, x.stride())
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def define_attention() -> None:
    define_composite("valid_first(Tensor valid) -> (Tensor, Tensor, Tensor)", valid_first)
    define_composite("reorder(Tensor x, Tensor order, Tensor inverse) -> Tensor", reorder)
    define_composite(
        "restore(Tensor x, Tensor order, Tensor inverse, Tensor valid) -> Tensor", restore
    )
    define_composite(
        "block_tables(Tensor? positions, Tensor? valid, SymInt batch, SymInt length, int? window, "
        "Device device, Tensor? sequences=None, Tensor? real=None) -> Tensor[]",
        block_tables,
    )
    define_composite(
        "block_attention(Tensor query, Tensor key, Tensor value, Tensor[] tables, int? window, "
        "float? scale, float? softcap=None, Tensor? sinks=None) -> Tensor",
        block_attention,
    )
