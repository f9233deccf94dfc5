"""Configurations of transformers' models: tiny ones, and the sizes that benchmarks run."""

from __future__ import annotations

from typing import Any

from inductor_q.testing.extras import imported


def _config(model_type: str, defaults: dict[str, Any], overrides: dict[str, Any]) -> Any:
    transformers = imported("transformers", "transformers")
    return transformers.AutoConfig.for_model(model_type, **{**defaults, **overrides})


_TINY: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "use_cache": False,
}


def tiny_llama_config(**overrides: Any) -> Any:
    """Return a Llama of two layers and 64 channels; fields of ``LlamaConfig`` can be overridden."""
    return _config("llama", _TINY, overrides)


def tiny_qwen3_config(**overrides: Any) -> Any:
    """Return a Qwen3 of the same size (RMS norm on queries and keys)."""
    return _config("qwen3", _TINY, overrides)


def tiny_qwen3_moe_config(**overrides: Any) -> Any:
    """Return a mixture of four experts, two per token, with fused expert weights."""
    moe = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return _config("qwen3_moe", {**_TINY, **moe}, overrides)


def tiny_qwen3_5_config(**overrides: Any) -> Any:
    """Return the text model of a Qwen3.5.

    It has three gated delta nets, then attention whose query projection has a gate.
    """
    shapes = {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "tie_word_embeddings": True,
    }
    return _config("qwen3_5_text", {**_TINY, **shapes}, overrides)


def qwen3_8b_config(num_hidden_layers: int = 8, **overrides: Any) -> Any:
    """Return Qwen3-8B's shapes with fewer layers.

    A step is then quick, and the embeddings still weigh what they weigh.
    """
    shapes: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return _config("qwen3", shapes, overrides)


def qwen3_0_6b_config(num_hidden_layers: int = 28, **overrides: Any) -> Any:
    """Make a configuration with Qwen3-0.6B's shapes."""
    shapes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    shapes |= {"tie_word_embeddings": True, **overrides}
    return qwen3_8b_config(num_hidden_layers, **shapes)


def qwen3_5_0_8b_config(num_hidden_layers: int = 24, **overrides: Any) -> Any:
    """Make a configuration with the shapes of Qwen3.5-0.8B's text model."""
    shapes: dict[str, Any] = {
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": num_hidden_layers,
        "layer_types": qwen3_5_layer_types(num_hidden_layers),
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    }
    return tiny_qwen3_5_config(**{**shapes, **overrides})


def qwen3_5_layer_types(layers: int) -> list[str]:
    """Name the kinds of a Qwen3.5's layers: every fourth is attention, of fewer than four the last.

    The others are gated delta nets.
    """
    kinds = ["linear_attention"] * layers
    for index in [*range(3, layers, 4)] or [layers - 1]:
        kinds[index] = "full_attention"
    return kinds
