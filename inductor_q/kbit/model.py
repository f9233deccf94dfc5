"""Quantize the linear layers of a model, in memory or straight from its checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from inductor_q.exc import UnknownLayer
from inductor_q.kbit.allocate import allocate, check_importance, measure, table
from inductor_q.kbit.checkpoint import Checkpoint, assign, check_not_quantized, owners
from inductor_q.kbit.layers import check_some, linear_layers, replace_layers
from inductor_q.kbit.linear import KBitLinear
from inductor_q.kbit.tensor import check_codebook, check_values, quantize
from inductor_q.ops.quantize_kbit import check_absmax, check_bits


def quantize_model(
    model: nn.Module,
    k: int | Mapping[str, int] | None = None,
    *,
    bits: float | None = None,
    skip: Collection[str] | None = None,
    codebook: Tensor | None = None,
    absmax: str = "e4m4",
    importance: Mapping[str, float] | None = None,
    checkpoint: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> nn.Module:
    """Replace every `nn.Linear` of `model` by a `KBitLinear`, one after the other.

    Quantize first, then attach adapters. Everything is checked before the first layer is replaced:
    after an error the model is as it was. Layers that another library or an earlier call has packed
    stay as they are; a warning counts them, and where nothing else is left it is an error.

    Args:
        k: bits of every layer, or by layer name (layers it does not name stay as they are).
        bits: instead of `k`, the average over all layers, scales included, between 2.25 and 5.25:
            K is chosen by layer (`allocate`), and the table printed.
        skip: names or shell patterns of layers to leave alone; by default the one called "lm_head".
        codebook: float32 [2**k], ascending, for every layer; None is the normal-float codebook.
        absmax: "e4m4" or "fp16".
        importance: with `bits`, factors of the layers' squared errors, by name; 1 by default.
        checkpoint: a safetensors file, an index of shards or a folder with either. `model` then
            only says what there is (make it under `meta_parameters()`): weights are read one at a
            time, the rest is loaded in the model's dtypes, and the whole model is never held
            unquantized.
        device: where each layer is quantized and stays; by default where its weight is, and the CPU
            with a checkpoint.
        progress: show progress and the table on stderr.

    Returns:
        The model, changed in place; a `KBitLinear` where `model` is itself a linear layer.

    Raises:
        UnsupportedBits, UnknownAbsmax, WrongCodebook, WrongBudget, UnknownLayer: the arguments.
        NothingToQuantize: no layer is left to quantize; the error says what was found instead.
        AlreadyQuantized: the checkpoint's config.json says that its weights are quantized.
        NotFinite, ScaleOutOfRange: a weight, by name, that cannot be quantized.
        WrongCheckpoint: it lacks tensors of the model, has them in other shapes, or is damaged.
    """
    if (k is None) == (bits is None):
        raise TypeError("give k or bits, and one of them only")
    if importance is not None and bits is None:
        raise TypeError("importance goes with bits: it weighs the choice of K by layer")
    check_absmax(absmax)
    if checkpoint is not None:
        check_not_quantized(checkpoint)
    layers = linear_layers(model, _default_skip(model) if skip is None else skip)
    check_some(layers, model, told=not isinstance(k, Mapping))
    source: _Source
    if checkpoint is None:
        source = _InMemory(model, layers, device)
    else:
        source = _FromCheckpoint(model, Checkpoint(checkpoint), device or "cpu")
    with Progress(*_COLUMNS, console=Console(stderr=True), disable=not progress) as bars:
        if bits is None:
            assert k is not None
            ks = dict.fromkeys(layers, k) if isinstance(k, int) else dict(k)
            _check_ks(ks, layers, codebook)
            source.check(ks, absmax)
        else:
            ks = _allocate(source, layers, bits, absmax, importance or {}, bars)
            _check_ks(ks, layers, codebook)
        for name in bars.track(ks, description="quantizing"):
            what = f"weight of {name or 'the layer'}"
            weight = quantize(source.weight(name), ks[name], codebook, absmax, what=what)
            weight = replace(weight, dtype=layers[name].weight.dtype)
            source.put(name, KBitLinear(weight, layers[name].bias))
        return source.finish()


def dequantize_model(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace every `KBitLinear` of `model` by an `nn.Linear` of the same values.

    Use this to merge an adapter, to export, or to compare. `dtype` is the original's by default. It
    changes the model in place and returns it, as `quantize_model` does.
    """
    packed = {n: m for n, m in model.named_modules() if isinstance(m, KBitLinear)}
    plain = {}
    for name, layer in packed.items():
        with torch.device("meta"):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=False)
        linear.weight = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
        linear.bias = layer.bias
        plain[name] = linear
    return replace_layers(model, plain)


_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


def _default_skip(model: nn.Module) -> tuple[str, ...]:
    """Skip the head, whose errors reach the loss directly, as other quantizers do."""
    heads = (type(m) is nn.Linear and _is_head(name) for name, m in model.named_modules())
    return ("lm_head",) if any(heads) else ()


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


def _check_ks(
    ks: Mapping[str, int], layers: Mapping[str, nn.Linear], codebook: Tensor | None
) -> None:
    for name, k in ks.items():
        if name not in layers:
            raise UnknownLayer(name=name, known=tuple(layers), source="k")
        check_bits(k)
        if codebook is not None:
            check_codebook(codebook, k)


def _allocate(
    source: _Source,
    layers: Mapping[str, nn.Linear],
    bits: float,
    absmax: str,
    importance: Mapping[str, float],
    bars: Progress,
) -> dict[str, int]:
    check_importance(importance, layers)
    errors = [
        measure(name, source.weight(name), absmax, importance.get(name, 1.0))
        for name in bars.track(layers, description="measuring")
    ]
    ks = allocate(errors, bits)
    bars.print(table(errors, ks))
    return ks


# --- where the weights come from ----------------------------------------------------------------


class _Source(Protocol):
    def check(self, names: Iterable[str], absmax: str) -> None:
        """Raise for a weight that cannot be quantized, where `put` could not be taken back."""
        ...

    def weight(self, name: str) -> Tensor: ...

    def put(self, name: str, layer: KBitLinear) -> None: ...

    def finish(self) -> nn.Module: ...


class _InMemory:
    """Take the model's own weights; each is freed once its layer is replaced."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Linear],
        device: torch.device | str | None,
    ) -> None:
        self._model = model
        self._layers = dict(layers)
        self._device = device

    def check(self, names: Iterable[str], absmax: str) -> None:
        for name in names:
            check_values(self._layers[name].weight, absmax, f"weight of {name or 'the layer'}")

    def weight(self, name: str) -> Tensor:
        weight = self._layers[name].weight.detach()
        return weight if self._device is None else weight.to(self._device)

    def put(self, name: str, layer: KBitLinear) -> None:
        self._model = replace_layers(self._model, {name: layer.to(layer.qweight.device)})
        del self._layers[name]

    def finish(self) -> nn.Module:
        return self._model


class _FromCheckpoint:
    """Read a checkpoint's weights one at a time; the model changes when all are quantized."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        device: torch.device | str,
    ) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._device = device
        self._packed: dict[str, KBitLinear] = {}
        self._names = _locate(model, checkpoint)

    def check(self, names: Iterable[str], absmax: str) -> None:
        pass  # nothing is put before everything was read

    def weight(self, name: str) -> Tensor:
        return self._read(f"{name}.weight" if name else "weight")

    def put(self, name: str, layer: KBitLinear) -> None:
        self._packed[name] = layer

    def finish(self) -> nn.Module:
        done = {f"{name}.weight" if name else "weight" for name in self._packed}
        state = self._model.state_dict(keep_vars=True)
        rest = {n: self._read(n).to(state[n].dtype) for n in self._names if n not in done}
        model = replace_layers(self._model, self._packed)
        assign(model, rest)
        return model.to(self._device)  # buffers that are in no checkpoint

    def _read(self, name: str) -> Tensor:
        return self._checkpoint.read(self._names[name]).to(self._device)


def _locate(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Map first names in the model to names in the checkpoint; raise when one is missing or
    differs.
    """
    shapes, state = checkpoint.shapes(), model.state_dict(keep_vars=True)
    names, problems = {}, []
    for name, aliases in owners(model).items():
        held = [alias for alias in aliases if alias in shapes]
        if not held:
            problems.append(f"{name} is not in it")
        elif shapes[held[0]] != tuple(state[name].shape):
            problems.append(f"{name} is {shapes[held[0]]} in it, {tuple(state[name].shape)} here")
        else:
            names[name] = held[0]
    problems += [
        f"the buffer {name} is on the meta device and in no checkpoint: make the model under "
        "inductor_q.kbit.meta_parameters()"
        for name, buffer in model.named_buffers()
        if buffer.is_meta and name not in state
    ]
    if problems:
        raise checkpoint.wrong(problems)
    return names
