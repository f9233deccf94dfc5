"""PEFT's methods on a model in NF4: one list, of which each row is tried, and which docs have."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import inductor_q
from inductor_q import testing
from tests.support.compiling import SMALL, gradients, no_codegen

for extra in ("bitsandbytes", "transformers"):
    pytest.importorskip(extra)
peft = pytest.importorskip("peft")
import transformers  # noqa: E402
from bitsandbytes.functional import dequantize_4bit  # noqa: E402
from peft.utils.loftq_utils import replace_lora_weights_loftq  # noqa: E402

TRAINING = Path(__file__).parents[2] / "docs" / "training.md"
TARGETS = ["q_proj", "v_proj"]
IDS = torch.arange(32).reshape(2, 16)
CONFIG = testing.tiny_llama_config(num_hidden_layers=1)
LAYERS = 7  # in 4 bits
QUICK = ("OFT", "LoHa", "LoftQ, `replace_lora_weights_loftq`")  # the others are slow tests

FUSED = "fused: one graph, every layer"
BROKEN = "works; the graph breaks in PEFT's penalty on A and B, behind the model, every layer fused"
REFUSED = "PEFT refuses it: it starts from weights in 16 or 32 bits"
SHAPE = "PEFT fails in eager mode: it takes the packed weight's shape for the layer's"
BYTES = "PEFT fails in eager mode: it takes the packed bytes for a weight"
FAILS = (REFUSED, SHAPE, BYTES)
DENSE = "works: one graph; the weights stay in 16 bits, so none is packed"


class OnCpu(TorchFunctionMode):
    """Give a CPU what is to go to "cuda", where PEFT computes LoftQ wherever the model is."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def moved(value: Any) -> Any:
            is_cuda = getattr(value, "type", value) == "cuda"
            return "cpu" if isinstance(value, (str, torch.device)) and is_cuda else value

        kwargs = {name: moved(value) for name, value in (kwargs or {}).items()}
        return func(*map(moved, args), **kwargs)


def four_bits() -> Any:
    base = testing.qlora_model(CONFIG, base=sixteen_bits()).unload()
    base.is_loaded_in_4bit = True
    return base


def sixteen_bits() -> Any:
    torch.manual_seed(0)
    build: Any = transformers.AutoModelForCausalLM.from_config
    return build(CONFIG, dtype=torch.bfloat16)


def on_four_bits(config: Any, folder: Path) -> Any:
    return peft.get_peft_model(four_bits(), config)


def on_sixteen_bits(config: Any, folder: Path) -> Any:
    with OnCpu():
        return peft.get_peft_model(sixteen_bits(), config)


def initialized_on_four_bits(config: Any, folder: Path) -> Any:
    with OnCpu():
        return peft.get_peft_model(four_bits(), config)


def replaced(config: Any, folder: Path) -> Any:
    """Take what 4 bits lost of the weights in a file into the adapter."""
    original, model = sixteen_bits(), peft.get_peft_model(four_bits(), config)
    original.save_pretrained(folder)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    weight = original.model.layers[0].self_attn.q_proj.weight.detach().float()
    lost = testing.relative_error(dense(layer), weight)
    with OnCpu():
        replace_lora_weights_loftq(model, str(folder))
    assert testing.relative_error(dense(layer), weight) < 0.9 * lost
    return model


def dense(layer: Any) -> torch.Tensor:
    values: torch.Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    delta: torch.Tensor = layer.get_delta_weight("default").detach().float()
    return values + delta


@dataclass(frozen=True)
class Method:
    name: str
    config: Callable[[], Any]
    outcome: str = FUSED
    model: Callable[[Any, Path], Any] = on_four_bits
    said: str = ""  # by the error, or by Dynamo of the first break: a pattern

    @property
    def row(self) -> str:
        return f"| {self.name} | {self.outcome} |"


def lora(**settings: Any) -> Callable[[], Any]:
    given = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **settings}
    return lambda: peft.LoraConfig(task_type="CAUSAL_LM", **given)


def loftq() -> Any:
    """Return LoRA's configuration with LoftQ. PEFT wants scipy to be there, and uses it nowhere."""
    find = importlib.util.find_spec
    with mock.patch("importlib.util.find_spec", lambda name: name == "scipy" or find(name)):
        start = {"init_lora_weights": "loftq", "loftq_config": peft.LoftQConfig(loftq_bits=4)}
        return lora(lora_alpha=4, **start)()


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
        said=r"adalora/model\.py:.*\n(?s:.*)setattr\(\) on Tensor\.requires_grad",
    ),
    Method("LoftQ, `replace_lora_weights_loftq`", lora(lora_alpha=4), model=replaced),
    Method(
        "LoftQ, `init_lora_weights`, of a model in 16 bits", loftq, DENSE, model=on_sixteen_bits
    ),
    Method(
        "LoftQ, `init_lora_weights`, of a model in 4 bits",
        loftq,
        BYTES,
        model=initialized_on_four_bits,
        said=r"mat2 shapes cannot be multiplied \(32x64 and 1x1\)",
    ),
    Method(
        "PiSSA",
        lora(init_lora_weights="pissa"),
        REFUSED,
        said="initialize PiSSA under float32, float16, or bfloat16",
    ),
    Method(
        "LoHa",
        other("LoHa", r=4, target_modules=TARGETS),
        SHAPE,
        said=r"mat2 shapes cannot be multiplied \(32x64 and 1x2048\)",  # 64 x 64 in 2048 bytes
    ),
    Method("LoKr", other("LoKr", r=4, target_modules=TARGETS), SHAPE, said=r"shape '\[2048, 1\]'"),
)


def test_docs_have_the_list() -> None:
    text = TRAINING.read_text(encoding="utf-8")
    table = text.partition("## PEFT's methods")[2].partition("| --- | --- |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    assert rows == [method.row for method in METHODS]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, id=m.name, marks=() if m.name in QUICK else pytest.mark.slow)
        for m in METHODS
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_step_under_autocast(method: Method, tmp_path: Path) -> None:
    """As a Trainer runs it: loss and gradients against eager mode's, or the reason why not."""
    torch._dynamo.reset()
    if method.outcome in FAILS:
        with pytest.raises((RuntimeError, TypeError), match=method.said):
            step(method.model(method.config(), tmp_path).forward)
        return
    torch.manual_seed(0)
    model = method.model(method.config(), tmp_path).train()
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
    assert not trace.breaks or re.search(method.said, trace.breaks[0])
    report = inductor_q.last_report()
    assert report is not None
    verdicts = report.verdicts()
    assert len(verdicts) == (0 if method.outcome == DENSE else LAYERS)
    assert {v.reason for v in verdicts.values() if not v.is_accepted} == set()


def step(call: Callable[..., Any]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = call(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach()
