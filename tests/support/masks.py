"""Make masks of a model's inputs as models write them, and say what is proven of one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from inductor_q.passes.causal_mask import Unproven, read
from tests.support.attention import captured, causal, positions

OTHERWISE = "the mask depends on the input x in a way that is not known"


def result(graph: fx.Graph) -> fx.Node:
    """What a graph with one result returns."""
    (found,) = graph.output_node().all_input_nodes
    return found


def meaning(mask: Callable[..., Tensor], *inputs: Tensor, dynamic: bool) -> str:
    """What a mask of inputs is proven to mean; or why it is not known."""
    graph = captured(mask, *inputs, dynamic=dynamic).graph
    found = read(result(graph), {}, [graph])
    if isinstance(found, Unproven):
        return found.reason
    parts = []
    for part in ("valid", "positions", "sequences"):
        source = getattr(found, part)
        if source is not None:
            assert source.op == "placeholder"
            parts.append(f"{part} {str(source.target)[2:3]}")
    parts += [found.is_valid] if found.valid is not None and found.is_valid != "!= 0" else []
    parts += [found.real] if found.real else []
    return ", ".join(parts + ([] if found.window is None else [f"window {found.window}"]))


def valid_keys(x: Tensor) -> Tensor:
    """As transformers writes it."""
    q, k = positions(x)
    sequence = torch.arange(x.shape[0])[:, None, None, None]
    return (k <= q) & x.to(dtype=torch.bool)[sequence, k]


def documents(x: Tensor) -> Tensor:
    """As transformers 5 writes it: by numbers of sequences, and not after the query's position."""
    first = x[:, :1] - 1
    number = (torch.diff(x, prepend=first, dim=-1) != 1).cumsum(-1)
    same = number[:, None, :, None] == number[:, None, None, :]
    return same & (x[:, None, None, :] <= x[:, None, :, None])


def documents_by_place(x: Tensor) -> Tensor:
    first = x[:, :1] - 1
    number = (torch.diff(x, prepend=first, dim=-1) != 1).cumsum(-1)
    return causal(x) & (number[:, None, :, None] == number[:, None, None, :])


def same(x: Tensor) -> Tensor:
    return x[:, None, :, None] == x[:, None, None, :]


def same_number(x: Tensor) -> Tensor:
    return causal(x) & same(x)


def same_and_real(x: Tensor) -> Tensor:
    return same_number(x) & (x != 0)[:, None, None, :]


def in_window_of_sixteen(x: Tensor) -> Tensor:
    q, k = positions(x)
    return causal(x) & (k > q - 16)


def same_in_window(x: Tensor) -> Tensor:
    return same_and_real(x) & in_window_of_sixteen(x)


def mapped(x: Tensor, sees: Callable[..., Tensor]) -> Tensor:
    """As transformers 4 writes it: a function of four numbers, mapped over all of them."""
    for dims in (
        (None, None, None, 0),
        (None, None, 0, None),
        (None, 0, None, None),
        (0,) + (None,) * 3,
    ):
        sees = torch.vmap(sees, in_dims=dims, out_dims=0)
    at, keys = torch.arange(0, x.shape[1]), torch.arange(x.shape[1])
    keys += 0
    with TransformGetItemToIndex():
        return sees(torch.arange(x.shape[0]), torch.arange(1), at, keys)
