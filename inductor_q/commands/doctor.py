"""`qfuse doctor` says whether this machine, and a model, are ready to be compiled."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers
    from inductor_q.diagnostics.checks import Finding
    from inductor_q.diagnostics.checks.finding import Status

DOCTOR_VERSION = 1


def register(subparsers: Subparsers) -> None:
    about = "check versions, GPU, compilers, caches and settings; and a model for known faults"
    parser = subparsers.add_parser("doctor", help=about, description=about)
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="also check the model that this function returns (called without arguments)",
    )
    parser.add_argument("--json", action="store_true", help="one document: docs/troubleshooting.md")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run the checks; the exit status is 1 if anything fails, and a warning does not count."""
    from inductor_q.diagnostics.checks import caches, check_environment, check_model, worst
    from inductor_q.diagnostics.targets import built

    # The model first: building it imports the user's code, which may configure Dynamo.
    with caches.usable():
        model = built(args.model) if args.model else None
    if args.model and model is None:
        return 1
    environment = check_environment()
    findings = [] if model is None else check_model(model)
    status = worst([*environment, *findings])
    if args.json:
        document = {
            "schema_version": DOCTOR_VERSION,
            "status": status,
            "environment": [asdict(finding) for finding in environment],
            "model": [asdict(finding) for finding in findings],
        }
        print(json.dumps(document, indent=1))
    else:
        _print({"environment": environment, f"model {args.model}": findings})
    return int(status == "fail")


def _print(sections: dict[str, Sequence[Finding]]) -> None:
    from rich.console import RenderableType
    from rich.table import Table

    from inductor_q.diagnostics.render.text import plain, show

    styles: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    parts: list[RenderableType] = []
    for title, findings in sections.items():
        if not findings:
            continue
        grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for _ in ("status", "check"):
            grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for finding in findings:
            status = plain(finding.status, styles[finding.status])
            grid.add_row(status, plain(finding.check), plain(finding.found))
            if finding.remedy:
                grid.add_row("", "", plain(f"-> {finding.remedy}", "cyan"))
        parts += [plain(title, "bold"), grid, plain("")]
    everything = [finding.status for findings in sections.values() for finding in findings]
    counts = (f"{everything.count(status)} {status}" for status in styles)
    parts.append(plain(", ".join(counts)))
    show(parts, sys.stdout)
