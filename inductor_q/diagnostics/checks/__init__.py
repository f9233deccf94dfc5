"""The checks of `qfuse doctor`, of the environment and of a model.

A check yields findings and changes nothing. To add one, write a file here with a `check`, a line
below and a section in docs/troubleshooting.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from inductor_q.diagnostics.checks import (
    bias_dtype,
    caches,
    compiled_regions,
    compiler,
    compute_dtype,
    cpu_packing,
    device,
    experts,
    fp8,
    int8_outliers,
    late_adapter,
    loss_head,
    nvrtc,
    packed_weights,
    quant_state,
    require_grads_hook,
    settings,
    target_parameters,
    versions,
)
from inductor_q.diagnostics.checks.finding import Finding, worst

__all__ = ["ENVIRONMENT", "MODEL", "Finding", "check_environment", "check_model", "worst"]

# After the caches, which are always looked at.
ENVIRONMENT: tuple[Callable[[], Iterator[Finding]], ...] = (
    versions.check,
    device.check,
    compiler.check,
    nvrtc.check,
    settings.check,
)

MODEL: tuple[Callable[[nn.Module], Iterator[Finding]], ...] = (
    packed_weights.check,
    quant_state.check,
    compute_dtype.check,
    bias_dtype.check,
    cpu_packing.check,
    int8_outliers.check,
    experts.check,
    fp8.check,
    target_parameters.check,
    require_grads_hook.check,
    loss_head.check,
    late_adapter.check,
    compiled_regions.check,
)


def check_environment() -> list[Finding]:
    """Check the machine, the packages and torch's settings in this process."""
    found = list(caches.check())  # first: without the folder the others cannot import what they ask
    with caches.usable():
        return found + [finding for check in ENVIRONMENT for finding in check()]


def check_model(model: nn.Module) -> list[Finding]:
    """Find what is known to go wrong when `model`, as it stands, is compiled or has been.

    Pass the model as it is trained: quantized, with adapters, in its mode. Nothing is run.
    """
    return [finding for check in MODEL for finding in check(model)]
