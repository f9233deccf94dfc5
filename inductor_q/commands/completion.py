"""`qfuse completion SHELL` prints a script that completes commands and their switches."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers

BASH = """\
_qfuse() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{commands}"
    elif [[ $current == -* || ( $COMP_CWORD -eq 2 && " {nouns} " == *" $command "* ) ]]; then
        case $command in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _qfuse qfuse
"""
ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + BASH
SHELLS = ("bash", "zsh", "fish")
EPILOG = """\
bash: eval "$(qfuse completion bash)"   in ~/.bashrc
zsh:  eval "$(qfuse completion zsh)"    in ~/.zshrc
fish: qfuse completion fish > ~/.config/fish/completions/qfuse.fish
"""


def register(subparsers: Subparsers) -> None:
    help = "a script that completes commands and switches in a shell"
    parser = subparsers.add_parser(
        "completion",
        help=help,
        description=help,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=main, subparsers=subparsers)


def main(args: argparse.Namespace) -> int:
    parsers: dict[str, argparse.ArgumentParser] = args.subparsers.choices
    nouns = ["help", *(name for name, parser in parsers.items() if _choices(parser))]
    words = {name: _words(parser) for name, parser in parsers.items()}
    words["help"] = list(words)
    if args.shell == "fish":
        print("\n".join(_fish(words, args.subparsers)))
        return 0
    cases = "\n".join(
        f'            {name}) words="{" ".join(known)}" ;;' for name, known in words.items()
    )
    script = BASH if args.shell == "bash" else ZSH
    print(script.format(commands=" ".join(words), nouns=" ".join(nouns), cases=cases), end="")
    return 0


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """List what can follow a command: its switches, and its arguments where they are of a set."""
    switches = [s for a in parser._actions for s in a.option_strings if a.help != argparse.SUPPRESS]
    return _choices(parser) + switches


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    return [str(c) for a in parser._actions if not a.option_strings for c in a.choices or ()]


def _fish(words: dict[str, list[str]], subparsers: Subparsers) -> list[str]:
    about = {action.dest: action.help or "" for action in subparsers._choices_actions}
    lines = [
        f"complete -c qfuse -n __fish_use_subcommand -f -a {name} -d '{about.get(name, '')}'"
        for name in words
    ]
    for name, known in words.items():
        of = f"complete -c qfuse -n '__fish_seen_subcommand_from {name}'"
        for word in known:
            kind = "-l" if word.startswith("--") else "-s" if word.startswith("-") else "-f -a"
            lines.append(f"{of} {kind} {word.lstrip('-')}")
    return lines
