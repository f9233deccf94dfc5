"""Choose K for each layer so that a model's bits go where they lower the error most."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from inductor_q.exc import UnknownLayer, WrongBudget
from inductor_q.formats.kbit import KBITS
from inductor_q.kbit.tensor import dequantize, quantize


@dataclass(frozen=True)
class LayerError:
    """Hold what each K costs a layer and what it loses by it.

    `error` is the sum of squared differences to the original, `power` the sum of its squares, both
    over all elements; `nbytes` counts codes and scales. `weight` multiplies the error.
    """

    name: str
    shape: tuple[int, ...]
    power: float
    error: Mapping[int, float]
    nbytes: Mapping[int, int]
    weight: float = 1.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def sqnr(self, k: int) -> float:
        """Return the signal-to-quantization-noise ratio in dB."""
        return 10 * math.log10(self.power / self.error[k]) if self.error[k] else math.inf


def measure(name: str, tensor: Tensor, absmax: str, weight: float = 1.0) -> LayerError:
    """Quantize `tensor` with every K and the normal-float codebook, and keep the errors."""
    exact = tensor.detach().float()
    quantized = {k: quantize(exact, k, absmax=absmax, what=f"weight of {name}") for k in KBITS}
    return LayerError(
        name=name,
        shape=tuple(tensor.shape),
        power=_sum_of_squares(exact),
        error={k: _sum_of_squares(exact - dequantize(q)) for k, q in quantized.items()},
        nbytes={k: q.nbytes for k, q in quantized.items()},
        weight=weight,
    )


def _sum_of_squares(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def allocate(layers: Sequence[LayerError], bits: float) -> dict[str, int]:
    """Choose K by layer: the least weighted error within `bits` per element on average.

    Scales count towards `bits`. Every layer starts at the smallest K; again and again the step that
    removes most error for its bytes is taken, until none fits. Each further bit of a layer removes
    less than the one before, so this is the optimum, up to the last steps, where a layer too large
    for what is left of the budget gives way to smaller ones.

    Raises:
        WrongBudget: below the smallest K of every layer, or above the largest.
    """
    numel = sum(layer.numel for layer in layers)
    least = sum(layer.nbytes[KBITS[0]] for layer in layers)
    most = sum(layer.nbytes[KBITS[-1]] for layer in layers)
    low, high = 8 * least / max(1, numel), 8 * most / max(1, numel)
    if not low <= bits <= high:
        raise WrongBudget(bits=bits, low=low, high=high)
    room = int(bits * numel / 8) - least
    chosen = {layer.name: KBITS[0] for layer in layers}
    steps = [(_gain(layer, KBITS[0]), i, KBITS[0]) for i, layer in enumerate(layers)]
    heapq.heapify(steps)
    while steps:
        _, i, k = heapq.heappop(steps)
        layer = layers[i]
        price = layer.nbytes[k + 1] - layer.nbytes[k]
        if price > room:
            continue
        room -= price
        chosen[layer.name] = k + 1
        if k + 1 < KBITS[-1]:
            heapq.heappush(steps, (_gain(layer, k + 1), i, k + 1))
    return chosen


def _gain(layer: LayerError, k: int) -> float:
    """Return minus the weighted error removed per byte by going from `k` to `k + 1`."""
    removed = layer.weight * (layer.error[k] - layer.error[k + 1])
    return -removed / max(1, layer.nbytes[k + 1] - layer.nbytes[k])


def check_importance(importance: Mapping[str, float], layers: Collection[str]) -> None:
    for name in importance:
        if name not in layers:
            raise UnknownLayer(name=name, known=tuple(layers), source="importance")


def table(layers: Sequence[LayerError], chosen: Mapping[str, int]) -> Table:
    """Tabulate what each layer got, and the whole."""
    rows = Table(title="Bits by layer", title_justify="left")
    rows.add_column("layer", overflow="fold")
    for header in ("shape", "weight", "k", "bits / element", "SQNR"):
        rows.add_column(header, justify="right", no_wrap=True)
    for layer in layers:
        k = chosen[layer.name]
        rows.add_row(
            layer.name,
            " x ".join(map(str, layer.shape)),
            f"{layer.weight:g}",
            str(k),
            f"{8 * layer.nbytes[k] / max(1, layer.numel):.2f}",
            f"{layer.sqnr(k):.1f} dB",
        )

    def total(of: Callable[[LayerError], float]) -> float:
        return sum(map(of, layers))

    error = total(lambda layer: layer.error[chosen[layer.name]])
    power = total(lambda layer: layer.power)
    nbytes = total(lambda layer: layer.nbytes[chosen[layer.name]])
    numel = total(lambda layer: layer.numel)
    rows.add_section()
    rows.add_row(
        "all",
        f"{numel:,.0f}",
        "",
        "",
        f"{8 * nbytes / max(1, numel):.2f}",
        f"{10 * math.log10(power / error):.1f} dB" if error else "",
    )
    return rows
