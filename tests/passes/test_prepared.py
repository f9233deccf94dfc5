"""Models whose norms, embeddings and head are float32, as PEFT's `prepare_model_for_kbit_training`
makes them and TRL loads them: the same plan as in bfloat16, and gradients as good as eager's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import inductor_q
from inductor_q import testing
from inductor_q.integrations import prepare_checkpointing
from inductor_q.passes.extend_k import GRADIENT
from tests.support.compiling import count_ops, gradients, no_codegen, partition

pytest.importorskip("bitsandbytes")
transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS = 2
ROWS = {
    "qfuse.thresholds": {
        "chunk_loss.min_logits": 1,
        "fuse_dropout.min_rows": 1,
        "extend_k.min_rows": 1,
        "keep_checkpointed.min_ratio": 1,
        "keep_checkpointed.min_positions": 1 << 20,
    }
}


def qlora(
    *,
    prepare: bool = True,
    dtype: torch.dtype = FP32,
    checkpointed: bool = False,
    dropout: float = 0.0,
) -> Any:
    model = testing.qlora_model(
        testing.tiny_qwen3_config(num_hidden_layers=LAYERS),
        adapter_dtype=dtype,
        randomize_adapters=True,
        prepare=prepare,
        dropout=dropout,
    )
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        prepare_checkpointing(model)
    return model


def step(run: Any, *, autocast: bool = True) -> None:
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[-1, -4:] = 0
    with torch.autocast("cpu", BF16, enabled=autocast):
        labels = ids.masked_fill(mask == 0, -100)
        loss = run(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()


def vector(model: Any) -> Tensor:
    found = gradients({}, model)
    assert len(found) == 14 * LAYERS
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


def applied(model: Any) -> tuple[Counter[str], list[fx.Graph]]:
    """Count the sites by pass, without fold_lora's: there are more casts to merge in float32."""
    graphs = partition(step, model, ROWS)
    report = inductor_q.last_report()
    assert report is not None and report.applied()["fold_lora"]
    return Counter({k: v for k, v in report.applied().items() if k != "fold_lora"}), graphs


def products(graphs: list[fx.Graph]) -> Counter[str]:
    counted = sum(map(count_ops, graphs), Counter[str]())
    return Counter({name: counted[name] for name in ("mm", "qfuse.extend", "qfuse.dequantize")})


@pytest.mark.parametrize(
    ("dtype", "checkpointed"),
    [pytest.param(FP32, True, marks=pytest.mark.slow), (BF16, False)],
    ids=["peft, checkpointed", "trl"],
)
def test_the_plan_is_that_of_bfloat16(dtype: torch.dtype, checkpointed: bool) -> None:
    expected, graphs = applied(qlora(prepare=False, dtype=dtype, checkpointed=checkpointed))
    model = qlora(dtype=dtype, checkpointed=checkpointed)
    found, own = applied(model)
    assert found == expected
    assert found["chunk_loss"] == 1
    assert found["stack_adapters"] == found["stack_gradients"] == 2 * LAYERS
    assert products(own) == products(graphs)
    outcome = vector(model)

    step(model)
    eager = vector(model)
    exact = testing.reference_model(model)
    step(exact, autocast=False)
    reference = vector(exact)
    error = testing.relative_error(outcome, reference)
    assert error <= 1.25 * testing.relative_error(eager, reference)


@pytest.mark.slow
def test_the_plan_with_dropout_and_checkpointing_is_that_of_bfloat16() -> None:
    settings: dict[str, Any] = {"checkpointed": True, "dropout": 0.05}
    expected, graphs = applied(qlora(prepare=False, **settings))
    found, own = applied(qlora(**settings))
    assert found["fuse_dropout"] == 7 * LAYERS
    # Norms and activations in float32 read sums in float32, which the pass refuses. Only the sum
    # that attention's output projection gives is in 16 bits.
    assert expected.pop("add_gradients") == 4 * LAYERS - 1
    assert found.pop("add_gradients") == LAYERS
    assert found == expected
    assert products(own) == products(graphs)


def test_without_autocast_the_reason_names_the_way_out() -> None:
    """Adapters and activations are float32, and the 4-bit layers compute in bfloat16."""
    partition(lambda run: step(run, autocast=False), qlora(), {"qfuse.numerics": "relaxed", **ROWS})
    report = inductor_q.last_report()
    assert report is not None
    reasons = {verdict.reason for verdict in report.verdicts().values()}
    assert reasons == {
        "the adapter computes in torch.float32, the layer in torch.bfloat16 "
        "(autocast or 16-bit adapters let them join the main product)"
    }


@pytest.mark.parametrize(
    ("prepare", "options", "refused"),
    [(True, ROWS, 1), (True, {}, 0), (False, ROWS, 0)],
    ids=["float32 norms", "few rows", "norms in 16 bits"],
)
def test_llm_int8_multiplies_gradients_in_the_dtype_of_the_norms(
    prepare: bool, options: dict[str, Any], refused: int
) -> None:
    """Those of gate and up are one sum, which counts for one of the two. Where no sum of so few
    rows is rewritten, nothing has failed."""
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    inductor_q.quantize(base, "llm_int8", progress=False)
    if prepare:
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear"))
    model.forward = torch.autocast("cpu", BF16)(model.forward)  # as accelerate has it
    torch._dynamo.reset()
    inductor_q.compile(model.train(), options=options)
    with no_codegen():
        step(model, autocast=False)
    report = inductor_q.last_report()
    assert report is not None
    verdicts = report.verdicts().values()
    assert [v.reason for v in verdicts if v.status != "fused"] == [GRADIENT] * refused
    assert len(verdicts) == 7
