"""memory.py: a budget decides what backward computes again."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import inductor_q
from inductor_q import testing
from inductor_q.cache import report_key
from inductor_q.context import Context, new_report
from inductor_q.cost import cost_of
from inductor_q.diagnostics import observe
from inductor_q.exc import InvalidOptionValue
from inductor_q.graph_report import Report
from inductor_q.hooks import Partitioner
from inductor_q.memory import Plan, _Ladder
from inductor_q.options import _memory as budget_of
from inductor_q.records import MemoryRecord
from inductor_q.resolved import Budget, Link
from tests.support.compiling import compile_step, count_ops, gradients, op_name, partition
from tests.support.resolving import on_cpu

# --- the choice, of peaks that are made up -------------------------------------------------------


class MadeUp(_Ladder):
    """A ladder whose steps have peaks without graphs."""

    def __init__(self, peaks: list[int]) -> None:
        self.peaks, self.made = peaks, {}
        self.link = Link(1, 1, 1) if len(peaks) > 18 else None

    def make(self, step: int) -> Any:
        return SimpleNamespace(step=step, peak=self.peaks[step])


@pytest.mark.parametrize("steps", [18, 22])
@pytest.mark.parametrize("seed", range(20))
def test_less_budget_never_plans_a_higher_peak(seed: int, steps: int) -> None:
    """It holds whatever the steps' peaks are: those of a knapsack go up and down."""
    rng = random.Random(seed)
    peaks = [rng.randrange(100) for _ in range(steps)]
    chosen = [MadeUp(peaks).choose(limit).peak for limit in range(101)]
    assert chosen == sorted(chosen)
    for limit, peak in enumerate(chosen):
        assert peak <= limit or peak == min(peaks)


def test_the_first_step_that_fits_is_taken() -> None:
    peaks = list(range(100, 10, -5))
    assert [MadeUp(peaks).choose(p).step for p in peaks] == list(range(18))
    assert MadeUp(peaks).choose(1000).step == 0


# --- models --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a transformer without attention, whose weights are frozen but for an adapter."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width).requires_grad_(False)
        self.down = nn.Linear(4 * width, width).requires_grad_(False)
        self.adapter = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.rms_norm(x, x.shape[-1:])
        joined: Tensor = x + self.down(torch.tanh(self.up(normed) + self.adapter(normed)))
        return joined


LAYERS = 4
X = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def loss_of_blocks(run: Any) -> Tensor:
    torch.manual_seed(0)
    found: Tensor = run(X).mean()  # keeps nothing beside
    return found


@dataclass
class Step:
    report: Report
    gradients: dict[str, Tensor]
    saved: int

    @property
    def memory(self) -> MemoryRecord:
        assert self.report.memory is not None
        return self.report.memory


def trained(
    model: nn.Module, budget: object = None, loss: Callable[[Any], Tensor] = loss_of_blocks
) -> Step:
    """Compile and run a step of a model, without code generation."""
    found: list[int] = []

    def run(compiled: Any) -> None:
        loss(compiled).backward()
        found.append(testing.count_saved_bytes(lambda: loss(compiled), model).total)

    partition(run, model, {} if budget is None else {"qfuse.memory": budget})
    report = inductor_q.last_report()
    assert report is not None
    return Step(report, gradients({}, model), *found)


def ladder_of(model: nn.Module, loss: Callable[[Any], Tensor] = loss_of_blocks) -> _Ladder:
    """All steps of a small model."""
    made: list[_Ladder] = []
    choose = _Ladder.choose

    def spy(self: _Ladder, limit: int) -> Any:
        made.append(self)
        return choose(self, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Ladder, "choose", spy)
        trained(model, "1KB", loss)
    return made[0]


@pytest.fixture(scope="module")
def ladder() -> _Ladder:
    return ladder_of(blocks())


def test_each_step_keeps_less(ladder: _Ladder) -> None:
    """From everything that functorch keeps down to next to nothing, and computes more again."""
    saved = [ladder.at(i).saved for i in range(18)]
    again = [ladder.at(i).recomputed for i in range(18)]
    assert saved == sorted(saved, reverse=True)
    assert again == sorted(again)
    assert again[0] == again[1] == 0 < again[3]
    assert saved[17] < saved[0] / 5


def test_plans_of_a_model_are_monotonic(ladder: _Ladder) -> None:
    highest = ladder.at(0).peak
    limits = [highest * i // 40 for i in range(42)]
    peaks = [ladder.choose(limit).peak for limit in limits]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) > 3
    assert peaks[-1] == highest
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True) if limit > peaks[0])


class Checkpointed(nn.Module):
    """The same with each layer checkpointed."""

    def __init__(self, policy: Callable[..., CheckpointPolicy] | None = None) -> None:
        super().__init__()
        self.blocks = blocks()
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        self.given: dict[str, Any] = {} if policy is None else {"context_fn": context}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.given)
        return x


def products(plan: Plan) -> int:
    """Count the operations of products that backward computes again."""
    forward, backward = (module.graph for module in plan.pair)
    computed = {node.name for node in forward.nodes}
    found = 0
    for node in backward.nodes:
        if node.name in computed and op_name(node) in ("mm", "addmm"):
            found += 2 * node.args[-2].meta["val"].shape[-1] * node.meta["val"].numel()
    return found


def test_a_plan_computes_no_more_again_than_checkpoints(ladder: _Ladder) -> None:
    """At their peak, and one value of the first layer that is its input for them, which is given,
    half of it is enough."""
    checkpointed = ladder_of(Checkpointed()).at(0)
    limit = checkpointed.peak + X.nbytes
    chosen = ladder.choose(limit)
    assert chosen.peak <= limit
    assert 0 < 2 * products(chosen) <= products(checkpointed)


def test_what_is_read_before_the_peak_is_kept_longest() -> None:
    """Logits would be computed again where their gradient is, when most is in memory."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = blocks(), nn.Linear(32, 512, bias=False).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.blocks(x))
            return logits.logsumexp(-1)

    order = ladder_of(WithLoss()).order
    assert order[-1].bytes == 4 * 256 * 512
    assert order[-1].rate(()) < order[-2].rate(())


def test_what_is_kept_is_what_was_planned() -> None:
    without = trained(blocks())
    assert without.report.memory is None
    assert "memory" not in without.report.summary()
    plenty = trained(blocks(), "1GB")
    assert plenty.memory.fits
    assert plenty.saved == without.saved == plenty.memory.saved
    budget = plenty.memory.peak - plenty.saved // 4
    less = trained(blocks(), budget)
    assert less.memory.fits
    assert less.memory.peak <= less.memory.budget == budget
    assert less.saved == less.memory.saved < plenty.saved
    assert less.memory.recomputed > plenty.memory.recomputed == 0
    for name, gradient in without.gradients.items():
        torch.testing.assert_close(less.gradients[name], gradient)


def test_graphs_run_as_they_were_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their nodes, each buffer freed where it ends."""
    found: list[tuple[bool, bool]] = []
    choose = _Ladder.choose

    def spy(self: _Ladder, limit: int) -> Plan:
        found.append((config.reorder_for_peak_memory, config.allow_buffer_reuse))
        return choose(self, limit)

    monkeypatch.setattr(_Ladder, "choose", spy)
    trained(blocks(), "1GB")
    assert found == [(False, False)]


def test_a_budget_that_cannot_be_met(caplog: pytest.LogCaptureFixture) -> None:
    """It says so, and what the least is; the plan is that one."""
    with observe() as seen:
        run = trained(blocks(), "1KB")
    assert seen.explanation().memory == (str(run.memory),)
    assert not run.memory.fits
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        f"qfuse.memory: {run.memory}"
    ]
    assert "THE BUDGET CANNOT BE MET, this is the least" in run.report.summary()
    assert run.memory.peak < trained(blocks(), "1GB").memory.peak
    again = Report.from_dict(run.report.to_dict())
    assert again.memory == run.memory


def test_a_checkpoint_is_left_as_it_is() -> None:
    """What a policy of the user's keeps is kept under any budget."""

    def keep(_: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        wide = op is torch.ops.aten.addmm.default and args[2].shape[1] == 128
        return CheckpointPolicy.MUST_SAVE if wide else CheckpointPolicy.PREFER_RECOMPUTE

    wide = 4 * 256 * 128
    for budget in ("1GB", "1KB"):
        assert trained(Checkpointed(keep), budget).saved >= LAYERS * wide
    assert trained(blocks(), "1KB").saved < LAYERS * wide


class Averaging(nn.Module):
    """Multiply with what a buffer holds, read as it lies or through a view, and then change it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("average", torch.rand(32, 32) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, seen = torch.sigmoid(self.average), torch.tanh(self.average.t())
        half, *_ = self.average.split(16)  # a view of several results
        y = torch.tanh(self.layer(x) @ gate * 0.1) @ seen * torch.exp(half[3])
        self.average.mul_(0.5).add_(0.1)
        return torch.tanh(y * 0.1)


def test_what_forward_has_overwritten_is_not_computed_again() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Averaging() for _ in range(3)])

    eager = model()
    loss_of_blocks(eager).backward()
    less = trained(model(), "1KB")
    assert less.memory.recomputed
    for name, parameter in eager.named_parameters():
        assert parameter.grad is not None
        assert testing.relative_error(less.gradients[name], parameter.grad) < 1e-5


@pytest.mark.slow
def test_a_quantized_model() -> None:
    """Gradients are what they were, and so much is kept as was planned."""
    for extra in ("bitsandbytes", "peft", "transformers"):
        pytest.importorskip(extra)
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = testing.qlora_model(config, adapter_dtype=torch.bfloat16, randomize_adapters=True)
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(3))

    def loss(run: Any) -> Tensor:
        torch.manual_seed(0)
        found: Tensor = run(input_ids=ids, labels=ids).loss
        return found

    without, less = trained(model, None, loss), trained(model, "100KB", loss)
    assert less.memory.recomputed
    assert less.saved == pytest.approx(less.memory.saved, rel=0.03)
    assert less.memory.peak < 0.9 * (less.memory.base + less.memory.unplanned)
    assert len(without.gradients) == 14
    for name, gradient in without.gradients.items():
        assert testing.relative_error(less.gradients[name], gradient.double()) < 0.02, name


@pytest.mark.slow
def test_masks_of_dropout() -> None:
    """They are computed again from the seeds of forward: none is drawn a second time."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.25)) for _ in range(3)]
    model = nn.Sequential(*layers)
    runs = []
    for budget in ("1GB", "1KB"):
        torch.manual_seed(1)
        options = {"qfuse.memory": budget, "force_disable_caches": True}
        runs.append(compile_step(model, X, options=options))
    for name, gradient in runs[0].gradients.items():
        torch.testing.assert_close(runs[1].gradients[name], gradient)
    forward, backward = (count_ops(graph) for graph in runs[1].partitioned)
    assert forward["inductor_seeds"] == 1 and not backward["inductor_seeds"]
    assert backward["inductor_random"]


def test_what_projections_under_dropout_cost() -> None:
    """They can be computed again: their masks come from seeds. Their gradients can not."""

    def ops(x: Tensor, seeds: Tensor, a: Tensor) -> list[Tensor]:
        dropped = (x, seeds, 0, a)
        low = torch.ops.qfuse.dropout_project(*dropped, 2, 0.5)
        wide = torch.ops.qfuse.extend_dropped(*dropped, 2, 0.5, 0)
        rest = (seeds, 0, low, 2, 0.5)
        of_a = torch.ops.qfuse.dropout_grad_a(x, *rest)
        of_x = torch.ops.qfuse.dropout_grad_x(a, *rest)
        return [low, wide, of_a, of_x, torch.ops.qfuse.add_dropout_grad_x(of_x, a, *rest)]

    given = torch.empty(2048, 4096), torch.zeros(1, dtype=torch.int64), torch.empty(2048, 4096)
    graph = make_fx(ops, tracing_mode="fake")(*given).graph
    costs = {op_name(node): cost_of(node) for node in graph.nodes if op_name(node)}
    product = 2 * 2048 * 4096 * 2048 / 200
    assert costs["qfuse.dropout_project"] == product
    assert costs["qfuse.extend_dropped"] == max(product, 4 * 2048 * (4096 + 6144 + 2048) + 8)
    assert costs["qfuse.dropout_grad_a"] is None
    assert costs["qfuse.dropout_grad_x"] is None
    assert costs["qfuse.add_dropout_grad_x"] is None


# --- around the plan -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("22GB", 22 * 10**9),
        ("20.5 GiB", 20.5 * 2**30),
        ("512mb", 512 * 10**6),
        (22e9, 22 * 10**9),
        (123456, 123456),
        ("123456", 123456),
    ],
)
def test_amounts(given: object, expected: float) -> None:
    assert on_cpu({"qfuse.memory": given}).memory == expected


@pytest.mark.parametrize("given", ["22 gigs", "GB", "-1GB", 0, True, "120%", "1.2.3GB", [1]])
def test_refused_amounts(given: object) -> None:
    with pytest.raises(InvalidOptionValue, match='is not an amount of memory such as "22GB"'):
        on_cpu({"qfuse.memory": given})


@pytest.mark.parametrize("given", [0.9, "0.9", "90%"])
def test_shares_are_of_a_gpu(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOptionValue, match='such as "8GB": the cpu has none to take a share'):
        on_cpu({"qfuse.memory": given})
    properties = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert budget_of(0.9, torch.device("cuda"), "") == 72 * 10**9


def test_the_limit_is_part_of_each_key() -> None:
    """Another state of the device is another plan, and so are longer sequences; a few bytes more
    are not."""

    def keys(base: int, inputs: int = 0) -> tuple[object, str]:
        resolved = on_cpu({"qfuse.memory": "1GB"})
        context = Context(resolved, new_report(resolved, torch.device("cpu")))
        context.budget = Budget(10**9, base, inputs=inputs)
        gm = torch.fx.symbolic_trace(nn.Identity())
        return Partitioner(context, None).uuid(), report_key(gm, [torch.ones(1)], context)

    assert keys(10**8) == keys(10**8 + 1)
    assert all(a != b for a, b in zip(keys(10**8), keys(5 * 10**8), strict=True))
    assert all(a != b for a, b in zip(keys(10**8), keys(10**8, inputs=1), strict=True))
