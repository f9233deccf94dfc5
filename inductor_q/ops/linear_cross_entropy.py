"""`qfuse::linear_cross_entropy`: the loss of a language model, whose logits are never all there.

Rows are taken in chunks: the logits of a chunk are computed, its losses and their gradient, which
overwrites them, and the products of that with weights and inputs. Since a loss is one number, its
gradients are computed beside it and backward only scales them: no product is made twice, and what
is kept for backward has the size of the inputs.

Numerics are those of `F.cross_entropy(F.linear(x, w).float(), ...)`: logits are rounded to the
dtype of the inputs, the softmax is float32, its gradient is rounded to the dtype of the inputs.
The gradient of a trained head is summed over chunks in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import OneBackward, WrongShape
from inductor_q.kernels.calls import SoftmaxLoss
from inductor_q.kernels.checks import check_device
from inductor_q.kernels.dispatch import serve
from inductor_q.ops.library import define, define_composite

#: Rows of a chunk are a multiple of this, where there are so many.
STEP = 128

#: So many numbers of a float32 weight are rounded to the inputs' dtype at a time, for each of a
#: chunk's two products again: 8,192 rows of 4,096. A copy of the whole head would be made once, and
#: lie there when a step needs the most memory: 1.24 GB of 151,936 rows, where this takes 67 MB.
SLICE = 1 << 25

#: A batch of fewer rows has larger slices, up to four times, since its products take less time than
#: the host needs to launch as many as a long batch has. It is a start value, not a measured one.
LONG = 2048

#: The gradients of a row's logits are written between this power of two and the next below, times
#: their softmax: float16 could not hold those of a mean over many rows. Sums of them over rows, the
#: gradients of weights and bias, it can not: they stay in float32 until backward scales them.
EXPONENT = 10


def linear_cross_entropy(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    labels: Tensor,
    divisor: Tensor | None,
    *,
    mean: bool,
    ignore_index: int,
    elements: int,
) -> Tensor:
    """Cross entropy of `labels` under the logits `sum_i inputs[i] @ weights[i].T + bias`.

    Args:
        inputs: each [..., K_i]; the rows of all are the same in number, that of the labels. All
            operands have one dtype: autocast does not change it.
        weights: each [V, K_i]; a head, and an adapter's B beside it. One that does not train may
            be float32, and is rounded to the inputs' dtype a part at a time.
        bias: [V], or None.
        labels: [...] int64. A label that is neither `ignore_index` nor a row of the weights makes
            the loss NaN.
        divisor: what the sum of the losses is divided by; one number, on the inputs' device.
        mean: divide by the number of labels that are not ignored instead.
        elements: how many logits there may be at a time.

    Returns:
        A float32 scalar. All operands that train get gradients.
    """
    result: Tensor = torch.ops.qfuse.linear_cross_entropy(
        list(inputs), list(weights), bias, labels, divisor, mean, ignore_index, elements
    )
    return result


def _linear_cross_entropy(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    labels: Tensor,
    divisor: Tensor | None,
    *settings: int,
) -> Tensor:
    operands = [*inputs, *weights, *([] if bias is None else [bias])]
    rows = [x.reshape(-1, x.shape[-1]) for x in operands[: len(inputs)]]
    operands[: len(inputs)] = rows
    result: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
        len(inputs), labels.reshape(-1), divisor, settings, *operands
    )
    return result


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        labels: Tensor,
        divisor: Tensor | None,
        settings: tuple[int, ...],
        *operands: Tensor,
    ) -> Tensor:
        wanted = list(ctx.needs_input_grad[-len(operands) :])
        ctx.wanted, ctx.dtype = wanted, operands[0].dtype
        loss, scale, *gradients = torch.ops.qfuse.linear_cross_entropy_chunks(
            operands, count, labels, divisor, *settings, wanted
        )
        ctx.save_for_backward(scale, *gradients)
        result: Tensor = loss
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what is returned would pass for constants
            raise OneBackward()
        scale, *gradients = ctx.saved_tensors
        factor = grad * scale
        scaled = iter([(gradient.float() * factor).to(ctx.dtype) for gradient in gradients])
        return *[None] * 4, *[next(scaled) if one else None for one in ctx.wanted]


def _chunks(
    operands: Sequence[Tensor],
    count: int,
    labels: Tensor,
    divisor: Tensor | None,
    mean: bool,
    ignore_index: int,
    elements: int,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Compute the loss, what is left to multiply its gradients by, and these, of what is `wanted`.

    `operands` are `count` inputs, as many weights, and a bias if there is one more.
    """
    inputs, weights, bias = _split(operands, count)
    _check(inputs, weights, bias, labels)
    rows, columns = labels.shape[0], weights[0].shape[0]
    dtype, device = inputs[0].dtype, labels.device
    losses = torch.empty(rows, dtype=torch.float32, device=device)
    if mean:
        divisor = (labels != ignore_index).sum()
    one = torch.ones((), dtype=torch.float32, device=device)
    scale = one if divisor is None else one / divisor
    # What is left for backward is a power of two: it rounds nothing a second time.
    mantissa, exponent = torch.frexp(scale)
    inside = mantissa * 2.0**EXPONENT
    left = torch.ldexp(one, exponent - EXPONENT)
    results = _gradients(operands, count, wanted)
    of_inputs, of_weights, of_bias = _split(results, count)
    starts = list(_starts(rows, rows_of_chunk(rows, columns, elements)))
    at_once = len(starts) == 1 and dtype is not torch.float16
    summed = [
        w if w is None or at_once else torch.zeros_like(w, dtype=torch.float32)
        for w in [*of_weights, of_bias]
    ]
    sizes = max((end - start for start, end in starts), default=0)
    buffer = torch.empty(sizes, columns, dtype=dtype, device=device)
    rounded = torch.empty(slice_of(weights, dtype, rows), dtype=dtype, device=device)
    for start, end in starts:
        logits = buffer[: end - start]
        chunk = [x[start:end] for x in inputs]
        for i, (x, weight) in enumerate(zip(chunk, weights, strict=True)):
            for part, values in _parts(weight, rounded):
                if i == 0:
                    torch.mm(x, values.t(), out=logits[:, part])
                else:
                    logits[:, part].addmm_(x, values.t())
        if bias is not None:
            logits.add_(bias)
        call = SoftmaxLoss(
            logits=logits,
            labels=labels[start:end],
            losses=losses[start:end],
            scale=inside if any(wanted) else None,
            ignore_index=ignore_index,
        )
        serve("softmax_loss", call)
        for result, weight in zip(of_inputs, weights, strict=True):
            if result is not None and weight.dtype == dtype:
                torch.mm(logits, weight, out=result[start:end])
            elif result is not None:
                total = torch.zeros_like(result[start:end], dtype=torch.float32)
                for part, values in _parts(weight, rounded):
                    _add_product(total, logits[:, part], values, only=False)
                result[start:end] = total
        for total, x in zip(summed, chunk, strict=False):
            if total is not None:
                _add_product(total, logits.t(), x, only=at_once)
        if summed[-1] is not None:
            own = logits.sum(0, dtype=torch.float32)
            summed[-1].copy_(own if at_once else summed[-1] + own)
    for result, total in zip([*of_weights, of_bias], summed, strict=True):
        if result is not None and result is not total:
            result.copy_(total)
    total_loss = losses.sum() if divisor is None else losses.sum() / divisor
    return [total_loss, left, *[x for x in results if x is not None]]


def rows_of_chunk(rows: int, columns: int, elements: int) -> int:
    """Return how many rows are taken at a time: as many in each chunk, up to a multiple of STEP."""
    most = max(1, elements // columns)
    if most >= STEP:
        most -= most % STEP
    chunks = max(1, -(-rows // most))
    even = -(-rows // chunks)
    return min(most, max(1, -(-even // STEP)) * STEP)


def _starts(rows: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, rows)) for start in range(0, rows, size))


def slice_of(weights: Sequence[Tensor], dtype: torch.dtype, rows: int) -> int:
    """Return how many numbers of a weight of another dtype are rounded at a time."""
    most = SLICE * min(max(LONG // max(rows, 1), 1), 4)
    others = [w for w in weights if w.dtype != dtype]
    return max((min(w.numel(), max(most, w.shape[1])) for w in others), default=0)


def _parts(weight: Tensor, rounded: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of a weight, as many at a time as `rounded` takes, or all of its dtype."""
    if weight.dtype == rounded.dtype:
        yield slice(None), weight
        return
    for start, end in _starts(weight.shape[0], max(1, rounded.numel() // weight.shape[1])):
        part = weight[start:end]
        yield slice(start, end), rounded[: part.numel()].view(part.shape).copy_(part)


def _split(operands: Sequence[Any], count: int) -> tuple[list[Any], list[Any], Any]:
    inputs, weights, rest = operands[:count], operands[count : 2 * count], operands[2 * count :]
    return list(inputs), list(weights), rest[0] if rest else None


def _gradients(
    operands: Sequence[Tensor], count: int, wanted: Sequence[bool]
) -> list[Tensor | None]:
    half = operands[0].dtype is torch.float16
    return [
        torch.empty(
            x.shape, dtype=torch.float32 if half and i >= count else x.dtype, device=x.device
        )
        if wanted[i]
        else None
        for i, x in enumerate(operands)
    ]


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, only: bool) -> None:
    """Add `a @ b` to `total`, or overwrite it with the `only` product."""
    if only:
        torch.mm(a, b, out=total)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a.float() @ b.float())


def _check(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, labels: Tensor
) -> None:
    columns = weights[0].shape[0]
    for x, weight in zip(inputs, weights, strict=True):
        if x.shape[0] != labels.shape[0]:
            raise WrongShape(what="labels", expected=(x.shape[0],), got=tuple(labels.shape))
        if tuple(weight.shape) != (columns, x.shape[1]):
            raise WrongShape(what="weight", expected=(columns, x.shape[1]), got=tuple(weight.shape))
    given = [*inputs[1:], *weights, *([] if bias is None else [bias]), labels]
    check_device("operand of linear_cross_entropy", given, inputs[0])


def _fake(
    operands: Sequence[Tensor],
    count: int,
    labels: Tensor,
    *settings: Any,
) -> list[Tensor]:
    _check(*_split(operands, count), labels)
    numbers = [torch.empty((), dtype=torch.float32, device=labels.device) for _ in range(2)]
    return [*numbers, *[x for x in _gradients(operands, count, settings[-1]) if x is not None]]


def define_linear_cross_entropy() -> None:
    define(
        "linear_cross_entropy_chunks(Tensor[] operands, int count, Tensor labels, "
        "Tensor? divisor, bool mean, int ignore_index, int elements, bool[] wanted) -> Tensor[]",
        _chunks,
        _fake,
    )
    define_composite(
        "linear_cross_entropy(Tensor[] inputs, Tensor[] weights, Tensor? bias, Tensor labels, "
        "Tensor? divisor, bool mean, int ignore_index, int elements) -> Tensor",
        _linear_cross_entropy,
    )
