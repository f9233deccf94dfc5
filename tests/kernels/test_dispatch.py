"""A provider is chosen, and what it launches is planned, once for all calls of a kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q import kernels
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.kernels import dispatch, scatter2scatter_cuda, scatter2scatter_reference
from inductor_q.kernels.calls import Call, Requantize
from inductor_q.kernels.dispatch import preferring, serve, serve_kind
from inductor_q.kernels.dropout_calls import DropoutGradA, DropoutGradX, DropoutProject
from inductor_q.kernels.expert_calls import (
    ARGUMENTS,
    GroupedGram,
    Scatter2Scatter,
    TileMap,
    unchecked,
)
from inductor_q.kernels.rows_calls import Adapter
from tests.support.few_rows import made
from tests.support.moe import Layer, layer
from tests.support.quantized import sample
from tests.support.tile_cases import BF16, FIT


def calls() -> list[Call]:
    matrix, seeds = torch.randn(32, 64), torch.zeros(3, dtype=torch.int64)
    routing = layer().routing
    left = torch.randn(len(routing.order), 16)
    case = layer(dtype=BF16, bias=True, gates=True, sentinel=-1)
    packed, absmax = sample(fmt := FORMATS["nf4_b64"], (16, 64))[0]
    wide = torch.empty(16, 64, dtype=torch.int8)
    return [
        case.call(),
        layer(quant="dense", lora=False).call(),
        DropoutProject(matrix, seeds, 1, torch.randn(16, 64), 2, 0.5, torch.empty(32, 24)),
        DropoutGradA(matrix, seeds, 1, torch.randn(32, 16), 2, 0.5),
        DropoutGradX(matrix, seeds, 1, torch.randn(64, 16), 2, 0.5),
        TileMap(routing.offsets, len(routing.order)),
        GroupedGram(left, left, routing.order, routing.offsets, 2, True, True, torch.float32),
        Requantize([packed, absmax], fmt, torch.ones(16), wide, False),
        made(fmt, (40, 320), 2, BF16, bias=True, ranks=(8, 8))[0],
    ]


def like(tensor: Tensor, *, dtype: torch.dtype | None = None, start: int = 0) -> Tensor:
    """Make a tensor of the same layout, `start` elements behind a multiple of 16 bytes."""
    memory = torch.zeros(64 + 2 * tensor.numel(), dtype=dtype or tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), start)


def others(value: Any) -> Iterator[Any]:
    """Change an argument in each way that a provider may go by."""
    if isinstance(value, Tensor):
        yield like(value, dtype=torch.float64)
        yield like(value, start=1)
        if value.numel() > 1:  # one element alone is contiguous
            yield torch.stack([value, value], -1)[..., 0]
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in others(item))
    elif isinstance(value, Adapter):
        yield None
        for f in fields(value):
            yield from (replace(value, **{f.name: o}) for o in others(getattr(value, f.name)))
    elif isinstance(value, QuantFormat):
        yield FORMATS["fp4_b64"]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, str):
        yield value + "_nested"
    elif isinstance(value, tuple):
        yield (*value[:-1], value[-1] + 64)
    elif isinstance(value, torch.dtype):
        yield torch.float64
    else:
        assert value is None
        yield torch.zeros(3, 4)


def on(call: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change all of the call's tensors."""

    def changed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(changed(item) for item in value)
        if isinstance(value, Adapter):
            return on(value, change)
        return change(value) if isinstance(value, Tensor) else value

    return replace(call, **{f.name: changed(getattr(call, f.name)) for f in fields(call)})


@pytest.mark.parametrize("call", calls(), ids=lambda call: type(call).__name__)
def test_a_kind_is_all_that_a_provider_may_go_by(call: Any) -> None:
    """Whatever of the call changes, but values and the scale of an adapter."""
    assert on(call, like).kind() == call.kind() != on(call, lambda t: t.to("meta")).kind()
    for field in fields(call):
        for other in others(getattr(call, field.name)):
            alike = replace(call, **{field.name: other}).kind() == call.kind()
            assert alike == (field.name == "scaling"), (field.name, other)


def test_unchecked_is_the_call_of_its_arguments() -> None:
    call: Any = layer(dtype=BF16).call()
    made = unchecked([getattr(call, name) for name in ARGUMENTS])
    assert vars(made) == vars(call) and type(made) is type(call)
    assert unchecked([list(call.shape) if n == "shape" else None for n in ARGUMENTS]).shape


class Picky(scatter2scatter_reference.Reference):
    """Serve few rows in bfloat16, of contiguous and aligned experts; count questions and calls."""

    name = "picky"

    def __init__(self) -> None:
        self.asked = self.served = 0

    def refuses(self, call: Scatter2Scatter) -> str:
        self.asked += 1
        first = call.operands[0]
        fits = first.is_contiguous() and first.data_ptr() % 16 == 0 and call.x.dtype is BF16
        return "" if fits and call.rows < 20 else "it does not fit"

    def run(self, call: Scatter2Scatter) -> tuple[Tensor, Tensor]:
        self.served += 1
        return super().run(call)


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Picky:
    provider = Picky()
    listed = (provider, scatter2scatter_reference.KERNEL)
    monkeypatch.setitem(kernels.PROVIDERS["scatter2scatter"], "cpu", listed)
    return provider


def test_a_provider_is_asked_once_about_calls_of_a_kind(picky: Picky, told: list[str]) -> None:
    case = layer(dtype=BF16)
    for count in range(1, 4):
        serve("scatter2scatter", on(case.call(), Tensor.clone))
        assert (picky.asked, picky.served) == (1, count)
    first, *others_ = case.operands
    for refused in (like(first, start=1), torch.stack([first, first], -1)[..., 0]):
        asked = picky.asked
        for _ in range(2):
            serve("scatter2scatter", replace(case.call(), operands=[refused, *others_]))
        assert (picky.asked, picky.served) == (asked + 1, 3)
    serve("scatter2scatter", layer(replace(FIT, tokens=40), dtype=BF16).call())
    serve("scatter2scatter", layer().call())
    assert picky.served == 3 and len(told) <= 1  # the same reason is told once
    serve("scatter2scatter", case.call())
    assert picky.served == 4


def test_a_preference_has_a_choice_of_its_own(picky: Picky) -> None:
    call = layer(dtype=BF16).call()
    for _ in range(2):
        serve("scatter2scatter", call)
        with preferring("scatter2scatter", "reference"):
            serve("scatter2scatter", call)
        serve("scatter2scatter", call, "reference")
    assert (picky.asked, picky.served) == (1, 2)
    dispatch.forget()
    serve("scatter2scatter", call)
    assert picky.asked == 2


def test_no_more_kinds_are_kept_than_said(picky: Picky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "KEPT", 2)
    cases = [layer(replace(FIT, tokens=tokens), dtype=BF16) for tokens in (3, 4, 5, 3)]
    for case in cases:
        serve("scatter2scatter", case.call())
        assert len(dispatch._PLANS) <= 2
    assert picky.asked == picky.served == 4
    monkeypatch.setattr(Scatter2Scatter, "kind", lambda _: None)
    for _ in range(2):
        serve("scatter2scatter", cases[0].call())
    assert picky.asked == 6  # it is not known what such calls share


class Somewhere:
    """A tensor as far as it is not known when code is generated."""

    def __init__(self, address: int, device: int) -> None:
        self.data_ptr, self.get_device = (lambda: address), (lambda: device)


def test_a_kind_that_generated_code_knows_has_a_plan(
    picky: Picky, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for each kind, device and preference; calls that are not aligned are asked about."""
    monkeypatch.setattr(Scatter2Scatter, "kind", lambda _: None)  # each plan is asked for anew
    call = layer(dtype=BF16).call()

    def served(kind: str, address: int = 32, device: int = 0) -> int:
        asked = picky.asked
        tensors: Any = [Somewhere(64, device), Somewhere(address, device)]
        serve_kind(kind, "scatter2scatter", call, tensors)
        return picky.asked - asked

    for _ in range(2):
        for first in (1, 0):
            assert served("one") == served("two") == served("one", device=1) == first
            assert served("one", address=40) == served("") == 1
            with preferring("scatter2scatter", "reference"):
                assert served("one") == 0
                assert picky.served == picky.asked + 3 * (1 - first)
        dispatch.forget()
        picky.served = picky.asked
    monkeypatch.setattr(dispatch, "KEPT", 2)
    for kind in "abc":
        served(kind)
        assert len(dispatch._PLANS) <= 2


@pytest.mark.parametrize("transposed", [False, True])
def test_the_plan_of_the_hopper_kernel_takes_the_tensors_of_each_call(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_rows = pytest.importorskip("inductor_q.kernels.expert_rows_triton")
    launched: list[tuple[int, ...]] = []
    numbers: list[tuple[int, ...]] = []

    def prepare(*_: Any, **options: Any) -> Any:
        numbers.append(options["numbers"])
        return lambda *pointers: launched.append(pointers)

    scales = torch.empty(0)
    monkeypatch.setattr(scatter2scatter_cuda, "_prepared", prepare)
    monkeypatch.setattr(scatter2scatter_cuda, "ExpandScales", lambda *_, **__: lambda _: scales)
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(triton_rows, "plan_rows_out", lambda _: lambda call, y: y)

    def made() -> Layer:
        return layer(FIT, dtype=BF16, lora=False, bias=True, transposed=transposed)

    first = made().call()
    plan = scatter2scatter_cuda.KERNEL.plan(first)
    _, n, k = first.shape
    assert numbers == [(n, k, 0, first.top_k)]
    assert first.fmt is not None
    planes, _ = scatter2scatter_cuda._codebook(first.fmt, first.device)
    for call in (first, made().call()):
        launched.clear()
        y, rank = plan(call)
        assert y.shape == (call.rows, call.out_features) and rank.shape == (call.rows, 0)
        assert call.fmt is not None and call.bias is not None
        place = dict(zip(call.fmt.operands, [t.data_ptr() for t in call.operands], strict=True))
        (product,) = launched
        assert product == (
            *(call.x.data_ptr(), place["qweight"], scales.data_ptr(), 0, 0, call.bias.data_ptr()),
            *(y.data_ptr(), call.order.data_ptr(), call.tiles.data_ptr(), planes.data_ptr()),
        )
