"""Adapt parameters of tiny mixtures of experts by PEFT's `target_parameters`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from tests.support.moe_models import model

FUSED = ["experts.gate_up_proj", "experts.down_proj"]


def lora(**settings: Any) -> Any:
    from peft import LoraConfig

    given: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
    return LoraConfig(**{**given, "init_lora_weights": False, **settings})


def wrapped(family: str, implementation: str = "grouped_mm", **settings: Any) -> Any:
    from peft import get_peft_model

    net = get_peft_model(model(family, implementation), lora(**settings))
    assert list(wrappers(net))
    return net


def wrappers(net: nn.Module) -> Iterator[Any]:
    kind = vars(sys.modules["peft.tuners.lora.layer"])["ParamWrapper"]
    return (module for module in net.modules() if isinstance(module, kind))
