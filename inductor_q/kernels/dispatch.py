"""Serve a checked call with the first provider of the device's list that does not refuse it.

What that provider plans is kept for all calls of the kind, so that choosing costs the host one
look into a dictionary from the second on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from torch import Tensor

from inductor_q.kernels import LATE, PROVIDERS
from inductor_q.kernels.calls import Call, aligned
from inductor_q.kernels.provider import Provider, against, in_order, on_device, select

#: How many kinds of calls are remembered. Beyond that all are forgotten, and come back.
KEPT = 4096

_PREFERRED: ContextVar[Mapping[str, str]] = ContextVar("preferred", default=MappingProxyType({}))


@contextmanager
def preferring(op: str, provider: str) -> Iterator[None]:
    """Prefer `provider` for eager calls of `op`, and for the calls that their backward makes.

    Compiled code follows the options of its compile (`qfuse.kernels`).
    """
    token = _PREFERRED.set({**_PREFERRED.get(), op: provider})
    try:
        yield
    finally:
        _PREFERRED.reset(token)


def preferred(op: str) -> str:
    return _PREFERRED.get().get(op, "auto")


def serve(op: str, call: Call, wanted: str = "") -> Any:
    """Compute a checked call of `op`, by `wanted` if it can; by default, by what is preferred."""
    empty = call.empty()
    return planned(op, call, wanted)(call) if empty is None else empty


def planned(op: str, call: Call, wanted: str = "") -> Callable[[Any], Any]:
    """Return what serves a checked call of `op`, and all of its kind."""
    wanted = wanted or preferred(op)
    key = (op, wanted, call.kind())
    plan = _PLANS.get(key)
    if plan is None:
        plan = select(op, PROVIDERS[op], call, wanted, LATE.get(op)).plan(call)
        if key[-1] is not None:
            _keep(key, plan)
    return plan


def serve_kind(
    kind: str,
    op: str,
    call: Call,
    tensors: Sequence[Tensor],
    wanted: str = "",
    plan_of: Callable[[str, Any, str], Callable[[Any], Any]] = planned,
) -> Any:
    """Compute a call of generated code, whose plan is kept under what that code knows beforehand.

    Args:
        kind: what `Call.kind` would tell, but for the index of the device and for addresses, of a
            call that has something to compute. If it is empty, the call is served as all are, and
            so is one whose tensors are not all aligned to 16 bytes.
        tensors: all tensors of the call.
        plan_of: returns what serves the call, and all of its kind.
    """
    if not kind or not aligned(*tensors):
        empty = call.empty()
        return plan_of(op, call, wanted)(call) if empty is None else empty
    key = (op, wanted or preferred(op), kind, tensors[0].get_device())
    plan = _PLANS.get(key)
    if plan is None:
        plan = plan_of(op, call, wanted)
        _keep(key, plan)
    return plan(call)


def _keep(key: tuple[Any, ...], plan: Callable[[Any], Any]) -> None:
    if len(_PLANS) >= KEPT:
        _PLANS.clear()
    _PLANS[key] = plan


_PLANS: dict[tuple[Any, ...], Callable[[Any], Any]] = {}

#: Ask providers anew about calls of every kind, as tests do that change what they answer.
forget = _PLANS.clear


def stands_against(op: str, call: Call) -> str:
    """Return why a call is not for the provider that the device prefers; empty where it is."""
    return against(on_device(PROVIDERS[op], call.device.type)[0], call)


def served_by(op: str, call: Call, wanted: str = "auto") -> str:
    """Return the name of the provider that `serve` would run (see `provider`)."""
    return provider(op, call, wanted).name


def provider(op: str, call: Call, wanted: str = "auto") -> Provider[Any]:
    """Return the provider that `serve` would run, without logging.

    The tensors of the call may be fake ones of concrete sizes.
    """
    providers = on_device(PROVIDERS[op], call.device.type)
    order = in_order(providers, LATE.get(op, {}), call, wanted)
    return next(each for each in order if not against(each, call))
