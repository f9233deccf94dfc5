"""Load checkpoints as they ship: what a library has packed stays packed, code by code."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn


def load_checkpoint(
    model: nn.Module,
    checkpoint: str | Path,
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> nn.Module:
    """Give `model` the tensors of a checkpoint, packed weights as packed layers of the same values.

    Nothing is quantized, and no packed weight is held in 16 bits: linear layers become
    `PackedLinear`, experts `inductor_q.experts.ExpertStack`s, and what is not packed is loaded in
    the model's dtypes. Make `model` under `inductor_q.kbit.meta_parameters()` from its
    configuration; it changes when everything has been read. Then attach adapters; where PEFT merges
    them into linear layers, those become ordinary ones. Its configuration loses the
    quantization_config, which does not say how the model is packed now: save it by
    `inductor_q.kbit.save`, or `inductor_q.kbit.dequantize_model` before `save_pretrained`. Tensors
    of the checkpoint that nothing in the model takes are told in a warning.

    Args:
        checkpoint: a safetensors file, an index of shards or a folder with either, beside the
            config.json whose quantization_config says how weights are packed.
        device: where everything is to lie.
        progress: show progress on stderr.

    Returns:
        The model, changed in place.

    Raises:
        UnreadCheckpoint: its quantization has no reader; the error says which have.
        WrongCheckpoint: it lacks tensors of the model, or has them in other shapes or damaged; or
            it has a bias that the model has not, or a packed weight that two modules share.
        CorruptQuantState: codes or scales in other dtypes than their library writes.
    """
    from inductor_q.experts.model import use_qfuse
    from inductor_q.experts.modules import put_stack
    from inductor_q.kbit.model import progress_bars
    from inductor_q.loading.files import Checkpoint, forget_quantization
    from inductor_q.loading.linear import PackedLinear
    from inductor_q.loading.readers import find_in
    from inductor_q.loading.sources import FromCheckpoint

    find = find_in(checkpoint)
    source = FromCheckpoint(model, Checkpoint(checkpoint), device, find)
    has_experts = False
    with progress_bars(progress) as bars:
        for name in bars.track(source.packed, description="loading"):
            packed = source.pack(name)
            owner, _, leaf = name.rpartition(".")
            layer: Any = model.get_submodule(owner)
            if type(layer) is nn.Linear:
                (rows, columns), dtype = packed.shape, layer.weight.dtype
                new = PackedLinear(
                    packed.operands,
                    packed.format,
                    (rows, columns),
                    layer.bias,
                    dtype=dtype,
                    columns=packed.columns,
                )
                source.put(name.removesuffix("weight").removesuffix("."), new)
                continue
            has_experts = True
            if leaf == "weight":  # of a stack that is dense so far
                owner, _, leaf = owner.rpartition(".")
                layer = model.get_submodule(owner)
            put = partial(put_stack, layer, leaf, packed.operands, packed.format, packed.shape)
            source.change(name, partial(put, transposed=False))
        model = source.finish()
    forget_quantization(model)
    return use_qfuse(model) if has_experts else model
