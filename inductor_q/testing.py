"""Real small QLoRA models, references and counters for the tests, the demo and the benchmarks.

Everything a builder here returns is the genuine article: a transformers model built from a
config, whose projections are bitsandbytes ``Linear4bit`` modules holding weights that
bitsandbytes quantized, wrapped by PEFT. Nothing is downloaded. bitsandbytes, peft and
transformers are imported inside the builders, so this module imports with torch alone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from inductor_q.backend import qfuse_backend
from inductor_q.diagnostics.events import TRACE, TraceHandler, listening
from inductor_q.exc import MissingExtra

__all__ = [
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
    "quantized_linear",
    "qwen3_8b_config",
    "reference_model",
    "relative_error",
    "static_storages",
    "tiny_llama_config",
    "tiny_qwen3_5_config",
    "tiny_qwen3_config",
    "tiny_qwen3_moe_config",
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION + MLP
GATED_DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


# --- configs --------------------------------------------------------------------------


def _config(model_type: str, defaults: dict[str, Any], overrides: dict[str, Any]) -> Any:
    transformers = _extra("transformers", "transformers")
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


def bitsandbytes() -> Any:
    """Return bitsandbytes as Any.

    Its annotations are partial, and strict type checks would drown in them.
    """
    return _extra("bitsandbytes", "bnb")


def _extra(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and lacks something itself
            raise
        raise MissingExtra(package=package, extra=extra, feature="building this model") from error


# --- models ---------------------------------------------------------------------------


def quantized_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    quant_type: str = "nf4",
    nested: bool = True,
    blocksize: int = 64,
    compute_dtype: torch.dtype = torch.bfloat16,
    quant_storage: torch.dtype = torch.uint8,
    cpu_packing: bool = False,
) -> Any:
    """Make bitsandbytes' ``Linear4bit`` over ``weight`` [N, K], quantized where ``weight`` lies.

    ``cpu_packing=False`` keeps the portable layout on CPU: bitsandbytes otherwise repacks the
    weight inside the first inference call on machines with AVX-512 bf16.
    """
    bnb = bitsandbytes()
    n, k = weight.shape
    with torch.device("meta"):  # the constructor's own random weight is thrown away: do not fill it
        linear = bnb.nn.Linear4bit(
            k,
            n,
            bias=False,
            compute_dtype=compute_dtype,
            compress_statistics=nested,
            quant_type=quant_type,
            quant_storage=quant_storage,
        )
    linear.weight = bnb.nn.Params4bit(
        weight.detach(),
        requires_grad=False,
        blocksize=blocksize,
        compress_statistics=nested,
        quant_type=quant_type,
        quant_storage=quant_storage,
        module=linear,
    ).to(weight.device)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    if not cpu_packing:
        linear.support_avx512bf16_for_cpu = False
    return linear


def _quantize_projections(model: nn.Module, names: Sequence[str], **quantization: Any) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and type(child) is nn.Linear:
                quantized = quantized_linear(child.weight, child.bias, **quantization)
                quantized.train(child.training)
                setattr(parent, name, quantized)
    # transformers sets this after loading with a BitsAndBytesConfig; PEFT chooses its layer class
    # by it.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def _finish_adapters(
    model: nn.Module, dtype: torch.dtype | None, randomize: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        if randomize and parameter.dim() == 2 and "lora_magnitude" not in name:
            noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
            parameter.data.copy_(noise)
        if dtype is not None:
            parameter.data = parameter.data.to(dtype)


def qlora_model(
    config: Any,
    *,
    quant_type: str = "nf4",
    nested: bool = True,
    blocksize: int = 64,
    compute_dtype: torch.dtype = torch.bfloat16,
    quant_storage: torch.dtype = torch.uint8,
    adapter_dtype: torch.dtype | None = None,
    r: int = 16,
    alpha: int | None = None,
    dropout: float = 0.0,
    dora: bool = False,
    targets: Sequence[str] = PROJECTIONS,
    target_parameters: Sequence[str] = (),
    adapters: int = 1,
    randomize_adapters: bool = False,
    prepare: bool = False,
    device: str | torch.device = "cpu",
    seed: int = 0,
    base: nn.Module | None = None,
    lora: Mapping[str, Any] | None = None,
) -> Any:
    """Return the model of ``config`` as a QLoRA user has it, in training mode.

    NF4 projections come from bitsandbytes, LoRA from PEFT. Every projection is quantized, those of
    gated delta nets too; ``targets`` are the ones that get an adapter, and PEFT adapts
    ``target_parameters`` by parametrization (experts in 16 bits). Embeddings, norms and the head
    stay in ``compute_dtype`` and are frozen. ``adapter_dtype=None`` is PEFT's default, fp32
    adapters. PEFT starts LoRA at B = 0, which makes the gradient of A vanish: tests of gradients
    need ``randomize_adapters``. FSDP2 needs packed weights in bf16, ``quant_storage``, as it shards
    floating point alone. ``adapters`` > 1 adds more and makes all of them active.
    ``prepare`` calls PEFT's ``prepare_model_for_kbit_training``, which makes embeddings, norms and
    the head float32, and with them what flows from layer to layer. ``base`` replaces the random
    model of ``config`` (the demo trains one first). ``lora`` has more fields of PEFT's LoraConfig,
    over those that the other arguments say.
    """
    peft, transformers = _extra("peft", "peft"), _extra("transformers", "transformers")

    torch.manual_seed(seed)
    if base is None:
        with torch.device(device):
            from_config: Any = transformers.AutoModelForCausalLM.from_config
            base = from_config(config, dtype=compute_dtype, attn_implementation="sdpa")
    model: Any = base.to(device=device, dtype=compute_dtype).requires_grad_(False)
    _quantize_projections(
        model,
        PROJECTIONS + GATED_DELTA_NET,
        quant_type=quant_type,
        nested=nested,
        blocksize=blocksize,
        compute_dtype=compute_dtype,
        quant_storage=quant_storage,
    )
    if prepare:  # checkpointing is the caller's choice, as without it
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(seed + 1)
    fields: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "r": r,
        "lora_alpha": 2 * r if alpha is None else alpha,
        "lora_dropout": dropout,
        "target_modules": list(targets),
        "target_parameters": list(target_parameters) or None,
        "use_dora": dora,
    }
    adapter = peft.LoraConfig(**{**fields, **(lora or {})})
    peft_model: Any = peft.get_peft_model(model, adapter)
    for index in range(1, adapters):
        peft_model.add_adapter(f"adapter_{index}", adapter)
    if adapters > 1:
        names = list(peft_model.peft_config)
        peft_model.base_model.set_adapter(names)
    _finish_adapters(peft_model, adapter_dtype, randomize_adapters, seed + 2)
    peft_model.train()
    return peft_model


def lora_linear(
    n: int,
    k: int,
    *,
    r: int = 16,
    bias: bool = False,
    adapter_dtype: torch.dtype | None = None,
    dropout: float = 0.0,
    dora: bool = False,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **quantization: Any,
) -> nn.Module:
    """Make one quantized linear [N, K] under a PEFT adapter with non-zero A and B.

    ``module(x)`` is ``module.proj(x)``.
    """
    peft = _extra("peft", "peft")

    torch.manual_seed(seed)
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5
    bias_tensor = torch.randn(n, device=device, dtype=torch.bfloat16) if bias else None
    model = _OneLinear(quantized_linear(weight, bias_tensor, **quantization))
    lora = peft.LoraConfig(
        r=r, lora_alpha=2 * r, lora_dropout=dropout, target_modules=["proj"], use_dora=dora
    )
    peft.inject_adapter_in_model(lora, model)
    _finish_adapters(model, adapter_dtype, randomize=True, seed=seed + 2)
    return model.train()


class _OneLinear(nn.Module):
    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj
        self.is_loaded_in_4bit = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.proj(x)
        return y


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that train."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adapter_state(model: nn.Module) -> list[torch.Tensor]:
    """Copy what trains, to start another run from the same point."""
    return [parameter.detach().clone() for parameter in adapter_parameters(model)]


def load_adapter_state(model: nn.Module, state: Sequence[torch.Tensor]) -> None:
    """Put ``adapter_state`` back in place and drop gradients."""
    with torch.no_grad():
        for parameter, value in zip(adapter_parameters(model), state, strict=True):
            parameter.copy_(value)
            parameter.grad = None


# --- references -----------------------------------------------------------------------


def reference_model(model: nn.Module) -> nn.Module:
    """Return ``model`` in float64 with the dequantized weights in ordinary linears.

    Every faster path is measured against it.

    Parameter names are the same, so gradients compare by name. transformers computes its norms in
    fp32 whatever it is given, which leaves about 1e-7 of noise in the reference.
    """
    bnb = bitsandbytes()

    def plain(linear: Any) -> nn.Linear:
        state = copy.copy(linear.weight.quant_state)
        state.dtype = torch.float32
        # bitsandbytes multiplies with the weight rounded to the compute dtype: so does the
        # reference.
        weight = bnb.functional.dequantize_4bit(linear.weight.data, state).to(linear.compute_dtype)
        result = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        result.weight = nn.Parameter(weight.double(), requires_grad=False)
        if linear.bias is not None:
            result.bias = nn.Parameter(linear.bias.detach().double(), requires_grad=False)
        return result

    # Swap first, copy, swap back: bitsandbytes parameters are not copied, only read.
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, bnb.nn.Linear4bit):
                    swapped.append((parent, name, child))
                    setattr(parent, name, plain(child))
        return copy.deepcopy(model).double()
    finally:
        for parent, name, child in swapped:
            setattr(parent, name, child)


def relative_error(out: torch.Tensor, ref64: torch.Tensor) -> float:
    """Return ``|out - ref| / |ref|`` in float64.

    It is NaN when anything is NaN, so that no bound lets it pass.
    """
    ref = ref64.detach().double()
    difference = (out.detach().double().to(ref.device) - ref).norm()
    scale = ref.norm()
    if scale == 0:
        return float(difference)
    return float(difference / scale)


# --- what autograd keeps --------------------------------------------------------------


def static_storages(*modules: nn.Module) -> set[int]:
    """Return the data pointers of everything the modules own for good.

    These are parameters, buffers and bitsandbytes' quantization states.
    """
    owned: set[int] = set()

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            owned.add(value.untyped_storage().data_ptr())
        elif hasattr(value, "absmax"):  # bitsandbytes QuantState, nested once
            for inner in vars(value).values():
                add(inner)

    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            add(tensor)
            add(getattr(tensor, "quant_state", None))
    return owned


@dataclass
class SavedBytes:
    """Count what a forward keeps for its backward, each storage once.

    What the model owns anyway is left out.
    """

    total: int = 0
    tensors: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)


def count_saved_bytes(fn: Callable[[], Any], *modules: nn.Module) -> SavedBytes:
    """Run ``fn`` (a forward, eager or compiled) and count the bytes it saves for backward.

    Storages that ``modules`` own are not counted. A compiled callable must have been compiled
    before: hooks present while Dynamo traces would become part of the graph.
    """
    owned = static_storages(*modules)
    # Keeps the storages alive: a freed pointer could come back as another tensor's.
    seen: dict[int, torch.UntypedStorage] = {}
    saved = SavedBytes()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in owned and pointer not in seen:
            seen[pointer] = storage
            saved.total += storage.nbytes()
            saved.tensors.append((tuple(tensor.shape), tensor.dtype))
        # Never the tensor itself: a node that saves its own output would own itself, for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = fn()
    del result
    return saved


# --- what Dynamo did ------------------------------------------------------------------


@dataclass
class CompileTrace:
    """Count what Dynamo did inside a ``with`` block, as torch's own structured trace has it.

    The trace sees breaks that ``torch._dynamo.utils.counters`` misses (frames skipped inside
    loops, data-dependent branches). It slows compilation down: never time a compile under it.
    """

    _WANTED: ClassVar = frozenset({"dynamo_graph_break_reason", "recompile_reasons"})

    graphs: int = 0
    handler: TraceHandler = field(default_factory=lambda: TraceHandler(CompileTrace._WANTED))

    @property
    def breaks(self) -> list[str]:
        return [event.payload for event in self.handler.named("dynamo_graph_break_reason")]

    @property
    def recompiles(self) -> list[str]:
        return [event.payload for event in self.handler.named("recompile_reasons")]

    def __enter__(self) -> CompileTrace:
        self._listening = listening(TRACE, self.handler)
        self._before = self._unique_graphs()
        self._listening.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.__exit__(None, None, None)
        self.graphs = self._unique_graphs() - self._before

    @staticmethod
    def _unique_graphs() -> int:
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]


# --- text -----------------------------------------------------------------------------


class ByteTokenizer:
    """Encode UTF-8 bytes as token ids 0..255, then bos, eos and pad. Nothing is lost, no file
    needed.
    """

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 264  # padded to a multiple of 8

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int] | torch.Tensor) -> str:
        return bytes(int(i) for i in ids if int(i) < 256).decode("utf-8", errors="replace")


def batches(
    text: str,
    tokenizer: ByteTokenizer,
    *,
    batch_size: int,
    seq_len: int,
    steps: int,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Iterator[torch.Tensor]:
    """Return ``steps`` batches [batch_size, seq_len] of random windows of ``text``.

    The same seed gives the same batches.
    """
    ids = torch.tensor(tokenizer.encode(text), dtype=torch.long)
    if len(ids) < seq_len:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than seq_len={seq_len}")
    rng = random.Random(seed)
    for _ in range(steps):
        starts = [rng.randint(0, len(ids) - seq_len) for _ in range(batch_size)]
        yield torch.stack([ids[start : start + seq_len] for start in starts]).to(device)


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Compile from nothing inside the block: Inductor's and AOTAutograd's caches are empty."""
    from torch._inductor.utils import fresh_cache as inductor_fresh_cache

    with inductor_fresh_cache():
        yield
