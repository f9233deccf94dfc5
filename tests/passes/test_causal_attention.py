"""causal_attention in whole models: a causal mask is left out, any other is kept and said."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from inductor_q import testing
from inductor_q.integrations import prepare_checkpointing
from tests.support.attention import ALWAYS, DOCUMENTS, GROUPED, LAYERS, PASS, VALID_FIRST, positions
from tests.support.captured import CapturedStage
from tests.support.compiling import count_ops, no_codegen, partition


def sites(path: Path) -> list[dict[str, Any]]:
    compiles = json.loads(path.read_text())["compiles"]
    return [s for c in compiles for s in c["sites"] if s["pass_name"] == PASS]


def step(call: Any, model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    loss = call(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    gradients = [p.grad.clone() for p in testing.adapter_parameters(model) if p.grad is not None]
    model.zero_grad()
    return loss.detach(), gradients


def qlora(config: Callable[..., Any] = testing.tiny_llama_config) -> Any:
    sizes = config(num_hidden_layers=LAYERS)
    return testing.qlora_model(sizes, compute_dtype=torch.float32, randomize_adapters=True)


QWEN3_5 = functools.partial(testing.tiny_qwen3_5_config, layer_types=["full_attention"] * LAYERS)


@pytest.mark.parametrize(
    ("config", "checkpointed"),
    [
        pytest.param(testing.tiny_llama_config, False, id="llama"),
        pytest.param(
            testing.tiny_qwen3_config, True, id="qwen3-checkpointed", marks=pytest.mark.slow
        ),
        pytest.param(QWEN3_5, False, id="qwen3.5"),
    ],
)
def test_attention_of_a_model_is_causal(
    config: Callable[..., Any], checkpointed: bool, tmp_path: Path
) -> None:
    torch.compiler.reset()
    model = qlora(config)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = step(model, model, ids)
    report = tmp_path / "report.json"
    options: Any = {"qfuse.report": str(report), "fx_graph_cache": False}
    with no_codegen():
        got = step(torch.compile(model, backend="qfuse", options=options), model, ids)
    found = sites(report)
    assert [(s["rejected"], s["provider"]) for s in found] == [("", GROUPED)] * LAYERS
    assert all(s["module"].endswith(f"layers.{i}.self_attn") for i, s in enumerate(found))
    torch.testing.assert_close(got[0], expected[0])
    for one, other in zip(got[1], expected[1], strict=True):
        assert testing.relative_error(one, other.double()) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_grouped_keys_on_a_gpu(
    checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is eager's, by a fused kernel, and takes no more memory than with repeated keys.

    Under checkpoints the peak is that of one layer, and the two differ by what Inductor reuses.
    """
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    sizes = testing.tiny_qwen3_config(num_hidden_layers=LAYERS, hidden_size=512, **heads)
    model = testing.qlora_model(sizes, randomize_adapters=True, device="cuda")
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    length = 2048
    ids = torch.randint(0, 200, (2, length), device="cuda")

    def measured(call: Any) -> tuple[tuple[Tensor, list[Tensor]], int]:
        step(call, model, ids)  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = step(call, model, ids)
        return result, torch.cuda.max_memory_allocated() - before

    def compiled(name: str) -> tuple[tuple[Tensor, list[Tensor]], int, list[dict[str, Any]]]:
        torch.compiler.reset()
        report = tmp_path / name
        options: Any = {"qfuse.report": str(report), "fx_graph_cache": False}
        return *measured(torch.compile(model, backend="qfuse", options=options)), sites(report)

    expected, _ = measured(model)
    got, grouped, found = compiled("grouped")
    assert [(s["rejected"], s["provider"]) for s in found] == [("", GROUPED)] * LAYERS
    monkeypatch.setattr("inductor_q.passes.grouped_keys.no_kernel", lambda *_: "not asked for")
    same, whole, found = compiled("whole")
    assert [s["provider"] for s in found] == ["sdpa, repeated keys: not asked for"] * LAYERS
    assert grouped <= whole * (1.05 if checkpointed else 1)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-2, atol=1e-2)
    for one, other, exact in zip(got[1], same[1], expected[1], strict=True):
        error = testing.relative_error(one, exact.double())
        assert error < max(3e-2, 1.5 * testing.relative_error(other, exact.double()))


def inputs_of(case: str, length: int) -> dict[str, Tensor]:
    """What a collator hands a model beside the tokens: three rows, and labels of real tokens."""
    ids = torch.randint(1, 200, (3, length), generator=torch.Generator().manual_seed(length))
    if case == "documents":
        lengths = (length // 3, 1, length - length // 3 - 1)
        positions = torch.cat([torch.arange(n) for n in lengths])
        return {"labels": ids, "position_ids": positions.expand(3, -1).contiguous()}
    mask = torch.ones_like(ids)
    mask[0, -5:], mask[1, :7], mask[2, 4:6] = 0, 0, 0  # on the right, on the left, and between
    # A row of padding before a real token has other logits than in eager, unless it is the first.
    labels = ids.masked_fill(mask == 0, -100)
    labels[2, 6] = -100
    return {"labels": labels, "attention_mask": mask}


def masked_step(call: Any, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    ids = torch.arange(inputs["labels"].numel()).view_as(inputs["labels"]) % 200
    loss = call(input_ids=ids, use_cache=False, **inputs).loss
    loss.backward()
    gradients = [p.grad.clone() for p in testing.adapter_parameters(model) if p.grad is not None]
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize(
    "checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "checkpointed"]
)
@pytest.mark.parametrize(
    ("case", "provider"),
    [("padded", VALID_FIRST), ("documents", DOCUMENTS)],
)
def test_masks_of_batches_are_replaced_by_what_they_mean(
    case: str, provider: str, checkpointed: bool
) -> None:
    """The loss and every gradient; without checkpoints of two lengths, the second of any length."""
    torch.compiler.reset()
    model = qlora()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = CapturedStage(PASS, **ALWAYS)
    compiled = torch.compile(model, backend=backend)
    lengths = (24,) if checkpointed else (24, 31)
    for length in lengths:
        assert_steps_agree(model, compiled, inputs_of(case, length))
    found = [(site.rejected, site.provider) for site in backend.sites]
    assert found == [("", provider)] * (len(lengths) * LAYERS)


def test_what_layers_share_is_made_once_a_step() -> None:
    """By forward, for all layers: neither backward nor a layer that it computes again makes it."""
    model = qlora()
    prepare_checkpointing(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = inputs_of("padded", 24)

    def run(call: Any) -> None:
        masked_step(call, model, inputs)

    graphs = partition(run, model, ALWAYS)
    counts = [count_ops(graph) for graph in graphs]
    assert [(found["cumsum"], found["scatter"]) for found in counts] == [(1, 1), (0, 0)]


def assert_steps_agree(model: Any, compiled: Any, inputs: dict[str, Tensor]) -> None:
    expected, got = (masked_step(call, model, inputs) for call in (model, compiled))
    torch.testing.assert_close(got[0], expected[0])
    assert len(got[1]) == len(expected[1])
    for one, other in zip(got[1], expected[1], strict=True):
        assert testing.relative_error(one, other.double()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["padded", "documents"])
def test_replaced_masks_by_inductor(case: str) -> None:
    torch.compiler.reset()
    model = qlora()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    options: Any = {**ALWAYS, "fx_graph_cache": False}
    compiled = torch.compile(model, backend="qfuse", options=options)
    assert_steps_agree(model, compiled, inputs_of(case, 24))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "24 positions, fewer than causal_attention.min_positions=1048576: the mask is kept"),
        (
            {**ALWAYS, "qfuse.numerics": "strict"},
            "strict numerics keep what rows of padding see",
        ),
    ],
    ids=["cpu", "strict"],
)
def test_a_mask_of_padding_is_kept(options: dict[str, Any], reason: str) -> None:
    torch.compiler.reset()
    model = qlora()
    backend = CapturedStage(PASS, **options)
    assert_steps_agree(model, torch.compile(model, backend=backend), inputs_of("padded", 24))
    assert [site.rejected for site in backend.sites] == [reason] * LAYERS
    # Nothing that "qfuse.strict" should refuse.
    assert all(site.by_choice for site in backend.sites)


def test_what_the_captured_graph_mutates_stays() -> None:
    """Dead code of Dynamo's graph is not ours to tell: a mutation has no users either."""
    generator = torch.Generator().manual_seed(0)

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Small enough that no score drowns the others: the mask then matters to every row.
            weight = torch.randn(64, 64, generator=generator) / 16
            self.linear = testing.quantized_linear(weight.bfloat16())
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)  # type: ignore[operator]
            q, k = positions(x[:, :, 0])
            x = self.linear(x).unsqueeze(1)
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(x, x, x, attn_mask=(k <= q).expand(2, 1, -1, -1))

    torch.compiler.reset()
    module = Counting()
    x = torch.randn(2, 8, 64, generator=generator).bfloat16()
    with torch.no_grad():
        exact = testing.reference_model(module)(x.double())
        compiled = torch.compile(module, backend="qfuse", options={"fx_graph_cache": False})
        got = compiled(x)
    from inductor_q import last_report

    report = last_report()
    assert report is not None
    assert [(s.provider, s.rejected) for s in report.sites if s.pass_name == PASS] == [("sdpa", "")]
    # Weights, which eager's product keeps in float32 here, projections and attention's result are
    # rounded to bfloat16. By itself an element may nearly cancel, and be off by more than its size.
    assert testing.relative_error(got, exact) < 2**-7
    assert module.calls == 1


def test_a_compile_with_no_other_pass_is_not_told_as_cached() -> None:
    from inductor_q import last_report

    torch.compiler.reset()
    layer = testing.quantized_linear(torch.randn(64, 64))
    options: Any = {"qfuse.passes": [PASS], "fx_graph_cache": False}
    with torch.no_grad():
        compiled: Any = torch.compile(layer, backend="qfuse", options=options)
        compiled(torch.randn(4, 64, dtype=torch.bfloat16))
    report = last_report()
    assert report is not None
    assert [p.name for p in report.passes] == [PASS] and not report.cached
