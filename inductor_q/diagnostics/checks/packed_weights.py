"""Show how a model's weights are packed, by which library, and who will compute with them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.capture.live import Quantized, layers_of
from inductor_q.diagnostics import serving
from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.explanation import Layer
from inductor_q.diagnostics.render import words

NAME = "packed_weights"


def check(model: nn.Module) -> Iterator[Finding]:
    """Warn of weights that nothing of ours reads, and of a device without a kernel for a format."""
    groups: dict[tuple[str, ...], list[Quantized]] = {}
    for weight in layers_of(model):
        key = weight.library, weight.format, weight.layout, weight.reason, weight.device
        groups.setdefault(key, []).append(weight)
    for alike in groups.values():
        served = [serving.expected(weight) for weight in alike]
        layers = [
            Layer(
                module=weight.module,
                kind=weight.kind,
                format=weight.format,
                status="unseen",
                library=weight.library,
                layout=weight.layout,
                serving=(one,),
            )
            for weight, one in zip(alike, served, strict=True)
        ]
        reason = f": {alike[0].reason}" if alike[0].reason else ""
        is_slow = any(map(serving.lacks_kernel, served))
        for what, which, who in words.packed(layers):
            found = f"{what}, {which}: {who}{reason}"
            yield Finding(NAME, "warn" if reason or is_slow else "ok", found)
    if not groups:
        yield Finding(NAME, "ok", "none")
