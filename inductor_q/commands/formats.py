"""`qfuse formats` lists the quantized weights it can read."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from inductor_q.commands import listing

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers


def register(subparsers: Subparsers) -> None:
    listing.add_parser(subparsers, "formats", main, "the formats of quantized weights it knows")


def main(args: argparse.Namespace) -> int:
    return listing.show(tables(), args)


def tables() -> list[listing.Table]:
    """Tabulate the name, bits of a code, and operands of `qfuse::dequantize` in their order."""
    from inductor_q.formats import FORMATS

    rows = [(f.name, str(f.packing.bits), ", ".join(f.operands)) for f in FORMATS.values()]
    return [listing.Table(("format", "bits", "operands of qfuse::dequantize"), rows)]
