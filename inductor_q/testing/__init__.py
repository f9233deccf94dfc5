"""Real small QLoRA models, references and counters for the tests, the demo and the benchmarks.

Everything a builder here returns is the genuine article: a transformers model built from a
config, whose projections are bitsandbytes ``Linear4bit`` modules holding weights that
bitsandbytes quantized, wrapped by PEFT. Nothing is downloaded. bitsandbytes, peft and
transformers are imported inside the builders, so this package imports with torch alone.
"""

from inductor_q.backend import qfuse_backend
from inductor_q.testing.compiles import CompileTrace, fresh_cache
from inductor_q.testing.configs import (
    qwen3_0_6b_config,
    qwen3_5_0_8b_config,
    qwen3_5_layer_types,
    qwen3_8b_config,
    tiny_llama_config,
    tiny_qwen3_5_config,
    tiny_qwen3_config,
    tiny_qwen3_moe_config,
)
from inductor_q.testing.extras import bitsandbytes
from inductor_q.testing.models import (
    ATTENTION,
    PROJECTIONS,
    adapter_parameters,
    adapter_state,
    load_adapter_state,
    lora_linear,
    qlora_model,
    quantize_projections,
    quantized_linear,
)
from inductor_q.testing.references import reference_model, relative_error
from inductor_q.testing.saved import SavedBytes, count_saved_bytes, static_storages
from inductor_q.testing.text import ByteTokenizer, batches

__all__ = [
    "ATTENTION",
    "PROJECTIONS",
    "ByteTokenizer",
    "CompileTrace",
    "SavedBytes",
    "adapter_parameters",
    "adapter_state",
    "batches",
    "bitsandbytes",
    "count_saved_bytes",
    "fresh_cache",
    "load_adapter_state",
    "lora_linear",
    "qfuse_backend",
    "qlora_model",
    "quantize_projections",
    "quantized_linear",
    "qwen3_0_6b_config",
    "qwen3_5_0_8b_config",
    "qwen3_5_layer_types",
    "qwen3_8b_config",
    "reference_model",
    "relative_error",
    "static_storages",
    "tiny_llama_config",
    "tiny_qwen3_5_config",
    "tiny_qwen3_config",
    "tiny_qwen3_moe_config",
]
