"""The providers of scatter2scatter that end in torch's grouped GEMM: what each of them decodes."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q import kernels
from inductor_q.formats import FORMATS
from inductor_q.kernels import (
    expert_weights,
    scatter2scatter_dequantize,
    scatter2scatter_grouped_mm,
    scatter2scatter_reference,
)
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.dequantize import write
from inductor_q.kernels.expert_calls import Scatter2Scatter
from inductor_q.kernels.expert_weights import ExpertWeights
from inductor_q.kernels.provider import in_order, on_device
from inductor_q.log import warn_once
from tests.ops.test_scatter2scatter import SHAPES, check
from tests.support.gpu_experts import (
    assert_as_near_as_the_loop,
    assert_never_synchronizes_and_is_captured,
)
from tests.support.moe import Sizes, layer, results
from tests.support.processes import interpreted
from tests.support.quantized import assert_same_bits, sample

BF16 = torch.bfloat16
FEW = Sizes(experts=64, tokens=3)  # 6 rows
MANY = Sizes(experts=4, tokens=12)  # 24 rows
KERNELS = (
    scatter2scatter_reference.KERNEL,
    scatter2scatter_grouped_mm.KERNEL,
    scatter2scatter_dequantize.KERNEL,
)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that are launched, in order."""
    names: list[str] = []
    for kernel in KERNELS:

        def run(
            call: Scatter2Scatter, kernel: Any = kernel, original: Any = kernel.run
        ) -> tuple[Tensor, Tensor]:
            names.append(kernel.name)
            result: tuple[Tensor, Tensor] = original(call)
            return result

        monkeypatch.setattr(kernel, "run", run, raising=False)
    yield names


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many bytes of weights are written, call by call."""
    written: list[int] = []

    def count(operands: Any, fmt: Any, out: Tensor) -> None:
        written.append(out.nbytes)
        write(operands, fmt, out)

    monkeypatch.setattr(expert_weights, "write", count)
    yield written


# --- some experts of a stack --------------------------------------------------------------------

#: Rows and columns of an expert, by what it is to blocks of 64 and to their nested blocks of 256.
EXPERTS = {
    "whole nested blocks": (128, 128),
    "whole blocks": (48, 64),
    "blocks span experts": (33, 17),
}


@pytest.mark.parametrize("name", FORMATS)
def test_some_experts_are_a_slice_of_all(name: str, decoded: list[int]) -> None:
    for rows, cols in EXPERTS.values():
        shape = (5, rows, cols)
        operands, _ = sample(FORMATS[name], shape)
        weights = ExpertWeights(operands, FORMATS[name], shape, BF16)
        some, whole = torch.tensor([4, 0, 3]), weights.all()
        decoded.clear()
        assert_same_bits(weights.some(some), whole[some])
        aligned = rows * cols % FORMATS[name].plain.period(cols) == 0
        assert decoded == [(3 if aligned else 5) * rows * cols * 2]


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32], ids=str)
def test_some_experts_of_any_storage(storage: torch.dtype) -> None:
    shape, fmt = (5, 48, 64), FORMATS["nf4_b64_nested"]
    operands, _ = sample(fmt, shape, storage=storage)
    weights = ExpertWeights(operands, fmt, shape, BF16)
    some = torch.tensor([1, 4])
    assert_same_bits(weights.some(some), weights.all()[some])


def test_some_dense_experts_are_picked_before_they_are_cast() -> None:
    weight, some = torch.randn(5, 3, 4), torch.tensor([4, 1])
    got = ExpertWeights([weight], None, weight.shape, BF16).some(some)
    assert_same_bits(got, weight[some].to(BF16))


#: Where experts are written: ends of longer rows, or of longer experts.
PLACES = {"rows": (5, 48, 72), "experts": (5, 56, 64), "whole": (5, 48, 64)}


WRITTEN = (
    *("nf4_b64_nested", "nf4_b4096", "kbit3_e4m4", "nvfp4", "int4_g128", "fp8_e4m3_row", DENSE),
    *("mxfp4", "nvfp4_rows", "fp8_e4m3_128x128"),
)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (name, place)
        for name, place in itertools.product(WRITTEN, PLACES)
        if place != "experts" or name == DENSE or not FORMATS[name].by_rows
    ],
)
def test_experts_are_written_where_they_are_told(name: str, place: str) -> None:
    shape, some = (5, 48, 64), torch.tensor([3, 0])
    fmt = None if name == DENSE else FORMATS[name]
    operands = [torch.randn(shape)] if fmt is None else sample(fmt, shape)[0]
    weights = ExpertWeights(operands, fmt, shape, BF16)
    for experts, write_into in ((5, weights.all), (2, lambda out: weights.some(some, out))):
        around = torch.full((experts, *PLACES[place][1:]), 7.0, dtype=BF16)
        inside = around[:, :48, :64]
        assert write_into(inside) is inside
        assert_same_bits(inside, weights.all()[some] if experts == 2 else weights.all())
        assert (around[:, 48:] == 7).all() and (around[:, :, 64:] == 7).all()


# --- dequantize ---------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["reference", "dequantize"])
@pytest.mark.parametrize(
    "name", ["mxfp4", "nvfp4_rows", "nvfp4_divided_rows", "fp8_e4m3_128x128", "int4_g32"]
)
def test_formats_of_checkpoints(name: str, provider: str, served: list[str]) -> None:
    """Forward and every gradient, with fewer rows than experts (of which some are decoded)."""
    form: dict[str, Any] = {"dtype": BF16, "quant": name, "bias": True, "sentinel": -1}
    for tokens in (3, 40):
        sizes = Sizes(experts=12, in_features=256, out_features=128, tokens=tokens)
        cases = [layer(sizes, seed=seed, grouped=(False, True), **form) for seed in range(3)]
        assert_as_near_as_the_loop(cases, provider)
    assert set(served) == {provider}


STACKS: dict[str, dict[str, Any]] = {
    "nf4": {},
    "fp4, plain": {"quant": "fp4", "nested": False},
    "transposed": {"transposed": True},
    "bias, gates": {"bias": True, "gates": True, "sentinel": -1},
    "no adapter": {"lora": False},
}


@pytest.mark.parametrize("stack", STACKS)
def test_no_more_experts_than_rows_are_decoded(
    stack: str, decoded: list[int], served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, provider = layer(FEW, dtype=BF16, **STACKS[stack]), "dequantize"
    bounded = results(case, case(provider=provider))
    expert = math.prod(case.shape[1:]) * 2
    assert decoded == [6 * expert] * 2  # forward, input gradient
    assert served == [provider] * 2
    decoded.clear()
    monkeypatch.setattr(scatter2scatter_dequantize, "fewer_experts", lambda call: None)
    everything = results(case, case(provider=provider))
    assert decoded == [64 * expert] * 2
    for name, value in everything.items():
        assert_same_bits(bounded[name], value)


@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("rank", [3, 8, 70])
def test_the_adapter_rides_in_the_product(
    rank: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products: rows through A, and the wider one, of rows that start at lines of the cache."""
    case = layer(replace(MANY, rank=rank), dtype=BF16, transposed=transposed)
    products: list[tuple[int, int]] = []
    original = torch._grouped_mm

    def grouped_mm(x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        assert x.stride(0) % 64 == 0
        products.append((weight.shape[1], weight.shape[2]))
        return original(x, weight, **kwargs)

    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm)
    case(provider="dequantize")
    aligned = -(-rank // 8) * 8
    assert products == [(64, aligned), (64 + aligned, 48)]


def test_all_experts_are_decoded_at_once_for_many_rows(decoded: list[int]) -> None:
    case = layer(MANY, dtype=BF16)
    case(provider="dequantize")
    assert decoded == [math.prod(case.shape) * 2]


def test_qwen3_5_decodes_a_32nd_for_one_token(decoded: list[int]) -> None:
    """256 experts, 8 of them for a token; features an eighth of the model's."""
    case = layer(Sizes(256, 256, 64, 1, 8, 4), dtype=BF16)
    with torch.no_grad():
        case(provider="dequantize")
    assert decoded == [math.prod(case.shape) * 2 // 32]


def test_a_block_over_two_experts_decodes_all(decoded: list[int]) -> None:
    sizes = replace(FEW, in_features=8, out_features=24)  # 192 elements, blocks of 128
    check(sizes, dtype=BF16, blocksize=128)
    case = layer(sizes, dtype=BF16, blocksize=128)
    decoded.clear()
    got = results(case, case(provider="dequantize"))
    assert decoded == [math.prod(case.shape) * 2] * 2
    for name, value in results(case, case.loop()).items():
        torch.testing.assert_close(got[name], value, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few rows", "many rows"])
def test_a_dense_weight_in_another_dtype_is_cast(sizes: Sizes, served: list[str]) -> None:
    case = layer(sizes, dtype=BF16, quant=DENSE, lora=False)
    wide = replace(case, operands=[case.operands[0].detach().float()])
    expected, got = case(provider="grouped_mm"), wide(provider="dequantize")
    assert served == ["grouped_mm", "dequantize"]
    assert_same_bits(got.detach(), expected.detach())


# --- grouped_mm ---------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
def test_a_dense_weight_is_read_where_it_lies(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = layer(FEW, dtype=BF16, quant=DENSE, transposed=transposed, lora=False)
    read: list[int] = []
    original = torch._grouped_mm

    def grouped_mm(x: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        read.append(weight.data_ptr())
        return original(x, weight, **kwargs)

    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm)
    y = case(provider="grouped_mm")
    torch.autograd.grad(y.sum(), case.x)
    assert read == [case.operands[0].data_ptr()] * 2


@pytest.mark.parametrize("provider", ["grouped_mm", "dequantize"])
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few rows", "many rows"])
def test_dense_experts(sizes: Sizes, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = layer(sizes, dtype=BF16, quant=DENSE)
    for device in ("cpu", "cuda"):
        listed = on_device(kernels.PROVIDERS["scatter2scatter"], device)
        found = in_order(listed, {}, case.call(), provider)
        reason = "nothing to decode" if provider == "dequantize" else ""
        assert found[0].name == provider
        assert reason in found[0].refuses(case.call())
    monkeypatch.setitem(kernels.PROVIDERS["scatter2scatter"], "cpu", KERNELS[1:])
    check(sizes, quant=DENSE, dtype=BF16, bias=True, gates=True, sentinel=-1)


def test_each_says_what_it_is_not_for(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    packed = layer(MANY, dtype=BF16)
    grouped_mm, dequantize = KERNELS[1:3]
    assert "nf4_b64_nested, not dense" in grouped_mm.refuses(packed.call())
    assert "bfloat16" in dequantize.refuses(layer(MANY).call())
    odd = layer(replace(MANY, in_features=60), dtype=BF16)
    assert "multiples of 8" in dequantize.refuses(odd.call())
    with caplog.at_level(logging.WARNING, "inductor_q"):
        packed(provider="grouped_mm")
    assert "'grouped_mm' is not used: the weight is nf4_b64_nested" in caplog.text


def test_a_kernel_for_other_formats_is_no_news(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, served: list[str]
) -> None:
    warn_once.cache_clear()
    monkeypatch.setitem(kernels.PROVIDERS["scatter2scatter"], "cpu", KERNELS[1:])
    with caplog.at_level(logging.WARNING, "inductor_q"):
        layer(MANY, dtype=BF16)()
    assert served == ["dequantize"] and not caplog.text


# --- rows ---------------------------------------------------------------------------------------


def test_rows_in_the_interpreter() -> None:
    """Real kernels, on CPU tensors."""
    assert interpreted("interpret_expert_rows") == [12]


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("case", ["dequantize", "grouped_mm"])
def test_gpu_in_a_captured_graph(case: str, sizes: Sizes) -> None:
    """So it never waits for the device."""
    quant = DENSE if case == "grouped_mm" else "nf4"
    fit = replace(sizes, in_features=128, out_features=128)
    one = layer(fit, quant=quant, dtype=BF16, device="cuda", bias=True, gates=True, sentinel=-1)
    with torch.no_grad():
        torch.testing.assert_close(one(provider=case), one.loop(), rtol=0.05, atol=0.05)
    assert_never_synchronizes_and_is_captured(one, case)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("grouped", [(False, True), (True, False)], ids=str)
@pytest.mark.parametrize("sizes", [FEW, MANY, SHAPES["medium"]], ids=["few", "many", "medium"])
@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda kernel: kernel.name)
def test_gpu_is_as_near_as_the_loop(
    kernel: Any,
    sizes: Sizes,
    grouped: tuple[bool, bool],
    transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(kernels.PROVIDERS["scatter2scatter"], "cuda", (kernel, *KERNELS[1:]))
    quant = DENSE if kernel.name == "grouped_mm" else "nf4"
    layout: Any = {"transposed": transposed, "grouped": grouped, "sentinel": -1}
    # Six rows a layer are few for a mean: 16 layers.
    check(sizes, quant=quant, dtype=BF16, device="cuda", gates=True, seeds=16, **layout)
