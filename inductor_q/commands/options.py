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
    # Inductor's keys come with torch, which takes seconds to import, and none of them begins so.
    everything = args.all or not all(word.startswith("qfuse.") for word in args.words)
    return listing.show(tables(args.words, everything=everything), args)


def tables(words: list[str] | None = None, *, everything: bool = False) -> list[listing.Table]:
    """Tabulate our keys; with `everything` also Inductor's, as the installed torch has them."""
    from inductor_q.exc import NoOption
    from inductor_q.own_options import OPTIONS

    known = {name: str(option) for name, option in OPTIONS.items()}
    if everything:
        from inductor_q.options import list_options  # which imports torch

        known = list_options()
    for word in words or ():
        if not any(word in name for name in known):
            raise NoOption(name=word, known=tuple(known))
    rows = [
        (name, text)
        for name, text in known.items()
        if not words or any(word in name for word in words)
    ]
    return [listing.Table(("option", "meaning"), rows)]
