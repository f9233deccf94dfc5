"""The calls of ops as kernels get them, and the checks of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import CorruptQuantState, WrongDevice, WrongDtype, WrongShape
from inductor_q.formats import QuantFormat, get_format
from inductor_q.formats.operand import FLOATS, Operand
from inductor_q.kernels.tile_map import check_tiles, height

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in FLOATS)

#: The name that stands for a weight that is not quantized: its one operand is the weight.
DENSE = "dense"

_REMEDY = "The state belongs to another weight, blocksize or format: quantize the weight again."


class Call:
    """The checked arguments of an op, as its providers get them."""

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        raise NotImplementedError

    def empty(self) -> Any:
        """Return the result where there is nothing to compute, and None elsewhere."""
        return None

    def kind(self) -> Hashable:
        """Return what its provider is chosen and its launches are planned by (`Provider` says what
        that is), or None where each call is asked about anew. Fake tensors have none."""
        return None


def _alike(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return what a kernel goes by in tensors of shapes that it knows, besides their values."""
    return tuple(
        [t if t is None else (t.dtype, t.is_contiguous(), t.data_ptr() % 16) for t in tensors]
    )


def _laid_out(*tensors: Tensor) -> tuple[Any, ...]:
    """Return what a kernel goes by in any tensors, besides their values."""
    return tuple([(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors])


class Stack:
    """The sizes of a stack of experts' weights: [E, N, K], or [E, K, N] where `transposed`."""

    shape: tuple[int, ...]
    transposed: bool

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1 if self.transposed else 2]

    @property
    def out_features(self) -> int:
        return self.shape[2 if self.transposed else 1]


@dataclass(frozen=True, kw_only=True)
class Scatter2Scatter(Call, Stack):
    """One call as a kernel gets it: the arguments of `qfuse::scatter2scatter` in their order.

    The op's schema, its calls and its gradients all use these fields. A kernel returns the result
    and `x @ A_e'` [R, r] in grouped order ([R, 0] without adapters), both with zeros in nobody's
    rows (`ops/routing.py` has the words).
    """

    x: Tensor
    operands: Sequence[Tensor]
    format: str  # "dense", or the name of a format
    shape: tuple[int, ...]
    transposed: bool = False
    order: Tensor
    inverse: Tensor
    offsets: Tensor
    tiles: Tensor
    top_k: int
    grouped_in: bool = False
    grouped_out: bool = False
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scaling: float = 1.0
    bias: Tensor | None = None
    gates: Tensor | None = None

    @functools.cached_property
    def fmt(self) -> QuantFormat | None:
        """The format of the weights; None where they are dense."""
        return None if self.format == DENSE else get_format(self.format)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def empty(self) -> tuple[Tensor, Tensor] | None:
        return self.results() if self.rows == 0 else None

    def kind(self) -> Hashable:
        routing = (self.order, self.inverse, self.offsets, self.tiles)
        return (
            *(self.x.device, self.format, self.shape, self.transposed, self.rows, self.rank),
            *(self.top_k, self.grouped_in, self.grouped_out),
            _alike(self.x, *routing, self.lora_a, self.lora_b, self.bias, self.gates),
            _alike(*self.operands),
        )

    def results(self) -> tuple[Tensor, Tensor]:
        """Allocate the op's results."""
        rows = self.rows if self.grouped_out else self.tokens
        x = self.x
        return x.new_empty((rows, self.out_features)), x.new_empty((self.rows, self.rank))

    @property
    def rank(self) -> int:
        return 0 if self.lora_a is None else self.lora_a.shape[1]

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    @functools.cached_property
    def tile_rows(self) -> int:
        """The most rows of one part of `tiles`; cached, since it queries the device."""
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


def _expect(what: str, got: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(got) != tuple(expected):
        raise WrongShape(what=what, expected=tuple(expected), got=tuple(got))


#: The names of the op's arguments, and the values of those that may be left out.
ARGUMENTS = tuple(field.name for field in fields(Scatter2Scatter))
DEFAULTS = {f.name: f.default for f in fields(Scatter2Scatter) if f.default is not MISSING}


def arguments(**named: Any) -> tuple[Any, ...]:
    """Put the arguments of `qfuse::scatter2scatter` in its order: tensors, or nodes of a graph."""
    given = {**DEFAULTS, **named}
    return tuple([given[name] for name in ARGUMENTS])


def unchecked(args: Sequence[Any]) -> Scatter2Scatter:
    """Make a call of the op's arguments, without checks."""
    call = object.__new__(Scatter2Scatter)  # `__init__` sets 18 fields of a frozen class one by one
    vars(call).update(zip(ARGUMENTS, args, strict=True))
    vars(call)["shape"] = tuple(call.shape)
    return call


#: The names that a schema has for the types of arguments.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "tuple[int, ...]": "SymInt[]",
    "torch.dtype": "ScalarType",
    **{name: name for name in ("bool", "float", "int", "str")},
}


def schema(op: str, call: Any, result: str) -> str:
    """Write the schema of an op whose arguments are the fields of `call`."""
    typed = ", ".join(f"{_TYPES[str(field.type)]} {field.name}" for field in fields(call))
    return f"{op}({typed}) -> {result}"


@dataclass(frozen=True)
class Dequantize(Call):
    """One call as a kernel gets it: write the values of `operands` into the matrix `out`."""

    operands: Sequence[Tensor]
    fmt: QuantFormat
    out: Tensor

    @property
    def device(self) -> torch.device:
        return self.out.device


@dataclass(frozen=True)
class QuantizeKbit(Call):
    """One call as a kernel gets it: the arguments of `quantize_kbit`, checked."""

    x: Tensor
    codebook: Tensor
    k: int
    absmax: str

    @property
    def device(self) -> torch.device:
        return self.x.device


@dataclass(frozen=True)
class TileMap(Call):
    """One call as a kernel gets it: the arguments of `tile_map`, checked."""

    offsets: Tensor
    rows: int

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    def kind(self) -> Hashable:
        return self.offsets.device, self.rows, _laid_out(self.offsets)

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1


@dataclass(frozen=True)
class GroupedGram(Call):
    """One call as a kernel gets it: the arguments of `grouped_gram`, checked."""

    left: Tensor
    right: Tensor
    order: Tensor
    offsets: Tensor
    top_k: int
    grouped_left: bool
    grouped_right: bool
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    @property
    def device(self) -> torch.device:
        return self.left.device

    def empty(self) -> Tensor | None:
        return None if self.rows else self.left.new_zeros(self.shape, dtype=self.dtype)

    def kind(self) -> Hashable:
        return (
            *(self.left.device, self.top_k, self.grouped_left, self.grouped_right, self.dtype),
            _laid_out(self.left, self.right, self.order, self.offsets),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.offsets.shape[0] - 1, self.left.shape[1], self.right.shape[1]

    def check(self) -> None:
        check_order(self.order)
        for what, side, grouped in (
            ("left side of grouped_gram", self.left, self.grouped_left),
            ("right side of grouped_gram", self.right, self.grouped_right),
        ):
            rows = self.rows if grouped else self.rows // self.top_k
            if side.dim() != 2 or side.shape[0] != rows:
                raise WrongShape(what=what, expected=(rows, "..."), got=tuple(side.shape))


@dataclass(frozen=True, kw_only=True)
class SoftmaxLoss(Call):
    """Rows of logits, whose losses a kernel writes; then gradients take the place of the logits.

    The loss of a row is `logsumexp(row) - row[label]` in float32: 0 where the label is
    `ignore_index`, and NaN where it is no column. Its gradient is written where a `scale` is given,
    multiplied by it.
    """

    logits: Tensor  # [R, V], overwritten by the gradients
    labels: Tensor  # [R] int64
    losses: Tensor  # [R] float32, written
    scale: Tensor | None  # float32, one number
    ignore_index: int

    @property
    def device(self) -> torch.device:
        return self.logits.device


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of a linear layer, which adds `scaling * (x @ a.t()) @ b.t()`."""

    a: Tensor  # [r, K]
    b: Tensor  # [N, r]
    scaling: float


@dataclass(frozen=True)
class LinearRows(Call):
    """One call as a kernel gets it: return `x @ weight.t()` of each weight with what is added, each
    contiguous, for a few rows; where `gated`, `silu(first) * second` of two alone."""

    x: Tensor  # [M, K]
    weights: Sequence[Sequence[Tensor]]  # operands of weights [N_i, K]
    fmt: QuantFormat
    features: Sequence[int]  # N_i
    biases: Sequence[Tensor | None]  # [N_i], in the dtype of x
    adapters: Sequence[Adapter | None]
    gated: bool = False

    @property
    def device(self) -> torch.device:
        return self.x.device

    def outputs(self) -> list[Tensor]:
        """Return memory for the results."""
        features = self.features[:1] if self.gated else self.features
        return [self.x.new_empty((self.x.shape[0], count)) for count in features]

    def empty(self) -> list[Tensor] | None:
        return None if self.x.shape[0] and sum(self.features) else self.outputs()

    def kind(self) -> Hashable:
        low = [a and (a.scaling, _laid_out(a.a, a.b)) for a in self.adapters]
        return (
            *(self.x.device, self.fmt, tuple(self.features), self.gated, _laid_out(self.x), *low),
            *[bias if bias is None else _laid_out(bias) for bias in self.biases],
            *[_alike(*operands) for operands in self.weights],
        )


@dataclass(frozen=True)
class AttentionRows(Call):
    """One call as a kernel gets it: return attention of a few queries that see the same keys,
    [B, G, R, D] and contiguous. Queries that see no key give zero."""

    query: Tensor  # [B, G, R, D]
    key: Tensor  # [B, G, K, D]
    value: Tensor  # [B, G, K, D]
    mask: Tensor  # [B, 1, 1, K] or [1, 1, 1, K], bool
    scale: float

    @property
    def device(self) -> torch.device:
        return self.query.device

    def check(self) -> None:
        """Raise unless the tensors fit."""
        (b, g, _, d), (keys, rows) = self.query.shape, (self.key.shape[2], self.mask.shape[0])
        _expect("key", self.key.shape, (b, g, keys, d))
        _expect("value", self.value.shape, (b, g, keys, d))
        _expect("mask", self.mask.shape, (1 if rows == 1 else b, 1, 1, keys))
        dtype = self.query.dtype
        dtypes = {"key": dtype, "value": dtype, "mask": torch.bool}
        for name, expected in dtypes.items():
            if (got := getattr(self, name).dtype) is not expected:
                raise WrongDtype(what=name, expected=expected, got=got)
        check_device("attention_rows", (self.key, self.value, self.mask), self.query)

    def result(self) -> Tensor:
        """Return memory for the result."""
        return torch.empty_like(self.query, memory_format=torch.contiguous_format)

    def empty(self) -> Tensor | None:
        return None if self.query.numel() and self.key.numel() else self.result().zero_()

    def kind(self) -> Hashable:
        laid_out = _laid_out(self.query, self.key, self.value, self.mask)
        return self.query.device, self.scale, laid_out


@dataclass(frozen=True)
class Requantize(Call):
    """One call as a kernel gets it: write a weight's values over its rows' scales into `out`.

    `out` is contiguous, in e4m3 or int8: [N, K], or [K, N] where `transposed`.
    """

    operands: Sequence[Tensor]
    fmt: QuantFormat
    scale: Tensor  # [N] in float32
    out: Tensor
    transposed: bool

    @property
    def device(self) -> torch.device:
        return self.out.device

    def kind(self) -> Hashable:
        alike = _alike(self.scale, *self.operands)
        return self.out.device, self.fmt, self.transposed, _laid_out(self.out), alike


@dataclass(frozen=True)
class DropoutProject(Call):
    """One call as a kernel gets it: write the projections of `x` under dropout into `out`.

    `out` [M, count * r + padding] has any row stride; the columns behind the projections become
    zero.
    """

    x: Tensor
    seeds: Tensor
    index: int
    a: Tensor
    count: int
    p: float
    out: Tensor

    @property
    def device(self) -> torch.device:
        return self.x.device

    def empty(self) -> Tensor | None:
        return None if self.out.numel() else self.out

    def kind(self) -> Hashable:
        layout = _laid_out(self.x, self.seeds, self.a, self.out)
        return self.x.device, self.index, self.count, self.p, layout

    def check(self) -> None:
        x, a, count = self.x, self.a, self.count
        if x.dim() != 2 or a.dim() != 2 or a.shape[1] != x.shape[1] or _rest(a, 0, count):
            operands = f"a [{count} * r, K] and x [M, K]"
            got = f"a {tuple(a.shape)} and x {tuple(x.shape)}"
            raise WrongShape(what="projection under dropout", expected=operands, got=got)
        check_dropped(x, a, self.seeds, self.index, self.p)
        rows, columns = self.out.shape
        if rows != self.x.shape[0] or columns < self.a.shape[0]:
            expected = (self.x.shape[0], f">= {self.a.shape[0]}")
            raise WrongShape(what="out", expected=expected, got=(rows, columns))
        if self.out.dtype != self.x.dtype:
            raise WrongDtype(what="out", expected=self.x.dtype, got=self.out.dtype)


@dataclass(frozen=True)
class DropoutGradA(Call):
    """One call as a kernel gets it: the arguments of `dropout_grad_a`, checked."""

    x: Tensor
    seeds: Tensor
    index: int
    grad: Tensor
    count: int
    p: float

    @property
    def device(self) -> torch.device:
        return self.x.device

    def empty(self) -> Tensor | None:
        return None if self.x.numel() else self.new().zero_()

    def kind(self) -> Hashable:
        layout = _laid_out(self.x, self.seeds, self.grad)
        return self.x.device, self.index, self.count, self.p, layout

    def new(self) -> Tensor:
        """Allocate the gradient of the adapters' A, [count * r, K]."""
        return self.x.new_empty((self.grad.shape[1], self.x.shape[1]))

    def check(self) -> None:
        x, grad = self.x, self.grad
        if x.dim() != 2 or grad.dim() != 2 or len(x) != len(grad) or _rest(grad, 1, self.count):
            expected = f"x [M, K] and a gradient [M, {self.count} * r]"
            got = f"x {tuple(x.shape)} and {tuple(grad.shape)}"
            raise WrongShape(what="gradient of projections", expected=expected, got=got)
        check_dropped(x, grad, self.seeds, self.index, self.p)


@dataclass(frozen=True)
class DropoutGradX(Call):
    """One call as a kernel gets it: the arguments of `dropout_grad_x`, checked."""

    a: Tensor
    seeds: Tensor
    index: int
    grad: Tensor
    count: int
    p: float

    @property
    def device(self) -> torch.device:
        return self.a.device

    def empty(self) -> Tensor | None:
        return None if self.grad.numel() and self.a.numel() else self.new().zero_()

    def kind(self) -> Hashable:
        layout = _laid_out(self.a, self.seeds, self.grad)
        return self.a.device, self.index, self.count, self.p, layout

    def new(self) -> Tensor:
        """Allocate the gradient of the input, [M, K]."""
        return self.a.new_empty((self.grad.shape[0], self.a.shape[1]))

    def check(self) -> None:
        a, grad = self.a, self.grad
        if a.dim() != 2 or grad.dim() != 2 or len(a) != grad.shape[1] or _rest(a, 0, self.count):
            expected = f"a [{self.count} * r, K] and a gradient [M, {self.count} * r]"
            got = f"a {tuple(a.shape)} and {tuple(grad.shape)}"
            raise WrongShape(what="gradient of projections", expected=expected, got=got)
        check_dropped(a, grad, self.seeds, self.index, self.p)


def _rest(adapters: Tensor, dim: int, count: int) -> int:
    """How many of the ranks are left over when `count` adapters share them."""
    return int(adapters.shape[dim] % max(count, 1))


def check_dropped(one: Tensor, other: Tensor, seeds: Tensor, index: int, p: float) -> None:
    """Raise unless two factors can be multiplied under a mask of dropout made from the seeds."""
    if one.dtype not in DTYPES or other.dtype != one.dtype:
        expected = f"factors of one dtype out of {DTYPES}"
        got = f"{other.dtype} and {one.dtype}"
        raise WrongDtype(what="product under dropout", expected=expected, got=got)
    if seeds.dtype is not torch.int64:
        raise WrongDtype(what="seeds", expected=torch.int64, got=seeds.dtype)
    if seeds.dim() != 1 or not 0 <= index < seeds.shape[0]:
        raise WrongShape(what="seeds", expected=f"({index + 1} or more,)", got=tuple(seeds.shape))
    if not 0 <= p < 1:
        raise WrongShape(what="share of dropped elements", expected="0 <= p < 1", got=p)
    check_device("product under dropout", [other, seeds], one)


def check_device(what: str, tensors: Sequence[Tensor], x: Tensor) -> None:
    """Raise unless `tensors` lie beside `x`: with one on "meta", torch would call the fake."""
    for tensor in tensors:
        if tensor.device != x.device:
            raise WrongDevice(what=what, expected=x.device, got=tensor.device)


def check_operands(
    operands: Sequence[Tensor], fmt: QuantFormat, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Raise unless `operands` can hold a weight of `shape` in format `fmt`."""
    if dtype not in DTYPES:
        raise WrongDtype(what="dequantized weight", expected=DTYPES, got=dtype)
    if len(operands) != len(fmt.operands):
        raise CorruptQuantState(
            what=f"number of operands of {fmt.name}",
            expected=f"{len(fmt.operands)} ({', '.join(fmt.operands)})",
            got=len(operands),
            remedy="Pass the operands in the order of FORMATS[format].operands.",
        )
    devices = {t.device for t in operands}
    if len(devices) > 1:
        raise CorruptQuantState(
            what=f"device of the operands of {fmt.name}",
            expected="one device",
            got=", ".join(
                f"{n} on {t.device}" for n, t in zip(fmt.operands, operands, strict=True)
            ),
            remedy="Move the quantization state with the weight: module.to(device).",
        )
    for operand, tensor in zip(fmt.requirements(shape), operands, strict=True):
        if operand.dtypes:
            _check_typed(operand, tensor)
        else:
            _check_bytes(operand, tensor, shape)


def _check_bytes(operand: Operand, tensor: Tensor, shape: Sequence[int]) -> None:
    packed = tensor.numel() * tensor.element_size()
    # A wider storage dtype may round the byte count up to its own size.
    if not operand.numel <= packed < operand.numel + tensor.element_size():
        raise CorruptQuantState(
            what="packed weight",
            expected=f"{operand.numel} bytes for shape {tuple(shape)}",
            got=f"{packed} bytes",
            remedy=_REMEDY,
        )


def _check_typed(operand: Operand, tensor: Tensor) -> None:
    if tensor.numel() != operand.numel:
        raise CorruptQuantState(
            what=f"number of elements of {operand.name}",
            expected=operand.numel,
            got=tensor.numel(),
            remedy=_REMEDY,
        )
    dtypes = tuple(getattr(torch, name) for name in operand.dtypes)
    if tensor.dtype in dtypes:
        return
    if operand.dtypes == FLOATS:
        raise WrongDtype(what=operand.name, expected=dtypes, got=tensor.dtype)
    raise CorruptQuantState(  # codes, or a scale that the format promises in one dtype
        what=f"dtype of {operand.name}",
        expected=" or ".join(map(str, dtypes)),
        got=tensor.dtype,
        remedy=_REMEDY,
    )
