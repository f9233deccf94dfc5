"""Where the weights of a model's linear layers come from while they are quantized one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from inductor_q.kbit.checkpoint import Checkpoint, assign, owners
from inductor_q.kbit.layers import replace_layers
from inductor_q.kbit.tensor import check_values


class Source(Protocol):
    def check(self, names: Iterable[str], absmax: str) -> None:
        """Raise for a weight that cannot be quantized, where `put` could not be taken back."""
        ...

    def weight(self, name: str) -> Tensor: ...

    def put(self, name: str, layer: nn.Module) -> None: ...

    def finish(self) -> nn.Module: ...


class InMemory:
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

    def put(self, name: str, layer: nn.Module) -> None:
        self._model = replace_layers(self._model, {name: layer})
        del self._layers[name]

    def finish(self) -> nn.Module:
        return self._model


class FromCheckpoint:
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
        self._packed: dict[str, nn.Module] = {}
        self._names = _locate(model, checkpoint)

    def check(self, names: Iterable[str], absmax: str) -> None:
        pass  # nothing is put before everything was read

    def weight(self, name: str) -> Tensor:
        return self._read(f"{name}.weight" if name else "weight")

    def put(self, name: str, layer: nn.Module) -> None:
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
