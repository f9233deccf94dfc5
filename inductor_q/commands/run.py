"""`qfuse run TARGET [args]` runs a program unchanged, with qfuse under all that it compiles."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers

EPILOG = """\
TARGET is a script, -m module, package.module:callable or a pytest node. Every
torch.compile of it compiles with qfuse, and every Trainer of transformers or
TRL gets a QfuseCallback, also where torch_compile_backend="qfuse" is given.
Mode and options that the target gives to Inductor or qfuse stay; more come from
environment variables (QFUSE_*). Output and exit status are the target's; a last
line on standard error says what was fused.
Many processes: qfuse run accelerate launch ... train.py, and the same with
torchrun, run each of them so.
"""


def register(subparsers: Subparsers) -> None:
    help = "run a target with qfuse under everything that it compiles or trains"
    parser = subparsers.add_parser(
        "run",
        help=help,
        description=help,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="qfuse run TARGET [args ...]",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=main, usage_error=parser.error)


def main(args: argparse.Namespace) -> int:
    from inductor_q.diagnostics.everywhere import qfuse_everywhere
    from inductor_q.diagnostics.targets import Target
    from inductor_q.diagnostics.torchrun import run_ranks

    command = ["-m", *args.module] if args.module is not None else args.target
    if not command:
        args.usage_error("no TARGET")
    if ranks := run_ranks(command):
        return Target.parse(ranks).run().status
    target = Target.parse(command)
    with qfuse_everywhere():
        return target.run(at_end=_say).status


def _say() -> None:
    """Print what was fused, while the models of the target are still there."""
    if "torch" not in sys.modules:
        return
    import inductor_q

    print(inductor_q.report().summary(), file=sys.stderr, flush=True)
