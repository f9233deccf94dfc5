"""A mixture of experts as trainers run it: what of such a step is fused, kept and computed again.

The step is that of `bench_moe_model --recipe`, under what CUDA casts in autocast.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import inductor_q
from inductor_q import testing
from inductor_q.graph_report import Report
from inductor_q.kernels.expert_calls import unchecked
from inductor_q.passes.add_gradients import WIDE
from tests.support.autocast import cuda_autocast
from tests.support.compiling import count_ops, gradients, partition

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)
pytest.importorskip("rich")  # of the benchmarks

from benchmarks import bench_moe_model, bench_step  # noqa: E402
from benchmarks.recipes import RECIPES  # noqa: E402

LAYERS = 2
#: What a GPU's presets fuse at its sizes; a choice of experts is small beside thousands of columns.
AS_ON_A_GPU = {
    "causal_attention.min_positions": 1,
    "extend_k.min_rows": 1,
    "fuse_dropout.min_rows": 1,
    "keep_checkpointed.min_ratio": 4,
}
CASES = [
    ("checkpointed", False),
    pytest.param("checkpointed", True, marks=pytest.mark.slow),
    pytest.param("trainer", False, marks=pytest.mark.slow),
    pytest.param("prepared", False, marks=pytest.mark.slow),
    pytest.param("trl", True, marks=pytest.mark.slow),
]
TO_ROWS, TO_TOKENS = (False, True), (True, False)  # of grouped_in and grouped_out


def model(recipe: str, packed: bool) -> Any:
    config = bench_moe_model._config(LAYERS, on_gpu=False)
    where = torch.device("cpu")
    return bench_moe_model.moe_model(
        config, where, RECIPES[recipe], packed=packed, adapts_experts=False
    )


@functools.cache
def compiled(recipe: str, packed: bool) -> tuple[fx.Graph, fx.Graph, Report, list[str]]:
    """Forward's and backward's graph of a step, its report and its graph breaks."""

    def run(call: Any) -> None:
        ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
        with cuda_autocast():
            bench_step.loss_of(call, RECIPES[recipe])(ids).backward()

    options = {"qfuse.thresholds": AS_ON_A_GPU}
    with testing.CompileTrace() as trace:
        forward, backward = partition(run, model(recipe, packed), options)
    report = inductor_q.last_report()
    assert report is not None
    return forward, backward, report, trace.breaks


def ways(graph: fx.Graph) -> list[tuple[bool, bool]]:
    nodes = graph.find_nodes(op="call_function", target=torch.ops.qfuse.scatter2scatter.default)
    calls = [unchecked(n.args) for n in nodes]
    return [(call.grouped_in, call.grouped_out) for call in calls]


def saved(forward: fx.Graph) -> list[Tensor]:
    """What forward computes and hands to backward."""
    output: Any = forward.output_node()
    found = [n.meta.get("val") for n in output.all_input_nodes if n.op != "placeholder"]
    return [value for value in found if isinstance(value, Tensor)]


@pytest.mark.parametrize(("recipe", "packed"), CASES)
def test_all_of_it_is_fused(recipe: str, packed: bool) -> None:
    _, _, report, breaks = compiled(recipe, packed)
    assert not breaks
    applied = report.applied()
    assert applied["causal_attention"] == LAYERS  # each mask is proven
    assert applied["fuse_dropout"] == 4 * LAYERS
    assert applied["fuse_scatter2scatter"] == 4 * LAYERS
    refused = report.rejections()
    refused.pop("chunk_loss", None)  # a vocabulary of some hundreds
    for reason in refused.pop("keep_checkpointed", {}):
        # Of q, k and v, which are projected together.
        wide = reason.startswith("its input is 1 times as large")
        assert wide or reason.startswith("attention of 32 positions is computed again")
    assert set(refused.pop("add_gradients", {})) <= {WIDE}  # what float32 norms and embeddings read
    assert not refused


@pytest.mark.parametrize(("recipe", "packed"), CASES)
def test_experts_are_read_packed_by_token(recipe: str, packed: bool) -> None:
    forward, backward, _, _ = compiled(recipe, packed)
    assert ways(forward) == [TO_ROWS, TO_TOKENS] * LAYERS
    again = [TO_ROWS] * LAYERS if RECIPES[recipe].checkpointed else []
    # The second product is not computed again: the gradient of its gates does without.
    assert Counter(ways(backward)) == Counter([TO_ROWS, TO_TOKENS] * LAYERS + again)


@pytest.mark.parametrize(("recipe", "packed"), CASES)
def test_decoded_weights_are_those_of_attention_once_a_pass(recipe: str, packed: bool) -> None:
    forward, backward, report, _ = compiled(recipe, packed)
    assert count_ops(forward)["qfuse.dequantize"] == 4 * LAYERS
    # The first layer's q, k and v give the embeddings no gradient, and are only computed again.
    checkpointed = RECIPES[recipe].checkpointed
    least = 4 * LAYERS if checkpointed else 4 * LAYERS - 3
    again = report.applied()["decode_again"]
    assert count_ops(backward)["qfuse.dequantize"] == least + again
    experts = bench_moe_model._config(LAYERS, on_gpu=False).num_experts
    assert not [v.shape for v in saved(forward) if v.dim() == 3 and v.shape[0] == experts]


def test_choices_of_experts_are_kept() -> None:
    """Nothing is chosen, sorted or cut into tiles again."""
    forward, backward, _, _ = compiled("checkpointed", False)
    for op in ("topk", "sort", "qfuse.tile_map"):
        assert count_ops(forward)[op] == LAYERS
        assert not count_ops(backward)[op]
    # Order and inverse, and the keys where transformers (5.17) masks rows that are nobody's.
    slots = [v for v in saved(forward) if [*v.shape] == [2 * 32 * 2]]
    assert len(slots) in (2 * LAYERS, 3 * LAYERS)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_keys_of_16_bits_are_sorted(packed: bool) -> None:
    """Among as many experts as there are: what is not chosen from so few keeps its dtype."""
    forward, _, _, _ = compiled("checkpointed", packed)
    sort = torch.ops.aten.sort.stable
    keys = [n.args[0] for n in forward.find_nodes(op="call_function", target=sort)]
    assert [key.meta["val"].dtype for key in keys] == [torch.int16] * LAYERS


def test_gradients_of_gates_are_not_sorted_to_be_added() -> None:
    """No two rows of a layer have the same slot: a slot reads its row."""
    _, backward, _, _ = compiled("checkpointed", False)
    assert not count_ops(backward)["index_put"]


def test_gradients_are_those_of_eager_mode() -> None:
    """Without dropout, of which the two draw other masks."""
    net = model("checkpointed", False)
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    for parameter in testing.adapter_parameters(net):
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    step = functools.partial(bench_step.loss_of, recipe=RECIPES["checkpointed"])
    ids = torch.randint(0, 64, (2, 32), generator=generator)
    found = []

    def run(call: Any) -> None:
        with cuda_autocast():
            step(call)(ids).backward()
        found.append(torch.cat([g.flatten() for g in gradients({}, net).values()]))

    run(net)
    partition(run, net, {"qfuse.thresholds": AS_ON_A_GPU})
    assert testing.relative_error(found[1], found[0]) < 0.03
