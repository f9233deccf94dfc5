"""Mark a quantized model as transformers marks what it has quantized itself.

PEFT, TRL and `save_pretrained` go by these marks: which layers an adapter gets, how a merged weight
is packed again, and what `config.json` says of the weights.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from inductor_q import capture
from inductor_q.capture.packed import packed_tensors
from inductor_q.exc import CannotSave
from inductor_q.loading.decodes import mend_decodes
from inductor_q.loading.linear import PackedLinear
from inductor_q.loading.merges import merge_by_values
from inductor_q.log import warn_once

ALONE = "save the adapter alone"
SEVERAL = "its layers are packed by several libraries or in 4 and 8 bits, and config.json names one"


def mark(model: nn.Module, names: Iterable[str], config: Any) -> None:
    """Mark a model in which layers, by name, have just been packed; torchao's by `config`.

    Without that, `from_pretrained` of what `save_pretrained` writes would take codes for values,
    and PEFT would merge no adapter into torchao's weights, or lose what DoRA has trained. PEFT and
    transformers are imported only where the model is one of theirs.
    """
    mend_decodes()
    packed = [model.get_submodule(name) for name in names]
    if config is not None:
        from torchao.quantization import quantize_

        for layer in packed:
            merge_by_values(layer, functools.partial(quantize_, config=config))
    if isinstance(model, nn.Linear):
        return
    inside: Any = getattr(model, "get_base_model", None)  # PEFT's
    base: Any = model if inside is None else inside()
    layers: list[Any] = [layer for layer in base.modules() if isinstance(layer, nn.Linear)]
    kinds = {type(layer).__name__: layer for layer in layers}
    found = [kinds[name] for name in ("Linear4bit", "Linear8bitLt") if name in kinds]
    for layer in found:
        # PEFT chooses the class of its layers by it, and TRL the dtype of adapters.
        setattr(base, f"is_loaded_in_{_bits(layer)}bit", True)
    transformers_model = getattr(
        sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ()
    )
    if not isinstance(base, transformers_model):
        return
    if config is not None:
        base.hf_quantizer = _quantizer_of_torchao(base, config)
        how = base.hf_quantizer.quantization_config
    elif found:
        how = _of_bitsandbytes(base, found[0])
    else:
        return
    unwritten = (
        (f"{name}.weight", type(layer.weight).__name__)
        for name, layer in base.named_modules()
        if isinstance(layer, nn.Linear) and not capture.is_written(layer.weight)
    )
    what, kind = next(unwritten, ("", ""))
    if what:
        problem = f"torchao does not write its {kind} to safetensors"
        remedy = f"Write it by torch.save(model.state_dict(), path), or {ALONE}"
    elif len(found) + any(capture.layout(layer.weight) is not None for layer in layers) > 1:
        what, problem = f"the {type(base).__name__}", SEVERAL
        remedy = f"Quantize all of it by one library, or {ALONE}"
    else:
        base.config.quantization_config = how
        return
    if hasattr(base.config, "quantization_config"):  # of what an earlier call has packed
        del base.config.quantization_config
    warn_once(f"inductor_q.quantize: save_pretrained cannot write this model: {problem}. {remedy}")
    if (quantizer := vars(base).get("hf_quantizer")) is not None:
        refuse = functools.partial(_refuse_to_save, what=what, problem=problem, remedy=remedy)
        quantizer.is_serializable = refuse


def _refuse_to_save(**said: str) -> bool:
    raise CannotSave(**said)


def _plain_layers(model: nn.Module) -> list[str]:
    """Name the layers that no library has packed; a `PackedLinear` is saved only once decoded."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, PackedLinear)
        or (type(layer) is nn.Linear and not any(packed_tensors(layer)))
    ]


def _bits(layer: nn.Module) -> int:
    return 4 if type(layer).__name__ == "Linear4bit" else 8


def _of_bitsandbytes(model: nn.Module, layer: Any) -> Any:
    from transformers import BitsAndBytesConfig

    how: dict[str, Any] = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    if _bits(layer) == 4:
        how = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": layer.weight.quant_type,
            "bnb_4bit_use_double_quant": layer.weight.compress_statistics,
            "bnb_4bit_compute_dtype": layer.compute_dtype,
            "bnb_4bit_quant_storage": layer.weight.quant_storage,
        }
    return BitsAndBytesConfig(**how, llm_int8_skip_modules=_plain_layers(model))


def _quantizer_of_torchao(model: nn.Module, config: Any) -> Any:
    """PEFT asks a model's `hf_quantizer` whether a merged weight can be packed, `save_pretrained`
    how tensor subclasses are written. `is_quantized` stays unset, as with other layers here:
    a Trainer would ask that object whether adapters may train, and it says no for 4 bits."""
    from transformers import TorchAoConfig
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    how = TorchAoConfig(config, modules_to_not_convert=_plain_layers(model))
    return TorchAoHfQuantizer(how)
