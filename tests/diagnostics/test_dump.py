"""What `--dump` writes: graphs around each pass, code, bytecode, and an index that names them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from inductor_q import testing
from inductor_q.diagnostics.observation import observe
from inductor_q.passes import PIPELINE
from tests.support.processes import ROOT, environment


def scale(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return x - 1


def test_dump(tmp_path: Path) -> None:
    torch._dynamo.reset()
    (tmp_path / "0_0.000.old.txt").write_text("of an earlier dump")
    (tmp_path / "index.json").write_text(json.dumps([{"file": "0_0.000.old.txt"}]))
    layer: Any = testing.quantized_linear(torch.randn(32, 64, dtype=torch.bfloat16))
    try:
        with observe(dump=tmp_path), torch.no_grad():
            torch.compile(scale, backend="eager")(torch.ones(4))
            compiled: Any = torch.compile(layer, backend="inductor")
            compiled(torch.ones(40, 64, dtype=torch.bfloat16))
    finally:
        torch._dynamo.reset()
    index = json.loads((tmp_path / "index.json").read_text())
    named = {entry["file"] for entry in index} | {"index.json"}
    assert named == {path.name for path in tmp_path.iterdir()}

    def text(kind: str, **about: str) -> str:
        [entry] = [e for e in index if e["kind"] == kind and about.items() <= e.items()]
        return Path(tmp_path, entry["file"]).read_text()

    before = text("graph", pass_name="canonicalize", moment="before")
    after = text("graph", pass_name="canonicalize", moment="after")
    assert "bitsandbytes.gemm_4bit" in before
    assert "bitsandbytes.gemm_4bit" not in after
    assert "qfuse.dequantize" in after
    assert "# bfloat16[32, 64]" in after
    assert "def call(" in text("code")
    broken = text("bytecode", compile_id="0/0")  # depyf follows the original, not what has a break
    assert "if x.sum() > 0:" in broken
    assert "as Dynamo left it" in broken


class Links(HTMLParser):
    """The href of every link of a page, and every id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids.add(named.get("id") or "")
        if tag == "a":
            self.found.append(named["href"] or "")


def test_the_command_dumps_and_its_page_links_to_the_files(tmp_path: Path) -> None:
    """A quantized layer behind a break, by stock Inductor: what qfuse would do to its graphs, what
    Inductor made of both, and their functions."""
    dump, page = tmp_path / "a dump", tmp_path / "pages" / "page.html"
    target = ROOT / "tests/targets/reduce_overhead.py"
    done = subprocess.run(
        [sys.executable, "-m", "inductor_q", "explain", "--dump", dump, "--html", page, target],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (done.returncode, done.stdout) == (0, "one step\n"), done.stderr
    index = json.loads((dump / "index.json").read_text())
    assert {e["file"] for e in index} | {"index.json"} == {f.name for f in dump.iterdir()}

    # Each pass before and after, in their order, of the frame with the layer. (Passes over
    # Dynamo's own graph and over the backward graph run where qfuse compiles, not in a dry run.)
    steps = [step.name for step in PIPELINE if step.stage in ("joint", "partition")]
    graphs = [(e["pass_name"], e["moment"]) for e in index if e["kind"] == "graph"]
    assert graphs == [(name, moment) for name in steps for moment in ("before", "after")]
    assert {e["compile_id"] for e in index if e["kind"] == "graph"} == {"1/0"}

    # Forward and backward of the layer, the graph before the break; a function for each frame.
    code = [e for e in index if e["kind"] == "code"]
    assert sorted(e["compile_id"] for e in code) == ["0/0", "1/0", "1/0"]
    assert all("def call(" in (dump / e["file"]).read_text() for e in code)
    functions = [e for e in index if e["kind"] == "bytecode"]
    assert [(e["compile_id"], "step.bytecode.py" in e["file"]) for e in functions] == [
        ("0/0", True),
        ("1/0", True),
    ]
    if importlib.util.find_spec("depyf"):
        assert "if x.sum() > 1000000.0:" in (dump / functions[0]["file"]).read_text()

    links = Links(page.read_text())
    files = {unquote(link) for link in links.found if not link.startswith(("#", "https:"))}
    assert {(page.parent / file).resolve() for file in files} == {dump / e["file"] for e in index}
    inside = [link[1:] for link in links.found if link.startswith("#")]
    assert {"dump-0/0", "dump-1/0"} == set(inside) <= links.ids
