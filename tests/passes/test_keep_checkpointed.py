"""What checkpointed segments keep, and how often backward decodes a weight."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import inductor_q
from inductor_q import testing
from inductor_q.graph_report import Report
from inductor_q.integrations import prepare_checkpointing
from inductor_q.passes.extend_k import EXTEND
from inductor_q.passes.graph import CAT
from inductor_q.passes.products import DEQUANTIZE
from inductor_q.passes.recompute import RECOMPUTED
from tests.support.compiling import count_ops, gradients, partition

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

LAYERS = 2
#: torch 2.11 leaves products of packed weights to be kept, as no later version does.
AGAIN = {"recompute_products.max_kept": 0}
PLAIN = {**AGAIN, "extend_k.min_rows": 1 << 20, "keep_checkpointed.min_ratio": 3}
WIDE = {**AGAIN, "extend_k.min_rows": 1, "keep_checkpointed.min_ratio": 1}
ATTENTION = {**WIDE, "keep_checkpointed.min_positions": 32}
SDPA = "_scaled_dot_product_flash_attention_for_cpu"


def checkpointed(*, dropout: float = 0.0, **keywords: Any) -> Any:
    config = testing.tiny_llama_config(num_hidden_layers=LAYERS)
    model = testing.qlora_model(
        config, adapter_dtype=torch.bfloat16, randomize_adapters=True, dropout=dropout
    )
    prepare_checkpointing(model)
    keywords = {"use_reentrant": False, **keywords}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)
    return model


def step(run: Any) -> None:
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(3))
    run(input_ids=ids, labels=ids).loss.backward()


@functools.cache
def eager() -> tuple[Tensor, Tensor]:
    """The gradients of eager mode, and exact ones."""
    model = checkpointed()
    step(model)
    found = vector(model)
    exact = testing.reference_model(model)
    step(exact)
    return found, vector(exact)


def vector(model: Any) -> Tensor:
    found = gradients({}, model)
    assert len(found) == 14 * LAYERS
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


@dataclass
class Run:
    forward: fx.Graph
    backward: fx.Graph
    report: Report

    @property
    def kept(self) -> Counter[tuple[int, ...]]:
        """Shapes of the 16-bit tensors that forward computes and returns."""
        output = next(iter(self.forward.find_nodes(op="output")))
        values = [n.meta.get("val") for n in output.all_input_nodes if n.op != "placeholder"]
        return Counter(
            tuple(v.shape) for v in values if isinstance(v, Tensor) and v.dtype is torch.bfloat16
        )

    @property
    def reasons(self) -> Counter[str]:
        return Counter(self.report.rejections().get("keep_checkpointed"))


def compiled(thresholds: Mapping[str, int], *, off: bool = False, **keywords: Any) -> Run:
    """One graph without a break, whose gradients are as good as eager's."""
    model = checkpointed(**keywords)
    passes = {"keep_checkpointed": not off, "decode_again": not off}
    options = {"qfuse.thresholds": thresholds, "qfuse.passes": passes}
    with testing.CompileTrace() as trace:
        forward, backward = partition(step, model, options)
    assert (trace.graphs, trace.breaks) == (1, [])
    own, exact = eager()
    allowed = 1.25 * testing.relative_error(own, exact)
    assert testing.relative_error(vector(model), exact) <= allowed
    return Run(forward, backward, _last())


def _last() -> Report:
    report = inductor_q.last_report()
    assert report is not None
    return report


def test_plain_adapters() -> None:
    """Without extend_k, small projections are kept, and the product that ends the last segment is
    not computed again. Decoding is shared."""
    before, after = compiled(PLAIN, off=True), compiled(PLAIN)
    # Projections of o_proj and down_proj, and the last layer's result. What gate_proj and up_proj
    # project together is half as large as its input.
    assert after.kept - before.kept == {(64, 16): 2 * LAYERS, (2, 32, 64): 1}
    assert not before.kept - after.kept
    assert any("2 times as large, less than" in reason for reason in after.reasons)
    less = count_ops(before.backward)["mm"] - count_ops(after.backward)["mm"]
    assert less == 2 * LAYERS + 2  # and the two of the last down_proj
    assert after.report.applied()["keep_checkpointed"] == 2 * LAYERS + 1
    # Each is decoded in forward, and once for what backward computes again and for gradients.
    for graph in (after.forward, after.backward):
        assert count_ops(graph)["qfuse.dequantize"] == 7 * LAYERS
    assert not after.report.applied()["decode_again"]


def test_wide_buffers_and_attention() -> None:
    """With extend_k, each wide product of backward has a decode of its own."""
    before, after = compiled(WIDE, off=True), compiled(ATTENTION)
    assert count_ops(before.backward)["qfuse.dequantize"] == 7 * LAYERS
    decodes = after.backward.find_nodes(op="call_function", target=DEQUANTIZE)
    for node in decodes:
        assert [user.target for user in node.users].count(CAT) <= 1
    # Neither o_proj, which is not wide again, nor down_proj, whose product is not needed again;
    # and the first layer's q, k and v give their input no gradient.
    again = 5 * LAYERS - 3
    assert after.report.applied()["decode_again"] == again
    assert len(decodes) == 7 * LAYERS + again
    # Attention's result and its logsumexp are kept, or neither.
    assert count_ops(before.backward)[SDPA] == LAYERS
    assert count_ops(after.forward)[SDPA] == LAYERS and count_ops(after.backward)[SDPA] == 0
    # The projections of o_proj and down_proj, of gate_proj and up_proj together, but not of q_proj,
    # k_proj and v_proj, as wide as their input here.
    kept = {(64, 16): 2 * LAYERS, (64, 32): LAYERS, (2, 32, 64): 1, (2, 4, 32, 16): LAYERS}
    assert after.kept - before.kept == kept
    # Forward projects into the wide buffers; backward copies what was kept, or projects there too.
    # It has no wide buffer of down_proj, whose product is not needed again.
    for graph, count, projects in ((after.forward, 3, 3), (after.backward, 2, 1)):
        wide = graph.find_nodes(op="call_function", target=EXTEND)
        of_segments: list[Any] = [n.args for n in wide if n.meta.get("recompute") in RECOMPUTED]
        assert len(of_segments) == count * LAYERS
        assert sum(bool(lefts) for _, lefts, *_ in of_segments) == projects * LAYERS
        assert all(lefts or len(blocks) == 2 for blocks, lefts, *_ in of_segments)


@pytest.mark.parametrize("extended", [False, True])
def test_projections_under_dropout(extended: bool) -> None:
    """They are kept as others are, and no mask of theirs is made again. A product of a buffer that
    is wide by them is no projection."""
    thresholds = {**(WIDE if extended else PLAIN), "fuse_dropout.min_rows": 1}
    options = {"qfuse.thresholds": thresholds}
    forward, backward = partition(step, checkpointed(dropout=0.1), options)
    run = Run(forward, backward, _last())
    assert run.report.applied()["fuse_dropout"] == 7 * LAYERS
    # Of what reads one input together, where that is not too wide; and the last result.
    kept = {(64, 16): 2, (64, 32): 1, (64, 48): 1} if extended else {(64, 16): 2}
    assert run.report.applied()["keep_checkpointed"] == sum(kept.values()) * LAYERS + 1
    assert {shape: run.kept[shape] for shape in kept} == {s: n * LAYERS for s, n in kept.items()}
    if extended:
        assert run.report.applied()["decode_again"]
        assert run.report.applied()["project_in_place"] == 3 * LAYERS
        wide, again = count_ops(forward), count_ops(backward)
        assert wide["qfuse.extend_dropped"] == 3 * LAYERS and not wide["qfuse.extend"]
        assert wide["qfuse.dropout_project"] == LAYERS  # attention cannot write into a wider buffer
        assert not again["qfuse.extend_dropped"] and not again["qfuse.dropout_project"]
    for node in backward.find_nodes(op="call_function", target=DEQUANTIZE):
        assert [user.target for user in node.users].count(CAT) <= 1


def save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE


def test_a_policy_of_the_users() -> None:
    """What TRL's `selective` checkpointing does. What it wants to be computed again, is."""
    policy = functools.partial(create_selective_checkpoint_contexts, save_attention)
    run = compiled(PLAIN, context_fn=policy)
    assert count_ops(run.forward)[SDPA] == LAYERS and count_ops(run.backward)[SDPA] == 0
    assert run.kept[64, 16] == 0
    assert not run.report.applied()["keep_checkpointed"] and not run.reasons
