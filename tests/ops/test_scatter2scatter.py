"""scatter2scatter against a loop over experts: values, gradients, what is saved, one op node."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from inductor_q import exc, kernels, ops, testing
from inductor_q.formats import FORMATS
from inductor_q.kernels import (
    scatter2scatter_cuda,
    scatter2scatter_dequantize,
    scatter2scatter_grouped_mm,
)
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_calls import GroupedGram
from inductor_q.kernels.expert_weights import ExpertWeights
from inductor_q.log import warn_once
from inductor_q.ops.routing import route
from tests.support.gpu_experts import assert_as_near_as_the_loop
from tests.support.moe import GROUPED, Layer, Sizes, choices, layer, results
from tests.support.quantized import assert_same_bits, quantize

QFUSE = torch.ops.qfuse

#: (E, K, N, T, top_k, r) of ScatterMoE LoRA's own tests and of models; the last ones odd.
SHAPES = {
    "small": Sizes(32, 128, 64, 64, 2, 4),
    "medium": Sizes(64, 256, 128, 128, 4, 8),
    "odd": Sizes(3, 33, 17, 7, 2, 3),
    "one expert": Sizes(1, 64, 32, 6, 1, 2),
    "all experts": Sizes(4, 32, 64, 5, 4, 2),
    "one token": Sizes(5, 64, 32, 1, 2, 2),
}
LARGE = {
    "256 experts": Sizes(256, 2048, 1024, 64, 8, 16),
    "Qwen3.5-35B-A3B": Sizes(256, 2048, 512, 64, 8, 16),
    "OLMoE": Sizes(64, 2048, 2048, 64, 8, 16),
    "Qwen3-30B-A3B": Sizes(128, 2048, 1536, 64, 8, 16),
}
#: What rows and extras the two projections of a layer have.
UP: dict[str, Any] = {"grouped": (False, True), "bias": True}
DOWN: dict[str, Any] = {"grouped": (True, False), "bias": True, "gates": True}
LAYERS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "small": (SHAPES["small"], DOWN),
    "medium": (SHAPES["medium"], DOWN),
    **{name: (replace(sizes, tokens=2048), UP) for name, sizes in LARGE.items()},
    "Qwen3.5-35B-A3B, down": (Sizes(256, 512, 2048, 2048, 8, 16), DOWN),
}

Results = list[dict[str, Tensor]]


def errors(got: Results, truth: Results) -> dict[str, float]:
    """Norm-relative error of each result, over all runs."""

    def norm(name: str, runs: list[dict[str, Tensor]]) -> Tensor:
        total: Tensor = torch.stack([run[name].norm() for run in runs]).norm()
        return total

    off = [{n: g[n].double() - t[n] for n in t} for g, t in zip(got, truth, strict=True)]
    return {name: float(norm(name, off) / norm(name, truth)) for name in truth[0]}


def check(
    *args: Any, seeds: int = 4, truth_dtype: torch.dtype = torch.float64, **kwargs: Any
) -> None:
    """As near to float64 as the loop in the same dtype, over several layers, one being chance."""
    cases = [layer(*args, **kwargs, seed=seed) for seed in range(seeds)]
    truth = [results(exact, exact.loop()) for exact in (case.exact(truth_dtype) for case in cases)]
    ours = errors([results(case, case()) for case in cases], truth)
    eager = errors([results(case, case.loop()) for case in cases], truth)
    eps = torch.finfo(cases[0].x.dtype).eps
    rounding = 4 * eps if cases[0].x.dtype is torch.float32 else 0.5 * eps
    for name, error in ours.items():
        assert error <= max(1.25 * eager[name], rounding), (name, error, eager[name])


# --- values and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("grouped", GROUPED, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("gates", [False, True], ids=["", "gates"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("quant", ["nf4", DENSE])
def test_every_layout(
    quant: str, bias: bool, gates: bool, transposed: bool, grouped: tuple[bool, bool]
) -> None:
    options: Any = {"quant": quant, "bias": bias, "gates": gates, "transposed": transposed}
    check(**options, grouped=grouped, seeds=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, dtype: torch.dtype) -> None:
    seeds = 12 if "one" in shape else 4
    check(SHAPES[shape], dtype=dtype, seeds=seeds)
    check(SHAPES[shape], dtype=dtype, grouped=(True, False), gates=True, bias=True, seeds=seeds)


@pytest.mark.slow
@pytest.mark.parametrize("shape", LARGE)
def test_large_shapes(shape: str) -> None:
    """Float32 is exact enough beside bfloat16, and float64 takes ten minutes."""
    options: Any = {"dtype": torch.bfloat16, "truth_dtype": torch.float32, "seeds": 1}
    check(LARGE[shape], grouped=(False, True), **options)
    check(LARGE[shape], grouped=(True, False), gates=True, **options)


@pytest.mark.parametrize(
    "name, device",
    [("small", "cpu"), ("medium", "cpu")]
    + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in LAYERS],
)
def test_every_provider_against_float64(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients in bfloat16, none off by more than 1 %, each by the kernel asked for."""
    providers = ["auto", "dequantize"]
    if device == "cuda":
        on_hopper = torch.cuda.get_device_capability() == scatter2scatter_cuda.CAPABILITY
        providers += ["triton", "cuda"] if on_hopper else ["triton"]
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "inductor_q.kernels.provider.warn_passed_over", lambda _, *why: told.append(why)
    )
    sizes, form = LAYERS[name]
    seeds = 4 if name in SHAPES else 1
    cases = [
        layer(sizes, dtype=torch.bfloat16, device=device, seed=seed, **form)
        for seed in range(seeds)
    ]
    errors = assert_as_near_as_the_loop(cases, *providers)
    assert {*cases[0].leaves} | {"y"} == {*errors["auto"]}
    for provider in providers:
        assert max(errors[provider].values()) < 0.01, (provider, errors[provider])
        with torch.no_grad():
            base = replace(cases[0], lora_a=None, lora_b=None)(provider=provider)
            off = replace(cases[0], scaling=0.0)(provider=provider)
        assert testing.relative_error(off, base) < 0.01, provider
    assert not [(kernel, reason) for kernel, reason in told if kernel in providers]


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_bf16_activations(lora: bool, adapter: torch.dtype) -> None:
    check(dtype=torch.bfloat16, lora=lora, adapter=adapter, gates=True)
    case = layer(dtype=torch.bfloat16, lora=lora, adapter=adapter, gates=True)
    grads = results(case, case())
    assert {name: grads[name].dtype for name in case.leaves} == {
        name: leaf.dtype for name, leaf in case.leaves.items()
    }


@pytest.mark.parametrize("grouped", GROUPED, ids=str)
@pytest.mark.parametrize("sentinel", [-1, 5])
def test_sentinels_are_skipped(sentinel: int, grouped: tuple[bool, bool]) -> None:
    """Expert parallelism: their rows are zero, give and take no gradient, and may hold anything."""
    check(sentinel=sentinel, grouped=grouped, gates=True, bias=True)
    case = layer(sentinel=sentinel, grouped=grouped, gates=True, bias=True)
    nobody = case.routing.order[int(case.routing.offsets[-1]) :]
    assert len(nobody)
    got = results(case, case())
    assert not got["gates"].flatten()[nobody].any()
    if grouped[0]:
        with torch.no_grad():
            case.x[-len(nobody) :] = float("nan")
        for name, value in results(case, case()).items():
            assert not value.isnan().any() or name == "x", name


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 9e-3)], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("devices", [2, 4])
def test_sentinels_are_the_masked_path(
    devices: int, lora: bool, dtype: torch.dtype, limit: float, device: str
) -> None:
    """One of `devices` that share 8 experts: skipping what is not here gives what computing it with
    some expert of one's own and a gate of zero does, by the same kernels or by a loop."""
    sizes = Sizes(experts=8 // devices, tokens=40)
    ids = choices(replace(sizes, experts=8)).to(device)
    here = ids < sizes.experts
    case = layer(sizes, dtype=dtype, lora=lora, gates=True, device=device)
    assert case.gates is not None and here.any() and not here.all()
    skipping = replace(case, routing=route(torch.where(here, ids, -1), sizes.experts))
    masked = replace(
        case,
        routing=route(ids.clamp(max=sizes.experts - 1), sizes.experts),
        gates=(case.gates.detach() * here).requires_grad_(),
    )
    got = results(skipping, skipping())
    for y in (masked(), masked.loop()):
        expected = results(masked, y)
        expected["gates"] *= here  # a masked slot's is not zero, and the mask then stops it
        for name, value in expected.items():
            assert testing.relative_error(got[name], value) < limit, name


def test_experts_without_rows_have_gradients_of_exactly_zero() -> None:
    case = layer(bias=True, quant=DENSE)  # nobody chooses the last expert
    assert case.routing.offsets[-2] == case.routing.offsets[-1]
    got = results(case, case())
    for name in ("lora_a", "lora_b", "bias", "weight"):
        assert not got[name][-1].any() and got[name][:-1].any(), name


def test_gradients_are_the_same_every_time() -> None:
    case = layer(SHAPES["medium"], dtype=torch.bfloat16, gates=True)
    first = results(case, case())
    for name, again in results(case, case()).items():
        assert_same_bits(again, first[name])


def test_scaling_of_zero_is_the_base() -> None:
    case = layer()
    off = replace(case, scaling=0.0)
    base = replace(case, lora_a=None, lora_b=None)
    assert_same_bits(off().detach(), base().detach())


@pytest.mark.parametrize("frozen", ["x", "gates", "lora_a", "lora_b"])
def test_a_frozen_input_costs_the_others_nothing(frozen: str) -> None:
    case = layer(gates=True)
    expected = results(case, case())
    case.leaves[frozen].requires_grad_(False)
    y = case()
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))
    for name, leaf in case.leaves.items():
        if name == frozen:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, expected[name])


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_one(tokens: int) -> None:
    case = layer(Sizes(tokens=tokens), gates=True, bias=True, grouped=(True, False))
    got = results(case, case())
    assert got["y"].shape == (tokens, 48)
    assert got["lora_a"].any() == (tokens > 0)


# --- what it costs ------------------------------------------------------------------------------


@pytest.mark.parametrize("gates", [False, True])
def test_no_dequantized_expert_is_saved(gates: bool) -> None:
    case = layer(SHAPES["medium"], dtype=torch.bfloat16, gates=gates, grouped=(True, False))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        case()
    floats = [t for t in saved if t.is_floating_point() and t.dim() > 1]
    assert max(t.numel() for t in floats) == max(case.x.numel(), case.lora_a.numel())  # type: ignore[union-attr]


def test_experts_without_rows_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    original = ExpertWeights.__getitem__

    def count(self: ExpertWeights, expert: int) -> Tensor:
        decoded.append(expert)
        return original(self, expert)

    monkeypatch.setattr(ExpertWeights, "__getitem__", count)
    case = layer(Sizes(experts=64, tokens=3))
    case()
    assert decoded == sorted({int(e) for e in decoded}) and len(decoded) <= 6


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("blocksize", [64, 4096])
@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(4, 64, 64), (3, 33, 17), (5, 48, 64)], ids=str)
def test_an_expert_alone_is_a_slice_of_all(
    shape: tuple[int, int, int], quant: str, blocksize: int, nested: bool
) -> None:
    """Also where a block, or a block of scales, spans two experts."""
    operands, name, _ = quantize(shape, quant, blocksize=blocksize, nested=nested).operands
    whole = ops.dequantize(operands, name, shape, torch.bfloat16)
    weights = ExpertWeights(operands, FORMATS[name], shape, torch.bfloat16)
    assert_same_bits(weights.all(), whole)
    for e in range(shape[0]):
        assert_same_bits(weights[e], whole[e])


# --- the grouped GEMM of torch --------------------------------------------------------------------


@pytest.mark.parametrize("grouped", GROUPED, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("rank", [8, 3])
@pytest.mark.parametrize("quant", ["nf4", "mxfp4"])
def test_dequantize_provider(
    monkeypatch: pytest.MonkeyPatch,
    quant: str,
    rank: int,
    transposed: bool,
    grouped: tuple[bool, bool],
) -> None:
    # No reference to fall back to: an unsupported call would be an error.
    product, gram = scatter2scatter_dequantize.KERNEL, scatter2scatter_grouped_mm.GRAM
    monkeypatch.setitem(kernels.PROVIDERS["scatter2scatter"], "cpu", (product,))
    monkeypatch.setitem(kernels.PROVIDERS["grouped_gram"], "cpu", (gram,))
    check(
        Sizes(rank=rank),
        quant=quant,
        dtype=torch.bfloat16,
        bias=True,
        gates=True,
        transposed=transposed,
        grouped=grouped,
        sentinel=-1,
    )


def test_dequantize_provider_says_why_not() -> None:
    gram = scatter2scatter_grouped_mm.GRAM
    left, order, offsets = torch.ones(2, 3), torch.arange(2), torch.tensor([0, 2])
    call = GroupedGram(left, left, order, offsets, 1, True, True, torch.float32)
    assert "bfloat16" in gram.refuses(call)


# --- as torch sees it ---------------------------------------------------------------------------


def arguments(case: Layer, row_scale: Tensor | None = None) -> tuple[Any, ...]:
    return (
        case.x,
        case.operands,
        case.format,
        case.shape,
        case.transposed,
        *case.routing,
        case.grouped_in,
        case.grouped_out,
        case.lora_a,
        case.lora_b,
        case.scaling,
        case.bias,
        case.gates,
        row_scale,
    )


@pytest.mark.parametrize("quant", ["nf4", DENSE])
@pytest.mark.parametrize("everything", [False, True])
def test_opcheck(everything: bool, quant: str) -> None:
    case = layer(quant=quant, lora=everything, bias=everything, gates=everything)
    opcheck(QFUSE.scatter2scatter.default, arguments(case))
    if quant != DENSE:
        scale = torch.full((case.shape[0] * case.shape[1],), 0.01)
        opcheck(QFUSE.scatter2scatter.default, arguments(case, scale))


def test_opcheck_grouped_gram() -> None:
    routing = route(torch.tensor([[0, 2], [2, -1], [1, 0]]), 4)
    left, right = torch.randn(6, 5), torch.randn(3, 7)
    plan = (routing.order, routing.offsets, routing.top_k)
    opcheck(QFUSE.grouped_gram.default, (left, right, *plan, True, False, torch.bfloat16))


def moe(x: Tensor, ids: Tensor, gates: Tensor, up: Layer, down: Layer) -> Tensor:
    """Two projections that share a routing."""
    routing = route(ids, up.routing.num_experts)
    hidden = ops.scatter2scatter(
        x, up.operands, up.format, up.shape, routing, grouped_out=True,
        lora_a=up.lora_a, lora_b=up.lora_b, scaling=up.scaling,
    )  # fmt: skip
    return ops.scatter2scatter(
        torch.nn.functional.silu(hidden), down.operands, down.format, down.shape, routing,
        grouped_in=True, lora_a=down.lora_a, lora_b=down.lora_b, scaling=down.scaling, gates=gates,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "qfuse"])
def test_a_layer_is_one_graph_for_any_number_of_tokens(backend: str) -> None:
    torch.compiler.reset()
    counters.clear()
    up = layer(Sizes(in_features=32, out_features=48))
    down = layer(Sizes(in_features=48, out_features=32), seed=1)
    leaves = [up.lora_a, up.lora_b, down.lora_a, down.lora_b]
    compiled = torch.compile(moe, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (7, 9, 4):  # 7: no other size, or the graph would think them tied
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, 32, generator=generator, requires_grad=True)
        scores = torch.rand(tokens, 5, generator=generator)
        gates, ids = scores.softmax(-1).topk(2)
        gates = gates.requires_grad_()
        ids[0, 0] = -1
        inputs = [x, gates, *(leaf for leaf in leaves if leaf is not None)]
        expected = moe(x, ids, gates, up, down)
        got = compiled(x, ids, gates, up, down)
        torch.testing.assert_close(got, expected)
        for a, b in zip(
            torch.autograd.grad(got.square().sum(), inputs),
            torch.autograd.grad(expected.square().sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("gates", [False, True])
def test_under_a_checkpoint(gates: bool) -> None:
    """In eager, where what was saved can be had once."""
    case = layer(gates=gates, bias=True)
    expected = results(case, case())
    y = checkpoint(case, use_reentrant=False)
    for name, value in results(case, y).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_another_backend_calls_the_op() -> None:
    """Its cache does not know our sources, and outlives them."""
    case = layer()
    torch.compiler.reset()
    compiled = torch.compile(case.__call__, backend="inductor")
    with torch.no_grad():
        _, codes = run_and_get_code(compiled)
    assert "torch.ops.qfuse.scatter2scatter.default(" in "".join(codes)
    assert "qfuse_scatter2scatter" not in "".join(codes)


def test_compiled_code_calls_past_the_dispatcher() -> None:
    up = layer(Sizes(in_features=32, out_features=48))
    down = layer(Sizes(in_features=48, out_features=32), seed=1)
    x = torch.randn(7, 32, requires_grad=True)
    gates, ids = torch.rand(7, 5).softmax(-1).topk(2)
    expected = moe(x, ids, gates, up, down)
    torch.compiler.reset()
    compiled = torch.compile(moe, backend="qfuse", options={"fx_graph_cache": False})
    got, codes = run_fw_bw_and_get_code(lambda: compiled(x, ids, gates, up, down))
    torch.testing.assert_close(got, expected)
    code = "".join(codes)
    assert code.count("= qfuse_scatter2scatter(") == 4
    assert code.count("= qfuse_grouped_gram(") == 4
    assert code.count("= qfuse_tile_map(") == 1  # shared by both projections, and by backward
    assert not re.search(r"torch\.ops\.qfuse\.\w+\.default\(", code)


@pytest.mark.slow
def test_a_wrapper_that_takes_no_provider_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The op's schema has none, so `qfuse.kernels` cannot be obeyed there."""
    case = layer(dtype=torch.bfloat16, lora=False)
    torch.compiler.reset()
    warn_once.cache_clear()
    kernels: dict[str, Any] = {"qfuse.kernels": {"scatter2scatter": "dequantize"}}
    options = {**kernels, "cpp_wrapper": True, "fx_graph_cache": False}
    compiled = torch.compile(case.__call__, backend="qfuse", options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(), case())
    assert "'dequantize' is not used: C++ wrapper code calls the op" in caplog.text


# --- mistakes -----------------------------------------------------------------------------------


def test_wrong_arguments() -> None:
    case = layer(gates=True, bias=True)
    wrong: dict[str, Any] = {
        "x": torch.zeros(9, 65),
        "lora_a": torch.zeros(5, 4, 63),
        "lora_b": None,
        "bias": torch.zeros(4, 48),
        "gates": torch.zeros(9, 3),
        "routing": case.routing._replace(offsets=case.routing.offsets[:-1]),
    }
    for name, value in wrong.items():
        with pytest.raises(exc.WrongShape):
            replace(case, **{name: value})()
    with pytest.raises(exc.CorruptQuantState):
        replace(case, operands=[case.operands[0][:-1], *case.operands[1:]])()
    with pytest.raises(exc.WrongShape, match="tile map"):
        replace(case, routing=case.routing._replace(tiles=case.routing.tiles[1:]))()
    wide = torch.cat([case.routing.tiles, case.routing.tiles], 1)[:, :4]
    with pytest.raises(exc.WrongShape, match="strides of the tile map"):
        replace(case, routing=case.routing._replace(tiles=wide))()
    narrow = case.routing._replace(order=case.routing.order.int())
    with pytest.raises(exc.WrongDtype, match=r"order of a routing is torch\.int32, expected"):
        replace(case, routing=narrow)()
