"""The commands of `qfuse`, in the order of its help: one module each.

A module has `register(subparsers)`, which adds its parser with `set_defaults(run=main)`, and
`main(args)`, which runs it and returns the exit status. It imports what it needs inside `main`:
importing it must not load torch.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Protocol

from inductor_q.commands import (
    cache,
    completion,
    diff,
    doctor,
    explain,
    formats,
    options,
    passes,
    presets,
    run,
    tune,
)

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


class Command(Protocol):
    __name__: str

    def register(self, subparsers: Subparsers) -> None: ...

    def main(self, args: argparse.Namespace) -> int: ...


COMMANDS: tuple[Command, ...] = (
    doctor,
    run,
    explain,
    diff,
    passes,
    presets,
    tune,
    formats,
    options,
    cache,
    completion,
)

__all__ = ["COMMANDS", "Command"]
