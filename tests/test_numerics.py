"""Compiled against float64: nothing is further off than 1.25 times what eager is."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.presets import select
from tests.support.compiling import SMALL, Between, compile_step, gradients, step

bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
N, K = 128, 64  # with 96 rows the sizes of tests/passes/, whose kernels then serve here
SLACK = 1.25
NOISE = 2e-7  # of the reference itself, and of a float32 sum in another order

#: N and K of a layer under a preset's own thresholds: on a GPU those of a model's.
SIZES = {"cpu": (N, K), "cuda": (4096, 2048)}

Step = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(autouse=True, scope="module")
def sums_in_float32() -> Iterator[None]:
    """cuBLAS may add up in 16 bits where it splits a sum: which of two products that a pass has
    shaped otherwise it does so for would be chance."""
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = [getattr(torch.backends.cuda.matmul, name) for name in names]
    for name in names:
        setattr(torch.backends.cuda.matmul, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(torch.backends.cuda.matmul, name, value)


def x_MK(*shape: int, dtype: torch.dtype = BF16, k: int = K, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(*(shape or (2, 48)), k, generator=generator)
    return x.to(device, dtype).requires_grad_()


def threshold(name: str, device: str) -> int:
    """What the preset of the device says."""
    value: int = select(torch.device(device)).thresholds[name].value
    return value


def reference(module: nn.Module, x: Tensor) -> Step:
    exact = testing.reference_model(module)
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    for name, parameter in exact.named_parameters():
        parameter.requires_grad_(name in trained)
        parameter.grad = None
    return step(exact, x.detach().double().requires_grad_(x.requires_grad), module=exact)


def assert_no_worse(got: Step, eager: Step, exact: Step) -> None:
    pairs = {"output": (got[0], eager[0], exact[0])}
    assert got[1].keys() == eager[1].keys() == exact[1].keys()
    pairs |= {name: (got[1][name], eager[1][name], exact[1][name]) for name in exact[1]}
    for name, (ours, theirs, truth) in pairs.items():
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
        error, limit = testing.relative_error(ours, truth), testing.relative_error(theirs, truth)
        assert error <= SLACK * limit + NOISE, f"{name}: {error:.2e}, eager {limit:.2e}"


@dataclass
class Case:
    adapter_dtype: torch.dtype = BF16
    compute_dtype: torch.dtype = BF16
    numerics: str = "default"
    bias: bool = False
    shape: tuple[int, ...] = (2, 48)
    extended: int = 2  # forward and backward
    autocast: bool = False
    stream: torch.dtype | None = None  # of the input, if not the compute dtype

    def context(self, device: str) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device, BF16) if self.autocast else contextlib.nullcontext()


CASES = {
    "bf16": Case(),
    "bf16, strict": Case(numerics="strict", extended=0),
    "fp32 adapter": Case(FP32, extended=0),
    "fp32 adapter, autocast": Case(FP32, autocast=True),
    "fp32 stream, autocast": Case(FP32, autocast=True, stream=FP32),
    "fp32 stream, bf16 adapter, bias": Case(autocast=True, stream=FP32, bias=True),
    "fp16": Case(FP16, FP16),
    "fp32": Case(FP32, FP32),
    "bias that trains": Case(bias=True),
    "matrix": Case(shape=(96,)),
    "one row": Case(shape=(1,), extended=0),  # the factor stays on [1, r]
    "one row of a batch": Case(shape=(1, 1), extended=0),
    "four dimensions": Case(shape=(2, 2, 24)),
}
#: They differ from "bf16" and "one row" in views only.
VIEWS = ("matrix", "one row of a batch", "four dimensions")
ON_CPU = [
    pytest.param(name, "cpu", marks=pytest.mark.slow if name in VIEWS else ()) for name in CASES
]
ON_GPU = [
    pytest.param(name, "cuda", marks=pytest.mark.gpu)
    for name in CASES
    if name not in (*VIEWS, "bf16, strict")
]


def layer(case: Case, device: str = "cpu", *, n: int = N, k: int = K) -> nn.Module:
    module = testing.lora_linear(
        n,
        k,
        bias=case.bias,
        adapter_dtype=case.adapter_dtype,
        compute_dtype=case.compute_dtype,
        device=device,
    )
    if case.bias:
        bias: Any = module.get_submodule("proj.base_layer").bias
        bias.data = bias.data.to(case.compute_dtype)
        bias.requires_grad_()
    return Between(module)


def is_canonical(rows: int, device: str) -> bool:
    """Whether a layer of so many rows is ours, by their number or by a kernel of few rows."""
    if rows >= threshold("canonicalize.min_rows", device):
        return True
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("name, device", [*ON_CPU, *ON_GPU])
def test_linear(name: str, device: str) -> None:
    case = CASES[name]
    module = layer(case, device)
    x = x_MK(*case.shape, dtype=case.stream or case.compute_dtype, device=device)
    with case.context(device):
        eager = step(module, x, module=module)
    if case.bias:
        assert "layer.proj.base_layer.bias" in eager[1]
    options = {"qfuse.numerics": case.numerics}
    result = compile_step(module, x, options=options, context=case.context(device))
    assert result.applied.get("extend_k", 0) == case.extended
    # Backward, and forward but where a GPU leaves the fewest rows to bitsandbytes' own kernel.
    forward = is_canonical(math.prod(case.shape), device)
    assert result.applied["canonicalize"] == 1 + forward
    assert_no_worse((result.output, result.gradients), eager, reference(module, x))


@pytest.mark.parametrize("rows", [128, 1024])
def test_rows_on_both_sides_of_the_presets_threshold(rows: int, device: str) -> None:
    """No threshold is the test's own: on Hopper, the wide product is for 256 rows and more."""
    n, k = SIZES[device]
    module, x = layer(Case(), device, n=n, k=k), x_MK(rows, k=k, device=device)
    eager = step(module, x, module=module)
    result = compile_step(module, x, options={"qfuse.thresholds": {}})
    extended = 2 if rows >= threshold("extend_k.min_rows", device) else 0
    assert result.applied.get("extend_k", 0) == extended
    assert result.applied["canonicalize"] == 2
    assert result.applied["keep_packed"] == 1
    assert_no_worse((result.output, result.gradients), eager, reference(module, x))


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_of_inference_under_the_presets_threshold(rows: int, device: str) -> None:
    """A GPU without a kernel of ours keeps bitsandbytes' own; its result is the same."""
    n, k = SIZES[device]
    module, x = layer(Case(), device, n=n, k=k).eval(), x_MK(rows, k=k, device=device).detach()
    with torch.no_grad():
        eager = step(module, x, module=module)
        result = compile_step(module, x, options={"qfuse.thresholds": {}})
        exact = reference(module, x)
    canonical = is_canonical(rows, device)
    assert result.applied.get("canonicalize", 0) == canonical
    assert result.ops["bitsandbytes.gemm_4bit"] == (not canonical)
    assert_no_worse((result.output, {}), eager, exact)


def test_relaxed_stays_within_the_rounding_of_its_dtype() -> None:
    """bf16 products in place of float32 ones lose what bf16 loses, as the option says."""
    module, x = layer(Case(FP32)), x_MK()
    result = compile_step(module, x, options={"qfuse.numerics": "relaxed"})
    exact = reference(module, x)
    assert testing.relative_error(result.output, exact[0]) < 2**-8
    for name, grad in exact[1].items():
        assert testing.relative_error(result.gradients[name], grad) < 2**-7, name


def test_input_that_is_not_contiguous(device: str) -> None:
    module = layer(Case(), device)
    swapped, wide = x_MK(48, 2, device=device).detach(), x_MK(2, 48, k=2 * K, device=device)
    for x in (swapped.transpose(0, 1), wide.detach()[..., ::2]):
        assert not x.is_contiguous()
        x.requires_grad_()
        eager = step(module, x, module=module)
        result = compile_step(module, x)
        assert result.applied["extend_k"] == 2
        assert_no_worse((result.output, result.gradients), eager, reference(module, x))


def test_no_rows(device: str) -> None:
    module, x = layer(Case(), device), x_MK(0, device=device)
    eager = step(module, x, module=module)
    result = compile_step(module, x)
    assert result.output.shape == (0, N)
    assert result.gradients.keys() == eager[1].keys()
    for name, grad in eager[1].items():
        assert torch.equal(result.gradients[name], grad), name


MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients(mode: str, device: str) -> None:
    module, x = layer(Case(), device).eval(), x_MK(device=device).detach()
    with MODES[mode]():
        eager = step(module, x, module=module)
        result = compile_step(module, x)
    assert result.applied["canonicalize"] == 1
    assert result.applied["extend_k"] == 1
    assert "keep_packed" not in result.applied
    assert not result.output.requires_grad
    with torch.no_grad():
        assert_no_worse((result.output, {}), eager, reference(module, x))


def test_training_and_evaluation_of_one_module() -> None:
    """Dropout is on in one and off in the other: two graphs, each right."""
    module, x = testing.lora_linear(N, K, adapter_dtype=BF16, dropout=0.5), x_MK().detach()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=qfuse, options={**SMALL, "fallback_random": True})
    for _ in range(2):
        for training in (True, False):
            module.train(training)
            torch.manual_seed(0)
            expected = module(x)
            torch.manual_seed(0)
            assert testing.relative_error(compiled(x), expected) < 2**-7


class Block(nn.Module):
    """Two layers and what is between them, recomputed in backward."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.up = testing.lora_linear(N, K, adapter_dtype=BF16, seed=1, device=device)
        self.down = testing.lora_linear(K, N, adapter_dtype=BF16, seed=2, device=device)
        self.recompute = True

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.silu(self.up(x)))
        return x + y

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self.inner(x)
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


def test_gradient_checkpointing(device: str) -> None:
    module, x = Block(device), x_MK(device=device)
    eager = step(module, x, module=module)
    result = compile_step(module, x, fullgraph=True)
    assert result.applied["extend_k"] >= 2
    module.recompute = False
    exact = reference(copy.copy(module), x)
    assert_no_worse((result.output, result.gradients), eager, exact)


# --- a whole model ------------------------------------------------------------------------------


@dataclass
class Llama:
    """A 2-layer Llama, compiled once with dynamic shapes."""

    model: Any
    compiled: Any
    trace: testing.CompileTrace


def ids(length: int, device: torch.device, batch: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, length), generator=generator).to(device)


LENGTHS = (24, 40, 17)


@pytest.fixture(scope="module")
def llama(device: str) -> Iterator[Llama]:
    pytest.importorskip("transformers")
    model = testing.qlora_model(
        testing.tiny_llama_config(), adapter_dtype=BF16, randomize_adapters=True, device=device
    )
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=qfuse, options=SMALL, dynamic=True)
    with testing.CompileTrace() as trace:
        for length in LENGTHS:
            batch = ids(length, model.device)
            compiled(input_ids=batch, labels=batch).loss.backward()
    gradients({}, model)
    yield Llama(model, compiled, trace)
    torch._dynamo.reset()


@pytest.mark.slow
def test_three_lengths_are_two_graphs_and_no_break(llama: Llama) -> None:
    assert llama.trace.breaks == []
    assert llama.trace.graphs <= 2
    report = inductor_q.last_report()
    assert report is not None
    applied = report.applied()
    # Layers, projections, forward and backward; the embeddings are frozen, so the first q, k and v
    # have no gradient to hand on.
    assert applied["canonicalize"] == 2 * 7 * 2 - 3
    # Forward all but the two o_proj, whose input comes from attention's kernel; backward all.
    assert applied["extend_k"] == 12 + 7


def logits_and_gradients(run: Callable[..., Any], model: Any) -> tuple[Tensor, Tensor]:
    """Of several batches, each as one vector: of a single one, the error is mostly chance."""
    logits, grads = [], []
    for seed in range(2):
        for length in LENGTHS:
            batch = ids(length, model.device, seed=seed)
            result = run(input_ids=batch, labels=batch)
            result.loss.backward()
            logits.append(result.logits.detach().double().flatten())
            found = gradients({}, model)
            assert len(found) == 2 * 7 * 2
            grads += [found[name].double().flatten() for name in sorted(found)]
    return torch.cat(logits), torch.cat(grads)


@pytest.mark.slow
def test_llama_against_float64(llama: Llama) -> None:
    exact: Any = testing.reference_model(llama.model)
    ours = logits_and_gradients(llama.compiled, llama.model)
    theirs = logits_and_gradients(llama.model, llama.model)
    for got, eager, true in zip(ours, theirs, logits_and_gradients(exact, exact), strict=True):
        error, limit = testing.relative_error(got, true), testing.relative_error(eager, true)
        assert error <= SLACK * limit, f"{error:.2e}, eager {limit:.2e}"


def train(run: Callable[..., Any], model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(testing.adapter_parameters(model), lr=5e-3)
    batch = ids(LENGTHS[0], model.device)
    losses = []
    for _ in range(steps):
        loss = run(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_ten_steps_of_training_agree_with_eager(llama: Llama) -> None:
    start = testing.adapter_state(llama.model)
    ours = train(llama.compiled, llama.model, 10)
    testing.load_adapter_state(llama.model, start)
    theirs = train(llama.model, llama.model, 10)
    testing.load_adapter_state(llama.model, start)
    learned = theirs[0] - theirs[-1]
    assert learned > 0.5  # else agreeing would be no feat
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.03 * learned
