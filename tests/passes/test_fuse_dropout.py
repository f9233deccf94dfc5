"""Which dropout becomes part of its adapter's kernels, with which masks, and why not."""

from __future__ import annotations

import copy
import functools
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config, inductor_prims
from torch._inductor.utils import run_and_get_code

import inductor_q
from inductor_q import testing
from inductor_q.graph_report import Report
from inductor_q.kernels import dropout_reference
from inductor_q.kernels.dropout import keep_mask
from inductor_q.kernels.dropout_calls import DropoutProject
from inductor_q.passes.add_gradients import ADD_GRAD_X
from inductor_q.passes.extend_k import EXTEND_DROPPED
from inductor_q.passes.fuse_dropout import GRAD_A, GRAD_X, PROJECT
from tests.support.compiling import compile_step, count_ops, no_codegen, partition, step

peft = pytest.importorskip("peft")

WIDTH, RANK, P = 64, 4, 0.25
ALWAYS = {"extend_k.min_rows": 1, "fuse_dropout.min_rows": 1}
GRADIENTS = "qfuse_(?:add_)?dropout_grad_[ax]"


class Block(nn.Module):
    """Three projections of one input, and one of their result, as in attention."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for name in ("q", "k", "v", "o"):
            weight = torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5
            setattr(self, name, testing.quantized_linear(weight.to(dtype), compute_dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        h: Any = torch.tanh(x)
        q, k, v, o = (self.get_submodule(name) for name in ("q", "k", "v", "o"))
        return torch.tanh(o(torch.tanh(q(h)) * torch.sigmoid(k(h)) + torch.tanh(v(h))))


def block(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    model: Any = Block(dtype)
    settings = {"r": RANK, "lora_dropout": P, "target_modules": ["q", "k", "v", "o"], **settings}
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), model)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) / 8
    return model.train()


def batch(dtype: torch.dtype = torch.float32, rows: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, rows, WIDTH, generator=generator).to(dtype).requires_grad_()


class Masked(nn.Module):
    """Dropout with the mask of an adapter of `qfuse::dropout_project`."""

    def __init__(self, seed: Tensor, adapter: int) -> None:
        super().__init__()
        self.seed, self.adapter = seed, adapter

    def forward(self, x: Tensor) -> Tensor:
        columns = x.shape[-1]
        keep = keep_mask(self.seed, x.numel() // columns, columns, self.adapter, P)
        return torch.where(keep.view(x.shape), x, 0.0) / (1 - P)


def masked(model: Any, seeds: Tensor | None = None) -> Any:
    """A copy of a block with the masks of `seeds`, or of those drawn after manual_seed(0)."""
    if seeds is None:
        torch.manual_seed(0)
        seeds = inductor_prims.seeds(2, torch.device("cpu"))
    other = copy.deepcopy(model)
    for place, name in enumerate(("q", "k", "v", "o")):
        layer = getattr(other, name)
        layer.lora_dropout["default"] = Masked(seeds[place // 3], place % 3)
    return other


def partitioned(model: Any, x: Tensor, thresholds: Mapping[str, int] = ALWAYS) -> Any:
    """Run forward and backward of the partitioned graphs, with the seeds of manual_seed(0)."""
    results: list[Any] = []

    def run(compiled: Any) -> None:
        torch.manual_seed(0)
        results.extend(step(compiled, x, module=model))

    graphs = partition(run, model, {"qfuse.thresholds": dict(thresholds)})
    report = inductor_q.last_report()
    assert report is not None
    return graphs, results, report


def reasons(report: Report) -> dict[str, int]:
    return dict(report.rejections().get("fuse_dropout", {}))


@pytest.mark.parametrize("extended", [True, False])
def test_forward_and_backward_use_the_same_masks(extended: bool) -> None:
    """Values and gradients are those of dropout written out with the masks that the op defines."""
    model, x = block(), batch()
    thresholds = ALWAYS if extended else {**ALWAYS, "extend_k.min_rows": 1 << 20}
    (forward, backward), (output, grads), report = partitioned(model, x, thresholds)
    assert report.applied()["fuse_dropout"] == 4
    found = count_ops(forward) + count_ops(backward)
    # One op for q, k and v, one for o, in either direction, and no random numbers besides.
    assert found["qfuse.extend_dropped" if extended else "qfuse.dropout_project"] == 2
    assert (found["qfuse.dropout_grad_a"], found["qfuse.add_dropout_grad_x"]) == (2, 2)
    assert not found["rand"]
    reference = masked(model)
    expected, right = step(reference, x, module=reference)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert grads.keys() - {"x0"} and len(grads) == 9
    for name, value in grads.items():
        torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [96, 128])
def test_large_ranks(rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v of rank 128 and their gradients, each under one mask; what 16 bits round of them
    is no more than they round of the same written out."""
    monkeypatch.setitem(globals(), "WIDTH", 2 * rank)
    model, x = block(dtype, r=rank), batch(dtype, rows=80)
    graphs, (output, grads), report = partitioned(model, x)
    assert report.applied()["fuse_dropout"] == 4
    found = sum(map(count_ops, graphs), Counter())
    assert (found["qfuse.extend_dropped"], found["qfuse.add_dropout_grad_x"]) == (2, 2)
    reference = masked(model)
    eager, own = step(reference, x, module=reference)
    exact_model = testing.reference_model(reference)
    exact, right = step(exact_model, x.detach().double().requires_grad_(), module=exact_model)
    floor = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps / 16
    for name, mine in {"output": output, **grads}.items():
        written, true = (eager, exact) if name == "output" else (own[name], right[name])
        allowed = max(1.25 * testing.relative_error(written, true), floor)
        assert testing.relative_error(mine, true) <= allowed, name


def test_what_is_saved_for_backward() -> None:
    """Forward keeps the input and what is as narrow as the adapters: no mask, no dropped copy."""
    (forward, _), _, _ = partitioned(block(), batch())
    output = next(iter(forward.find_nodes(op="output")))
    kept = [n.meta["val"] for n in output.all_input_nodes if n.op != "placeholder"]
    assert all(value.dtype is not torch.bool for value in kept)
    # The block's output, the four results before their activations; the inputs are computed again.
    assert sum(value.shape[-1:] == (WIDTH,) for value in kept) <= 5


def note_seeds(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list that gets the seeds of each projection under dropout that is computed."""
    drawn: list[Tensor] = []
    make = dropout_reference.Project.run

    def run(self: Any, call: DropoutProject) -> Tensor:
        drawn.append(call.seeds.clone())
        return make(self, call)

    monkeypatch.setattr(dropout_reference.Project, "run", run)
    return drawn


@pytest.mark.slow
def test_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code with the ops, of dynamic lengths, gives what the masks written out give."""
    model, x = block(), batch()
    drawn = note_seeds(monkeypatch)
    result = compile_step(model, x, options={"qfuse.thresholds": ALWAYS}, dynamic=True)
    assert result.applied["fuse_dropout"] == 4
    reference = masked(model, drawn[-1])
    expected, grads = step(reference, x, module=reference)
    torch.testing.assert_close(result.output, expected, rtol=1e-5, atol=1e-5)
    for name, value in result.gradients.items():
        torch.testing.assert_close(value, grads[name], rtol=1e-4, atol=1e-5)


def test_one_kernel_makes_an_input_again_and_what_its_gradient_becomes() -> None:
    """The gradient of A waits for it: what both are computed from is read once."""
    model, x = block(), batch()
    run = functools.partial(compile_step, model, x, options={"qfuse.thresholds": ALWAYS})
    _, codes = run_and_get_code(run)
    backward = codes[-1][codes[-1].index("def call(") :]
    calls = re.findall(rf"^\s+(?:\w+ = )?(cpp_fused_\w+|{GRADIENTS})\(", backward, re.M)
    places = [i for i, name in enumerate(calls) if name == "qfuse_dropout_grad_a"]
    assert len(places) == 2
    for place in places:
        kernel, before = calls[place - 1], calls[place - 2]
        assert "tanh_tanh_backward" in kernel, calls
        assert before == "qfuse_add_dropout_grad_x", calls


def test_under_autocast_and_checkpointing() -> None:
    """float32 adapters under bf16 autocast; the recomputed segment has the masks of forward."""
    model = block()
    x = batch()

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            return result.float()

    (_, _), (output, grads), report = partitioned_function(forward, model, x)
    assert report.applied()["fuse_dropout"] == 4
    reference = masked(model)
    exact, right = step(reference.double(), x.detach().double().requires_grad_(), module=reference)
    assert testing.relative_error(output, exact) < 0.02
    for name, value in grads.items():
        assert testing.relative_error(value, right[name]) < 0.03, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["peft", "trl"])
def test_of_a_float32_input_that_each_layer_casts(dtype: torch.dtype) -> None:
    """Layers in bfloat16, float32 between them: one op for q, k and v all the same."""
    model, x = block(torch.bfloat16), batch()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)

    def autocast(model: Any) -> Any:
        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                result: Tensor = model(x)
                return result

        return forward

    graphs, (output, grads), report = partitioned_function(autocast(model), model, x)
    assert report.applied()["fuse_dropout"] == 4
    assert report.applied()["extend_k"] == 5  # forward four, backward the sum of q, k and v
    found = sum(map(count_ops, graphs), Counter())
    assert (found["qfuse.extend_dropped"], found["qfuse.dropout_grad_x"]) == (2, 2)
    reference = masked(model)
    eager, own = step(autocast(reference), x, module=reference)
    exact_model = testing.reference_model(reference)
    exact, right = step(exact_model, x.detach().double().requires_grad_(), module=exact_model)
    assert output.dtype == eager.dtype == torch.float32
    assert testing.relative_error(output, exact) <= 1.25 * testing.relative_error(eager, exact)
    for name, value in grads.items():
        allowed = 1.25 * testing.relative_error(own[name], right[name])
        assert testing.relative_error(value, right[name]) <= allowed, name


def partitioned_function(forward: Any, model: Any, x: Tensor) -> Any:
    results: list[Any] = []

    def run(compiled: Any) -> None:
        torch.manual_seed(0)
        results.extend(step(compiled, x, module=model))

    graphs = partition(run, forward, {"qfuse.thresholds": ALWAYS})
    report = inductor_q.last_report()
    assert report is not None
    return graphs, results, report


def test_refusals() -> None:
    x = batch()
    few = {"fuse_dropout.min_rows": 97}
    reason = "96 rows, fewer than fuse_dropout.min_rows=97 of the preset"
    assert reasons(partitioned(block(), x, few)[2]) == {reason: 4}
    options = {"qfuse.numerics": "strict"}
    strict = "qfuse.numerics='strict' keeps every product as written"
    partition(lambda compiled: step(compiled, x) and None, block(), options)
    report = inductor_q.last_report()
    assert report is not None and reasons(report) == {strict: 4}


def test_the_numbers_of_eager_where_they_are_asked_for() -> None:
    model, x = block(), batch()
    with config.patch(fallback_random=True):
        torch.manual_seed(0)
        result = compile_step(model, x, options={"qfuse.thresholds": ALWAYS}, context=no_codegen())
    reason = "torch._inductor.config.fallback_random asks for the numbers of eager"
    assert reasons(result.report) == {reason: 4}
    torch.manual_seed(0)
    expected, grads = step(model, x, module=model)
    torch.testing.assert_close(result.output, expected, rtol=1e-5, atol=1e-5)
    for name, value in result.gradients.items():
        torch.testing.assert_close(value, grads[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_numbers_of_eager_under_checkpointing(autocast: bool) -> None:
    """By an option of the one compile; what is computed again draws what forward drew."""
    model, x = block(), batch()

    def checkpointed(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result: Tensor = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            return result.float()

    forward: Any = checkpointed
    options = {"qfuse.thresholds": ALWAYS, "fallback_random": True}
    results: list[Any] = []

    def run(compiled: Any) -> None:
        torch.manual_seed(0)
        results.extend(step(compiled, x, module=model))

    partition(run, forward, options)
    output, grads = results
    torch.manual_seed(0)
    expected, right = step(forward, x, module=model)
    # Another mask would be off by a multiple of this.
    allowed = 0.02 if autocast else 1e-5
    assert testing.relative_error(output, expected.double()) < allowed
    for name, value in grads.items():
        assert testing.relative_error(value, right[name].double()) < allowed, name


def test_every_step_and_every_input_has_masks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input that adapters read has a seed, drawn anew in each step; backward has the same."""
    forward: list[int] = []
    backward: list[int] = []
    for kind, seen in (
        (dropout_reference.Project, forward),
        (dropout_reference.GradA, backward),
        (dropout_reference.GradX, backward),
    ):

        def run(self: Any, call: Any, *, make: Any = kind.run, seen: list[int] = seen) -> Tensor:
            seen.append(int(call.seeds[call.index]))
            result: Tensor = make(self, call)
            return result

        monkeypatch.setattr(kind, "run", run)
    model, x = block(), batch()

    def two_steps(compiled: Any) -> None:
        torch.manual_seed(0)
        outputs = [step(compiled, x, module=model)[0] for _ in range(2)]
        assert not torch.equal(*outputs)

    partition(two_steps, model, {"qfuse.thresholds": ALWAYS})
    assert len(forward) == len(set(forward)) == 4  # q, k and v read one input, and o another
    for i in range(2):
        assert sorted(backward[4 * i : 4 * i + 4]) == sorted(forward[2 * i : 2 * i + 2] * 2)


def test_a_dropped_input_that_others_read_stays() -> None:
    class Twice(nn.Module):
        """Two adapters behind one dropout."""

        def __init__(self) -> None:
            super().__init__()
            self.base = block().q.base_layer
            self.down = nn.Parameter(torch.randn(2, RANK, WIDTH) / 8)
            self.up = nn.Parameter(torch.randn(2, WIDTH, RANK) / 8)

        def forward(self, x: Tensor) -> Tensor:
            dropped = nn.functional.dropout(torch.tanh(x), P)
            low = [dropped @ a.t() @ b.t() for a, b in zip(self.down, self.up, strict=True)]
            result: Tensor = self.base(torch.tanh(x)) + low[0] + low[1]
            return result

    report = partitioned(Twice(), batch())[2]
    reason = "what dropout leaves of the input is read by more than its adapter"
    assert reasons(report) == {reason: 1}


class ByHand(nn.Module):
    """A quantized layer, and an adapter of its own input or of another."""

    def __init__(self, *, other: bool, broadcast: bool) -> None:
        super().__init__()
        self.base = block().q.base_layer
        self.a = nn.Parameter(torch.randn(RANK, WIDTH) / 8)
        self.b = nn.Parameter(torch.randn(WIDTH, RANK) / 8)
        self.other, self.broadcast = other, broadcast

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        read = torch.sigmoid(x) if self.other else h
        if self.broadcast:
            keep = torch.rand(x.shape[0], 1, WIDTH) > P
            dropped = keep * read * (1 / (1 - P))
        else:
            dropped = nn.functional.dropout(read, P)
        result: Tensor = torch.tanh(self.base(h) + dropped @ self.a.t() @ self.b.t())
        return result


def test_no_gradient_of_an_input_that_needs_none() -> None:
    """Neither kernel nor memory goes into it: the first layer's input is frozen embeddings."""
    model, x = block(), batch().detach()
    (_, backward), (output, grads), _ = partitioned(model, x)
    ops = (GRAD_A, GRAD_X, ADD_GRAD_X)
    found = [len(backward.find_nodes(op="call_function", target=op)) for op in ops]
    assert found == [2, 0, 1]  # q, k and v read x, and o what they make of it
    reference = masked(model)
    expected, right = step(reference, x, module=reference)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for name, value in grads.items():
        torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-5)


def test_adapters_of_two_dtypes_are_apart() -> None:
    class Mixed(nn.Module):
        """One adapter rounds what dropout leaves of the input, the other does not."""

        def __init__(self) -> None:
            super().__init__()
            self.base = block().q.base_layer
            self.down = nn.Parameter(torch.randn(2, RANK, WIDTH) / 8)
            self.up = nn.Parameter(torch.randn(2, WIDTH, RANK) / 8)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(x)
            result: Tensor = self.base(h)
            for i, dtype in enumerate((torch.float32, torch.bfloat16)):
                low = nn.functional.dropout(h, P).to(dtype) @ self.down[i].to(dtype).t()
                result = result + low.float() @ self.up[i].t()
            return torch.tanh(result)

    model = Mixed()
    (forward, _), (output, _), report = partitioned(model, batch())
    assert report.applied()["fuse_dropout"] == 2 and output.isfinite().all()
    found = forward.find_nodes(op="call_function", target=PROJECT)
    wide = forward.find_nodes(op="call_function", target=EXTEND_DROPPED)
    dtypes = [node.meta["val"].dtype for node in (*found, *wide)]
    assert sorted(map(str, dtypes)) == ["torch.bfloat16", "torch.float32"]


def test_an_adapter_of_another_input_than_its_layer() -> None:
    """Its own input is projected, beside the layer's product."""
    (forward, _), _, report = partitioned(ByHand(other=True, broadcast=False), batch())
    assert report.applied()["fuse_dropout"] == 1
    assert count_ops(forward)["qfuse.dropout_project"] == 1
    assert not count_ops(forward)["qfuse.extend_dropped"]
    reason = "an adapter under dropout reads another input than its layer"
    assert report.rejections()["extend_k"][reason] == 1


def test_a_mask_that_is_broadcast_stays() -> None:
    model, x = ByHand(other=False, broadcast=True), batch().detach()
    report = partitioned(model, x)[2]
    assert not report.applied()["fuse_dropout"]


def test_dropout_of_no_adapter_is_left_alone() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block(lora_dropout=0.0)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.block(x), 0.5)

    model = Dropped().train()
    _, _, report = partitioned(model, batch())
    assert reasons(report) == {}
    assert not report.applied()["fuse_dropout"]
