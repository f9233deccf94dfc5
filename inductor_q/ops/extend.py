"""`qfuse::extend`: matrices beside their own low-rank projections, in one buffer.

`extend([x], [x], [p], 0) = [x | x @ p]`. Both directions of a LoRA layer become one GEMM over it:
`y = [x | x @ A'] @ [W | s*B]'` and `dX = [dY | dY @ s*B] @ [W ; A]`. It is an op of its own for the
sake of memory: the producer of `x` and the projection write straight into the wide buffer
(`inductor_q.lowerings.extend`), which `cat` does not promise.

`qfuse::extend_grads` is the same for the gradients of layers beside those of their projections. It
also returns the gradients of the adapters' B, since whoever multiplies dY with B has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.ops.adapter_grads import adapter_grads
from inductor_q.ops.library import define, define_autograd


def extend(
    blocks: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor], padding: int = 0
) -> Tensor:
    """Return `cat([*blocks, *(lefts[j] @ rights[j])], -1)`, and columns of zeros behind it.

    Args:
        blocks: [..., K_i] with the same leading dimensions and dtype; all but the first may be
            matrices of as many rows.
        lefts: [..., L_j] with those leading dimensions, most often blocks again.
        rights: [L_j, R_j].
        padding: the columns of zeros.

    Returns:
        [..., sum K_i + sum R_j + padding], contiguous.
    """
    result: Tensor = torch.ops.qfuse.extend(list(blocks), list(lefts), list(rights), padding)
    return result


def _extend(
    blocks: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor], padding: int
) -> Tensor:
    parts = [left @ right for left, right in zip(lefts, rights, strict=True)]
    return _join((*blocks, *parts), padding)


def _join(parts: Sequence[Tensor], padding: int) -> Tensor:
    lead = parts[0].shape[:-1]
    zeros = parts[0].new_zeros((*lead, padding))
    return torch.cat([part.reshape(*lead, part.shape[-1]) for part in (*parts, zeros)], -1)


def _fake(
    blocks: Sequence[Tensor], lefts: Sequence[Tensor], rights: Sequence[Tensor], padding: int
) -> Tensor:
    width = sum(b.shape[-1] for b in blocks) + sum(r.shape[-1] for r in rights) + padding
    return blocks[0].new_empty((*blocks[0].shape[:-1], width))


def extend_grads(
    blocks: Sequence[Tensor],
    grads: Sequence[Tensor],
    bs: Sequence[Tensor],
    ps: Sequence[Tensor],
    factors_p: Sequence[float],
    factors_b: Sequence[float],
    padding: int,
) -> list[Tensor]:
    """Return `extend(blocks, grads, [factors_p[j] * bs[j]], padding)`, and of each j the gradient
    `factors_b[j] * (grads[j]' @ ps[j])` of B.

    Args:
        blocks: as of `extend`.
        grads: [..., N_j], the gradients of layers.
        bs: [N_j, R_j].
        ps: [M, R_j], the projections of the layers' inputs, of as many rows.
        factors_p, factors_b: the scaling of each adapter, where it is not in `ps` or `bs`.
        padding: columns of zeros behind the last product.

    Returns:
        [..., sum K_i + sum R_j + padding], contiguous, and each [N_j, R_j].
    """
    parts, of_bs = [], []
    for grad, b, p, *factors in zip(grads, bs, ps, factors_p, factors_b, strict=True):
        of_p, of_b = adapter_grads(grad.reshape(-1, grad.shape[-1]), p, b, *factors)
        parts.append(of_p)
        of_bs.append(of_b)
    return [_join((*blocks, *parts), padding), *of_bs]


def _fake_grads(
    blocks: Sequence[Tensor], grads: Sequence[Tensor], bs: Sequence[Tensor], *others: Any
) -> list[Tensor]:
    *_, padding = others
    return [_fake(blocks, grads, bs, padding), *(b.new_empty(b.shape) for b in bs)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    blocks, lefts, rights, padding = inputs
    ctx.shapes = [block.shape for block in blocks]
    ctx.widths = [*(t.shape[-1] for t in (*blocks, *rights)), padding]
    ctx.save_for_backward(*lefts, *rights)


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], None]:
    saved = ctx.saved_tensors
    lefts, rights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    *grads, _ = grad.split(ctx.widths, -1)
    blocks, parts = grads[: len(grads) - len(rights)], grads[len(grads) - len(rights) :]
    return (
        [g.reshape(shape) for g, shape in zip(blocks, ctx.shapes, strict=True)],
        [g @ right.t() for g, right in zip(parts, rights, strict=True)],
        [
            left.reshape(-1, left.shape[-1]).t() @ g.reshape(-1, g.shape[-1])
            for g, left in zip(parts, lefts, strict=True)
        ],
        None,
    )


def define_extend() -> None:
    arguments = "Tensor[] blocks, Tensor[] lefts, Tensor[] rights, int padding"
    define(f"extend({arguments}) -> Tensor", _extend, _fake)
    define_autograd("extend", _backward, _setup_context)
    arguments = (
        "Tensor[] blocks, Tensor[] grads, Tensor[] bs, Tensor[] ps, "
        "float[] factors_p, float[] factors_b, int padding"
    )
    define(f"extend_grads({arguments}) -> Tensor[]", extend_grads, _fake_grads)
