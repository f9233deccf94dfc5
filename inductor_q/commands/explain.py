"""`qfuse explain [options] TARGET [args]` runs a target unchanged and reports what was compiled."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers

EPILOG = """\
TARGET is a script, -m module, package.module:callable or a pytest node
(tests/test_x.py::test_y). Its output and exit status are its own; the report
goes to standard error. Exit status: the target's if it is not 0, else 1 when a
budget was missed, else 0. Under torchrun every rank writes FILE.rankN.json, and
one of them the merged FILE:
torchrun --nproc-per-node 2 -m inductor_q explain --json FILE script.py
"""

FUSED = "0 to 1, of quantized layers; one that a threshold leaves to its library is not fused"


def register(subparsers: Subparsers) -> None:
    help = "run a target and tell its graph breaks, recompiles and fused layers"
    parser = subparsers.add_parser(
        "explain",
        help=help,
        description=help,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="qfuse explain [options] TARGET [args ...]",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="the report as JSON")
    out.add_argument("--html", metavar="FILE", help="the report as one self-contained HTML file")
    out.add_argument("--github", action="store_true", help="annotations for GitHub Actions")
    out.add_argument(
        "--dump", metavar="DIR", help="graphs before and after each pass, code, bytecode"
    )
    run = parser.add_argument_group("run")
    run.add_argument("--backend", metavar="NAME", help="force a backend, such as qfuse")
    run.add_argument("--inputs", metavar="MODULE:FUNCTION", default="", help="makes the arguments")
    run.add_argument(
        "--numerics",
        choices=("fp8", "int8"),
        default="",
        help="compute the products of frozen weights both ways, and name the worst layers",
    )
    limits = parser.add_argument_group("budgets", "exit status 1 when one is missed")
    limits.add_argument("--max-breaks", type=_count, metavar="N")
    limits.add_argument("--max-recompiles", type=_count, metavar="N")
    limits.add_argument("--min-fused", type=_share, metavar="SHARE", help=FUSED)
    limits.add_argument("--max-saved-mb", type=float, metavar="MB", help="saved for backward")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=main, usage_error=parser.error)


def main(args: argparse.Namespace) -> int:
    from inductor_q.diagnostics import launch

    if not args.module and not args.target:
        args.usage_error("no TARGET")
    return launch.explain(args)


def _count(text: str) -> int:
    """Read a limit on events: 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of events")
    return int(text)


def _share(text: str) -> float:
    """Read a part of all layers: 0 to 1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: 1 is all layers, 0.5 half of them")
    return share
