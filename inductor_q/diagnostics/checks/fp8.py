"""Find layers in FP8 whose own products quantize the input as well, which no pass reads."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import several, tidy
from inductor_q.integrations.fp8 import left_to_library

NAME = "fp8"
REMEDY = "from inductor_q.integrations import prepare_fp8; prepare_fp8(model)"
LOAD = "from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True))"


def check(model: nn.Module) -> Iterator[Finding]:
    """`inductor_q.compile` and the callback take them over; a compile of one's own does not."""
    found: dict[tuple[str, str], list[str]] = {}
    for path, layer, held in left_to_library(model):
        paths = found.setdefault((type(layer).__name__, held.reason), [])
        if tidy(path) not in paths:
            paths.append(tidy(path))
    for (kind, reason), paths in found.items():
        what = f"{several(paths, kind)} quantize their input as well, and are left to their library"
        what += f": {reason}" if reason else ""
        yield Finding(NAME, "warn", what, LOAD if reason else REMEDY)
    if not found:
        yield Finding(NAME, "ok", "none that quantizes its input")
