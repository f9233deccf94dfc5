"""Print a registry as a table, in text, JSON or Markdown; several commands share this.

Text fits 80 columns on a pipe and the window on a terminal, where the heads are bold.
docs/reference.md is made of the Markdown. JSON has one object per row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from inductor_q.commands import Subparsers


@dataclass(frozen=True)
class Table:
    """Hold rows of text under column heads; `note` is a sentence that stands above it.

    The last column takes what room is left and wraps; the others keep their width. Where too little
    is left, text has the last column `below` the others.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ""
    note: str = ""
    below: bool = False

    def records(self) -> list[dict[str, str]]:
        """Return one object per row, with the title where there are several tables."""
        head = {"table": self.title} if self.title else {}
        return [{**head, **dict(zip(self.columns, row, strict=True))} for row in self.rows]

    def markdown(self) -> str:
        lines = [f"### {self.title}", ""] if self.title else []
        lines += [self.note, ""] if self.note else []
        if self.rows:
            lines += [_row(self.columns), _row(("---",) * len(self.columns))]
            lines += [_row(map(_cell, row)) for row in self.rows]
        return "\n".join(lines).rstrip() + "\n"


def add_parser(
    subparsers: Subparsers, name: str, run: Callable[[argparse.Namespace], int], help: str
) -> argparse.ArgumentParser:
    """Add a parser with the switches for the form of the output."""
    parser = subparsers.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object a row")
    form.add_argument("--markdown", action="store_true", help="as in docs/reference.md")
    return parser


def show(tables: Sequence[Table], args: argparse.Namespace) -> int:
    """Print the tables in the form that was asked for."""
    if args.json:
        print(json.dumps([record for table in tables for record in table.records()], indent=1))
    elif args.markdown:
        print("\n".join(table.markdown() for table in tables), end="")
    else:
        _print(tables)
    return 0


def _print(tables: Sequence[Table]) -> None:
    from rich.table import Table as Grid

    from inductor_q.diagnostics.render.text import plain, show

    parts: list[RenderableType] = []
    for table in tables:
        head = [plain(table.title, "bold"), plain(table.note)]
        parts += [*([plain("")] if parts else []), *(line for line in head if line.plain)]
        if table.below:
            parts += _below(table)
        if not table.rows or table.below:
            continue
        grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for position, column in enumerate(table.columns):
            grid.add_column(column, no_wrap=position == 0, overflow="fold")
        for row in table.rows:
            grid.add_row(*map(plain, row))
        parts.append(grid)
    show(parts, sys.stdout)


def _below(table: Table) -> list[RenderableType]:
    """Print the last column of each row on lines of its own."""
    from rich.padding import Padding

    from inductor_q.diagnostics.render.text import plain

    rows = [table.columns, *table.rows] if table.rows else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    parts: list[RenderableType] = []
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        parts.append(plain("  ".join(list(cells)[:-1]), "bold" if row is table.columns else ""))
        parts.append(Padding(plain(row[-1]), (0, 0, 0, 4)))
    return parts


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
