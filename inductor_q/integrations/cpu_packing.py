"""Keep bitsandbytes' 4-bit weights on a CPU in the layout that gradients go through.

On CPUs with AVX512-BF16, a `Linear4bit` packs its weight again in its first inference call, for a
kernel without a backward. A model that trains after an evaluation gets no gradient through such a
layer, and `state_dict()`, which a checkpoint calls, unpacks it to a state that bitsandbytes' own
kernels refuse or misread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inductor_q.capture.bnb_state import is_packed_for_cpu, unpacked
from inductor_q.log import log

_FLAG = "support_avx512bf16_for_cpu"


def keep_unpacked(model: nn.Module) -> None:
    """Keep 4-bit layers that lie on a CPU from being packed for inference; unpack those that are.

    `inductor_q.compile` and `QfuseCallback` do this. Call it before the first evaluation: each
    later call is then fused, in training and inference. Called afterwards, it repairs the layers,
    whose scales stay rounded to bfloat16.
    """
    layers: list[Any] = [
        layer
        for layer in model.modules()
        if hasattr(layer, _FLAG)
        and isinstance(layer.weight, Tensor)
        and layer.weight.device.type == "cpu"
    ]
    kept = [layer for layer in layers if getattr(layer, _FLAG)]
    for layer in kept:
        setattr(layer, _FLAG, False)
    if kept:
        log.info("%d 4-bit layers keep their layout on the CPU in evaluation", len(kept))
    repaired = sum(_repair(layer.weight) for layer in layers)
    if repaired:
        log.info("%d 4-bit layers were packed for inference", repaired)


def _repair(weight: Any) -> bool:
    """Bring the weight of a layer back to the usual layout; return whether it was in another."""
    state: Any = getattr(weight, "quant_state", None)
    if not hasattr(state, "original_qshape"):
        return False
    if is_packed_for_cpu(state):
        data, state.absmax = unpacked(weight.data, state)
        data = data.reshape(state.original_qshape)
        storage = getattr(state, "original_storage_type", None)
        weight.data = data if storage is None else data.view(storage)
        state.nested, state.offset, state.state2 = False, None, None
        state.dtype, state.packing_format_for_cpu = state.original_dtype, False
    elif state.nested:  # bitsandbytes unpacked it, and has left what follows from bfloat16
        state.offset, state.state2.dtype = state.offset.float(), torch.float32
    else:
        state.absmax = state.absmax.t().reshape(-1).float()
    for name in [name for name in vars(state) if name.startswith("original_")]:
        delattr(state, name)
    return True
