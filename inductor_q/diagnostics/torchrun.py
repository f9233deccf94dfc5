"""Act on the ranks, not on the process that waits for them, when the target is a launcher."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import pairwise

from inductor_q.exc import MissingExtra

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")

_OPTIONS = (
    "json",
    "html",
    "dump",
    "backend",
    "inputs",
    "numerics",
    "max_breaks",
    "max_recompiles",
    "min_fused",
    "max_saved_mb",
)


def explained_ranks(command: Sequence[str], options: Namespace) -> list[str]:
    """Rewrite `command` so that each rank runs its script under `qfuse explain`.

    `command` is "-m torch.distributed.run ... script.py a b"; each rank has the same options.
    """
    from torch.distributed.run import get_args_parser

    launched = _Launched(get_args_parser(), command[2:])
    return [*command[:2], *launched.own, *_ours("explain"), *_as_given(options), *launched.target]


def run_ranks(command: Sequence[str]) -> list[str]:
    """Rewrite the command of torchrun or of `accelerate launch` so that each rank runs its script
    under `qfuse run`; return nothing for any other command.

    accelerate then need not know a backend "qfuse": the switch that names it is left out.
    """
    match command:
        case ["-m", ("torch.distributed.run" | "torch.distributed.launch") as name, *words]:
            pass
        case ["torchrun", *words] if not os.path.exists("torchrun"):
            name = "torch.distributed.run"
        case ["-m", "accelerate.commands.launch" as name, *words]:
            pass
        case ["accelerate", "launch", *words] if not os.path.exists("accelerate"):
            name = "accelerate.commands.launch"
        case _:
            return []
    if name.startswith("torch"):
        from torch.distributed.run import get_args_parser

        launched = _Launched(get_args_parser(), words)
    else:
        launched = _Launched(_parser_of_accelerate(), words)
        launched.own = _without_backend(launched.own)
    return ["-m", name, *launched.own, *_ours("run"), *launched.target]


class _Launched:
    """Hold the words of a launcher's command: its `own`, and the `target` that it starts."""

    def __init__(self, parser: ArgumentParser, words: Sequence[str]) -> None:
        parsed = parser.parse_args(words)
        script = len(words) - len(parsed.training_script_args) - 1
        self.own = [word for word in words[:script] if word not in ("-m", "--module")]
        self.target = ["-m", *words[script:]] if parsed.module else list(words[script:])


def _parser_of_accelerate() -> ArgumentParser:
    try:
        from accelerate.commands.launch import launch_command_parser
    except ModuleNotFoundError as error:
        raise MissingExtra(
            package="accelerate", extra="trl", feature="accelerate launch"
        ) from error
    parser: ArgumentParser = launch_command_parser()
    for action in parser._actions:
        if action.dest == "dynamo_backend":
            action.choices = None
    return parser


def _without_backend(words: list[str]) -> list[str]:
    """Leave out `--dynamo_backend qfuse`, as two words or as one."""
    plain = [word.replace("-", "_") for word in words]
    pairs = [pair == ("__dynamo_backend", "qfuse") for pair in pairwise([*plain, ""])]
    left_out = {i for i, found in enumerate(pairs) if found}
    left_out |= {i + 1 for i in left_out}
    left_out |= {i for i, word in enumerate(plain) if word == "__dynamo_backend=qfuse"}
    return [word for i, word in enumerate(words) if i not in left_out]


def _ours(command: str) -> list[str]:
    return ["-m", "inductor_q", command]


def _as_given(options: Namespace) -> list[str]:
    words = ["--github"] if options.github else []
    for name in _OPTIONS:
        value = getattr(options, name)
        if value not in (None, ""):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words
