"""`qfuse`, the command line: it picks one of the commands, each a file of `commands/`, and runs it.

Nothing heavy is imported before a command runs, so `qfuse --help` answers at once. Exit status: 0,
1 where a command found what it was asked to look for (a budget missed, a run that got worse), 2 for
a mistake in how it was called or a file that cannot be read or written, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Collection, Sequence

from inductor_q import __version__
from inductor_q.commands import COMMANDS
from inductor_q.exc import ClosedOutput, QfuseError, UnknownCommand

USAGE_ERROR = 2


def parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line, from which `--help` prints."""
    top = argparse.ArgumentParser(
        prog="qfuse",
        description="What torch.compile made of a model with quantized weights, and why.",
    )
    top.add_argument("-V", "--version", action="version", version=f"qfuse {__version__}")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    about = "the same as `qfuse COMMAND --help`"
    help = subparsers.add_parser("help", help=about, description=about)
    help.add_argument("command", nargs="?", metavar="COMMAND")
    help.set_defaults(run=_help, top=top)
    top.set_defaults(commands=subparsers.choices)
    return top


def _help(args: argparse.Namespace) -> int:
    if args.command:
        _check(args.command, args.commands)
    (args.commands[args.command] if args.command else args.top).print_help()
    return 0


def _check(name: str, commands: Collection[str]) -> None:
    if name not in commands:
        raise UnknownCommand(name=name, known=tuple(commands))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status of the process."""
    words = sys.argv[1:] if argv is None else argv
    top = parser()
    try:
        if sys.stdout is None:
            raise ClosedOutput()
        if words and not words[0].startswith("-"):
            _check(words[0], top.get_default("commands"))
        args, unknown = top.parse_known_args(words)
        if unknown:  # said with the usage of the command, and not with that of all
            command: argparse.ArgumentParser = top.get_default("commands").get(words[0], top)
            command.error(f"unrecognized arguments: {' '.join(unknown)}")
        status: int = args.run(args)
        sys.stdout.flush()
    except QfuseError as error:
        print(f"qfuse: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # `qfuse options | head`: the reader has seen enough
        _drop_output()
        return 0
    except OSError as error:  # of a program that is run, `diagnostics.targets` has caught it
        print(f"qfuse: {error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def _drop_output() -> None:
    """Send what standard output still holds to nowhere, as the interpreter would fail to write it
    on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
