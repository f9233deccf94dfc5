"""Define a provider, and choose the one of several that serves a call.

A provider computes one op. It says in words what stands in its way: `missing` on this machine,
`refuses` for a call; an empty answer means that nothing does. The first in the order of the table
that has no reason against a call serves it, and each that was passed over is logged once, with its
reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from inductor_q.formats import QuantFormat
from inductor_q.kernels.calls import Call, Dequantize
from inductor_q.log import warn_once

C = TypeVar("C", bound=Call, contravariant=True)

REFERENCE = "reference"
DENSE_WEIGHT = "the weight is dense"


class Provider(Protocol[C]):
    """One way to compute an op for calls of type C, as the op's reference does.

    The answers of `missing`, `refuses` and `plan` hold for every call of the same `Call.kind`: of
    the same sizes, format, flags and numbers (but the scaling of experts' adapters), whose tensors
    lie on the same device, have the same dtypes and strides (packed weights and experts' tensors:
    are as contiguous), and lie as far from a multiple of 16 bytes. So they depend on nothing else,
    least of all on values.
    """

    name: str
    #: Whether it writes the values of a packed weight to memory before it multiplies with them.
    decodes_first: bool = False

    def missing(self) -> str:
        """Return why this machine cannot run it; empty where it can."""
        return ""

    def unknown(self, fmt: QuantFormat | None) -> str:
        """Return why it takes no weights in a format (None for dense ones); empty where it does."""
        return ""

    def refuses(self, call: C) -> str:
        """Return why it does not serve the call, the format included; empty where it does."""
        return ""

    def workspace(self, call: C) -> int:
        """Return the most bytes that it holds beside arguments and results while it serves a call;
        0 where they are few, or nothing plans with them."""
        return 0

    def plan(self, call: C) -> Callable[[C], Any]:
        """Return what serves the call, which it does not refuse, and all of the same kind.

        This finds what it can, so that serving costs the host little. It launches nothing. A
        provider that plans nothing defines `run` instead.
        """
        return self.run

    def run(self, call: C) -> Any:
        """Serve a call that it does not refuse, on a machine that misses nothing."""
        return self.plan(call)(call)


class TritonProvider(Provider[C], Protocol):
    """A provider that needs nothing but Triton."""

    name: str = "triton"

    def missing(self) -> str:
        return "" if importlib.util.find_spec("triton") else "triton is not installed"


#: Writes the values of a weight's operands into a matrix, on the current stream.
Launch: TypeAlias = Callable[[Sequence[Tensor], Tensor], None]


class DequantizeProvider(Provider[Dequantize], Protocol):
    """Writes a weight's values into `call.out` (any row stride, unit column stride).

    The answers of `refuses` and `prepare` hold for every call that is like theirs: of the same
    format, with `out` on the same device and of the same dtype, shape and strides, operands of the
    same dtypes, as contiguous, and all of them as far from a multiple of 16 bytes.
    """

    def prepare(self, call: Dequantize) -> Launch:
        """Return a launch for the call, which it does not refuse, and for all that are like it.

        This finds what it can, so that a launch costs the host little. It launches nothing.
        """
        ...

    def run(self, call: Dequantize) -> None:
        self.prepare(call)(call.operands, call.out)


Providers: TypeAlias = Sequence[Provider[Any]]
#: Providers by device type, the preferred first. Those behind the reference run only if named.
Table: TypeAlias = dict[str, tuple[Provider[Any], ...]]
#: Names of providers -> the calls for which one comes just before the reference, not in its place.
Late: TypeAlias = Mapping[str, Callable[[Any], bool]]


def on_device(table: Table, device_type: str) -> tuple[Provider[Any], ...]:
    """Return the providers of a type of devices: the reference alone where nothing is listed."""
    found = table.get(device_type)
    return found or tuple(p for p in table["cpu"] if p.name == REFERENCE)


def in_order(providers: Providers, late: Late, call: Call, wanted: str) -> list[Provider[Any]]:
    """Put the providers in the order in which they are tried for `call`, `wanted` first."""
    order = list(providers)
    slow = [p for p in providers if p.name in late and late[p.name](call)]
    if slow:
        order = [p for p in order if p not in slow]
        place = next(i for i, p in enumerate(order) if p.name == REFERENCE)
        order[place:place] = slow
    return order if wanted == "auto" else sorted(order, key=lambda p: p.name != wanted)


def against(provider: Provider[C], call: C) -> str:
    """Return what stands against a provider: on this machine first, then in the call."""
    return provider.missing() or provider.refuses(call)


def select(
    op: str, table: Table, call: Call, wanted: str = "auto", late: Late | None = None
) -> Provider[Any]:
    """Return the first provider that serves `call`; log what stands against those before it."""
    order = in_order(on_device(table, call.device.type), late or {}, call, wanted)
    if wanted not in ("auto", order[0].name):
        warn_passed_over(op, wanted, not_listed(call.device.type))
    for provider in order:
        reason = against(provider, call)
        if not reason:
            return provider
        # It is no news that a provider is for other formats, unless it was named.
        if provider.name == wanted or not provider.unknown(getattr(call, "fmt", None)):
            warn_passed_over(op, provider.name, reason)
    raise AssertionError(f"the reference of {op} serves every call")


def not_listed(device_type: str) -> str:
    return f"there is none of that name for {device_type} tensors"


def warn_passed_over(op: str, name: str, reason: str) -> None:
    """Warn that a provider was passed over, once for each reason."""
    warn_once(f"{op}: provider {name!r} is not used: {reason}")
