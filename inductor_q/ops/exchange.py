"""Tokens to the ranks that have their experts, and results back: torch's collectives in a graph.

Rank r of W has the experts r E / W to (r + 1) E / W of each layer, and tokens of its own. A token
travels once to a rank, with all its choices and their gates; its results there, weighted and
summed, travel back once, and are summed over the ranks. Ranks may have different numbers of tokens.
There are two ways:

**Gathered**, where a token has as many choices as there are ranks or more, so that most tokens have
experts on most ranks: all tokens go to all ranks. A rank tells the others how many tokens it has
from host to host, and nothing waits for a device.

**Chosen**, where there are more ranks than choices: a token goes to those ranks that have some of
its experts.

    rank 0 has experts 0, 1 and tokens a, b       rank 1 has experts 2, 3 and token c
    choices    a: 0 3    b: 1 0                   c: 2 1
    sends      a b to rank 0, a to rank 1         c to rank 0, c to rank 1
    receives   a b c                              a c
    ids there  0 -  1 0  - 1                      - 1  0 -          "-" is another rank's expert

How many rows travel then, only the routing knows. So the host waits for the device once a layer, to
learn it from all ranks.

Either way a rank receives as many rows as were sent: sizes that Dynamo lets into a graph with
`capture_dynamic_output_shape_ops` (`inductor_q.compile` sets it), and at which the graph breaks
otherwise.

In backward gradients take the same ways, divided by W where they reach the experts and multiplied
where they leave: what an expert's own parameters get is the mean over ranks of each rank's loss,
as DDP and FSDP take it of all others.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from inductor_q.ops.library import define, define_autograd


class Exchange(NamedTuple):
    """Where the tokens of all ranks go in one layer.

    rows: [S] int64, this rank's token in each row that it sends, rank after rank; empty where
        tokens are gathered, since all of them go to each rank.
    ids: [R, top_k] int64, the choices of each row that it receives, as its own experts count; an id
        outside of them is a sentinel. One row of sentinels where it receives none.
    splits: [2, ranks] int64 on the host, how many rows it sends to each rank, and receives.
    """

    rows: Tensor
    ids: Tensor
    splits: Tensor


def plan_exchange(expert_ids: Tensor, num_experts: int, ranks: int) -> Exchange:
    """Tell all ranks of the process group which of this rank's tokens they get.

    Args:
        expert_ids: [tokens, top_k], among the experts of all ranks; other ids go nowhere.
        num_experts: experts on each rank.
        ranks: how many there are.
    """
    return Exchange(*torch.ops.qfuse.plan_exchange(expert_ids, num_experts, ranks))


def to_experts(x: Tensor, exchange: Exchange) -> Tensor:
    """Send [tokens, D] to the ranks; return what they send to this one, [R, D]."""
    result: Tensor = torch.ops.qfuse.to_experts(x, *exchange)
    return result


def to_tokens(y: Tensor, exchange: Exchange, tokens: int) -> Tensor:
    """Send [R, D] back, and sum, in float32, what comes back for each of this rank's tokens."""
    result: Tensor = torch.ops.qfuse.to_tokens(y, *exchange, tokens)
    return result


def is_gathered(top_k: int, ranks: int) -> bool:
    """Whether all tokens go to all ranks.

    With as many choices as ranks, spread evenly, a rank has an expert of two thirds of all tokens;
    with twice as many of seven eighths.
    """
    return ranks <= top_k


def _plan(expert_ids: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = expert_ids.to(torch.int64).contiguous()
    plan = _plan_gathered if is_gathered(ids.shape[1], ranks) else _plan_chosen
    rows, there, splits = plan(ids, num_experts, ranks)
    return rows, there - dist.get_rank() * num_experts, splits


def _plan_gathered(ids: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = ids.shape[0]
    counts = _tokens_of_ranks(tokens, ranks)
    there = ids.new_full((max(sum(counts), 1), ids.shape[1]), -1)
    _gather(there, ids, counts)
    return ids.new_empty(0), there, torch.tensor([[tokens] * ranks, counts])


def _plan_chosen(ids: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, device = ids.shape[0], ids.device
    owners = ids.div(num_experts, rounding_mode="floor")
    goes = (owners.unsqueeze(-1) == torch.arange(ranks, device=device)).any(1).T
    sent = goes.sum(1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    splits = torch.stack([sent, received]).cpu()
    to, back = splits.tolist()
    flat = torch.argsort((~goes).reshape(-1).to(torch.uint8), stable=True)
    rows = flat[: sum(to)] % max(tokens, 1)
    there = ids.new_full((max(sum(back), 1), ids.shape[1]), -1)
    _all_to_all(there, ids[rows], back, to)
    return rows, there, splits


def _tokens_of_ranks(tokens: int, ranks: int) -> list[int]:
    """Tell all ranks how many tokens this one has; return what they say."""
    told = torch.empty(ranks, dtype=torch.int64)
    _all_gather(told, torch.tensor([tokens]), _hosts(dist.group.WORLD))
    counts: list[int] = told.tolist()
    return counts


def meet() -> None:
    """Make the group in which the hosts of all ranks speak; all ranks call it.

    Raises:
        RuntimeError: the hosts do not reach each other.
    """
    _hosts(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _hosts(world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a group of the ranks of `world`, the default group, that speaks from host to host."""
    hosts: dist.ProcessGroup = dist.new_group(backend="gloo")
    return hosts


def _plan_fake(expert_ids: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    rows = expert_ids.new_empty((context.new_dynamic_size(),), dtype=torch.int64)
    there = expert_ids.new_empty(
        (context.new_dynamic_size(min=1), expert_ids.shape[1]), dtype=torch.int64
    )
    return rows, there, torch.empty((2, ranks), dtype=torch.int64, device="cpu")


def _to_experts(x: Tensor, rows: Tensor, ids: Tensor, splits: Tensor) -> Tensor:
    to, back = splits.tolist()
    there = x.new_empty((ids.shape[0], *x.shape[1:]))
    there[sum(back) :] = 0
    if is_gathered(ids.shape[1], len(to)):
        _gather(there, x.contiguous(), back)
    else:
        _all_to_all(there, x[rows], back, to)
    return there


def _to_experts_fake(x: Tensor, rows: Tensor, ids: Tensor, splits: Tensor) -> Tensor:
    return x.new_empty((ids.shape[0], *x.shape[1:]))


def _to_tokens(y: Tensor, rows: Tensor, ids: Tensor, splits: Tensor, tokens: int) -> Tensor:
    to, back = splits.tolist()
    if is_gathered(ids.shape[1], len(to)):
        parts = y.new_empty((len(to), tokens, *y.shape[1:]))
        _all_to_all(parts.flatten(0, 1), y.contiguous(), to, back)
        return parts.sum(0)  # which adds 16 bits up in float32
    here = y.new_empty((rows.shape[0], *y.shape[1:]))
    _all_to_all(here, y.contiguous(), to, back)
    wide = torch.promote_types(y.dtype, torch.float32)
    total = here.new_zeros((tokens, *y.shape[1:]), dtype=wide)
    # A token is in the rows of one rank once, so that the order of each sum is known.
    for token, part in zip(rows.split(to), here.split(to), strict=True):
        total.index_add_(0, token, part.to(wide))
    return total.to(y.dtype)


def _to_tokens_fake(y: Tensor, rows: Tensor, ids: Tensor, splits: Tensor, tokens: int) -> Tensor:
    return y.new_empty((tokens, *y.shape[1:]))


def _all_to_all(out: Tensor, x: Tensor, out_splits: list[int], splits: list[int]) -> None:
    """Fill the first rows of `out`."""
    dist.all_to_all_single(out[: sum(out_splits)], x[: sum(splits)], out_splits, splits)


def _gather(out: Tensor, x: Tensor, counts: list[int]) -> None:
    """Fill the first rows of `out` with the ranks' `x`, of which each has `counts` rows."""
    out, ranks = out[: sum(counts)], len(counts)
    if len(set(counts)) == 1:
        _all_gather(out, x)
    else:
        _all_to_all(out, torch.cat([x] * ranks), counts, [len(x)] * ranks)


def _all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    # torch 2.13 has another name for it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x, group=group)


def _to_experts_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.tokens = inputs[0].shape[0]


def _to_experts_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    exchange = Exchange(*ctx.saved_tensors)
    ranks = exchange.splits.shape[1]
    return to_tokens(grad, exchange, ctx.tokens) * ranks, None, None, None


def _to_tokens_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])


def _to_tokens_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    exchange = Exchange(*ctx.saved_tensors)
    return to_experts(grad / exchange.splits.shape[1], exchange), None, None, None, None


def define_exchange() -> None:
    where = "Tensor rows, Tensor ids, Tensor splits"
    for schema, implementation, fake in (
        (
            "plan_exchange(Tensor expert_ids, int num_experts, int ranks)"
            " -> (Tensor, Tensor, Tensor)",
            _plan,
            _plan_fake,
        ),
        (f"to_experts(Tensor x, {where}) -> Tensor", _to_experts, _to_experts_fake),
        (f"to_tokens(Tensor y, {where}, SymInt tokens) -> Tensor", _to_tokens, _to_tokens_fake),
    ):
        define(schema, implementation, fake, tags=(torch.Tag.cudagraph_unsafe,))
    define_autograd("to_experts", _to_experts_backward, _to_experts_context)
    define_autograd("to_tokens", _to_tokens_backward, _to_tokens_context)
