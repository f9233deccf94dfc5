"""Write what the documents take from code and results; a test finds what is stale.

`make docs` runs this.

A page has `<!-- KIND NAME -->` and `<!-- end -->`; what stands between comes from here:

- `qfuse COMMAND`: what that command prints;
- `figures NAME`: a table of `docs.figures`, read from the files in benchmarks/results;
- `api MODULE`: the public names of a module, with their signatures and docstrings;
- `versions packages`: what the library was run with;
- `private names`: the names of torch that it stands on.

docs/package.md is README.md for an index page, where no relative link holds.

Inside a sentence `<!-- figure NAME -->` and `<!-- / -->` enclose one value of `docs.figures`.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from docs import api, figures, private
from inductor_q import cli
from inductor_q.diagnostics.checks import tested
from inductor_q.diagnostics.render.schema import schema

HERE = Path(__file__).parent
ROOT = HERE.parent
README, PACKAGE = ROOT / "README.md", HERE / "package.md"
PAGES = (README, *sorted(path for path in HERE.glob("*.md") if path != PACKAGE))
BLOCK = re.compile(
    r"(<!-- (qfuse|figures|api|versions|private) (.+?) -->\n).*?(<!-- end -->)", re.DOTALL
)
VALUE = re.compile(r"(<!-- figure (\S+) -->).*?(<!-- / -->)")


def filled(page: str) -> str:
    """Return the page with everything between its markers written again."""
    page = BLOCK.sub(lambda found: f"{found[1]}\n{KINDS[found[2]](found[3])}\n{found[4]}", page)
    return VALUE.sub(lambda found: f"{found[1]}{figures.VALUES[found[2]]()}{found[3]}", page)


LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")
COMMENT = re.compile(r"<!-- .*? -->\n?")
SOURCES = "\nPaths are those in the repository and in the source distribution.\n"


def for_package(readme: str) -> str:
    """Return README.md for a package index: each relative link becomes the path that it leads to.

    The project has no public address yet. Once it has one, the links can lead there.
    """
    return COMMENT.sub("", LINK.sub(_path, readme)) + SOURCES


def _path(link: re.Match[str]) -> str:
    return f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`)"


def shown(command: str) -> str:
    """Show Markdown as it is, and text as a recording."""
    text = output(command)
    return text if "--markdown" in command else f"```\n$ qfuse {command}\n{text}```\n"


def output(command: str) -> str:
    """Return what `qfuse COMMAND` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(shlex.split(command))
    assert status == 0, f"qfuse {command}: {status}"
    return printed.getvalue()


KINDS: dict[str, Callable[[str], str]] = {
    "qfuse": shown,
    "figures": lambda name: figures.TABLES[name]() + "\n",
    "api": lambda module: api.reference(module) + "\n",
    "versions": lambda _: tested.table(),
    "private": lambda _: private.table() + "\n",
}


def generated() -> dict[Path, str]:
    """Return each generated file and what it should hold."""
    return {
        **{page: filled(page.read_text(encoding="utf-8")) for page in PAGES},
        PACKAGE: for_package(filled(README.read_text(encoding="utf-8"))),
        HERE / "explain.schema.json": json.dumps(schema(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for path, text in generated().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
