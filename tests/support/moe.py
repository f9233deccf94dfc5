"""Make mixture-of-experts layers for tests: seeded inputs, and a loop over slots as the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from inductor_q import ops
from inductor_q.formats import FORMATS
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.dispatch import preferring
from inductor_q.kernels.expert_calls import GroupedGram, Scatter2Scatter
from inductor_q.kernels.provider import Provider
from inductor_q.ops.routing import Routing, route
from tests.support.quantized import quantize, random_weight

#: Names of what takes a gradient, in the order of `Layer.leaves`.
LEAVES = ("x", "lora_a", "lora_b", "bias", "gates", "weight")

#: Each pair says whether rows come in grouped, and whether they go out so.
GROUPED = ((False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True)
class Sizes:
    experts: int = 5
    in_features: int = 64
    out_features: int = 48
    tokens: int = 9
    top_k: int = 2
    rank: int = 4


@dataclass(frozen=True)
class Layer:
    """Hold one call of `scatter2scatter`."""

    x: Tensor
    operands: list[Tensor]
    format: str
    shape: list[int]
    routing: Routing
    transposed: bool
    grouped_in: bool
    grouped_out: bool
    lora_a: Tensor | None
    lora_b: Tensor | None
    bias: Tensor | None
    gates: Tensor | None
    scaling: float = 0.75

    @property
    def leaves(self) -> dict[str, Tensor]:
        weight = self.operands[0] if self.format == DENSE else None
        values = (self.x, self.lora_a, self.lora_b, self.bias, self.gates, weight)
        return {n: v for n, v in zip(LEAVES, values, strict=True) if v is not None}

    def __call__(self, provider: str = "auto", **kwargs: Any) -> Tensor:
        if provider != "auto":
            with preferring("scatter2scatter", provider):
                return self(**kwargs)
        return ops.scatter2scatter(
            self.x,
            self.operands,
            self.format,
            self.shape,
            self.routing,
            transposed=self.transposed,
            grouped_in=self.grouped_in,
            grouped_out=self.grouped_out,
            lora_a=self.lora_a,
            lora_b=self.lora_b,
            scaling=self.scaling,
            bias=self.bias,
            gates=self.gates,
            **kwargs,
        )

    def call(self, **changes: Any) -> Scatter2Scatter:
        """Return the call as a kernel gets it."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own |= {"shape": tuple(self.shape), **own.pop("routing")._asdict()}
        return Scatter2Scatter(**{**own, **changes})

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return [E, N, K] in `dtype`, with a gradient where it is dense."""
        values = (
            self.operands[0]
            if self.format == DENSE
            else ops.dequantize(self.operands, self.format, self.shape, torch.float32)
        ).to(dtype)
        return values.transpose(1, 2) if self.transposed else values

    def loop(self) -> Tensor:
        """Compute the same in plain torch, an expert at a time, in the dtype of x."""
        routing, weight = self.routing, self.weight(self.x.dtype)
        offsets, k = routing.offsets.tolist(), routing.top_k
        tokens = routing.order.shape[0] // k
        x = self.x if self.grouped_in else self.x[routing.order // k]
        rows = []
        for e in range(len(offsets) - 1):
            part = x[offsets[e] : offsets[e + 1]]
            y = part @ weight[e].t()
            if self.lora_a is not None and self.lora_b is not None:
                a, b = self.lora_a[e].to(x.dtype), self.lora_b[e].to(x.dtype)
                y = y + (part @ a.t()) @ b.t() * self.scaling
            if self.bias is not None:
                y = y + self.bias[e].to(y.dtype)
            rows.append(y)
        nobody = x.new_zeros(x.shape[0] - offsets[-1], weight.shape[1])
        y = torch.cat([*rows, nobody])
        if self.gates is not None:
            y = (y * self.gates.reshape(-1, 1)[routing.order]).to(x.dtype)
        if self.grouped_out:
            return y
        return y[routing.inverse].reshape(tokens, k, -1).sum(1)

    def exact(self, dtype: torch.dtype) -> Layer:
        """Return the same layer in a wider dtype, with leaves of its own."""

        def to(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(dtype).requires_grad_()

        operands = self.operands
        if self.format == DENSE:
            operands = [operands[0].detach().to(dtype).requires_grad_()]
        x = to(self.x)
        assert x is not None
        return replace(
            self,
            x=x,
            operands=operands,
            lora_a=to(self.lora_a),
            lora_b=to(self.lora_b),
            bias=to(self.bias),
            gates=to(self.gates),
        )

    def double(self) -> Layer:
        return self.exact(torch.float64)


def choices(sizes: Sizes, seed: int = 0, sentinel: int | None = None) -> Tensor:
    """Choose [tokens, top_k] different experts.

    The last expert is nobody's choice, and every third token's first choice is `sentinel`.
    """
    generator = torch.Generator().manual_seed(seed)
    most = max(sizes.top_k, sizes.experts - 1)
    ids = torch.rand(sizes.tokens, most, generator=generator).argsort(-1)[:, : sizes.top_k]
    if sentinel is not None:
        ids[::3, 0] = sentinel
    return ids


def layer(
    sizes: Sizes = Sizes(),
    *,
    quant: str = "nf4",
    nested: bool = True,
    blocksize: int = 64,
    dtype: torch.dtype = torch.float32,
    adapter: torch.dtype | None = None,
    lora: bool = True,
    bias: bool = False,
    gates: bool = False,
    transposed: bool = False,
    grouped: Sequence[bool] = (False, False),
    sentinel: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Layer:
    """Make a seeded layer; B is not zero, so every gradient is alive. `quant` may be "dense", or a
    name in FORMATS.
    """
    e, k, n, r = sizes.experts, sizes.in_features, sizes.out_features, sizes.rank
    generator = torch.Generator().manual_seed(seed)

    def leaf(shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * scale
        return value.to(device, dtype).requires_grad_()

    shape = [e, k, n] if transposed else [e, n, k]
    if quant == DENSE:
        operands, name = [leaf(shape, dtype, k**-0.5)], DENSE
    elif quant in FORMATS:
        operands, name = [t.to(device) for t in random_weight(quant, shape, seed)], quant
    else:
        packed = quantize(
            shape, quant, blocksize=blocksize, nested=nested, dtype=dtype, device=device, seed=seed
        )
        operands, name, _ = packed.operands
    ids = choices(sizes, seed, sentinel).to(device)
    rows = sizes.tokens * sizes.top_k if grouped[0] else sizes.tokens
    adapter = adapter or dtype
    return Layer(
        x=leaf((rows, k), dtype),
        operands=operands,
        format=name,
        shape=shape,
        routing=route(ids, e),
        transposed=transposed,
        grouped_in=grouped[0],
        grouped_out=grouped[1],
        lora_a=leaf((e, r, k), adapter, k**-0.5) if lora else None,
        lora_b=leaf((e, n, r), adapter, 0.1) if lora else None,
        bias=leaf((e, n), dtype) if bias else None,
        gates=leaf((sizes.tokens, sizes.top_k), torch.float32) if gates else None,
    )


def cotangent(y: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)


def results(case: Layer, y: Tensor, grad: Tensor | None = None) -> dict[str, Tensor]:
    """Return the output and every gradient, from a fixed cotangent unless there is another."""
    grad = cotangent(y) if grad is None else grad
    grads = torch.autograd.grad(y, [*case.leaves.values()], grad)
    return {"y": y.detach(), **dict(zip(case.leaves, grads, strict=True))}


def gram(case: Layer, left: int, right: int, grouped: tuple[bool, bool]) -> GroupedGram:
    """Make a gram over the rows of `case`, from seeded matrices of those widths in its dtype."""
    order, _, offsets, _, top_k = case.routing
    generator = torch.Generator().manual_seed(0)

    def side(columns: int, is_grouped: bool) -> Tensor:
        rows = len(order) if is_grouped else len(order) // top_k
        return torch.randn(rows, columns, generator=generator).to(case.x)

    sides = side(left, grouped[0]), side(right, grouped[1])
    return GroupedGram(*sides, order, offsets, top_k, *grouped, case.x.dtype)


def alone(call: GroupedGram, expert: int) -> GroupedGram:
    """Copy one expert's rows out of both sides, as if there were no others."""
    rows = slice(*call.offsets[expert : expert + 2].tolist())
    left, right = (
        side[rows] if grouped else side[call.order[rows] // call.top_k]
        for side, grouped in ((call.left, call.grouped_left), (call.right, call.grouped_right))
    )
    order = torch.arange(len(left), device=left.device)
    offsets = call.offsets.new_tensor([0, len(left)])
    return GroupedGram(left.clone(), right.clone(), order, offsets, 1, True, True, call.dtype)


def assert_experts_alone_have_the_same_gram(
    kernel: Provider[GroupedGram], call: GroupedGram
) -> None:
    """Assert bit by bit that grouping adds no term and changes no order; without rows, zeros."""
    together = kernel.run(call)
    assert (call.offsets.diff() == 0).any() and together.any()
    for expert, own in enumerate(together):
        assert torch.equal(kernel.run(alone(call, expert))[0], own), expert
