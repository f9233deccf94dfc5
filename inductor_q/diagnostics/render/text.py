"""Print an `Explanation` to a terminal or a log: the first thing to do comes first, nothing is
empty.

A pipe gets 80 columns, no colour and no trailing blanks; a terminal its width, up to 100.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from inductor_q.diagnostics.explanation import Explanation, Frame, GraphBreak, Layer, Recompile
from inductor_q.diagnostics.render import words
from inductor_q.diagnostics.render.tree import Branch, build

PIPE_WIDTH, WIDEST = 80, 100
MODULE_WIDTH, NAME_WIDTH = 36, 48
MOST_ROWS = 10  # of a table; the rest of it is in the JSON and the HTML

STYLE = {
    "fused": "green",
    "left": "cyan",
    "canonical": "yellow",
    "rejected": "red",
    "unseen": "magenta",
}


def write(run: Explanation, file: TextIO, *, missed: Sequence[str] = ()) -> None:
    """Print the run; `missed` are the budgets that it did not keep, a sentence each."""
    show(sections(run, missed), file)


def show(parts: Iterable[RenderableType], file: TextIO) -> None:
    """Print what rich renders, as plain as `file` needs it."""
    console = Console(file=file, highlight=False, soft_wrap=False)
    console.width = min(console.width, WIDEST) if console.is_terminal else PIPE_WIDTH
    with console.capture() as captured:
        console.print(Group(*parts))
    text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    encoding = file.encoding or "utf-8"
    file.write(text.encode(encoding, "replace").decode(encoding))
    file.flush()


def plain(text: str, style: str = "") -> Text:
    """Return text of others: nothing in it is markup, no escape sequence reaches the terminal."""
    return Text("".join(c if c.isprintable() or c in "\n\t" else " " for c in text), style=style)


def sections(run: Explanation, missed: Sequence[str] = ()) -> Iterator[RenderableType]:
    """Return the parts of the report, each with an empty line before it."""
    head = Text.assemble(("qfuse explain ", "bold"), plain(words.command(run)))
    yield Group(head, plain(words.summary(run)))
    if ending := words.ending(run):
        yield plain(ending, "red")
    for title, body in _bodies(run, missed):
        yield from section(title, body)


def section(title: str, body: Sequence[RenderableType]) -> Iterator[RenderableType]:
    """Return a heading and what stands under it; nothing where that is empty."""
    if body:
        yield Text(f"\n{title}", style="bold")
        yield Padding(Group(*body), (0, 0, 0, 2))


_Bodies = Iterator[tuple[str, list[RenderableType]]]


def _bodies(run: Explanation, missed: Sequence[str]) -> _Bodies:
    """Yield every section with its content, in order; `section` leaves the empty ones out."""
    yield _title("Budgets missed", len(missed)), [plain(line, "red") for line in missed]
    yield _title("Graph breaks", len(run.breaks)), [*_breaks(run.breaks)]
    yield _title("Recompiles", len(run.recompiles)), [_recompile(item) for item in run.recompiles]
    yield (
        _title("Left in eager mode", len(run.fallbacks)),
        [_facts(_times(f.reason, f.count), ("at", _place(f.where))) for f in run.fallbacks],
    )
    yield (
        _title("Suppressed errors", len(run.suppressed)),
        [
            *(_facts(_times(s.error, s.count), ("at", _place(s.where))) for s in run.suppressed),
            *([plain(words.UNSUPPRESS, "green")] if run.suppressed else []),
        ],
    )
    yield "CUDA graphs skipped", [_times(s.reason, s.count) for s in run.cudagraph_skips]
    yield f"Fusion: {words.coverage(run)}", [*_fusion(run)]
    yield "Packed weights", [*_packed(run.layers)]
    for _, title, records in words.beside(run):
        yield title, [*_modules(records)]
    yield (
        f"Saved for backward: {words.size(run.saved_bytes)}",
        columns([(s.op, words.size(s.bytes), f"x{s.count}") for s in run.saved]),
    )
    advice = [plain(words.exclusion(run), "green")] if run.numerics else []
    yield words.numerics(run), [*columns(words.errors(run)), *advice]
    yield "Memory", [plain(line) for line in run.memory]
    yield (
        "Compile time (phases nest)",
        columns(
            [(p.name, f"{p.seconds:.1f} s", f"x{p.calls}") for p in run.phases if p.seconds > 0.05]
        ),
    )
    yield "Options that were set", columns(words.options(run))
    yield "Warnings", [plain(line) for line in run.warnings]
    yield "Run with", [plain(words.environment(run))] if run.environment else []
    yield "Graphs and code", [plain(words.short(run.dump))] if run.dump else []


def _title(name: str, count: int) -> str:
    return f"{name}: {count}" if count > 1 else name


def _times(text: str, count: int) -> Text:
    return plain(f"{text} (x{count})" if count > 1 else text)


def _facts(head: Text, *facts: tuple[str, Text]) -> RenderableType:
    """Return a head, and labelled lines under it."""
    head.stylize("bold")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, text in facts:
        if text.plain:
            grid.add_row(label, text)
    return Group(head, Padding(grid, (0, 0, 0, 2)))


def _place(frame: Frame) -> Text:
    """Show a place and the line that stands there."""
    text = plain(words.place(frame))
    return text.append_text(plain(f"\n  {frame.text.strip()}", "cyan")) if frame.text else text


def _breaks(items: Iterable[GraphBreak]) -> Iterator[RenderableType]:
    """Show each fix and line once, since one cause often breaks a graph in several places."""
    fixes: set[str] = set()
    lines: set[Frame] = set()
    for item in items:
        head = _times(item.reason, item.count)
        if item.gb_id:
            head.append(f" {item.gb_id}", style="dim")
        fix = item.fix or " ".join(item.hints)
        origin = "" if item.origin == item.user else words.place(item.origin)
        yield _facts(
            head,
            ("at", plain(words.place(item.user)) if item.user in lines else _place(item.user)),
            ("in", plain(" ".join(filter(None, (item.library, origin))))),
            ("fix", plain("as above" if fix in fixes else fix, "green") if fix else Text()),
        )
        fixes.add(fix)
        lines.add(item.user)


def _recompile(item: Recompile) -> RenderableType:
    limit = plain("the limit was reached: it runs in eager mode from then on", "red")
    return _facts(
        _times(words.failed_guard(item), item.count),
        ("at", plain(words.place(item.where))),
        ("", limit if item.hit_limit else Text()),
        ("fix", plain(item.fix, "green")),
    )


def _fusion(run: Explanation) -> Iterator[RenderableType]:
    """Show the tree of modules, and which passes stood back where, with their reasons."""
    yield from _modules(run.layers)
    for name, reason, count in words.refusals(run):
        yield plain(f"no {name} in {words.plural(count, 'layer')}: {reason}", "dim")


def _packed(layers: Sequence[Layer]) -> Iterator[RenderableType]:
    """Show whose formats there are, and below each who computes with it and what that moves."""
    for what, which, served in words.packed(layers):
        yield Text.assemble(plain(what, "bold"), plain(f"  {which}"))
        yield Padding(plain(served), (0, 0, 0, 2))


def _modules(layers: Sequence[Layer]) -> Iterator[RenderableType]:
    if not layers:
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(max_width=MODULE_WIDTH, overflow="fold")
    grid.add_column(overflow="fold")
    for depth, branch in _opened(build(layers)):
        module = Padding(plain(branch.name, "bold"), (0, 0, 0, 2 * depth))
        grid.add_row(module, plain(_fate(branch), STYLE[branch.status]))
    yield grid


def _opened(branches: Iterable[Branch], depth: int = 0) -> Iterator[tuple[int, Branch]]:
    """Yield each branch before its children; one with nothing to mend is not opened."""
    for branch in branches:
        yield depth, branch
        if branch.status != "fused" and not branch.alike:
            yield from _opened(branch.parts, depth + 1)


def _fate(branch: Branch) -> str:
    """Say in one sentence what became of the layers in a branch."""
    count = len(branch.layers)
    many = f"{count} layers " if count > 1 else ""
    if branch.status == "fused":
        return f"{many}{words.fused_by(branch.layers)}"
    if branch.alike:
        return f"{many}{words.outcome(branch.layers[0])}"
    return f"{branch.fused} of {count} {words.done(branch.layers[0])}"


def columns(rows: Sequence[tuple[str, ...]]) -> list[RenderableType]:
    """Show what, how much, and perhaps a remark, for the first rows; nothing without any."""
    if not rows:
        return []
    grid = Table.grid(padding=(0, 2))
    grid.add_column(max_width=NAME_WIDTH, overflow="fold")
    grid.add_column(justify="right" if len(rows[0]) > 2 else "left", overflow="fold")
    grid.add_column(style="dim", overflow="fold")
    for row in rows[:MOST_ROWS]:
        grid.add_row(*map(plain, row))
    left = len(rows) - MOST_ROWS
    return [grid, *([plain(f"and {left} more", "dim")] if left > 0 else [])]
