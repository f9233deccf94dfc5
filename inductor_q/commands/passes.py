"""`qfuse passes` lists the pipeline, in order."""

from __future__ import annotations

import argparse
import inspect
from typing import TYPE_CHECKING

from inductor_q.commands import listing

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers


def register(subparsers: Subparsers) -> None:
    listing.add_parser(
        subparsers, "passes", main, "the passes of the backend, in the order they run"
    )


def main(args: argparse.Namespace) -> int:
    return listing.show(tables(), args)


def tables() -> list[listing.Table]:
    """Tabulate name, stage and the first line of the file that holds the pass."""
    from inductor_q.passes import PIPELINE

    rows = []
    for step in PIPELINE:
        module = inspect.getmodule(type(step))
        assert module is not None and module.__doc__, step.name
        rows.append((step.name, step.stage, module.__doc__.partition("\n")[0]))
    return [listing.Table(("pass", "stage", "what it does"), rows)]
