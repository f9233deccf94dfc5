"""The records that passes keep: a `SiteRecord` for each site, a `PassRecord` for each run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SiteRecord:
    """Record what one pass did at one site.

    `module` is the module path of the quantized weight, `source` the user's file and line,
    `rejected` the reason when nothing was done, `by_choice` whether another plan was preferred
    (rather than this one impossible), `bytes_saved` the bytes no longer kept for backward. `also`
    names other modules that run by the same graph: a nested compile region is called for each.
    """

    pass_name: str
    target: str
    module: str = ""
    source: str = ""
    shape: tuple[int, ...] = ()
    provider: str = ""
    rejected: str = ""
    by_choice: bool = False
    bytes_saved: int = 0
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class PassRecord:
    name: str
    applied: int
    seconds: float
