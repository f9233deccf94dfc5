"""corrections.py: the first step says what a plan of memory did not know."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inductor_q
from inductor_q import corrections
from inductor_q.backend import qfuse, reports
from inductor_q.records import MemoryRecord
from tests.support.compiling import no_codegen

GB = 10**9
CUDA = torch.device("cuda")


@dataclass
class Device:
    """A device that says to have allocated so much, whatever runs."""

    most: int = 0
    told: list[Any] = field(default_factory=list)

    def step(self, run: Any, most: int, *, backward: bool = True) -> None:
        out = run(torch.ones(1, requires_grad=True))
        self.most = most
        if backward:
            out.backward()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: device.most)
    monkeypatch.setattr(corrections, "is_measured", lambda _: True)
    corrections.forget()
    yield device
    corrections.forget()


def told(device: Device) -> Any:
    def tell(most: int, exact: bool, code: CodeType | None) -> None:
        device.told.append((most, exact, code))

    return corrections.measuring(lambda x: x + 1, CUDA, tell)


def test_the_first_step_is_measured(device: Device) -> None:
    """It is told once, when the next begins."""
    run = told(device)
    for most in (9, 11, 12):
        device.step(run, most)
    assert device.told == [(9, True, None)]


def test_a_peak_before_the_step_is_a_bound_only(device: Device) -> None:
    device.most = 9
    run = told(device)
    for _ in range(3):
        device.step(run, 9)
    assert device.told == [(9, False, None)]


def test_a_step_of_another_graph_in_between_is_not_this_one(device: Device) -> None:
    run, other = told(device), told(device)
    for each, most in ((run, 5), (other, 9), (run, 9)):
        device.step(each, most)
    assert device.told == [(9, False, None)]


def test_a_step_of_a_graph_that_has_told_counts_too(device: Device) -> None:
    other, run = told(device), told(device)
    for each, most in ((other, 1), (other, 2), (run, 3), (other, 9), (run, 9)):
        device.step(each, most)
    assert [exact for _, exact, _ in device.told] == [True, False]


def test_calls_before_the_backward_pass_are_no_step(device: Device) -> None:
    """As where layers of a model share one graph: the peak is that of all of them."""
    run = told(device)
    waits = run(torch.ones(1, requires_grad=True))
    device.step(run, 5)
    device.step(run, 9)
    assert waits.requires_grad and not device.told, "its own backward pass has not come"
    run = told(device)
    first = run(torch.ones(1, requires_grad=True))
    second = run(torch.ones(1, requires_grad=True))
    device.most = 12
    (second + first).backward()
    device.step(run, 12)
    assert device.told == [(12, False, None)]


def test_a_call_whose_backward_pass_never_comes_is_no_step(device: Device) -> None:
    """The next one is measured in its place."""
    run = told(device)
    for most, backward in ((3, False), (5, True), (9, True)):
        device.step(run, most, backward=backward)
    assert device.told == [(5, True, None)]


# --- what is corrected ---------------------------------------------------------------------------

#: 6 GB of tensors planned beside 2 GB, of a budget of 10; without recomputation 9 would be needed.
PLAN = MemoryRecord(
    budget=10 * GB,
    base=2 * GB,
    limit=8 * GB,
    forward=5 * GB,
    backward=6 * GB,
    unplanned=9 * GB,
    saved=4 * GB,
    recomputed=3 * GB,
    exact=True,
)
CODE = test_the_first_step_is_measured.__code__


@pytest.mark.parametrize(
    ("measured", "difference"),
    [
        (11 * GB, 3 * GB),  # over the budget
        (9 * GB, 0),  # more than planned, and within it
        (8.3 * GB, 0),
        (7.7 * GB, 0),
        (6 * GB, -2 * GB),  # so much would not have to be computed again
    ],
)
def test_what_a_miss_does(measured: float, difference: int) -> None:
    corrections.forget()
    found = replace(PLAN, measured=int(measured))
    assert corrections.correct("graph", found, CODE) == bool(difference)
    assert corrections.difference("graph") == difference
    assert corrections.difference("another graph") == 0
    corrections.forget()
    assert corrections.difference("graph") == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"exact": False},
        {"limit": 5 * GB},  # the least was planned already
        {"measured": 6 * GB, "unplanned": 6 * GB},  # nothing is computed again
    ],
)
def test_what_cannot_be_corrected(changed: dict[str, Any]) -> None:
    corrections.forget()
    found = replace(PLAN, **{"measured": 11 * GB, **changed})
    assert not corrections.correct("graph", found, CODE)


def test_corrections_come_to_an_end() -> None:
    """Room is gained once; a plan that then takes too much is corrected once more."""
    corrections.forget()
    assert corrections.correct("graph", replace(PLAN, measured=6 * GB), CODE)
    again = replace(PLAN, difference=-2 * GB, backward=9 * GB, limit=10 * GB)
    assert not corrections.correct("graph", replace(again, measured=8 * GB), CODE)
    assert corrections.correct("graph", replace(again, measured=12 * GB), CODE)
    assert corrections.difference("graph") == 12 * GB - 9 * GB - 2 * GB
    assert not corrections.correct("graph", replace(again, measured=12 * GB), CODE)
    corrections.forget()


def test_where_dynamo_may_not_compile_again(caplog: pytest.LogCaptureFixture) -> None:
    corrections.forget()
    found = replace(PLAN, measured=11 * GB)
    assert not corrections.correct("graph", found, None)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert not corrections.correct("graph", found, CODE)
    assert "not called by code of Dynamo's" in caplog.messages[0]
    assert 'set_stance("fail_on_recompile") is in force' in caplog.messages[1]


# --- a model -------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, *self.layers):
            x = torch.tanh(layer(torch.sin(x)))
        return x.sum()


X = torch.randn(4096, 32, generator=torch.Generator().manual_seed(1))


def test_the_step_behind_the_second_is_compiled_again(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """With a plan that leaves room for what was not planned; its gradients are the same."""
    torch.compiler.reset()
    model = Blocks()

    def step(options: Any = None) -> None:
        compiled(X).backward()

    budget = 5_000_000
    compiled: Any = torch.compile(
        model, backend=qfuse, options={"qfuse.memory": budget, "force_disable_caches": True}
    )
    with no_codegen(), caplog.at_level(logging.WARNING):
        step()
        first = reports()[-1].memory
        assert first is not None and first.fits
        device.most = budget + 300_000
        gradient = model.first.weight.grad
        model.zero_grad()
        step()
        assert len(reports()) == 1
        step()
        step()
    assert len(reports()) == 2, "compiled once more, and not again"
    assert "the next step is compiled again" in caplog.text
    last = reports()[-1].memory
    assert last is not None and last.fits
    assert last.difference == device.most - first.peak
    assert last.transient < first.transient
    assert last.saved < first.saved
    assert f"corrected: a step took {last.difference / 1e6:.3f} MB more" in str(last)
    assert gradient is not None
    torch.testing.assert_close(model.first.weight.grad, 3 * gradient)
    assert inductor_q.last_report() is reports()[-1]


@pytest.mark.gpu
def test_a_step_that_takes_more_than_the_graph_knows_ends_within_the_budget() -> None:
    """Between forward and backward the program holds memory that no plan can know of."""
    torch.compiler.reset()
    torch.cuda.empty_cache()
    model, x = Blocks().cuda(), torch.randn(1 << 20, 32, device="cuda")
    size = x.nbytes
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    budget = base + 21 * size // 2  # a plan of 9, which would do, and one of 7
    options: dict[str, Any] = {"qfuse.memory": budget, "force_disable_caches": True}
    compiled: Any = torch.compile(model, backend=qfuse, options=options)

    def step() -> None:
        loss = compiled(x)
        held = torch.empty(3 * size, dtype=torch.uint8, device="cuda")
        loss.backward()
        del held
        model.zero_grad()

    for _ in range(4):
        step()
    first, last = (report.memory for report in reports())
    assert first is not None and last is not None
    assert first.exact and first.measured > budget >= first.peak
    assert last.difference == first.measured - first.peak > 0
    assert last.saved < first.saved
    torch.cuda.reset_peak_memory_stats()
    step()
    # Where the peak moved to, cuBLAS may work in a MiB that it did not need where the peak was.
    assert torch.cuda.max_memory_allocated() <= budget + (2 << 20)
    assert len(reports()) == 2
