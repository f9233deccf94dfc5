"""`qfuse::linears`: quantized linear layers of one input, with their adapters, for a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import WrongShape
from inductor_q.formats import get_format
from inductor_q.kernels.checks import check_device, check_operands
from inductor_q.kernels.dispatch import serve
from inductor_q.kernels.rows_calls import Adapter, LinearRows
from inductor_q.ops.library import define
from inductor_q.ops.linear import check_input


def linears(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    features: Sequence[int],
    biases: Sequence[Tensor | None],
    lora_a: Sequence[Tensor | None],
    lora_b: Sequence[Tensor | None],
    scaling: Sequence[float],
    gated: bool = False,
) -> list[Tensor]:
    """Return `x @ W_i.t() + bias_i + scaling_i * (x @ A_i.t()) @ B_i.t()` of each weight.

    This is for inference: it has no formula for gradients.

    Args:
        x: [..., K].
        operands, format: those of weights [N_i, K] of one format, one after the other.
        features: N_i.
        biases: [N_i] each, or None.
        lora_a, lora_b, scaling: A_i [r_i, K] and B_i [N_i, r_i], both or neither, and a factor.
        gated: return `silu(first) * second` of two results alone.

    Returns:
        [..., N_i] each, in the dtype of `x`.

    Raises:
        WrongShape, WrongDevice: `x`, a bias or an adapter does not fit its weight, or one of them
            lies on another device.
    """
    result: list[Tensor] = torch.ops.qfuse.linears(
        x,
        list(operands),
        format,
        list(features),
        list(biases),
        list(lora_a),
        list(lora_b),
        list(scaling),
        gated,
    )
    return result


def _call(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    features: Sequence[int],
    biases: Sequence[Tensor | None],
    lora_a: Sequence[Tensor | None],
    lora_b: Sequence[Tensor | None],
    scaling: Sequence[float],
    gated: bool,
) -> LinearRows:
    """Check the arguments of the op."""
    lists = {
        "biases": biases,
        "lora_a": lora_a,
        "lora_b": lora_b,
        "scaling": scaling,
        "operands": operands,
    }
    each = len(get_format(format).operands)
    for name, values in lists.items():
        count = len(values) // each if name == "operands" else len(values)
        if count != len(features):
            raise WrongShape(what=name, expected=(len(features),), got=(count,))
    columns = x.shape[-1] if x.dim() else 1
    weights: list[Sequence[Tensor]] = []
    adapters: list[Adapter | None] = []
    for i, rows in enumerate(features):
        weight, bias, a, b = operands[i * each : (i + 1) * each], biases[i], lora_a[i], lora_b[i]
        check_input(x, weight, (rows, columns), bias)
        check_operands(weight, get_format(format), (rows, columns), x.dtype)
        weights.append(weight)
        adapters.append(None)
        if a is not None or b is not None:
            got = tuple(() if t is None else tuple(t.shape) for t in (a, b))
            rank = a.shape[0] if a is not None else -1
            if got != ((rank, columns), (rows, rank)):
                expected = (("r", columns), (rows, "r"))
                raise WrongShape(what=f"adapter {i} (A, B)", expected=expected, got=got)
            assert a is not None and b is not None
            check_device("adapter", [a, b], x)
            adapters[-1] = Adapter(a, b, scaling[i])
    if gated and (len(features) != 2 or features[0] != features[1]):
        raise WrongShape(what="gated pair of weights", expected=("N", "N"), got=tuple(features))
    added = [None if bias is None else bias.to(x.dtype) for bias in biases]
    matrix = x.reshape(-1, columns)
    return LinearRows(matrix, weights, get_format(format), list(features), added, adapters, gated)


def _linears(x: Tensor, *arguments: Any) -> list[Tensor]:
    call = _call(x, *arguments)
    return [y.view(*x.shape[:-1], y.shape[1]) for y in serve("linear_rows", call)]


def _fake(x: Tensor, *arguments: Any) -> list[Tensor]:
    return [y.view(*x.shape[:-1], y.shape[1]) for y in _call(x, *arguments).outputs()]


def define_linears() -> None:
    define(
        "linears(Tensor x, Tensor[] operands, str format, SymInt[] features, Tensor?[] biases, "
        "Tensor?[] lora_a, Tensor?[] lora_b, float[] scaling, bool gated) -> Tensor[]",
        _linears,
        _fake,
    )
