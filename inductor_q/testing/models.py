"""Build QLoRA models and layers: bitsandbytes quantizes, PEFT adapts, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from inductor_q.testing.extras import bitsandbytes, imported

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION + MLP
GATED_DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


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


def quantize_projections(model: nn.Module, names: Sequence[str], **quantization: Any) -> None:
    """Replace the linears of these names by ``quantized_linear``, and mark the model for PEFT."""
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
    peft, transformers = imported("peft", "peft"), imported("transformers", "transformers")

    torch.manual_seed(seed)
    if base is None:
        with torch.device(device):
            from_config: Any = transformers.AutoModelForCausalLM.from_config
            base = from_config(config, dtype=compute_dtype, attn_implementation="sdpa")
    model: Any = base.to(device=device, dtype=compute_dtype).requires_grad_(False)
    quantize_projections(
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
    peft = imported("peft", "peft")

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
