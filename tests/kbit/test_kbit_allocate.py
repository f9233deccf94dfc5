"""K by layer for a budget of bits: the best of all, and what a model then takes."""

from __future__ import annotations

import itertools

import pytest
import torch

from inductor_q import kbit
from inductor_q.kbit.allocate import LayerError, allocate, measure
from tests.support.kbit_models import KBITS, model, packed


def layer_error(name: str, numel: int, scale: float, weight: float = 1.0) -> LayerError:
    return LayerError(
        name=name,
        shape=(numel,),
        power=scale * numel,
        error={k: scale * numel * 4.0**-k for k in KBITS},
        nbytes={k: numel * (4 * k + 1) // 32 for k in KBITS},
        weight=weight,
    )


@pytest.mark.parametrize("bits", [2.25, 2.7, 3.25, 3.5, 4.1, 5.25])
def test_allocation_is_the_best_of_all(bits: float) -> None:
    """Layers of one size, where the greedy choice is exact: against every assignment there is."""
    layers = [layer_error(str(i), 1024, scale) for i, scale in enumerate((1.0, 9.0, 0.05, 3.0))]
    numel = sum(layer.numel for layer in layers)

    def error(ks: tuple[int, ...]) -> float:
        return sum(layer.error[k] for layer, k in zip(layers, ks, strict=True))

    def nbytes(ks: tuple[int, ...]) -> int:
        return sum(layer.nbytes[k] for layer, k in zip(layers, ks, strict=True))

    every = [ks for ks in itertools.product(KBITS, repeat=4) if 8 * nbytes(ks) <= bits * numel]
    chosen = tuple(allocate(layers, bits).values())
    assert chosen in every
    assert error(chosen) == pytest.approx(min(map(error, every)))


def test_allocation_uses_the_budget_and_the_importance() -> None:
    layers = [layer_error("a", 4096, 1.0), layer_error("b", 1024, 1.0), layer_error("c", 64, 1.0)]
    even = allocate(layers, 3.25)
    assert even["a"] == 3  # all alike: the large one, too, gets the average
    weighted = [layers[0], layer_error("b", 1024, 1.0, weight=100.0), layers[2]]
    assert allocate(weighted, 3.25)["b"] == 5
    for bits in (2.3, 3.0, 4.4):
        ks = allocate(layers, bits)
        used = sum(8 * layer.nbytes[ks[layer.name]] for layer in layers)
        room = bits * sum(layer.numel for layer in layers) - used
        assert 0 <= room < 4096


def test_measured_errors() -> None:
    x = torch.randn(32, 48)
    found = measure("x", x, "e4m4")
    for k in KBITS:
        q = kbit.quantize(x, k)
        assert found.error[k] == pytest.approx(float((x - kbit.dequantize(q)).square().sum()))
        assert found.nbytes[k] == q.nbytes
    steps = [found.error[k] - found.error[k + 1] for k in KBITS[:-1]]
    assert steps == sorted(steps, reverse=True)  # each further bit removes less


def test_bits_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    m = model()
    with torch.no_grad():
        m.get_parameter("layers.1.up.weight").mul_(8)  # its errors count 64 times as much
    kbit.quantize_model(m, bits=3.5, progress=True)
    weights = {name: layer.kbit_weight for name, layer in packed(m).items()}
    assert weights["layers.1.up"].k == 5
    used = 8 * sum(q.nbytes for q in weights.values()) / (4 * 32 * 64)
    assert 3.0 < used <= 3.5
    table = capsys.readouterr().err
    for text in ("Bits by layer", "layers.1.up", "64 x 32", "5.25", " dB", "8,192"):
        assert text in table
    importance = {"layers.0.down": 1e6}
    other = kbit.quantize_model(model(), bits=3.5, importance=importance, progress=False)
    assert packed(other)["layers.0.down"].format == "kbit5_e4m4"
