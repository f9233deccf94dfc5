"""Find LLM.int8() with an outlier threshold: the number of outlier columns depends on the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import instances, several

NAME = "int8_outliers"
REMEDY = (
    "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
    "  # or BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
)


def check(model: nn.Module) -> Iterator[Finding]:
    """Find layers in which a threshold above 0 breaks the graph, unless dynamic output shapes are
    on.
    """
    from torch._dynamo import config

    layers = list(instances(model, "bitsandbytes.nn", "Linear8bitLt"))
    breaking = [path for path, layer in layers if _looks_for_outliers(layer)]
    if not layers:
        yield Finding(NAME, "ok", "no 8-bit layer of bitsandbytes")
    elif not breaking:
        yield Finding(NAME, "ok", "no outlier decomposition")
    elif config.capture_dynamic_output_shape_ops:
        yield Finding(NAME, "ok", "dynamic output shapes are captured")
    else:
        threshold = max(layer.state.threshold for _, layer in layers)
        found = f"{several(breaking, '8-bit layer')} with threshold {threshold:g} break the graph"
        yield Finding(NAME, "warn", found, REMEDY)


def _looks_for_outliers(layer: Any) -> bool:
    """Return whether a layer looks for outliers; in training on a CPU or XPU it does not."""
    state = layer.state
    if state.threshold <= 0 or state.has_fp16_weights:
        return False
    return not (layer.training and layer.weight.device.type in ("cpu", "xpu"))
