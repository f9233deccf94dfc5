"""Have the layers of an FP8 model multiply with their decoded weights, over the bytes they hold.

transformers' own products quantize the input to FP8 as well, in kernels for GPUs which no pass
reads. Products with the values of the weights are nearer to those of the model in 16 bits, run
anywhere, and are fused with adapters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.capture import packed_weight
from inductor_q.capture.library import Packed
from inductor_q.capture.packed import packed_tensors
from inductor_q.experts.forward import IMPLEMENTATION
from inductor_q.experts.model import use_qfuse
from inductor_q.integrations.methods import has_own_forward, name_of_forward
from inductor_q.loading.merges import mend_merges
from inductor_q.log import log, warn_once
from inductor_q.options import asked

_TAKEN = "_qfuse_operands"  # what a layer has that is taken over: their format, their names

TOLD = (
    "%s multiply with their decoded weights from now on; their library's own products quantize the "
    'input to FP8 as well. "qfuse.compute": "fp8" multiplies in FP8, and inductor_q.compile with '
    '"qfuse.numerics": "strict" leaves such layers to their library'
)


def prepare_fp8(model: nn.Module) -> None:
    """Have layers of `model` whose products quantize their input to FP8 read decoded weights.

    These are transformers' `FP8Linear` and `FP8Experts`, which `from_pretrained` makes of
    checkpoints as Qwen3-FP8 and DeepSeek-V3 ship them. From now on they multiply with the values of
    their weights in the dtype of the input; a warning says so. Codes and scales stay the layers'
    own parameters, under their names: state dicts, saved files, hooks and adapters are as before,
    and adapters may come before or after. They are frozen, for they have no gradients.

    `inductor_q.compile` and `QfuseCallback` do this, but not where "qfuse.numerics" is "strict".
    Where "qfuse.compute" is "fp8", products are in FP8 again, with a scale for each row. Weights in
    none of our formats stay as they are, and a warning gives the reason. A model that `torch.save`
    has written whole comes back with linear layers of transformers': prepare it again.
    """
    found = [(layer, held) for _, layer, held in left_to_library(model)]
    refused = Counter((type(x).__name__, held.reason) for x, held in found if held.reason)
    for (kind, reason), count in refused.items():
        warn_once(f"left to its library: {count} x {kind} ({reason})")
    taken = [layer for layer, held in found if held.kind == "linear" and _take(layer, held)]
    experts = [(layer, held.reason) for layer, held in found if held.kind == "experts"]
    if experts and not any(reason for _, reason in experts):
        taken += dict(experts)  # all or none, since one configuration says who computes them
        use_qfuse(model)
    if taken:
        mend_merges()
        counts = Counter(type(layer).__name__ for layer in taken)
        log.warning(TOLD, " and ".join(f"{count} {kind}" for kind, count in counts.items()))


def prepare_unless_strict(model: nn.Module, options: Mapping[str, Any] | None) -> None:
    """Do so for a compile with these options, under which products may be computed otherwise."""
    if asked("qfuse.numerics", options) != "strict":
        prepare_fp8(model)


def forward(self: Any, input: Tensor) -> Tensor:
    """Multiply with the decoded weight, in the place of a layer's own `forward`.

    Dynamo traces this in every layer, so it asks nobody what the layer holds.
    """
    format, names = getattr(self, _TAKEN)
    parts: list[Tensor] = [getattr(self, name) for name in names]
    if parts[0].itemsize > 1:  # somebody has dequantized it
        result: Tensor = type(self).forward(self, input)
        return result
    operands = [p.float() if p.dtype is torch.float8_e8m0fnu else p for p in parts]
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    return ops.linear(input, operands, format, parts[0].shape, self.bias)


def left_to_library(model: nn.Module) -> Iterator[tuple[str, Any, Packed]]:
    """Yield path, layer and weight where the layer's own product quantizes the input as well, and
    is what computes it."""
    for path, module in model.named_modules():
        for name, _ in packed_tensors(module):
            held = packed_weight(module, name)
            if held is not None and held.quantizes_input and not _is_taken(module, held):
                yield path, module, held


def _is_taken(layer: Any, held: Packed) -> bool:
    if held.kind == "experts":
        return bool(layer.config._experts_implementation == IMPLEMENTATION)
    return getattr(getattr(layer, name_of_forward(layer)), "__func__", None) is forward


def _take(layer: nn.Module, held: Packed) -> bool:
    """Replace the forward of a layer that can be read, unless somebody already has."""
    if not has_own_forward(layer) or held.read is None:
        return False
    names = ("weight", *held.beside)
    for each in names:
        layer.get_parameter(each).requires_grad_(False)
    setattr(layer, _TAKEN, (held.read().format, names))
    setattr(layer, name_of_forward(layer), MethodType(forward, layer))
    return True
