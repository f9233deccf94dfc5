"""`qfuse::scatter2scatter`: every token times the weights of its experts (arXiv 2403.08245).

Rows come in and go out scattered, one a token, or grouped, one a slot and each expert's together
(`inductor_q.experts.routing`), so a layer never copies tokens only to sort them. Weights are packed
in any format or dense, with a LoRA adapter an expert if wanted. The input gradient is this op again
on the same packed weights; the adapters' gradients are two `grouped_gram`s. What is saved for
backward is `x`, the adapters, the packed weights and `x @ A'`, which has r columns; never a
dequantized expert, and, gates or not, never the unweighted result.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inductor_q.exc import WrongDtype, WrongShape
from inductor_q.formats import QuantFormat, get_format
from inductor_q.ops.dequantize import check_operands
from inductor_q.ops.library import define, define_autograd
from inductor_q.ops.linear import check_device
from inductor_q.ops.tile_map import check_tiles

if TYPE_CHECKING:
    from inductor_q.experts.routing import Routing

log = logging.getLogger("inductor_q")

#: The name that stands for a weight that is not quantized: its one operand is the weight.
DENSE = "dense"

SCHEMA = (
    "scatter2scatter(Tensor x, Tensor[] operands, str format, SymInt[] shape, bool transposed, "
    "Tensor order, Tensor inverse, Tensor offsets, Tensor tiles, int top_k, bool grouped_in, "
    "bool grouped_out, Tensor? lora_a, Tensor? lora_b, float scaling, Tensor? bias, Tensor? gates, "
    "str provider) -> (Tensor, Tensor)"
)


def scatter2scatter(
    x: Tensor,
    operands: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    routing: Routing,
    *,
    transposed: bool = False,
    grouped_in: bool = False,
    grouped_out: bool = False,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    scaling: float = 1.0,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    provider: str = "auto",
) -> Tensor:
    """`gate * (x @ W_e' + scaling * (x @ A_e') @ B_e' + bias_e)` for each slot and its expert e.

    Args:
        x: [R, K] where `grouped_in`, R = tokens * top_k rows in grouped order; else [tokens, K].
        operands, format, shape: the weights [E, N, K], as in `dequantize`, quantized along the
            flattened stack; or one dense tensor and the format "dense".
        routing: `experts.route` of this layer's choices.
        transposed: the weights are stored as [E, K, N], and `shape` says so.
        grouped_out: return rows in grouped order; else the sum of each token's slots.
        lora_a, lora_b: [E, r, K] and [E, N, r], any float dtype; computed in the dtype of `x`.
        scaling: the adapters' factor.
        bias: [E, N] or None.
        gates: [tokens, top_k], a factor a slot, or None.
        provider: the kernel to ask first.

    Returns:
        [R, N] or [tokens, N], in the dtype of `x`; a slot's terms and a token's slots are added in
        float32. Slots of sentinels are skipped: zero where rows are grouped, no term elsewhere.
        Gradients reach `x`, the adapters, `bias`, `gates` and dense weights, and are
        deterministic; those of an expert without rows are exactly zero.

    Raises:
        WrongShape, WrongDtype, WrongDevice, UnknownFormat, CorruptQuantState.
    """
    result: tuple[Tensor, Tensor] = torch.ops.qfuse.scatter2scatter(
        x,
        list(operands),
        format,
        list(shape),
        transposed,
        routing.order,
        routing.inverse,
        routing.offsets,
        routing.tiles,
        routing.top_k,
        grouped_in,
        grouped_out,
        lora_a,
        lora_b,
        scaling,
        bias,
        gates,
        provider,
    )
    return result[0]


@dataclass(frozen=True, kw_only=True)
class Scatter2Scatter:
    """One call as a kernel gets it: the arguments of `scatter2scatter`, checked.

    A kernel returns the result and `x @ A_e'` [R, r] in grouped order ([R, 0] without adapters),
    both with zeros in nobody's rows.
    """

    x: Tensor
    operands: Sequence[Tensor]
    fmt: QuantFormat | None  # None: dense
    shape: tuple[int, ...]
    transposed: bool
    order: Tensor
    inverse: Tensor
    offsets: Tensor
    tiles: Tensor
    top_k: int
    grouped_in: bool
    grouped_out: bool
    lora_a: Tensor | None
    lora_b: Tensor | None
    scaling: float
    bias: Tensor | None
    gates: Tensor | None

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1 if self.transposed else 2]

    @property
    def out_features(self) -> int:
        return self.shape[2 if self.transposed else 1]

    @property
    def rank(self) -> int:
        return 0 if self.lora_a is None else self.lora_a.shape[1]

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    @functools.cached_property
    def tile_rows(self) -> int:
        """Of a part of `tiles` at most. Kernels ask several times; it asks CUDA for the device."""
        from inductor_q.kernels.tiles import height  # kernels sit above ops

        return height(self.rows, self.num_experts, self.x.device)

    @property
    def tokens(self) -> int:
        return self.rows // self.top_k

    def check(self) -> None:
        """Raise unless the arguments fit each other."""
        e, n, k = self.num_experts, self.out_features, self.in_features
        _expect("weight of experts", self.shape, (self.offsets.shape[0] - 1, *self.shape[1:]))
        rows = self.rows if self.grouped_in else self.tokens
        _expect("input of experts", self.x.shape, (rows, k))
        if (self.lora_a is None) != (self.lora_b is None):
            raise WrongShape(what="adapter", expected="both A and B, or none", got="one of them")
        if self.lora_a is not None and self.lora_b is not None:
            _expect("adapter A of experts", self.lora_a.shape, (e, self.rank, k))
            _expect("adapter B of experts", self.lora_b.shape, (e, n, self.rank))
            check_device("adapter", [self.lora_a, self.lora_b], self.x)
        if self.bias is not None:
            _expect("bias of experts", self.bias.shape, (e, n))
            check_device("bias", [self.bias], self.x)
        if self.gates is not None:
            _expect("gates", self.gates.shape, (self.tokens, self.top_k))
            check_device("gates", [self.gates], self.x)
        check_device("routing", [self.order, self.inverse, self.offsets, self.tiles], self.x)
        check_order(self.order)
        check_tiles(self.tiles, self.rows, self.num_experts)
        check_device("weight", self.operands, self.x)
        if self.fmt is not None:
            check_operands(self.operands, self.fmt, self.shape, self.x.dtype)
        else:
            _expect("dense weight", self.operands[0].shape, self.shape)
            if not self.x.dtype.is_floating_point:
                raise WrongDtype(what="input of experts", expected="floating", got=self.x.dtype)


def check_order(order: Tensor) -> None:
    """Raise unless kernels can read `order` as it lies: a routing's, [R] int64."""
    if order.dtype is not torch.int64:
        raise WrongDtype(what="order of a routing", expected=torch.int64, got=order.dtype)


#: What the op's arguments behind the shape are called; taken once, since calls are many.
_REST = tuple(field.name for field in fields(Scatter2Scatter))[4:]


def _expect(what: str, got: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(got) != tuple(expected):
        raise WrongShape(what=what, expected=tuple(expected), got=tuple(got))


def unchecked(args: Sequence[Any]) -> Scatter2Scatter:
    """The op's arguments, but the provider."""
    x, operands, name, shape, *rest = args
    return Scatter2Scatter(
        x=x,
        operands=operands,
        fmt=None if name == DENSE else get_format(name),
        shape=tuple(shape),
        **dict(zip(_REST, rest, strict=True)),
    )


def _checked(args: Sequence[Any]) -> Scatter2Scatter:
    call = unchecked(args)
    call.check()
    return call


def _scatter2scatter(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, provider = args
    return run(_checked(inputs), provider)


def run(call: Scatter2Scatter, provider: str) -> tuple[Tensor, Tensor]:
    """A checked call by the first kernel that serves it."""
    from inductor_q.kernels import scatter2scatter_kernels  # kernels sit above ops

    if call.rows == 0:
        return _empty(call)
    device_type = call.x.device.type
    kernels = scatter2scatter_kernels(device_type, provider, call)
    if provider not in ("auto", kernels[0].name):
        _tell_once(provider, f"there is none of that name for {device_type} tensors")
    for kernel in kernels:
        reason = kernel.supports(call)
        if not reason:
            return kernel.launch(call)
        if kernel.name == provider or not kernel.decodes(call.fmt):  # one for others is no news
            _tell_once(kernel.name, reason)
    raise AssertionError("the reference kernel serves every call")


@functools.cache
def _tell_once(kernel: str, reason: str) -> None:
    log.warning("scatter2scatter: kernel %r not used: %s", kernel, reason)


def _empty(call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
    rows = call.rows if call.grouped_out else call.tokens
    return call.x.new_empty((rows, call.out_features)), call.x.new_empty((call.rows, call.rank))


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _empty(_checked(args[:-1]))


def define_scatter2scatter() -> None:
    from inductor_q.ops.scatter2scatter_backward import backward, setup_context

    define(SCHEMA, _scatter2scatter, _fake)
    define_autograd("scatter2scatter", backward, setup_context)
