"""Render an `Explanation` as one HTML file that needs nothing else: no network, no server.

The template escapes everything that a model, a script or torch said. Should something slip through,
the page's content policy runs no script but ours (by its hash) and fetches nothing.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from inductor_q.diagnostics.explanation import Explanation, Frame
from inductor_q.diagnostics.render import words
from inductor_q.diagnostics.render.tree import build

TEMPLATES = Path(__file__).parent / "templates"
AROUND = 4  # lines of source above and below the one that is meant


def render(run: Explanation, *, missed: Sequence[str] = (), folder: Path = Path()) -> str:
    """Render the page; `missed` are the budgets that the run did not keep, a sentence each.

    `folder` is where the page will lie: its links to the files of a dump start there.
    """
    script, style = (_asset(name) for name in ("explain.js", "explain.css"))
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    page: str = _template().render(
        run=run,
        missed=missed,
        tree=build(run.layers),
        beside=[(kind, title, build(records)) for kind, title, records in words.beside(run)],
        dumped=dumped(run.dump, folder) if run.dump else {},
        policy=policy,
        script=Markup(script),
        style=Markup(style),
    )
    return page


@dataclass(frozen=True)
class SourceLine:
    number: int
    text: str
    is_meant: bool


def excerpt(frame: Frame) -> list[SourceLine]:
    """Return the lines around a frame; only its own line where the file is gone or has changed."""
    try:
        lines = Path(frame.file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError, ValueError):
        lines = []
    index = frame.line - 1
    if not 0 <= index < len(lines) or (frame.text and lines[index].strip() != frame.text.strip()):
        return [SourceLine(frame.line, frame.text, True)] if frame.text else []
    first, last = max(0, index - AROUND), min(len(lines), index + AROUND + 1)
    while not lines[first].strip() and first < index:
        first += 1
    while not lines[last - 1].strip() and last > index + 1:
        last -= 1
    return [SourceLine(n + 1, lines[n], n == index) for n in range(first, last)]


@dataclass(frozen=True)
class Link:
    href: str
    title: str


def dumped(dump: str, folder: Path) -> dict[str, list[Link]]:
    """Return the files of `--dump` by compile, as its index lists them; none where that is gone."""
    try:
        index = json.loads((Path(dump) / "index.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    found: dict[str, list[Link]] = {}
    for item in index:
        path = os.path.relpath(Path(dump) / item["file"], folder.resolve())
        step = f"{item['pass_name']} {item['moment']}".strip()
        title = step or f"{item['kind']} {item['file']}"
        found.setdefault(item["compile_id"], []).append(Link(quote(path), title))
    return found


def _gb_link(gb_id: str) -> str:
    """Link to torch's page about a graph break ("GB0170"); empty for anything but such an id."""
    is_known = gb_id[:2] == "GB" and gb_id[2:].isdigit() and gb_id.isascii()
    site = "https://meta-pytorch.github.io/compile-graph-break-site/gb"
    return f"{site}/{gb_id.lower()}.html" if is_known else ""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _date(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M UTC")


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "date": _date,
        "excerpt": excerpt,
        "gb_link": _gb_link,
        "done": words.done,
        "outcome": words.outcome,
        "place": words.place,
        "product": math.prod,
        "sentence": _sentence,
        "serves": words.serves,
        "size": words.size,
    }
    environment.globals |= {"words": words}
    return environment.get_template("explain.html.j2")


def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
