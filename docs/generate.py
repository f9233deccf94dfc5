"""Write what these pages take from the code: `make docs`; tests/test_docs.py finds what is stale.

A page has `<!-- COMMAND -->` and `<!-- end -->`; what stands between is the output of that command.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

from inductor_q import cli
from inductor_q.diagnostics.render.schema import schema

HERE = Path(__file__).parent
_BLOCK = re.compile(r"(<!-- qfuse (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with the output of each command between its markers."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{shown(found[2])}\n{found[3]}", page)


def shown(command: str) -> str:
    """Markdown as it is, text as a recording."""
    text = output(command)
    return text if "--markdown" in command else f"```\n$ qfuse {command}\n{text}```\n"


def output(command: str) -> str:
    """What `qfuse COMMAND` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(shlex.split(command))
    assert status == 0, f"qfuse {command}: {status}"
    return printed.getvalue()


def generated() -> dict[Path, str]:
    """Each generated file and what it should hold."""
    pages = (HERE / "reference.md", HERE / "cli.md")
    return {
        **{page: filled(page.read_text(encoding="utf-8")) for page in pages},
        HERE / "explain.schema.json": json.dumps(schema(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(HERE.parent)}")
