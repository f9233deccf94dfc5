"""A finding is a check's answer: a status, what was found, and the line that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Hold one line of `qfuse doctor`.

    "fail": it cannot work, or works and silently gives something else than was asked for. "warn":
    it works slowly, or nobody has tried it. `remedy` is a command or a line of code.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status of all findings."""
    found = {finding.status for finding in findings}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"
