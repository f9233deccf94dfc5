"""offload.py: what forward keeps goes to the host and comes back, where the link hides it.

On a CPU the copies are of its own memory, and the link is made up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

import inductor_q
from inductor_q import backend, corrections, offload
from inductor_q.backend import qfuse
from inductor_q.liveness import COPY_START, storages
from inductor_q.memory import Plan, _Ladder
from inductor_q.offload import COPY_END, Offload, find_link
from inductor_q.records import MemoryRecord
from inductor_q.resolved import Link
from tests.support.compiling import gradients
from tests.support.resolving import on_cpu
from tests.test_memory import Block, X, blocks, ladder_of, loss_of_blocks, trained

#: A link as fast as memory, and one that is so slow that little is hidden.
FAST, SLOW = Link(1e9, 1e9, 1e9, least=1), Link(2e7, 2e7, 1e9, least=1)
#: The last step that offloads alone.
ALL = 5


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Callable[[Link | str], None]:
    """Have what is compiled next offload over a link."""

    def use(link: Link | str) -> None:
        monkeypatch.setattr(backend, "find_link", lambda *_: link)

    return use


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have what is compiled next take a step of the ladder, and keep to it."""
    monkeypatch.setattr(corrections, "is_measured", lambda _: False)

    def take(number: int) -> None:
        monkeypatch.setattr(_Ladder, "choose", lambda self, _: self.at(number))

    return take


def targets(plan: Plan) -> list[list[Any]]:
    return [[node.target for node in module.graph.nodes] for module in plan.pair]


# --- the plan ------------------------------------------------------------------------------------


def test_each_step_offloads_more(over: Any) -> None:
    over(FAST)
    ladder = ladder_of(blocks())
    plans = [ladder.at(i) for i in range(1, ALL + 1)]
    sizes = [sum(saved.bytes for saved in plan.offloaded) for plan in plans]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 0
    for plan, size in zip(plans, sizes, strict=True):
        assert plan.saved == plans[0].saved - size
        assert plan.recomputed == 0
        for graph in targets(plan):
            assert graph.count(COPY_START) == graph.count(COPY_END) == len(plan.offloaded)
    peaks = [plan.peak for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 2


def test_plans_are_monotonic(over: Any) -> None:
    over(SLOW)
    ladder = ladder_of(blocks())
    peaks = [ladder.choose(ladder.at(0).peak * i // 40).peak for i in range(42)]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) > 3


def test_what_the_link_cannot_hide_is_computed_again(over: Any) -> None:
    over(FAST)
    fast = ladder_of(blocks())
    over(SLOW)
    slow = ladder_of(blocks())
    assert 0 < len(slow.at(ALL).offloaded) < len(fast.at(ALL).offloaded)
    limit = fast.at(ALL).peak * 3 // 2
    assert fast.choose(limit).recomputed == 0 < slow.choose(limit).recomputed
    over(Link(1e4, 1e9, 1e9, least=1))
    assert not ladder_of(blocks()).at(ALL).offloaded
    over(Link(1e9, 1e4, 1e9, least=1))
    assert not ladder_of(blocks()).at(ALL).offloaded


def test_small_tensors_stay(over: Any) -> None:
    over(Link(1e9, 1e9, 1e9, least=100_000))
    plan = ladder_of(blocks()).at(ALL)
    assert {saved.bytes for saved in plan.offloaded} == {4 * 256 * 128}


def test_copies_overlap_with_what_is_computed(over: Any) -> None:
    """Between the start of one and its end there are products, in both graphs."""
    over(Link(2e8, 2e8, 1e9, least=8000))
    plan = ladder_of(blocks()).at(ALL)
    for module in plan.pair:
        nodes = list(module.graph.nodes)
        hidden = 0
        for end in (node for node in nodes if node.target is COPY_END):
            between = nodes[nodes.index(end.args[0]) : nodes.index(end)]
            if any("mm" in str(node.target) for node in between):
                hidden += sum(storages(end).values())
        assert hidden > 0.7 * sum(saved.bytes for saved in plan.offloaded)


class Shares(nn.Module):
    """Keeps what it returns, a part of a tensor, and a tensor beside a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.first(x).chunk(2, 1)
        returned = torch.tanh(self.second(torch.sin(left)))
        return returned, (torch.tanh(returned @ returned.t()) @ right)


def test_what_others_hold_stays(over: Any) -> None:
    def loss(run: Any) -> Tensor:
        left, right = run(X)
        found: Tensor = left.mean() + right.mean()
        return found

    over(FAST)
    pair = ladder_of(Shares(), loss).at(0).pair
    outputs: Any = pair[0].graph.output_node().args[0]
    held = Counter(s for node in outputs if isinstance(node, fx.Node) for s in storages(node))
    inputs = {s for n in pair[0].graph.find_nodes(op="placeholder") for s in storages(n)}
    found = list(Offload(*pair, FAST, lambda _: 0.0)._candidates())
    assert found
    assert len(found) < sum(storage not in inputs for storage in held)
    for saved in found:
        [storage] = storages(saved.value)
        assert held[storage] == 1
        assert saved.value not in outputs[:2]
        assert saved.value.meta["val"].untyped_storage().nbytes() == saved.value.meta["val"].nbytes


# --- the step ------------------------------------------------------------------------------------


def compiled_anew(model: nn.Module, **keywords: Any) -> Any:
    torch.compiler.reset()
    options: dict[str, Any] = {"qfuse.memory": "1TB", "qfuse.offload": True}
    options["force_disable_caches"] = True
    # Else reductions choose by timing how they add up, and two compiles may differ in the last bit.
    options["deterministic"] = True
    return torch.compile(model, backend=qfuse, options=options, **keywords)


def run(model: nn.Module, *inputs: Tensor, **keywords: Any) -> dict[str, Tensor]:
    """Compile a model, run a step for each input, and return the sums of its gradients."""
    compiled = compiled_anew(model, **keywords)
    for x in inputs:
        compiled(x).mean().backward()
    return gradients({}, model)


def two(width: int = 32, **where: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(2)]).to(**where)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_bitwise_the_same(over: Any, step: Any, dynamic: bool) -> None:
    inputs = (X, X[:96], X) if dynamic else (X, X, X)
    step(1)
    expected = run(two(), *inputs, dynamic=dynamic)
    over(FAST)
    step(ALL)
    found, codes = run_and_get_code(run, two(), *inputs, dynamic=dynamic)
    memory = last_plan()
    assert memory.offloaded
    assert f"{memory.offloaded / 1e6:.3f} MB offloaded to the host, link measured at" in str(memory)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    for code in codes:  # what is copied lives until the copy ends
        begun = re.findall(r"copy_start\.default\((\w+),", code)
        assert begun
        assert sorted(begun) == sorted(re.findall(r"copy_end\.default\(\w+, (\w+),", code))


def last_plan() -> MemoryRecord:
    report = inductor_q.last_report()
    assert report is not None and report.memory is not None
    return report.memory


@pytest.mark.slow
def test_backward_may_run_twice(over: Any, step: Any) -> None:
    over(FAST)
    step(ALL)
    model = two()
    compiled = compiled_anew(model)
    loss = compiled(X).mean()
    loss.backward(retain_graph=True)
    once = gradients({}, model)
    loss.backward()
    for name, gradient in gradients({}, model).items():
        assert torch.equal(gradient, once[name])


def test_the_plan_is_what_is_kept(over: Any) -> None:
    """Without code generation: what goes to the host is not kept on the device."""
    over(FAST)
    whole = trained(blocks(), "1GB")
    assert whole.memory.offloaded == 0
    less = trained(blocks(), whole.memory.peak - whole.saved // 2)
    assert less.memory.fits
    assert less.memory.offloaded >= whole.saved // 3
    assert less.memory.recomputed == 0
    assert less.saved == less.memory.saved + less.memory.offloaded
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(less.gradients[name], gradient)


# --- where nothing is offloaded ------------------------------------------------------------------


def reason(device: str = "cuda", options: Mapping[str, Any] | None = None) -> Link | str:
    given = {"qfuse.memory": "1GB", "qfuse.offload": True, **(options or {})}
    return find_link(on_cpu(given), torch.device(device))


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_measure", lambda _: FAST)
    assert reason() is FAST
    assert reason(options={"qfuse.offload": False}) == ""
    assert "cpu has no memory of its own" in str(reason("cpu"))
    assert "CUDA graphs" in str(reason(options={"triton.cudagraphs": True}))
    assert "C++ wrapper" in str(reason(options={"cpp_wrapper": True}))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "processes of a group" in str(reason())


def test_a_reason_is_in_the_report() -> None:
    compiled = compiled_anew(two())
    loss_of_blocks(compiled).backward()
    assert "nothing offloaded: a cpu has no memory of its own" in str(last_plan())
    assert last_plan().offloaded == 0


# --- on a GPU ------------------------------------------------------------------------------------


def big(dtype: torch.dtype) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(2048) for _ in range(6)]).to("cuda", dtype)
    return model, torch.randn(4096, 2048, device="cuda", dtype=dtype)


def peak_of(model: nn.Module, x: Tensor) -> tuple[int, dict[str, Tensor]]:
    """Compile, run some steps that may not wait for the device, and take the peak of the last, over
    what lives before it."""
    compiled = compiled_anew(model)
    for i in range(5):
        if i == 2:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        try:
            compiled(x).mean().backward()
        finally:
            if i == 4:
                torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held, gradients({}, model)


@pytest.mark.gpu
def test_a_step_on_a_gpu(over: Any, step: Any) -> None:
    """Gradients are bitwise the same, the peak is lower, as planned, and the host never waits.

    In 16 bits other fusions of Inductor's would round elsewhere.
    """
    over("")
    step(1)
    model, x = big(torch.float32)
    before, expected = peak_of(model, x)
    planned = last_plan().transient
    over(Link(1e12, 1e12, 1e12))
    step(ALL)
    after, found = peak_of(model, x)
    memory = last_plan()
    assert memory.offloaded > 3 * 4096 * 8192 * 4
    assert after < 1.05 * memory.transient
    assert before - after > 0.8 * (planned - memory.transient)  # plans are a little above both
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.gpu
def test_the_link_is_measured() -> None:
    link = reason()
    assert isinstance(link, Link)
    assert 1e9 < link.to_host < link.device and 1e9 < link.from_host < link.device
    assert reason() is link


@pytest.mark.gpu
def test_copies_run_beside_kernels(step: Any) -> None:
    """Over the link as measured, most of the time of the copies something else runs."""
    from torch.profiler import ProfilerActivity, profile

    step(ALL)
    model, x = big(torch.bfloat16)
    compiled = compiled_anew(model)
    for _ in range(3):
        compiled(x).mean().backward()
    assert last_plan().offloaded
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        compiled(x).mean().backward()
        torch.cuda.synchronize()
    on_gpu = [e for e in seen.events() if str(e.device_type).endswith("CUDA")]
    for way in ("Memcpy DtoH", "Memcpy HtoD"):
        copies = [e.time_range for e in on_gpu if way in e.name and "Pinned" in e.name]
        kernels = [e.time_range for e in on_gpu if "Mem" not in e.name]
        assert copies
        both = sum(
            max(0, min(c.end, k.end) - max(c.start, k.start)) for c in copies for k in kernels
        )
        # Backward waits for the first copies; how long they take is the link's.
        assert both > 0.5 * sum(c.end - c.start for c in copies), way
