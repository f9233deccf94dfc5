"""The examples of docs/kbit.md run as they stand, on a small checkpoint and the device there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import kbit, testing

PAGE = Path(__file__).parents[2] / "docs" / "kbit.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_has_two_examples() -> None:
    assert len(EXAMPLES) == 2


def test_from_a_checkpoint_to_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "checkpoint", max_shard_size="100KB")
    monkeypatch.chdir(tmp_path)
    code = EXAMPLES[0].replace("path/to/Qwen3-8B", str(tmp_path / "checkpoint"))
    if not torch.cuda.is_available():
        code = code.replace('"cuda"', '"cpu"')
    names: dict[str, Any] = {}
    exec(code, names)
    layers = [m for m in names["model"].modules() if isinstance(m, kbit.KBitLinear)]
    assert {layer.format for layer in layers} == {"kbit4_e4m4"}
    assert len(layers) == 7

    again = kbit.load(plain, tmp_path / "qwen3-k4.safetensors")
    head = again.get_submodule("lm_head")
    assert type(head) is nn.Linear
    loaded = [m for m in again.modules() if isinstance(m, kbit.KBitLinear)]
    for one, other in zip(layers, loaded, strict=True):
        assert torch.equal(one.dequantize().cpu(), other.dequantize())


def test_a_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    code = EXAMPLES[1].replace("4096, 4096", "64, 96")
    names: dict[str, Any] = {}
    exec(code, names)
    assert capsys.readouterr().out == "kbit3_e4m4 3.25\n"
    assert names["back"].dtype == torch.bfloat16
    assert names["exact_scales"].format == "kbit3_fp16"
