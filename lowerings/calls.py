"""Functions that generated code calls by name.

`kind` is what lowerings.kind has written down of a call, whose plan is found by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from inductor_q.formats import FORMATS
from inductor_q.kernels.calls import AdapterGrads, AddProduct, Requantize
from inductor_q.kernels.dequantize import write
from inductor_q.kernels.dispatch import serve, serve_kind
from inductor_q.kernels.dropout_calls import (
    AddDropoutGradX,
    DropoutGradA,
    DropoutGradX,
    DropoutProject,
)
from inductor_q.kernels.expert_calls import GroupedGram, TileMap, unchecked
from inductor_q.kernels.requantize_parts import Parts
from inductor_q.kernels.rows_calls import Adapter, LinearRows
from inductor_q.kernels.scatter2scatter_dequantize import Large, preferred
from inductor_q.ops.linear import compute


def qfuse_dequantize(
    operands: Sequence[Tensor], format: str, provider: str, *, kind: str = "", out: Tensor
) -> None:
    """Write a weight's values into `out`, a matrix or a slice of a wider one."""
    write(operands, FORMATS[format], out, provider, kind)


def qfuse_requantize(
    operands: Sequence[Tensor],
    scale: Tensor,
    format: str,
    transposed: bool,
    parts: Sequence[int],
    provider: str,
    *,
    kind: str = "",
    out: Tensor,
) -> None:
    """Write weights in eight bits into `out`."""
    whole = Requantize(operands, FORMATS[format], scale, out, transposed)
    tensors = (*operands, scale, out)
    serve_kind(kind, "requantize", whole, tensors, provider, partial(Parts, parts))


def qfuse_add_product(
    base: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, *, kind: str = ""
) -> None:
    """Add `alpha * (a @ b)` to `base`."""
    serve_kind(kind, "add_product", AddProduct(base, a, b, alpha), (base, a, b))


def qfuse_adapter_grads(
    grad: Tensor,
    p: Tensor,
    b: Tensor,
    of_b: Tensor,
    factor_p: float,
    factor_b: float,
    *,
    kind: str = "",
    out: Tensor | None = None,
) -> None:
    """Write `factor_p * (grad @ b)` into `out`, with zeros behind where that is wider, and
    `factor_b * (grad' @ p)` into `of_b`.

    Inductor makes no `out` where nothing is computed from it after all.
    """
    out = grad.new_empty(p.shape) if out is None else out
    call = AdapterGrads(grad, p, b, factor_p, factor_b, out, of_b)
    serve_kind(kind, "adapter_grads", call, (grad, p, b, out, of_b))


def qfuse_scatter2scatter(*args: Any) -> tuple[Tensor, Tensor]:
    """Serve the op, checked when it was traced; who is preferred follows its arguments: a provider,
    and the sizes from which experts are decoded first."""
    *inputs, named, large = args
    call = unchecked(inputs)
    wanted = preferred(call, named, large and Large(*large))
    result: tuple[Tensor, Tensor] = serve(call.op, call, wanted)
    return result


def qfuse_grouped_gram(*args: Any) -> Tensor:
    """Serve the op, whose arguments were checked when it was traced."""
    result: Tensor = serve("grouped_gram", GroupedGram(*args))
    return result


def qfuse_linear(
    x: Tensor, operands: Sequence[Tensor], format: str, shape: Sequence[int], bias: Tensor | None
) -> Tensor:
    """Serve the op, whose arguments were checked when it was traced."""
    return compute(x, operands, format, shape, bias)


def qfuse_linears(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    features: Sequence[int],
    biases: Sequence[Tensor | None],
    lora_a: Sequence[Tensor | None],
    lora_b: Sequence[Tensor | None],
    scaling: Sequence[float],
    gated: bool,
) -> list[Tensor]:
    """Serve the op, whose arguments were checked when it was traced."""
    each, columns = len(FORMATS[format].operands), x.shape[-1]
    call = LinearRows(
        x.reshape(-1, columns),
        [operands[i : i + each] for i in range(0, len(operands), each)],
        FORMATS[format],
        features,
        [None if bias is None else bias.to(x.dtype) for bias in biases],
        [
            None if a is None or b is None else Adapter(a, b, factor)
            for a, b, factor in zip(lora_a, lora_b, scaling, strict=True)
        ],
        gated,
    )
    return [y.view(*x.shape[:-1], y.shape[1]) for y in serve("linear_rows", call)]


def qfuse_tile_map(offsets: Tensor, rows: int) -> Tensor:
    """Serve the op, whose arguments were checked when it was traced."""
    result: Tensor = serve("tile_map", TileMap(offsets, rows))
    return result


def qfuse_dropout_project(
    x: Tensor, seeds: Tensor, index: int, a: Tensor, count: int, p: float, *, kind: str = ""
) -> Tensor:
    """Serve the op, whose arguments were checked when it was traced."""
    out = x.new_empty((x.shape[0], a.shape[0]))
    qfuse_dropout_project_out(x, seeds, a, index, count, p, kind=kind, out=out)
    return out


def qfuse_dropout_project_out(
    x: Tensor,
    seeds: Tensor,
    a: Tensor,
    index: int,
    count: int,
    p: float,
    *,
    kind: str = "",
    out: Tensor,
) -> None:
    """Write what the op computes into `out`, and zeros into the columns behind."""
    call = DropoutProject(x, seeds, index, a, count, p, out)
    serve_kind(kind, "dropout_project", call, (x, seeds, a, out))


def qfuse_dropout_grad_a(
    x: Tensor, seeds: Tensor, index: int, grad: Tensor, count: int, p: float, *, kind: str = ""
) -> Tensor:
    """Serve the op, whose arguments were checked when it was traced."""
    call = DropoutGradA(x, seeds, index, grad, count, p)
    result: Tensor = serve_kind(kind, "dropout_grad_a", call, (x, seeds, grad))
    return result


def qfuse_dropout_grad_x(
    a: Tensor, seeds: Tensor, index: int, grad: Tensor, count: int, p: float, *, kind: str = ""
) -> Tensor:
    """Serve the op, whose arguments were checked when it was traced."""
    call = DropoutGradX(a, seeds, index, grad, count, p)
    result: Tensor = serve_kind(kind, "dropout_grad_x", call, (a, seeds, grad))
    return result


def qfuse_add_dropout_grad_x(
    base: Tensor,
    a: Tensor,
    seeds: Tensor,
    index: int,
    grad: Tensor,
    count: int,
    p: float,
    *,
    kind: str = "",
) -> None:
    """Add what `dropout_grad_x` computes to `base`."""
    call = AddDropoutGradX(a, seeds, index, grad, count, p, base)
    serve_kind(kind, "dropout_grad_x", call, (base, a, seeds, grad))
