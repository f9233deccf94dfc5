"""Graph breaks: torch's text of each is taken apart, and a cause at one place is counted once."""

from __future__ import annotations

import contextlib
import importlib.metadata
import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from inductor_q.diagnostics.explanation import Frame, GraphBreak
from inductor_q.diagnostics.fixes import fix_for
from inductor_q.frames import library_of

OWN_CODE = "your code"

_BLOCK = re.compile(
    r"^(?P<title>\S.*)\n(?:[ ]{2}Higher Order Operator: .*\n)?"
    r"(?P<body>(?:[ ]{2}(?:Explanation|Hint): .*\n(?:[ ]{4,}.*\n)*)+)",
    re.MULTILINE,
)
_FIELD = re.compile(r"^  (Explanation|Hint): (.*(?:\n    +.*)*)", re.MULTILINE)
_GB_ID = re.compile(r"/gb/gb(\d+)\.html")
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)(?:, in (.+))?$', re.MULTILINE)
_HEADER = re.compile(r"^Graph break in user code at (.+):(\d+)$", re.MULTILINE)
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+$")
_VOLATILE = re.compile(r"0x[0-9a-f]+|\bid=\d+|___stack\d+")

_STACK_TITLE = "User code traceback:"
_REST = ("\nTraceback (most recent call last)", "\nfrom user code:")


@dataclass(frozen=True)
class Parsed:
    """Hold one break as torch reported it: the first cause of the chain, frames outermost first."""

    title: str
    explanation: str = ""
    hints: tuple[str, ...] = ()
    gb_id: str = ""
    frames: tuple[Frame, ...] = ()


def parse(text: str) -> Parsed:
    """Take apart the payload of `dynamo_graph_break_reason` (or the message of an `Unsupported`).

    A break that could not be resumed names two causes; the first is the one to mend, the second
    (a loop, a `with`) only says why the whole frame was given up.
    """
    told, _, rest = text.partition(_STACK_TITLE)
    frames = parse_frames(_before(rest, _REST))
    if not frames and (header := _HEADER.search(text)):
        frames = (_frame(header[1], header[2], ""),)
    reason = told.partition("Graph Break Reason: ")[2] or told
    block = _BLOCK.search(_before(reason, ("Stack variable source attribution:",)) + "\n")
    if block is None:
        return Parsed(title=_first_line(reason), frames=frames)
    fields = _FIELD.findall(block["body"])
    after = _GB_ID.search(reason, block.end())
    return Parsed(
        title=block["title"].strip(),
        explanation=" ".join(_flat(v) for k, v in fields if k == "Explanation"),
        hints=tuple(_flat(v) for k, v in fields if k == "Hint"),
        gb_id=f"GB{after[1]}" if after else "",
        frames=frames,
    )


def parse_error(text: str) -> Parsed | None:
    """Parse the break that `fullgraph=True` turned into an error.

    `text` is the payload of `dynamo_error`. The result is None for another error.
    """
    _, found, told = text.rpartition("torch._dynamo.exc.Unsupported: ")
    if not found or "recompile limit" in _first_line(told):
        return None
    head, _, rest = told.partition("from user code:")
    return replace(parse(head), frames=parse_frames(rest))


def parse_frames(text: str) -> tuple[Frame, ...]:
    """Read the frames of a printed traceback, outermost first."""
    return tuple(_frame(*found) for found in _FRAME.findall(text))


def _frame(file: str, line: str | int, function: str) -> Frame:
    number = int(line)
    return Frame(file, number, function_name(function), linecache.getline(file, number).strip())


def function_name(name: str) -> str:
    """Return the user's name of a function; torch has "…resume_in_f_at_7" for one after a break."""
    resumed = _RESUMED.match(name)
    return resumed[1] if resumed else name


def graph_break(parsed: Parsed, *, compile_id: str, outer: Sequence[Frame] = ()) -> GraphBreak:
    """Make the record of one break.

    `outer` are the frames of the call that was being compiled: where a resumed function breaks,
    torch's own traceback no longer reaches the user's code.
    """
    origin = blamed(parsed.frames)
    user = innermost_own(parsed.frames) or innermost_own(outer) or origin
    return GraphBreak(
        reason=parsed.title,
        gb_id=parsed.gb_id,
        explanation=parsed.explanation,
        hints=parsed.hints,
        fix=fix_for(parsed.title, parsed.explanation, parsed.hints, parsed.frames),
        library=owner(origin.file),
        user=user,
        origin=origin,
        compile_ids=(compile_id,) if compile_id else (),
    )


def distinct(breaks: Iterable[GraphBreak]) -> tuple[GraphBreak, ...]:
    """Join breaks of the same cause at the same place into one, the most frequent first."""
    found: dict[tuple[str, str, str, int], GraphBreak] = {}
    for one in breaks:
        title = _VOLATILE.sub("…", one.reason)
        key = (one.gb_id, title, one.origin.file, one.origin.line)
        if key in found:
            known = found[key]
            ids = tuple(dict.fromkeys((*known.compile_ids, *one.compile_ids)))
            one = replace(known, count=known.count + one.count, compile_ids=ids)
        found[key] = one
    return tuple(sorted(found.values(), key=lambda b: -b.count))


def blamed(frames: Sequence[Frame]) -> Frame:
    """Return the frame to blame: the innermost one outside of torch and the standard library.

    Those two break only because of what others call them with.
    """
    others = (f for f in reversed(frames) if library_of(f.file) not in ("torch", "Python"))
    return next(others, frames[-1] if frames else Frame())


def innermost_own(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's own code."""
    return next((frame for frame in reversed(frames) if not library_of(frame.file)), None)


def owner(file: str) -> str:
    """Return the distribution that a file belongs to with its version, or "your code"."""
    name = library_of(file)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{name} {importlib.metadata.version(name)}" if name else OWN_CODE
    return name


def _before(text: str, marks: Iterable[str]) -> str:
    for mark in marks:
        text = text.partition(mark)[0]
    return text


def _flat(text: str) -> str:
    return " ".join(text.split())


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
