"""`qfuse::extend`: matrices beside their own low-rank projections, in one buffer.

`extend([x], [x], [p]) = [x | x @ p]`. Both directions of a LoRA layer become one GEMM over it:
`y = [x | x @ A'] @ [W | s*B]'` and `dX = [dY | dY @ s*B] @ [W ; A]`. It is an op of its own for the
sake of memory: the producer of `x` and the projection write straight into the wide buffer
(`inductor_q.lowerings.extend`), which `cat` does not promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.ops.library import define, define_autograd


def extend(blocks: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Return `cat([*blocks, *(lefts[j] @ rights[j])], -1)`.

    Args:
        blocks: [..., K_i] with the same leading dimensions and dtype; all but the first may be
            matrices of as many rows.
        lefts: [..., L_j] with those leading dimensions, most often blocks again.
        rights: [L_j, R_j].

    Returns:
        [..., sum K_i + sum R_j], contiguous.
    """
    result: Tensor = torch.ops.qfuse.extend(list(blocks), list(lefts), list(rights))
    return result


def _extend(blocks: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    parts = [left @ right for left, right in zip(lefts, rights, strict=True)]
    lead = blocks[0].shape[:-1]
    return torch.cat([part.reshape(*lead, part.shape[-1]) for part in (*blocks, *parts)], -1)


def _fake(blocks: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    width = sum(b.shape[-1] for b in blocks) + sum(r.shape[-1] for r in rights)
    return blocks[0].new_empty((*blocks[0].shape[:-1], width))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    blocks, lefts, rights = inputs
    ctx.shapes = [block.shape for block in blocks]
    ctx.widths = [t.shape[-1] for t in (*blocks, *rights)]
    ctx.save_for_backward(*lefts, *rights)


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    saved = ctx.saved_tensors
    lefts, rights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    grads = grad.split(ctx.widths, -1)
    blocks, parts = grads[: len(grads) - len(rights)], grads[len(grads) - len(rights) :]
    return (
        [g.reshape(shape) for g, shape in zip(blocks, ctx.shapes, strict=True)],
        [g @ right.t() for g, right in zip(parts, rights, strict=True)],
        [
            left.reshape(-1, left.shape[-1]).t() @ g.reshape(-1, g.shape[-1])
            for g, left in zip(parts, lefts, strict=True)
        ],
    )


def define_extend() -> None:
    define("extend(Tensor[] blocks, Tensor[] lefts, Tensor[] rights) -> Tensor", _extend, _fake)
    define_autograd("extend", _backward, _setup_context)
