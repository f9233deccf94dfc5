"""PEFT's methods on a model in NF4: one list, of which each row is tried, and which docs have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_q
from inductor_q import testing
from tests.support.compiling import SMALL, gradients, no_codegen

for extra in ("bitsandbytes", "transformers"):
    pytest.importorskip(extra)
peft = pytest.importorskip("peft")

TRAINING = Path(__file__).parents[2] / "docs" / "training.md"
TARGETS = ["q_proj", "v_proj"]
IDS = torch.arange(32).reshape(2, 16)
LAYERS = 7  # in 4 bits

FUSED = "fused: one graph, every layer"
BROKEN = "works; the graph breaks in PEFT's penalty on A and B, behind the model, every layer fused"
FAILS = "PEFT refuses it, or fails, in eager mode"


@dataclass(frozen=True)
class Method:
    name: str
    config: Callable[[], Any]
    outcome: str = FUSED

    @property
    def row(self) -> str:
        return f"| {self.name} | {self.outcome} |"


def lora(**settings: Any) -> Callable[[], Any]:
    given = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **settings}
    return lambda: peft.LoraConfig(task_type="CAUSAL_LM", **given)


def other(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, f"{name}Config")(task_type="CAUSAL_LM", **settings)


METHODS = (
    Method("LoRA", lora()),
    Method("rsLoRA", lora(use_rslora=True)),
    Method("DoRA", lora(use_dora=True)),
    Method("`modules_to_save`", lora(modules_to_save=["lm_head"])),
    Method("`trainable_token_indices`", lora(trainable_token_indices=[1, 2])),
    Method(
        "IA3",
        other("IA3", target_modules=[*TARGETS, "down_proj"], feedforward_modules=["down_proj"]),
    ),
    Method("VeRA", other("Vera", r=4, target_modules=["q_proj", "o_proj"])),
    Method("OFT", other("OFT", oft_block_size=16, target_modules=TARGETS)),
    Method("prompt tuning", other("PromptTuning", num_virtual_tokens=4)),
    Method("prefix tuning", other("PrefixTuning", num_virtual_tokens=4)),
    Method(
        "AdaLoRA",
        other("AdaLora", init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
        BROKEN,
    ),
    Method("PiSSA", lora(init_lora_weights="pissa"), FAILS),
    Method("LoHa", other("LoHa", r=4, target_modules=TARGETS), FAILS),
    Method("LoKr", other("LoKr", r=4, target_modules=TARGETS), FAILS),
)


def test_docs_have_the_list() -> None:
    text = TRAINING.read_text(encoding="utf-8")
    table = text.partition("## PEFT's methods")[2].partition("| --- | --- |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    assert rows == [method.row for method in METHODS]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, id=m.name, marks=() if m.name in ("OFT", "LoHa") else pytest.mark.slow)
        for m in METHODS
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_step_under_autocast(method: Method) -> None:
    """As a Trainer runs it: loss and gradients against eager mode's."""
    torch._dynamo.reset()
    config = testing.tiny_llama_config(num_hidden_layers=1)
    base = testing.qlora_model(config).unload()
    base.is_loaded_in_4bit = True
    if method.outcome == FAILS:
        with pytest.raises((RuntimeError, TypeError)):
            step(peft.get_peft_model(base, method.config()).forward)
        return
    torch.manual_seed(0)
    model = peft.get_peft_model(base, method.config()).train()
    for name, parameter in model.named_parameters():  # some start at zero, without gradients
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data += 0.01 * torch.randn(parameter.shape)
    expected = step(model.forward).item()
    theirs = gradients({}, model)
    with no_codegen(), testing.CompileTrace() as trace:
        inductor_q.compile(model, options=SMALL)
        loss = step(model).item()
    ours = gradients({}, model)
    assert loss == pytest.approx(expected, rel=1e-3)
    assert ours.keys() == theirs.keys() and ours
    for name, gradient in theirs.items():
        assert testing.relative_error(ours[name], gradient) < 0.05, name
    assert trace.graphs == 1
    assert bool(trace.breaks) == (method.outcome == BROKEN)
    report = inductor_q.last_report()
    assert report is not None
    verdicts = report.verdicts()
    assert len(verdicts) == LAYERS
    assert {v.reason for v in verdicts.values() if not v.is_accepted} == set()


def step(call: Callable[..., Any]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = call(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach()
