"""Who serves a checked call: the first provider of the device's list that does not refuse it."""

from __future__ import annotations

from typing import Any

from inductor_q.kernels import LATE, PROVIDERS
from inductor_q.kernels.calls import Call
from inductor_q.kernels.provider import against, in_order, on_device, select


def serve(op: str, call: Call, wanted: str = "auto") -> Any:
    """Compute a checked call of `op`, by `wanted` if it can."""
    empty = call.empty()
    if empty is not None:
        return empty
    provider = select(op, PROVIDERS[op], call, wanted, LATE.get(op))
    return provider.run(call)


def served_by(op: str, call: Call, wanted: str = "auto") -> str:
    """Return the name of the provider that `serve` would run, without a word to the log."""
    providers = on_device(PROVIDERS[op], call.device.type)
    order = in_order(providers, LATE.get(op, {}), call, wanted)
    return next(provider.name for provider in order if not against(provider, call))
