"""What passes record: a `SiteRecord` for each of their sites, a `PassRecord` for each run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SiteRecord:
    """One site of one pass.

    `module` is the module path of the quantized weight, `source` the user's file and line,
    `rejected` the reason when nothing was done, `by_choice` whether another plan was preferred
    (rather than this one impossible), `bytes_saved` what is no longer kept for backward. `also` are
    other modules that run by the same graph: those of a nested compile region called for each.
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
