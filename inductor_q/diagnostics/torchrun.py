"""Explain the ranks, not the process that waits, when the target is a launcher."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

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

    launcher, launched = list(command[:2]), list(command[2:])
    parsed = get_args_parser().parse_args(launched)
    script = len(launched) - len(parsed.training_script_args) - 1
    own = [word for word in launched[:script] if not (parsed.module and word in ("-m", "--module"))]
    target = ["-m", *launched[script:]] if parsed.module else launched[script:]
    return [*launcher, *own, "-m", "inductor_q", "explain", *_as_given(options), *target]


def _as_given(options: Namespace) -> list[str]:
    words = ["--github"] if options.github else []
    for name in _OPTIONS:
        value = getattr(options, name)
        if value not in (None, ""):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words
