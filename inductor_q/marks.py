"""Mark a quantized model as transformers marks what it has quantized itself.

PEFT, TRL and `save_pretrained` go by these marks: which layers an adapter gets, how a merged weight
is packed again, and what `config.json` says of the weights.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import capture
from inductor_q.capture.packed import packed_tensors
from inductor_q.capture.values import dequantize
from inductor_q.exc import CannotMerge


def mark(model: nn.Module, config: Any) -> None:
    """Mark a model with layers of bitsandbytes, or with weights that torchao packed by `config`.

    Without that, `from_pretrained` of what `save_pretrained` writes would take codes for values,
    and PEFT would merge no adapter into torchao's weights.
    """
    if isinstance(model, nn.Linear):
        return
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    ours = [m for m in layers if type(m).__name__ in ("Linear4bit", "Linear8bitLt")]
    if ours:
        _of_bitsandbytes(model, ours[0])
    elif config is not None and importlib.util.find_spec("transformers") is not None:
        _of_torchao(model, config)


def _plain_layers(model: nn.Module) -> list[str]:
    return [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and not any(packed_tensors(layer))
    ]


def _of_bitsandbytes(model: nn.Module, layer: Any) -> None:
    is_4bit = type(layer).__name__ == "Linear4bit"
    # PEFT chooses the class of its layers by it, and TRL the dtype of adapters.
    setattr(model, "is_loaded_in_4bit" if is_4bit else "is_loaded_in_8bit", True)
    if not hasattr(model, "save_pretrained"):
        return
    from transformers import BitsAndBytesConfig, PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return  # a PEFT model, which saves its adapters alone
    how: dict[str, Any] = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    if is_4bit:
        how = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": layer.weight.quant_type,
            "bnb_4bit_use_double_quant": layer.weight.compress_statistics,
            "bnb_4bit_compute_dtype": layer.compute_dtype,
            "bnb_4bit_quant_storage": layer.weight.quant_storage,
        }
    plain = _plain_layers(model)
    model.config.quantization_config = BitsAndBytesConfig(**how, llm_int8_skip_modules=plain)


def _of_torchao(model: nn.Module, config: Any) -> None:
    """PEFT asks a model's `hf_quantizer` how to pack a merged weight again, and `save_pretrained`
    how tensor subclasses are written. `is_quantized` stays unset, as with other layers here:
    a Trainer would ask that object whether adapters may train, and it says no for 4 bits."""
    from transformers import PreTrainedModel, TorchAoConfig
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    base: Any = model
    if hasattr(model, "peft_config"):
        base = base.get_base_model()
    how = TorchAoConfig(config, modules_to_not_convert=_plain_layers(base))
    base.hf_quantizer = TorchAoHfQuantizer(how)
    if isinstance(base, PreTrainedModel):
        base.config.quantization_config = how
    if importlib.util.find_spec("peft") is not None:
        _mend_merges()


# --- adapters over torchao's weights --------------------------------------------------------------


def _mend_merges() -> None:
    """Have PEFT's layers over torchao's weights merge any adapter, of any weight that is read here.

    PEFT 0.21 adds `B A` there whatever the variant of LoRA is: a DoRA adapter loses its magnitudes,
    and nothing says so. And torchao has no function that decodes its tiles of int4.
    """
    from peft.tuners.lora.torchao import TorchaoLoraLinear

    for function in (merge, unmerge):
        setattr(TorchaoLoraLinear, function.__name__, function)


def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
    """Add adapters to the base layer's weight, and pack that again as it was."""
    from peft.tuners.tuners_utils import check_adapters_to_merge

    for name in check_adapters_to_merge(self, adapter_names):
        if name not in self.lora_A:
            continue  # it adapts other layers
        if self.get_apply_tensor_subclass is None and capture.layout(self.get_base_layer().weight):
            raise CannotMerge(
                adapter=name,
                problem="nothing says how torchao packed the weight below it",
                remedy="Pack the model by inductor_q.quantize or from_pretrained, then attach it",
            )
        variant = self.lora_variant.get(name)
        values = dequantize(self.get_base_layer().weight)
        if variant is None:
            values = values + self.get_delta_weight(name)
        else:
            values = variant.merge_safe(self, name, values)
        if safe_merge and not values.isfinite().all():
            problem = "the merged weight has NaNs or infinities"
            raise CannotMerge(adapter=name, problem=problem, remedy="Load it again, or train it")
        _pack_again(self, values, name)
        self.merged_adapters.append(name)


def unmerge(self: Any) -> None:
    """Take adapters out of the base layer's weight again, the last one first."""
    while self.merged_adapters:
        name = self.merged_adapters[-1]
        variant = self.lora_variant.get(name)
        values = dequantize(self.get_base_layer().weight)
        if variant is None:
            values = values - self.get_delta_weight(name)
        else:
            values = variant.unmerge(self, name, values)
        _pack_again(self, values, name)
        self.merged_adapters.pop()


def _pack_again(layer: Any, values: Tensor, name: str) -> None:
    """Put values with the adapter `name` in the place of a base layer's weight, packed as that."""
    from torchao.quantization import quantize_

    base = layer.get_base_layer()
    with torch.device("meta"):
        new = nn.Linear(base.in_features, base.out_features, bias=False)
    new.weight = nn.Parameter(values.to(base.weight.dtype), requires_grad=False)
    if (before := capture.layout(base.weight)) is not None:
        quantize_(new, config := layer.get_apply_tensor_subclass())
        after = capture.layout(new.weight)
        if after is None or after.format != before.format:
            raise CannotMerge(
                adapter=name,
                problem=f"the weight below it is {before.format}, which is not what torchao packs "
                f"by the model's {type(config).__name__}",
                remedy="Decode the model first: inductor_q.kbit.dequantize_model(model)",
            )
    base.weight = new.weight
