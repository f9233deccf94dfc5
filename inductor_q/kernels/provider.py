"""What a provider is, and which one of several serves a call.

A provider computes one op. It says in words what stands in its way: `missing` of this machine,
`refuses` of a call; an empty answer means that nothing does. The first in the order of the table
that has no reason against a call serves it, and each that was passed over is logged once, with its
reason.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from inductor_q.formats import QuantFormat
from inductor_q.kernels.calls import Call, Dequantize

log = logging.getLogger("inductor_q")

C = TypeVar("C", bound=Call, contravariant=True)

REFERENCE = "reference"
DENSE_WEIGHT = "the weight is dense"


class Provider(Protocol[C]):
    """One way to compute an op for calls of type C, as the op's reference does."""

    name: str

    def missing(self) -> str:
        """Return why this machine cannot run it; empty where it can."""
        return ""

    def unknown(self, fmt: QuantFormat | None) -> str:
        """Return why it takes no weights in that format, None being dense; empty where it does."""
        return ""

    def refuses(self, call: C) -> str:
        """Return why it does not serve the call, the format included; empty where it does."""
        return ""

    def run(self, call: C) -> Any:
        """Serve a call that it does not refuse, on a machine that misses nothing."""
        ...


#: Writes the values of a weight's operands into a matrix, on the current stream.
Launch: TypeAlias = Callable[[Sequence[Tensor], Tensor], None]


class DequantizeProvider(Provider[Dequantize], Protocol):
    """Writes a weight's values into `call.out` (any row stride, unit column stride).

    What `refuses` and `prepare` answer holds for every call that is like theirs: of the same
    format, with `out` on the same device and of the same dtype, shape and strides, operands of the
    same dtypes, as contiguous, and all of them as far from a multiple of 16 bytes.
    """

    def prepare(self, call: Dequantize) -> Launch:
        """Return what serves the call, which it does not refuse, and all that are like it.

        Finds once what it can, so that a later launch costs the host little. Launches nothing.
        """
        ...

    def run(self, call: Dequantize) -> None:
        self.prepare(call)(call.operands, call.out)


Providers: TypeAlias = Sequence[Provider[Any]]
#: By device type, the preferred first. What stands behind the reference is asked by name only.
Table: TypeAlias = dict[str, tuple[Provider[Any], ...]]
#: By name, for which calls a provider is asked just before the reference, whatever its place.
Late: TypeAlias = Mapping[str, Callable[[Any], bool]]


def on_device(table: Table, device_type: str) -> tuple[Provider[Any], ...]:
    """The providers of a type of devices: the reference alone where nothing is listed."""
    found = table.get(device_type)
    return found or tuple(p for p in table["cpu"] if p.name == REFERENCE)


def in_order(providers: Providers, late: Late, call: Call, wanted: str) -> list[Provider[Any]]:
    """The providers in the order in which they are asked for `call`, `wanted` first."""
    order = list(providers)
    slow = [p for p in providers if p.name in late and late[p.name](call)]
    if slow:
        order = [p for p in order if p not in slow]
        place = next(i for i, p in enumerate(order) if p.name == REFERENCE)
        order[place:place] = slow
    return order if wanted == "auto" else sorted(order, key=lambda p: p.name != wanted)


def against(provider: Provider[C], call: C) -> str:
    """Return what stands against a provider: of this machine first, then of the call."""
    return provider.missing() or provider.refuses(call)


def select(
    op: str, table: Table, call: Call, wanted: str = "auto", late: Late | None = None
) -> Provider[Any]:
    """The first provider that serves `call`; what stands against those before it is logged."""
    order = in_order(on_device(table, call.device.type), late or {}, call, wanted)
    if wanted not in ("auto", order[0].name):
        warn_once(op, wanted, not_listed(call.device.type))
    for provider in order:
        reason = against(provider, call)
        if not reason:
            return provider
        # That a provider is for other formats is no news, unless it was asked for.
        if provider.name == wanted or not provider.unknown(getattr(call, "fmt", None)):
            warn_once(op, provider.name, reason)
    raise AssertionError(f"the reference of {op} serves every call")


def not_listed(device_type: str) -> str:
    return f"there is none of that name for {device_type} tensors"


@functools.cache
def warn_once(op: str, name: str, reason: str) -> None:
    """Warn that a provider was passed over, once for each reason."""
    log.warning("%s: provider %r is not used: %s", op, name, reason)
