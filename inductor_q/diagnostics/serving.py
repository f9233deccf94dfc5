"""Say who computes with a packed weight on its device, and what that moves through memory.

The providers know it: which of them this machine lacks, which does not know the format, and which
writes the values of a weight before it multiplies. Bytes follow from the weight's own tensors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from inductor_q.capture.live import Quantized
from inductor_q.diagnostics.explanation import Serving
from inductor_q.formats import FORMATS
from inductor_q.kernels import PROVIDERS
from inductor_q.kernels.dequantize import POINTWISE, compiled_by
from inductor_q.kernels.expert_calls import IN_FP8
from inductor_q.kernels.provider import REFERENCE, Provider, on_device

#: Ops that write the values of a weight, whoever serves them, and in how many bits.
_WRITTEN = {"dequantize": 16, "requantize": 8, IN_FP8: 8}


def of_weight(serving: Serving, weight: Quantized) -> Serving:
    """Add to who serves what it costs, and what stands against the providers before it."""
    fmt = FORMATS.get(weight.layout)
    if fmt is None or not serving.op:
        return serving
    listed = {p.name: p for p in on_device(PROVIDERS[serving.op], weight.device)}
    if serving.op == "requantize":  # its lowering chooses, after the passes
        usable = (n for n, p in listed.items() if not (p.missing() or p.unknown(fmt)))
        name = next((n for n in usable if n != REFERENCE), POINTWISE)
        serving = replace(serving, provider=name)
    passed_over = {}
    for name, provider in listed.items():
        if name in (serving.provider, REFERENCE):
            break
        if reason := provider.missing() or provider.unknown(fmt):
            passed_over[name] = reason
    return replace(
        serving,
        packed=weight.nbytes,
        written=_written(serving.op, listed.get(serving.provider), weight),
        passed_over=tuple(f"{name}: {reason}" for name, reason in passed_over.items()),
    )


def expected(weight: Quantized) -> Serving:
    """Say who will compute with a weight where it lies, as far as its format and machine tell."""
    fmt = FORMATS.get(weight.layout)
    if fmt is None or weight.device == "meta":
        return Serving("", weight.library)
    if len(weight.shape) == 2:
        return of_weight(Serving("dequantize", compiled_by(weight.device, fmt=fmt)), weight)
    listed = on_device(PROVIDERS["scatter2scatter"], weight.device)
    name = next(p.name for p in listed if not (p.missing() or p.unknown(fmt)))
    return of_weight(Serving("scatter2scatter", name), weight)


def lacks_kernel(serving: Serving) -> bool:
    """Whether loops for any format serve where the device has kernels, since none takes this."""
    return bool(serving.passed_over) and serving.provider in (POINTWISE, REFERENCE)


def _written(op: str, provider: Provider[Any] | None, weight: Quantized) -> int:
    """Return the bytes of the values that are in memory before the product reads them."""
    bits = _WRITTEN.get(op, 16 if provider is not None and provider.decodes_first else 0)
    return math.prod(weight.shape) * bits // 8


__all__ = ["expected", "lacks_kernel", "of_weight"]
