"""`qfuse diff A.json B.json` says what got better or worse between two runs."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from inductor_q.commands import Subparsers
    from inductor_q.diagnostics.diff import Change

WORSE = 1
STYLES = {"worse": "red", "better": "green", "changed": ""}


def register(subparsers: Subparsers) -> None:
    help = "what got better or worse between two reports; exit status 1 when anything got worse"
    parser = subparsers.add_parser("diff", help=help, description=help)
    parser.add_argument("before", metavar="A.json", help="a report of qfuse explain --json")
    parser.add_argument("after", metavar="B.json", help="a later one")
    parser.add_argument(
        "--noise",
        type=float,
        metavar="PERCENT",
        default=20.0,
        help="compile times closer than this are equal (20)",
    )
    parser.add_argument("--json", action="store_true", help="the changes as JSON")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    from inductor_q.diagnostics.diff import compare
    from inductor_q.diagnostics.render.json import read

    changes = compare(read(args.before), read(args.after), noise=args.noise / 100)
    if args.json:
        _print_json(changes)
    else:
        _print(changes, f"qfuse diff {args.before} {args.after}")
    return WORSE if any(change.verdict == "worse" for change in changes) else 0


def _print_json(changes: Sequence[Change]) -> None:
    import json
    from dataclasses import asdict

    worse = any(change.verdict == "worse" for change in changes)
    print(json.dumps({"worse": worse, "changes": [asdict(c) for c in changes]}, indent=1))


def _print(changes: Sequence[Change], title: str) -> None:
    from itertools import groupby

    from rich.padding import Padding

    from inductor_q.diagnostics.render.text import columns, plain, section, show

    parts: list[RenderableType] = [plain(title, "bold")]
    if not changes:
        parts.append(plain("no difference"))
    for verdict, found in groupby(changes, lambda change: change.verdict):
        body: list[RenderableType] = []
        for kind, same in groupby(found, lambda change: change.kind):
            rows = [(change.what, f"{change.before} -> {change.after}") for change in same]
            body += [
                plain(kind, STYLES[verdict]),
                *(Padding(c, (0, 0, 0, 2)) for c in columns(rows)),
            ]
        parts += section(verdict.capitalize(), body)
    show(parts, sys.stdout)
