"""The reference of TRL's trainers, where a mixture's experts have adapters of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.common import byte_tokenizer
from inductor_q import experts
from inductor_q.log import warn_once
from tests.loading.test_merges import peft_as_it_comes as peft_as_it_comes
from tests.support.moe_models import model
from tests.support.trainers import COMMON, texts

peft: Any = pytest.importorskip("peft")
trl: Any = pytest.importorskip("trl")
datasets: Any = pytest.importorskip("datasets")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["peft_config", "without ref", "ref"])
def test_experts_are_disabled_in_it(way: str, tmp_path: Path, told: list[str]) -> None:
    """Where the trainer has no adapter "ref"; with that one they are on, and a warning says so."""
    warn_once.cache_clear()
    tokenizer = byte_tokenizer()
    net: Any = experts.quantize(model("mixtral", vocab_size=len(tokenizer)), "mxfp4")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    if way != "peft_config":
        net = peft.get_peft_model(net, config)
        experts.add_lora(net, r=4)
    columns = ("prompt", "chosen", "rejected")
    rows = {name: texts(8, seed, 10, 60) for seed, name in enumerate(columns)}
    trainer = trl.DPOTrainer(
        net,
        args=trl.DPOConfig(output_dir=str(tmp_path), **{**COMMON, "max_steps": 2}),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer,
        peft_config=config if way == "peft_config" else None,
    )
    if way == "peft_config":
        experts.add_lora(trainer.model, r=4)
    if way == "without ref":
        trainer.model.delete_adapter("ref")
    stack: Any = next(m for m in trainer.model.modules() if isinstance(m, experts.ExpertStack))
    before = stack.lora_B.detach().clone()
    seen = set()
    stack.register_forward_hook(
        lambda *_: seen.add(("trained" if torch.is_grad_enabled() else "reference", stack.disabled))
    )
    trainer.train()
    assert seen == {("trained", False), ("reference", way != "ref")}
    assert not torch.equal(stack.lora_B, before)
    assert any("leaves the adapters of experts on" in line for line in told) is (way == "ref")
