"""Make tiny models of transformers with its layers of FP8 checkpoints, from their configurations.

On a CPU `from_pretrained` dequantizes such checkpoints and the layers' kernel is missing, so the
layers are put in by the function that `from_pretrained` calls on a GPU, and `emulate_kernels` has
the kernel's formula in torch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as transformers_package
from torch import Tensor, nn
from transformers.integrations import finegrained_fp8 as shipped
from transformers.quantizers.auto import AutoHfQuantizer

from inductor_q import testing
from tests.support.moe_models import awaken

transformers: Any = transformers_package  # as shipped, it is typed in parts
fp8: Any = shipped

PROJECTIONS = ("gate_up_proj", "down_proj")
TOKENS = torch.arange(14).reshape(2, 7)
LINEARS = 7  # of the dense model, whose head is not quantized

#: Sums in another order, in float32.
CLOSE = 1e-5


def net(family: str = "qwen3", *, intermediate: int = 256, **quantization: Any) -> Any:
    """Make a model in float32 whose codes and scales are random, scales about as large as a real
    model's. Its head, and the router of a mixture, are not quantized."""
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 1}
    if family == "qwen3":
        config = testing.tiny_qwen3_config(**sizes, intermediate_size=intermediate)
    else:
        config = testing.tiny_qwen3_moe_config(**sizes, moe_intermediate_size=intermediate)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    said = transformers.FineGrainedFP8Config(**quantization)
    fp8.replace_with_fp8_linear(model, ["lm_head", "mlp.gate"], said)
    for layer in layers(model):
        fill(layer)
    model.config.quantization_config, model.is_quantized = said, True
    model.hf_quantizer = AutoHfQuantizer.from_config(said, pre_quantized=True)
    model.set_experts_implementation("eager")
    return model


def layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, (fp8.FP8Linear, fp8.FP8Experts))]


def fill(layer: Any) -> None:
    """Give a layer, which may be on the meta device, codes and scales."""
    for name, old in list(layer._parameters.items()):
        if old is None:
            continue
        if old.dtype is torch.int8:
            new = torch.randint(-128, 128, old.shape, dtype=torch.int8)
        elif old.dtype is torch.float8_e8m0fnu:
            new = torch.exp2(torch.randint(-11, -8, old.shape).float())
        elif name.endswith("scale_inv"):
            new = 1e-3 + 1e-3 * torch.rand(old.shape)
        else:
            new = torch.randn(old.shape) * (20 if old.itemsize == 1 else 0.1)
        layer._parameters[name] = nn.Parameter(new.to(old.dtype), requires_grad=old.requires_grad)


def values(codes: Tensor, scale: Tensor, block: Any = (128, 128)) -> Tensor:
    """Decode a weight in float32 by transformers' own function, which its backward has. E8M0 has no
    product there. transformers 5.17 has no such function: there the scale of a block, or of all,
    is multiplied by hand."""
    if codes.dtype is torch.int8:  # and it refuses FP4 there; what loads checkpoints does not
        found: Tensor = fp8.Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
        return found
    scale = scale.detach().float()
    if hasattr(fp8, "_dequantize_fp8_weight"):
        found = fp8._dequantize_fp8_weight(codes.detach(), scale, block, torch.float32)
        return found
    if scale.numel() > 1:
        for dim in (-2, -1):
            scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, codes.shape[dim])
    return codes.detach().float() * scale


def plain(model: Any) -> Any:
    """Copy a model with ordinary weights of these values in the place of the packed ones."""
    dense = copy.deepcopy(model)
    for name, layer in list(dense.named_modules()):
        if isinstance(layer, fp8.FP8Linear):
            new = nn.Linear(layer.in_features, layer.out_features, bias=False)
            weight = values(layer.weight, layer.weight_scale_inv, layer.block_size)
            new.weight = nn.Parameter(weight, requires_grad=False)
            dense.set_submodule(name, new)
        elif isinstance(layer, fp8.FP8Experts):
            for each in PROJECTIONS:
                scale = getattr(layer, f"{each}_scale_inv")
                weight = values(getattr(layer, each), scale, layer.block_size)
                setattr(layer, each, nn.Parameter(weight, requires_grad=False))
    return dense


def addresses(model: nn.Module) -> dict[str, tuple[int, torch.dtype]]:
    """Where the tensors of the state dict lie, by name."""
    return {name: (t.data_ptr(), t.dtype) for name, t in model.state_dict().items()}


def quantized_input(x: Tensor) -> Tensor:
    """Round x as the kernel does: to E4M3, with a scale for 128 columns of a row."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    rounded: Tensor = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)


def emulate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' layers run here: codes by codes, in float32."""

    def matmul(
        x: Tensor, codes: Tensor, scale: Tensor, block: Any, dtype: torch.dtype, **_: Any
    ) -> Tensor:
        return (quantized_input(x) @ values(codes, scale).t()).to(dtype)

    def grouped(x: Tensor, codes: Tensor, scale: Tensor, *, offsets: Tensor, **_: Any) -> Tensor:
        rows = torch.arange(x.shape[0], dtype=torch.int32)
        weight = values(codes, scale)[torch.searchsorted(offsets, rows, right=True)]
        return (weight @ quantized_input(x).unsqueeze(-1)).squeeze(-1).to(x.dtype)

    kernels = fp8.FineGrainedFP8(matmul=matmul, batched_matmul=None, grouped_matmul=grouped)
    monkeypatch.setattr(fp8, "_FINEGRAINED_FP8", kernels)


def lora(model: Any, *names: str) -> Any:
    """Adapt layers of these names by PEFT, with adapters that are not zero."""
    peft: Any = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[*names]))
    awaken([p for p in adapted.parameters() if p.requires_grad])
    return adapted
