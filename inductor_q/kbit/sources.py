"""Where the weights of a model's linear layers come from while they are quantized one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from inductor_q.exc import NoValues
from inductor_q.formats.encode import check_finite
from inductor_q.kbit.tensor import check_values
from inductor_q.loading.layers import replace_layers


class Source(Protocol):
    def check(self, names: Iterable[str], absmax: str | None) -> None:
        """Raise for a weight that cannot be quantized, where `put` could not be taken back: to k
        bits with this kind of scale or, with None, to any format."""
        ...

    def weight(self, name: str) -> Tensor: ...

    def put(self, name: str, layer: nn.Module) -> None: ...

    def finish(self) -> nn.Module: ...


class InMemory:
    """Take the model's own weights; each is freed once its layer is replaced.

    Raises:
        NoValues: a weight is on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Linear],
        device: torch.device | str | None,
    ) -> None:
        for name, layer in layers.items():
            if layer.weight.is_meta:
                raise NoValues(what=f"weight of {name or 'the layer'}")
        self._model = model
        self._layers = dict(layers)
        self._device = device

    def check(self, names: Iterable[str], absmax: str | None) -> None:
        for name in names:
            weight, what = self._layers[name].weight, f"weight of {name or 'the layer'}"
            if absmax is None:
                check_finite(weight, what)
            else:
                check_values(weight, absmax, what)

    def weight(self, name: str) -> Tensor:
        weight = self._layers[name].weight.detach()
        return weight if self._device is None else weight.to(self._device)

    def put(self, name: str, layer: nn.Module) -> None:
        self._model = replace_layers(self._model, {name: layer})
        del self._layers[name]

    def finish(self) -> nn.Module:
        return self._model
