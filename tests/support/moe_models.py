"""Make tiny mixture-of-experts models of transformers, from their configurations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as transformers_package
from torch import Tensor, nn

from inductor_q.experts.modules import expert_layers
from inductor_q.experts.stack import ExpertStack

transformers: Any = transformers_package  # as shipped, it is typed in parts

# bitsandbytes' CPU kernel needs rows of whole blocks, 64.
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 2, 64, 128, 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

#: The text model: a delta net, then attention, each with a shared expert beside the others.
QWEN3_5: dict[str, Any] = _COMMON | {
    "num_experts": EXPERTS,
    "moe_intermediate_size": INTERMEDIATE,
    "shared_expert_intermediate_size": INTERMEDIATE,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON,
        num_experts=EXPERTS,
        moe_intermediate_size=INTERMEDIATE,
        intermediate_size=INTERMEDIATE,
        decoder_sparse_step=1,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_COMMON, num_local_experts=EXPERTS, intermediate_size=INTERMEDIATE
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **_COMMON, num_experts=EXPERTS, intermediate_size=INTERMEDIATE
    ),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**QWEN3_5),
    # Transposed, interleaved, biased, a clamped gated unit.
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON,
        num_local_experts=EXPERTS,
        intermediate_size=INTERMEDIATE,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def model(family: str, implementation: str = "eager", **config: Any) -> Any:
    """Make a float32 model with weights from a seed, biases and routers included."""
    torch.manual_seed(0)
    sizes = FAMILIES[family]()
    sizes.update(config)
    built = transformers.AutoModelForCausalLM.from_config(sizes, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    built.set_experts_implementation(implementation)
    return built


def model_of_images_and_text() -> Any:
    """Make a Qwen3.5-MoE: its experts are in a text model inside, its configuration is nested."""
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config = transformers.Qwen3_5MoeConfig(
        text_config=QWEN3_5, vision_config={**vision, "out_hidden_size": HIDDEN}
    )
    auto = transformers.AutoModelForImageTextToText
    built = auto.from_config(config, dtype=torch.float32)
    built.set_experts_implementation("eager")
    return built


def tokens(batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def unpacked(packed: Any) -> Any:
    """Copy a model with its experts' base weights as plain parameters, in eager mode."""
    plain = copy.deepcopy(packed)
    for layer in expert_layers(plain).values():
        for name, stack in list(layer.named_children()):
            if isinstance(stack, ExpertStack):
                weight = stack.dequantize(torch.float32)
                if stack.transposed != layer.is_transposed:
                    weight = weight.mT.contiguous()
                delattr(layer, name)
                setattr(layer, name, nn.Parameter(weight, requires_grad=False))
        # The order in which transformers registers them, which PEFT's names depend on.
        layer._parameters = {k: layer._parameters[k] for k in sorted(layer._parameters)[::-1]}
    plain.set_experts_implementation("eager")
    return plain


def awaken(parameters: list[nn.Parameter], seed: int = 3) -> None:
    """Fill B, which starts at zero: a test needs every gradient alive."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
