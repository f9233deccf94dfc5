"""`qfuse options` lists every key of torch.compile(..., options={...})."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from inductor_q.commands import listing

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers


def register(subparsers: Subparsers) -> None:
    parser = listing.add_parser(subparsers, "options", main, "the keys that options={...} takes")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only keys that contain one")
    parser.add_argument("--all", action="store_true", help="Inductor's keys too")


def main(args: argparse.Namespace) -> int:
    return listing.show(tables(args.words, everything=args.all or bool(args.words)), args)


def tables(words: list[str] | None = None, *, everything: bool = False) -> list[listing.Table]:
    """Tabulate our keys; with `everything` also Inductor's, as the installed torch has them."""
    from inductor_q.options import list_options

    rows = [
        (name, text)
        for name, text in list_options().items()
        if (everything or name.startswith("qfuse."))
        and (not words or any(word in name for word in words))
    ]
    return [listing.Table(("option", "meaning"), rows)]
