"""Weights that are stored in eight bits, with a scale for each row: multiplied as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.kernels import rounding
from inductor_q.passes import quantize_products
from inductor_q.passes.graph import CLONE
from tests.support.compiling import Compiled, compile_step, no_codegen, partition, step
from tests.support.thresholds import ANY_PRODUCT
from tests.support.torchao_weights import CONFIGS, Adapted, linear

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
N, K = 128, 256
OPTIONS: dict[str, Any] = {
    "qfuse.compute": "fp8",
    "qfuse.thresholds": ANY_PRODUCT,
}


def weight_in(format: str) -> list[Tensor]:
    """Make codes and scales of rows. No code is the largest that there is, so that a cast with
    another scale would round them; one scale is zero, and one is negative."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(N, K, generator=generator) * 2 - 1
    scale = torch.rand(N, generator=generator) + 0.5
    scale[3], scale[5] = 0, -scale[5]
    codes = (numbers * 100).to(torch.int8 if format == "int8_absmax" else FP8)
    scale = scale[:1] if format.endswith("tensor") else scale
    return [codes, scale * (0.001 if codes.dtype is FP8 else 0.1)]


class Between(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.layer = Adapted(linear(CONFIGS[case][0], N, K), N, K)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(x)))


def tokens() -> Tensor:
    x = torch.randn(32, K, generator=torch.Generator().manual_seed(3)).to(BF16)
    return x.requires_grad_()


def compiled(
    block: nn.Module, x: Tensor, compute: str = "fp8", *, codegen: bool = False
) -> Compiled:
    context = None if codegen else no_codegen()
    options = {**OPTIONS, "qfuse.compute": compute}
    return compile_step(block, x, module=block, options=options, context=context)


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("codegen", [False, True], ids=["graph", "code"])
@pytest.mark.parametrize("case", ["float8 row", "float8 tensor"])
def test_nothing_is_decoded(case: str, codegen: bool) -> None:
    block, x = Between(case), tokens()
    outcome = compiled(block, x, codegen=codegen)
    assert outcome.report.in_eight_bits() == (2, 2)
    for op in ("row_amax", "requantize", "dequantize"):
        assert outcome.ops[f"qfuse.{op}"] == 0
    assert outcome.ops["qfuse.row_scale"] == 1, "forward's, which backward reads"
    (joint,) = outcome.joint
    copies = joint.find_nodes(op="call_function", target=CLONE)
    (turned,) = [n for n in copies if n.meta["val"].dtype is FP8]  # for the gradient alone
    assert turned.meta["val"].shape == (K, N)


#: Format and compute of operands, and whether their codes are bytes in one row: torchao holds e4m3
#: as it is, `load_checkpoint` as such bytes, bitsandbytes int8 as it is.
STORED = {
    "fp8": ("fp8_e4m3_row", "fp8", False),
    "fp8 flat bytes": ("fp8_e4m3_row", "fp8", True),
    "fp8 tensor": ("fp8_e4m3_tensor", "fp8", False),
    "int8": ("int8_absmax", "int8", False),
    "int8 flat bytes": ("int8_absmax", "int8", True),
}


class Plain(nn.Module):
    """A layer of codes and scales; the codes may be bytes in one row, as a checkpoint's are."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.format, _, flat = STORED[case]
        codes, scale = weight_in(self.format)
        codes = codes.view(torch.uint8).flatten() if flat else codes
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        operands: Any = [self.codes, self.scale]
        return torch.tanh(ops.linear(torch.tanh(x), operands, self.format, (N, K)))


@pytest.mark.parametrize("codegen", [False, True], ids=["graph", "code"])
@pytest.mark.parametrize("case", STORED)
def test_codes_of_any_shape_are_not_decoded(case: str, codegen: bool) -> None:
    outcome = compiled(Plain(case), tokens(), STORED[case][1], codegen=codegen)
    assert outcome.report.in_eight_bits() == (2, 2)
    for op in ("row_amax", "requantize", "dequantize"):
        assert outcome.ops[f"qfuse.{op}"] == 0
    assert outcome.ops["qfuse.row_scale"] == 1, "forward's, which backward reads"
    if STORED[case][2]:
        shaped = compiled(Plain(case.split()[0]), tokens(), STORED[case][1], codegen=codegen)
        assert torch.equal(outcome.output, shaped.output)
        assert torch.equal(outcome.gradients["x0"], shaped.gradients["x0"])


class Emulated(torch.autograd.Function):
    """The product of numbers that are cast, and of the weight's own codes, without a cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        codes, of_x = rounding.cast_rows(x, weight.dtype)
        values = weight.double() * scale.double()[:, None]
        return ((codes.double() * of_x) @ values.t()).to(BF16)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight, scale = ctx.saved_tensors
        codes, of_g = rounding.cast_rows(grads[0], weight.dtype, scale)
        return ((codes.double() * of_g) @ weight.double()).to(BF16), None, None


@pytest.mark.parametrize("case", STORED)
def test_the_weight_adds_no_error(case: str) -> None:
    """What is left are roundings to bfloat16: 2^-9 of each number, in a chain of a few. A cast of
    an e4m3 weight with other scales would be an error of 2^-5, and one of int8 a 200th of the norm
    in forward; the scale of a row may be zero or negative. A gradient that is rounded elsewhere,
    as in torch 2.11, is cast to the next code now and then."""
    outcome = compiled(Plain(case), tokens(), STORED[case][1])
    codes, scale = weight_in(STORED[case][0])
    scale = (scale / 127 if codes.dtype is torch.int8 else scale).expand(N)
    multiply: Any = Emulated.apply
    output, gradients = step(lambda x: torch.tanh(multiply(torch.tanh(x), codes, scale)), tokens())
    assert error(outcome.output, output) < 2**-8
    bound = 2**-6 if str(torch.__version__).startswith("2.11") else 2**-7
    assert error(outcome.gradients["x0"], gradients["x0"]) < bound


@pytest.mark.parametrize("flat", [False, True], ids=["matrix", "flat bytes"])
def test_nothing_of_it_is_kept(flat: bool) -> None:
    """Backward gets the weight as it is stored, and copies it there."""
    block = Plain("fp8 flat bytes") if flat else Between("float8 row")

    def run(call: Any) -> None:
        call(tokens()).sum().backward()

    forward, backward = partition(run, block, OPTIONS)
    copies = [
        node.meta["val"].dtype
        for graph in (forward, backward)
        for node in graph.find_nodes(op="call_function", target=CLONE)
    ]
    assert copies.count(FP8) == 1
    given = [n.meta["val"] for n in backward.find_nodes(op="placeholder")]
    kept = [tuple(v.shape) for v in given if v.element_size() == 1]
    assert kept == [(N * K,) if flat else (N, K)]
    assert all(v.dtype is (torch.uint8 if flat else FP8) for v in given if v.element_size() == 1)
    assert all(v.numel() <= N for v in given if v.dtype is torch.float32)


@pytest.mark.parametrize(
    ("case", "compute"), [("float8 e5m2", "fp8"), ("float8 row", "int8"), ("int8 row", "fp8")]
)
def test_other_numbers_are_decoded(case: str, compute: str) -> None:
    outcome = compiled(Between(case), tokens(), compute)
    assert outcome.report.in_eight_bits() == (2, 2)
    assert (outcome.ops["qfuse.requantize"], outcome.ops["qfuse.row_scale"]) == (2, 0)


def test_rows_of_zeros() -> None:
    """Their scale may be zero: what is stored is never divided by it."""
    block, x = Between("float8 row"), tokens()
    weight: Any = block.layer.base.weight
    with torch.no_grad():
        weight.qdata[3], weight.scale[3] = 0, 0
    outcome = compiled(block, x)
    assert outcome.output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in outcome.gradients.values())


class Rotating(nn.Module):
    """A weight that every forward exchanges for another one after reading it."""

    codes: Tensor
    scale: Tensor

    def __init__(self, format: str) -> None:
        super().__init__()
        self.format = format
        for name, operand in zip(("codes", "scale"), weight_in(format), strict=True):
            self.register_buffer(name, operand)

    def forward(self, x: Tensor) -> Tensor:
        weight = ops.dequantize([self.codes, self.scale], self.format, (N, K), BF16)
        y = torch.tanh(torch.tanh(x) @ weight.t())
        self.codes.copy_(self.codes.flip(0))
        return y


@pytest.mark.parametrize(
    ("format", "compute"),
    [("fp8_e4m3_row", "fp8"), ("int8_absmax", "int8"), ("int8_absmax", "fp8")],
)
def test_a_weight_that_forward_writes_to_stays_in_16_bits(format: str, compute: str) -> None:
    """Stored or decoded: backward would read what is in it by then."""
    output, gradients = step(Rotating(format), tokens())
    outcome = compiled(Rotating(format), tokens(), compute)
    assert outcome.reasons["quantize_products"] == {quantize_products.WRITTEN: 2}
    assert error(outcome.output, output) < 2**-7
    assert error(outcome.gradients["x0"], gradients["x0"]) < 2**-7
