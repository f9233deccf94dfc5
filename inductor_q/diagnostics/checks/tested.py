"""The versions that the library was run with; docs/compatibility.md has the same table."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """Name a package: pyproject.toml admits `oldest` to below `excluded`; `tried` was run, in
    order.
    """

    name: str
    oldest: str
    tried: tuple[str, ...]
    excluded: str = ""
    required: bool = False

    @property
    def requirement(self) -> str:
        """The requirement as pip takes it: "torch>=2.11,<2.16"."""
        return f"{self.name}>={self.oldest}" + (f",<{self.excluded}" if self.excluded else "")

    def admits(self, version: str) -> bool:
        key = release(version)
        return key >= release(self.oldest) and not (self.excluded and key >= release(self.excluded))


PACKAGES = (
    Package("torch", "2.11", ("2.11.0", "2.13.0", "2.15.0"), excluded="2.16", required=True),
    Package("triton", "3.6", ("3.6.0", "3.7.1", "3.9.0")),
    Package("bitsandbytes", "0.49", ("0.49.2", "0.50.2")),
    Package("peft", "0.18", ("0.21.2",)),
    Package("transformers", "4.57", ("5.23.0", "5.24.0")),
    Package("torchao", "0.15", ("0.18.0",)),
    Package("depyf", "0.19", ("0.20.0",)),
)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without build and pre-release: (2, 13, 0) of
    "2.13.0a0+cu130".
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def table() -> str:
    """Make the table of docs/compatibility.md."""
    rows = [("package", "admitted", "tried"), ("---", "---", "---")]
    rows += [(f"`{p.name}`", p.requirement[len(p.name) :], ", ".join(p.tried)) for p in PACKAGES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
