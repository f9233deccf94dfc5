"""The values that hold for one compile, once `inductor_q.options` has merged what was given."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inductor_q.presets import Preset

Numerics = Literal["strict", "default", "relaxed"]
Loss = Literal["auto", "chunked", "whole"]
Compute = Literal["bf16", "fp8", "int8"]


@dataclass(frozen=True)
class Link:
    """Bytes a second: of the link between a device and the host, each way, and of the device's own
    memory; and the size from which a tensor is worth a copy."""

    to_host: float
    from_host: float
    device: float
    least: int = 1 << 22


@dataclass(frozen=True)
class Budget:
    """The budget of a graph, what of it is allocated before the graph runs, what an earlier step
    of the graph took beyond its plan (inductor_q.corrections), and what is left; the link over
    which tensors may be offloaded, or why none is; and the bytes of the graph's inputs: a plan for
    short sequences is none for long ones."""

    total: int
    base: int
    difference: int = 0
    link: Link | str = ""
    inputs: int = 0

    @property
    def limit(self) -> int:
        """What is left. It is part of cache keys, so it is rounded to a 256th of the budget."""
        unit = max(1, self.total >> 8)
        return (self.total - self.base - self.difference) // unit * unit

    @property
    def key(self) -> str:
        """What of it decides on a plan."""
        return f"{self.limit} {self.link if isinstance(self.link, Link) else ''} {self.inputs}"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Hold the values of one compile, and where each came from."""

    inductor: Mapping[str, Any]  # config_patches for compile_fx
    preset: Preset
    passes: tuple[str, ...]  # enabled, in pipeline order
    numerics: Numerics
    loss: Loss
    compute: Compute  # of products with frozen weights
    exclude: tuple[str, ...]  # patterns of layers that `compute` leaves as they are
    memory: int | None  # the budget in bytes
    offload: bool  # to the host's memory, under a budget
    kernels: Mapping[str, str]  # op -> provider; "auto" where absent
    report: str | None
    strict: bool
    sources: Mapping[str, str]
    _fingerprint: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Where a value came from and where the report goes do not change the code. `strict` counts:
        # a cache hit skips the passes, and with them the error that strict promises.
        content = {
            "inductor": self.inductor,
            "preset": self.preset.name,
            "thresholds": {name: entry.value for name, entry in self.preset.thresholds.items()},
            "passes": self.passes,
            "numerics": self.numerics,
            "loss": self.loss,
            "compute": self.compute,
            "exclude": self.exclude,
            "memory": self.memory,
            "offload": self.offload,
            "kernels": self.kernels,
            "strict": self.strict,
        }
        digest = hashlib.sha256(_stable(content).encode()).hexdigest()
        object.__setattr__(self, "_fingerprint", digest)

    def threshold(self, name: str) -> int:
        """Return the threshold in force: the user's, or else the preset's, which has them all."""
        return int(self.preset.thresholds[name].value)

    def fingerprint(self) -> str:
        """Return a text for cache keys: equal options give the same text in every process.

        A value that has no stable text (a callable, an object without `uuid()`) gives a new one
        each time, so what was cached with it is never found again, rather than found wrongly.
        """
        return self._fingerprint


def _stable(value: Any) -> str:
    """Return a text that is equal in every process for equal values, and never for opaque ones."""
    import torch  # not above: `qfuse options` answers without it

    if value is None or isinstance(
        value, (bool, int, float, str, bytes, torch.dtype, torch.device)
    ):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, Mapping):
        items = sorted((_stable(key), _stable(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}={item}' for key, item in items)}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{', '.join(map(_stable, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set[{', '.join(sorted(map(_stable, value)))}]"
    identify = getattr(value, "uuid", None)  # torch's custom passes have it
    identity = identify() if callable(identify) and not isinstance(value, type) else None
    if identity is not None:
        return f"{type(value).__module__}.{type(value).__qualname__}:{_stable(identity)}"
    return f"opaque:{uuid.uuid4()}"
