"""fuse_scatter2scatter: transformers' experts, as they are, read packed."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils.checkpoint import checkpoint

import inductor_q
from inductor_q import experts
from inductor_q.experts.modules import expert_layers
from inductor_q.integrations import prepare_checkpointing
from inductor_q.kernels import PROVIDERS
from inductor_q.kernels.expert_calls import unchecked
from inductor_q.log import warn_once
from tests.support.autocast import cuda_autocast
from tests.support.compiling import Compiled, compile_step, no_codegen, op_name, step
from tests.support.moe_models import EXPERTS, HIDDEN, INTERMEDIATE, awaken, model, tokens

PASS = "fuse_scatter2scatter"
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}
AS_STORED = {
    "fuse_scatter2scatter.min_elements_of_large": 1,
    "fuse_scatter2scatter.min_rows_of_large": 1,
}
TRANSPOSED = {
    "fuse_scatter2scatter.min_elements_of_large_transposed": 1,
    "fuse_scatter2scatter.min_rows_of_large_transposed": 1,
}
DECODED_FIRST = AS_STORED | TRANSPOSED


class Experts(nn.Module):
    """The expert layer of a tiny model, with its choices, and an input that wants a gradient."""

    def __init__(
        self,
        family: str,
        implementation: str,
        dtype: torch.dtype,
        packed: bool = True,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        net = model(family).to(device, dtype)
        self.experts: Any = expert_layers(net)["model.layers.0.mlp.experts"]
        self.experts.requires_grad_(False)
        if packed:
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(self.experts, name)
            # What the hooks cache of a layer alone would leave the graph as outputs.
            self.experts._forward_hooks.clear()
            self.experts._forward_pre_hooks.clear()
        self.experts.config._experts_implementation = implementation

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        result: Tensor = self.experts(x, ids, gates)
        return result


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the providers of scatter2scatter that run, in order; nothing was warned of."""
    names: list[str] = []
    warn_once.cache_clear()
    for provider in PROVIDERS["scatter2scatter"]["cpu"]:

        def run(call: Any, provider: Any = provider, original: Any = provider.run) -> Any:
            names.append(provider.name)
            return original(call)

        monkeypatch.setattr(provider, "run", run, raising=False)
    return names


def inputs(dtype: torch.dtype, n: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, HIDDEN, generator=generator).to(dtype).requires_grad_()
    gates = torch.rand(n, 2, generator=generator).to(dtype).requires_grad_()
    return x, torch.rand(n, EXPERTS, generator=generator).argsort(-1)[:, :2], gates


def skip_unless_torch_compiles(layer: Experts, args: tuple[Tensor, ...]) -> None:
    """transformers 5.17 multiplies groups in float32 on a CPU in a loop over their sizes."""
    try:
        torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)(*args)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, GuardOnDataDependentSymNode):
            pytest.skip("no backend compiles this transformers' grouped_mm here: it reads sizes")
        raise
    finally:
        torch.compiler.reset()


def compiled(
    layer: Experts, dtype: torch.dtype, args: tuple[Tensor, ...] = (), **kwargs: Any
) -> Compiled:
    """One step, held to the layer in eager mode: in float32, or in 16 bits and in float64."""
    args = args or inputs(dtype)
    skip_unless_torch_compiles(layer, args)
    expected = step(layer, *args)
    result = compile_step(layer, *args, fullgraph=True, **kwargs)
    if dtype is torch.float32:
        torch.testing.assert_close(result.output, expected[0], **CLOSE)
        assert_all_close(result.gradients, expected[1])
    else:
        check_errors(result, expected, in_float64(layer, args))
    return result


def assert_all_close(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], **CLOSE)


Step = tuple[Tensor, dict[str, Tensor]]  # an output, and gradients by name


def in_float64(layer: nn.Module, args: tuple[Tensor, ...]) -> Step:
    """A step of the layer in eager mode in float64."""
    exact: Any = copy.deepcopy(layer)
    for name in list(exact.experts._modules.get("parametrizations") or ()):
        unpack(exact.experts, name)
    exact.experts.config._experts_implementation = "eager"
    doubles = [a.detach().double().requires_grad_() if a.requires_grad else a for a in args]
    return step(exact.double(), *doubles)


def unpack(module: Any, name: str) -> None:
    """Replace a parameter that bitsandbytes has packed by its values, decoded in float32."""
    module.parametrizations[name][0].quant_state.dtype = torch.float32
    weight = getattr(module, name).detach()
    torch.nn.utils.parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    setattr(module, name, nn.Parameter(weight, requires_grad=False))


def check_errors(result: Compiled, eager: Step, exact: Step) -> None:
    """Both round to 16 bits, in other places: no further from float64 than eager, and a quarter."""
    names = ["output", *eager[1]]
    ours, theirs, true = (
        [output, *gradients.values()]
        for output, gradients in ((result.output, result.gradients), eager, exact)
    )
    assert result.gradients.keys() == eager[1].keys() == exact[1].keys()
    for name, mine, other, value in zip(names, ours, theirs, true, strict=True):
        assert (mine - value).norm() <= 1.25 * (other - value).norm(), name


def saved(result: Compiled) -> int:
    """The largest tensor that the forward graph hands to backward."""
    output: Any = result.partitioned[0].output_node()
    computed = [v for v in output.args[0] if v is not None and v.op != "placeholder"]
    return max(int(v.meta["val"].numel()) for v in computed)


def products(result: Compiled) -> list[tuple[Any, ...]]:
    """(top_k, grouped_in, grouped_out) of each scatter2scatter."""
    nodes = [n for graph in result.joint for n in graph.nodes]
    op = torch.ops.qfuse.scatter2scatter.default
    calls = [unchecked(n.args) for n in nodes if n.target is op]
    return [(call.top_k, call.grouped_in, call.grouped_out) for call in calls]


#: Tokens in, sorted rows between the projections, tokens out; and back.
TO_ROWS, TO_TOKENS = (2, False, True), (2, True, False)
BY_TOKEN = [TO_ROWS, TO_TOKENS, TO_ROWS, TO_TOKENS]


def copies(result: Compiled, slots: int) -> list[str]:
    """What has a row of the hidden size for each slot, which nothing needs."""
    nodes = [n for graph in result.joint for n in graph.nodes]
    return [n.name for n in nodes if [*getattr(n.meta.get("val"), "shape", ())] == [slots, HIDDEN]]


SLOW = pytest.mark.slow
CASES = [
    ("qwen3_moe", "grouped_mm", torch.float32),
    ("gpt_oss", "batched_mm", torch.float32),
    pytest.param("qwen3_moe", "grouped_mm", torch.bfloat16, marks=SLOW),
    pytest.param("qwen3_moe", "batched_mm", torch.float32, marks=SLOW),
    pytest.param("qwen3_moe", "batched_mm", torch.bfloat16, marks=SLOW),
    pytest.param("gpt_oss", "grouped_mm", torch.float32, marks=SLOW),
    pytest.param("gpt_oss", "grouped_mm", torch.bfloat16, marks=SLOW),
    pytest.param("gpt_oss", "batched_mm", torch.bfloat16, marks=SLOW),
]


@pytest.mark.parametrize(("family", "implementation", "dtype"), CASES)
def test_packed_experts_are_read_packed(
    family: str, implementation: str, dtype: torch.dtype
) -> None:
    result = compiled(Experts(family, implementation, dtype), dtype)
    assert result.applied[PASS] == 4  # two projections, forward and input gradient
    assert result.ops["qfuse.scatter2scatter"] == 4
    assert result.ops["qfuse.tile_map"] == 1  # both projections, and backward
    assert not {"_grouped_mm", "bmm", "qfuse.dequantize", "bitsandbytes.dequantize_4bit"} & {
        *result.ops
    }
    assert saved(result) <= 14 * 2 * INTERMEDIATE
    assert result.ops["sort"] <= 1
    if implementation == "grouped_mm":
        assert PASS not in result.reasons
        if family == "gpt_oss":  # a bias between the second product and its gates
            assert products(result) == [TO_ROWS, (1, True, True), TO_ROWS, TO_TOKENS]
        else:
            assert products(result) == BY_TOKEN
            assert not copies(result, 14)


def half_dense(implementation: str) -> Experts:
    """Its first projection in float32, beside a packed one: a model without any is Inductor's."""
    layer = Experts("qwen3_moe", implementation, torch.float32)
    unpack(layer.experts, "gate_up_proj")
    return layer


class Checkpointed(Experts):
    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, ids, gates, use_reentrant=False)
        return result


def test_under_a_checkpoint() -> None:
    result = compiled(Checkpointed("qwen3_moe", "grouped_mm", torch.float32), torch.float32)
    assert PASS not in result.reasons
    assert all(product in BY_TOKEN for product in products(result))
    assert not copies(result, 14)


@pytest.mark.parametrize(
    ("dtype", "kind", "masked"),
    [
        (torch.bfloat16, Experts, False),
        (torch.float32, Checkpointed, True),
        pytest.param(torch.float32, Experts, False, marks=SLOW),
        pytest.param(torch.bfloat16, Checkpointed, True, marks=SLOW),
    ],
)
def test_under_autocast_of_cuda(dtype: torch.dtype, kind: type[Experts], masked: bool) -> None:
    """It takes sums in float32; what flows from layer to layer may be float32, too, and masked."""
    layer = kind("qwen3_moe", "grouped_mm", torch.bfloat16)
    layer.experts._is_expert_parallel = masked
    x, ids, gates = inputs(torch.bfloat16)
    args = x.detach().to(dtype).requires_grad_(), ids, gates
    with cuda_autocast():
        eager = step(layer, *args)
        result = compile_step(layer, *args, fullgraph=True)
    assert result.output.dtype == eager[0].dtype == dtype
    assert products(result) == BY_TOKEN and PASS not in result.reasons
    assert not copies(result, 14)
    check_errors(result, eager, in_float64(layer, args))


@SLOW
def test_gathered_dense_experts_are_not_copied() -> None:
    layer = half_dense("batched_mm")
    result = compiled(layer, torch.float32)
    assert result.applied[PASS] == 4
    assert saved(result) <= 14 * 2 * INTERMEDIATE


def test_grouped_dense_experts_stay() -> None:
    layer = half_dense("grouped_mm")
    result = compiled(layer, torch.float32)
    assert result.applied[PASS] == 2
    assert result.reasons[PASS] == {
        "the experts are dense: torch's grouped product reads them as they are": 2
    }
    assert list(result.report.verdicts()) == ["experts.down_proj"]


def test_dense_experts_are_no_quantized_layers() -> None:
    """Of a model that calls our op, and of one that gathers them: sites, without a verdict."""
    net = model("qwen3_moe").requires_grad_(False)
    experts.quantize(net, "dense")
    layer = Experts("qwen3_moe", "qfuse", torch.float32, packed=False)
    layer.experts = expert_layers(net)["model.layers.0.mlp.experts"]
    with no_codegen():
        result = compile_step(layer, *inputs(torch.float32), fullgraph=True)
        assert result.applied[PASS] == 4
        assert not result.report.verdicts() and "quantized" not in result.report.summary()
        gathered = compile_step(half_dense("batched_mm"), *inputs(torch.float32), fullgraph=True)
    assert gathered.applied[PASS] == 4
    assert list(gathered.report.verdicts()) == ["experts.down_proj"]


@pytest.mark.parametrize("passes", [{}, {PASS: False}], ids=["", "without the pass"])
@pytest.mark.parametrize(
    ("dtype", "wanted", "provider"),
    [
        (torch.bfloat16, "auto", "reference"),
        (torch.bfloat16, "dequantize", "dequantize"),
        (torch.float32, "dequantize", "reference"),  # bfloat16 only
        (torch.float32, "triton", "reference"),  # on a GPU only
    ],
    ids=str,
)
def test_products_of_our_own_are_served_and_reported_as_asked(
    dtype: torch.dtype,
    wanted: str,
    provider: str,
    passes: dict[str, bool],
    launched: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Forward and backward, whether or not a pass looks at them; what is refused is logged."""
    net = model("qwen3_moe").requires_grad_(False)
    experts.quantize(net)
    layer = Experts("qwen3_moe", "qfuse", dtype, packed=False)
    layer.experts = expert_layers(net)["model.layers.0.mlp.experts"]
    awaken(experts.add_lora(layer, r=2))
    layer.to(dtype)
    options = {
        "qfuse.kernels": {"scatter2scatter": wanted},
        "qfuse.passes": passes,
        "fx_graph_cache": False,
    }
    result = compile_step(layer, *inputs(dtype), fullgraph=True, options=options)
    assert launched == [provider] * 4
    assert result.report.providers["scatter2scatter"] == {provider: 4}
    assert ("is not used" in caplog.text) == (wanted not in ("auto", provider))
    sites = [s for s in result.report.sites if s.pass_name == PASS]
    if not passes:
        assert result.applied[PASS] == 4
        assert {s.provider for s in sites} == {provider}
        assert {s.module for s in sites} == {"experts.gate_up_proj", "experts.down_proj"}


@SLOW
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_any_number_of_tokens(implementation: str) -> None:
    layer = Experts("qwen3_moe", implementation, torch.float32)
    result = compiled(layer, torch.float32, dynamic=True)
    assert result.applied[PASS] == 4
    assert result.ops["qfuse.scatter2scatter"] == 4
    if implementation == "grouped_mm":  # of choices too, which is for this layer alone
        assert result.reasons[PASS] == {"rows stay sorted: top_k is no number": 4}


def test_any_number_of_tokens_by_a_fixed_number_of_choices() -> None:
    """How many rows there are is asked of their order: the tokens' copies are not made any more."""
    args = inputs(torch.float32, 9)
    for one in args:
        torch._dynamo.mark_dynamic(one, 0)
    result = compiled(Experts("qwen3_moe", "grouped_mm", torch.float32), torch.float32, args)
    assert products(result)[0] == TO_ROWS
    nodes = [n for graph in result.joint for n in graph.nodes]
    (tiles,) = (n for n in nodes if n.target is torch.ops.qfuse.tile_map.default)
    (asked,) = tiles.args[1].all_input_nodes
    assert asked.meta["val"].dim() == 1


def test_rows_of_sentinels_are_nobodys() -> None:
    """Under expert parallelism transformers masks them around each product; 5.17 always does."""
    layer = Experts("qwen3_moe", "grouped_mm", torch.float32)
    layer.experts._is_expert_parallel = True
    x, ids, gates = inputs(torch.float32)
    elsewhere = ids == 2
    ids = ids.masked_fill(elsewhere, EXPERTS)
    gates = gates.detach().masked_fill(elsewhere, 0.0).requires_grad_()
    result = compiled(layer, torch.float32, (x, ids, gates))
    assert result.ops["ge"] and products(result) == BY_TOKEN
    assert not copies(result, 14) and PASS not in result.reasons


class Twice(Experts):
    """The same layer on its own result."""

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        return super().forward(super().forward(x, ids, gates), ids, gates)


@SLOW
def test_a_layer_on_the_result_of_a_layer() -> None:
    """What is fused first is what the next reads."""
    result = compiled(Twice("qwen3_moe", "grouped_mm", torch.float32), torch.float32)
    assert sorted(products(result)) == sorted(BY_TOKEN * 2)
    assert not copies(result, 14) and not result.ops["transformers.grouped_mm_fallback"]


Order = tuple[Tensor, Tensor]  # of sorted slots: the expert of each, and which it is


def grouped_mm(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Torch's, which has no float64: there, a loop over the groups."""
    if rows.dtype is not torch.float64:
        return torch._grouped_mm(rows, weight, offs=offs)
    spans = itertools.pairwise([0, *offs.tolist()])
    return torch.cat([rows[start:end] @ weight[e] for e, (start, end) in enumerate(spans)])


class First(Experts):
    """The first product alone, of rows and with a result that a test chooses."""

    def __init__(
        self,
        rows: Callable[[Tensor, Order], Tensor],
        result: Callable[[Tensor, Tensor, Order], Tensor] = lambda y, gates, order: y,
    ) -> None:
        super().__init__("qwen3_moe", "grouped_mm", torch.bfloat16)
        self.rows, self.result = rows, result

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        keys, order = torch.sort(ids.reshape(-1))
        counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        offs = counts.cumsum(0, dtype=torch.int32)
        weight = self.experts.gate_up_proj.transpose(1, 2)
        y = grouped_mm(self.rows(x, (keys, order)), weight, offs)
        return self.result(y, gates, (keys, order))


def masked(keys: Tensor, first: int) -> Tensor:
    return (keys >= first).unsqueeze(-1)


def check_first(
    layer: First, *, found: list[Any], reasons: dict[str, int], numerics: str = "default"
) -> None:
    args = inputs(torch.bfloat16)
    options = {"qfuse.numerics": numerics}
    result = compile_step(layer, *args, fullgraph=True, options=options)
    check_errors(result, step(layer, *args), in_float64(layer, args))
    assert result.applied[PASS] == 2 and products(result) == found
    told = {f"rows stay sorted: {reason}": count for reason, count in reasons.items()}
    assert result.reasons.get(PASS, {}) == told


NOT_DIVIDED = "their tokens are not slots divided by top_k"
NOT_SORTED = "their order is not that of a sort"
NOT_NOBODYS = "some are masked that may be an expert's"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (lambda x, order: x[order[1] // 2], ""),
        (lambda x, order: x[order[1] // 2].masked_fill(masked(order[0], 4), 0), ""),
        (lambda x, order: x.float()[order[1] // 2].to(x.dtype), ""),
        (lambda x, order: x.float().exp()[order[1] // 2].to(x.dtype), ""),
        (lambda x, order: x[order[1] % 7], NOT_DIVIDED),
        (lambda x, order: x[order[1].flip(0) // 2], NOT_SORTED),
        (lambda x, order: x[order[1] // 3], "they are not 3 a token"),
        (lambda x, order: x[order[1] // 2].masked_fill(masked(order[0], 3), 0), NOT_NOBODYS),
        (lambda x, order: x[order[1] // 2].masked_fill((x > 9).any(), 0), NOT_NOBODYS),
    ],
)
def test_rows_are_copies_only_where_that_is_shown(rows: Any, reason: str) -> None:
    if reason:
        check_first(First(rows), found=[(1, True, True)] * 2, reasons={reason: 2})
    else:
        check_first(First(rows), found=[TO_ROWS, TO_TOKENS], reasons={})


def inverse(order: Tensor) -> Tensor:
    """As transformers computes it."""
    result = torch.empty_like(order)
    result[order] = torch.arange(order.shape[0])
    return result


def added(y: Tensor, place: Tensor) -> Tensor:
    return y[place].view(-1, 2, y.shape[1]).sum(1)


def weighted(y: Tensor, gates: Tensor, order: Tensor) -> Tensor:
    return y * gates.reshape(-1)[order].unsqueeze(-1)


@pytest.mark.parametrize(
    ("result", "forward", "backward", "reasons"),
    [
        (lambda y, _, order: added(y, inverse(order[1])), TO_TOKENS, TO_ROWS, {}),
        (
            lambda y, gates, order: added(weighted(y, gates, order[1]), inverse(order[1])),
            TO_TOKENS,
            TO_ROWS,
            {},
        ),
        (
            lambda y, gates, order: added(weighted(y, gates, order[1].flip(0)), inverse(order[1])),
            (1, True, True),
            (1, True, True),
            {"their gates are not one a slot": 2},
        ),
        (
            lambda y, gates, order: added(
                weighted(y, gates.float(), order[1]), inverse(order[1])
            ).to(y.dtype),
            (1, True, True),
            (1, True, True),
            {"their gates are of another dtype": 2},
        ),
        (
            lambda y, gates, order: (
                added(weighted(y, gates, order[1]), inverse(order[1])) + y.sum(0)
            ),
            (1, True, True),
            (1, True, True),
            {"they are read again": 1},
        ),
        (
            lambda y, gates, order: added(y, inverse(order[1].flip(0))),
            (1, True, True),
            (1, True, True),
            {NOT_SORTED: 2},
        ),
        (lambda y, gates, order: added(y, order[1]), (1, True, True), (1, True, True), {}),
    ],
)
def test_rows_are_added_only_where_that_is_shown(
    result: Any, forward: Any, backward: Any, reasons: dict[str, int]
) -> None:
    layer = First(lambda x, _: torch.cat([x, x]), result)
    check_first(layer, found=[forward, backward], reasons=reasons)


def in_float32(y: Tensor, gates: Tensor, order: Order) -> Tensor:
    """What `added` and `weighted` give under autocast of CUDA, which a model need not round."""
    by_slot = weighted(y, gates, order[1])[inverse(order[1])].view(-1, 2, y.shape[1])
    return by_slot.sum(1, dtype=torch.promote_types(y.dtype, torch.float32))


@pytest.mark.parametrize("numerics", ["default", "strict"])
@pytest.mark.parametrize("rounded", [True, False])
def test_rows_are_added_in_float32(rounded: bool, numerics: str) -> None:
    """The op does so too, and rounds: strictly where the model does."""

    def result(y: Tensor, gates: Tensor, order: Order) -> Tensor:
        total = in_float32(y, gates, order)
        return total.to(y.dtype) if rounded else total

    keeps = numerics == "strict" and not rounded
    kept = {"qfuse.numerics='strict' keeps their sums in the model's dtype": 1} if keeps else {}
    check_first(
        First(lambda x, _: torch.cat([x, x]), result),
        found=[(1, True, True) if kept else TO_TOKENS, TO_ROWS],
        reasons=kept,
        numerics=numerics,
    )


class Routed(Experts):
    """Choices of a top-k among so many scores."""

    def __init__(self, scores: int) -> None:
        super().__init__("qwen3_moe", "grouped_mm", torch.bfloat16)
        self.scores = scores

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        scores = x.detach()[:, :1] * torch.linspace(-1, 1, self.scores, dtype=x.dtype)
        ids = scores.topk(2).indices
        return super().forward(x, ids if self.scores == EXPERTS else ids % EXPERTS, gates)


@pytest.mark.parametrize(("scores", "dtype"), [(EXPERTS, torch.int16), (7, torch.int64)])
def test_keys_are_narrow_where_a_top_k_shows_it(scores: int, dtype: torch.dtype) -> None:
    layer, args = Routed(scores), inputs(torch.bfloat16)
    result = compile_step(layer, *args, fullgraph=True)
    check_errors(result, step(layer, *args), in_float64(layer, args))
    assert products(result) == BY_TOKEN
    nodes = [n for graph in result.joint for n in graph.nodes]
    (keys,) = [n.args[0] for n in nodes if op_name(n) == "sort"]
    assert keys.meta["val"].dtype == dtype


def untouched(implementation: str, **kwargs: Any) -> Any:
    """A model packed by bitsandbytes, whose embedding trains."""
    net = model("qwen3_moe", implementation).requires_grad_(False).to(**kwargs)
    net.model.embed_tokens.weight.requires_grad_(True)
    for layer in expert_layers(net).values():
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(layer, name)
    return net


@SLOW
@pytest.mark.parametrize("any_length", [False, True])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_an_untouched_model(implementation: str, any_length: bool) -> None:
    net, ids = untouched(implementation), tokens()

    def logits(ids: Tensor) -> Tensor:
        result: Tensor = net(input_ids=ids, use_cache=False).logits
        return result

    expected, expected_grads = step(logits, ids, module=net)
    if any_length:
        torch._dynamo.mark_dynamic(ids, 1)
    result = compile_step(logits, ids, module=net, fullgraph=True)
    assert result.applied[PASS] == 8
    if implementation == "grouped_mm":
        assert sorted(products(result)) == sorted(BY_TOKEN * 2)
        assert PASS not in result.reasons
        assert any_length or not copies(result, 28)
    torch.testing.assert_close(result.output, expected, **CLOSE)
    assert result.gradients.keys() == expected_grads.keys()
    for name, grad in result.gradients.items():
        torch.testing.assert_close(grad, expected_grads[name], **CLOSE)


def test_no_expert_of_an_untouched_model_is_decoded_for_a_cache() -> None:
    """Of the first layer, the hooks around packed experts would return decoded ones."""
    net, ids = untouched("grouped_mm", dtype=torch.bfloat16), tokens()
    prepare_checkpointing(net)

    def logits(ids: Tensor) -> Tensor:
        result: Tensor = net(input_ids=ids, use_cache=False).logits
        return result

    with no_codegen():
        result = compile_step(logits, ids, module=net, fullgraph=True)
    assert sorted(products(result)) == sorted(BY_TOKEN * 2)
    assert not result.ops["qfuse.dequantize"]
    told = inductor_q.report(net)  # under the names that the model has for them
    assert (told.fused, len(told.layers)) == (4, 4)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
@SLOW
def test_an_untouched_model_in_bfloat16(device: str) -> None:
    """The dtype in which transformers calls torch's grouped product on a GPU, in every version."""
    net = untouched("grouped_mm", dtype=torch.bfloat16, device=device)
    ids = tokens().to(device)

    def logits(ids: Tensor) -> Tensor:
        result: Tensor = net(input_ids=ids, use_cache=False).logits
        return result

    expected = step(logits, ids, module=net)
    result = compile_step(logits, ids, module=net, fullgraph=True)
    assert sorted(products(result)) == sorted(BY_TOKEN * 2)
    assert not copies(result, 28) and PASS not in result.reasons
    for layer in expert_layers(net).values():
        for name in ("gate_up_proj", "down_proj"):
            unpack(layer, name)
    net.double().set_experts_implementation("eager")
    check_errors(result, expected, step(logits, ids, module=net))


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({}, {"reference": 4}),
        ({"qfuse.thresholds": DECODED_FIRST}, {"dequantize": 4}),
        ({"qfuse.thresholds": AS_STORED}, {"dequantize": 2, "reference": 2}),
        ({"qfuse.thresholds": TRANSPOSED}, {"dequantize": 2, "reference": 2}),
        ({"qfuse.thresholds": DECODED_FIRST, "qfuse.memory": "16GB"}, {"reference": 4}),
    ],
    ids=["", "large", "large as stored", "large transposed", "under a budget"],
)
def test_large_experts_are_decoded_first(
    options: dict[str, Any], served: dict[str, int], launched: list[str]
) -> None:
    """Compiled code finds it at each call, and the report says it; gradients of x read the weight
    transposed."""
    layer = Experts("qwen3_moe", "grouped_mm", torch.bfloat16)
    result = compiled(layer, torch.bfloat16, options={**options, "fx_graph_cache": False})
    assert Counter(launched) == served
    assert result.report.providers["scatter2scatter"] == served
    assert {s.provider for s in result.report.sites if s.pass_name == PASS} == set(served)


@pytest.mark.gpu
@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_large_experts_are_decoded_first_on_a_gpu(large: bool) -> None:
    """By either route a step is no further from float64 than one and a quarter of eager's error."""
    layer = Experts("qwen3_moe", "grouped_mm", torch.bfloat16, device="cuda")
    x, ids, gates = inputs(torch.bfloat16, n=64)
    args = (
        x.detach().cuda().requires_grad_(),
        ids.cuda(),
        gates.detach().cuda().requires_grad_(),
    )
    thresholds = {"qfuse.thresholds": DECODED_FIRST} if large else {}
    result = compiled(layer, torch.bfloat16, args, options={**thresholds, "fx_graph_cache": False})
    served = result.report.providers["scatter2scatter"]
    assert sum(served.values()) == 4 and ("dequantize" in served) == large, served
