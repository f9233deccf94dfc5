"""The page: read as text, and driven in a browser at the sizes of a phone and of a desktop."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from inductor_q.diagnostics.explanation import Explanation, Frame, GraphBreak
from inductor_q.diagnostics.render import html
from tests.support import browser
from tests.support.browser import ENTER, Browser
from tests.support.explanations import (
    PADDED,
    REASON,
    clean,
    explanation,
    layer,
    llama,
    write_source,
)

MISSED = ("4 graph breaks, at most 0 allowed (--max-breaks 0)",)
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'{{ 1 }}"
VOID = {"meta", "br", "img"}


class Reader(HTMLParser):
    """Tags in order, with a check that each one is closed where it should be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def hostile(value: Any) -> Any:
    """The same record with a script in every text."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = {"status", "schema_version", "file", "dump"}
        changed = {
            f.name: hostile(getattr(value, f.name)) for f in fields(value) if f.name not in kept
        }
        return replace(value, **changed)
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    if isinstance(value, dict):
        return {HOSTILE + key: hostile(item) for key, item in value.items()}
    return f"{value}{HOSTILE}" if isinstance(value, str) else value


@pytest.mark.parametrize("run", [explanation(), clean(), Explanation(target="t.py")])
def test_the_page_is_whole_and_needs_nothing_else(run: Explanation) -> None:
    page = Reader(html.render(run, missed=MISSED))
    assert len(page.named("script")) == len(page.named("style")) == 1
    assert not page.named("link") and not page.named("img") and not page.named("iframe")
    assert not any("src" in attributes or "style" in attributes for _, attributes in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    for link in page.named("a"):
        assert (link["href"] or "").startswith("https://meta-pytorch.github.io/"), link


def test_empty_sections_are_left_out() -> None:
    page = Reader(html.render(replace(clean(), attention=(), saved=(), phases=(), options={})))
    assert [section["id"] for section in page.named("section")] == ["fusion", "compiles"]


def test_what_others_said_is_inert() -> None:
    page = html.render(hostile(explanation()), missed=(HOSTILE,))
    read = Reader(page)
    assert len(read.named("script")) == 1 and not read.named("img")
    assert page.count("&lt;script&gt;window.hacked = 1&lt;/script&gt;") > 50
    assert "{{ 1 }}" in page  # not evaluated as a template


def test_attention_is_told_by_module_and_reason() -> None:
    section = html.render(explanation()).partition('<section id="attention">')[2]
    told = " ".join(section.partition("</section>")[0].split())
    assert "<h2>Attention: 3 of 4 masks left out</h2>" in told
    for name, fate in (("0-2", "3 layers fused by"), ("3", f"still masked: {PADDED}")):
        assert f'<span class="path">{name}.self_attn</span> <span class="quiet">{fate}' in told


def test_a_link_is_made_of_a_real_id_only() -> None:
    item = GraphBreak(reason="x", gb_id="GB1/../../evil")
    page = Reader(html.render(replace(clean(), breaks=(item,))))
    assert page.named("a") == []


# --- source excerpts ----------------------------------------------------------------------------


def test_an_excerpt_has_the_lines_around(tmp_path: Path) -> None:
    script = write_source(tmp_path)
    lines = html.excerpt(Frame(str(script), 7, "step", "    if loss.item() > 10:"))
    assert [line.number for line in lines] == [4, 5, 6, 7, 8, 9]  # blank lines at its ends go
    assert [line.text for line in lines if line.is_meant] == ["    if loss.item() > 10:"]
    assert html.excerpt(Frame(str(script), 1))[0].text == "import torch"


def test_a_file_that_changed_or_is_gone_gives_the_line_as_it_was(tmp_path: Path) -> None:
    script = write_source(tmp_path)
    for frame in (Frame(str(script), 7, "", "gone = 1"), Frame("/none.py", 7, "", "gone = 1")):
        assert html.excerpt(frame) == [html.SourceLine(7, "gone = 1", True)]
    assert html.excerpt(Frame(str(script), 99)) == []
    assert html.excerpt(Frame()) == []


# --- the files of a dump ------------------------------------------------------------------------


def test_files_of_a_dump_are_linked_from_where_the_page_lies(tmp_path: Path) -> None:
    dump = tmp_path / "a dump"
    dump.mkdir()
    listed = [
        {
            "file": "0_0.000.fold_lora.before.py",
            "kind": "graph",
            "compile_id": "0/0",
            "pass_name": "fold_lora",
            "moment": "before",
        },
        {
            "file": "0_0.code.py",
            "kind": "code",
            "compile_id": "0/0",
            "pass_name": "",
            "moment": "",
        },
    ]
    (dump / "index.json").write_text(json.dumps(listed))
    run = replace(explanation(), dump=str(dump))
    page = html.render(run, folder=tmp_path / "pages")
    links = [link["href"] for link in Reader(page).named("a")]
    assert "../a%20dump/0_0.000.fold_lora.before.py" in links
    assert "../a%20dump/0_0.code.py" in links
    assert ">fold_lora before</a>" in page and ">code 0_0.code.py</a>" in page
    anchor = next(link for link in links if (link or "").startswith("#dump"))
    assert links.count(anchor) == 2  # from the break and from the graph
    assert any(article.get("id") == (anchor or "")[1:] for article in Reader(page).named("article"))


def test_a_dump_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert 'id="dump"' not in html.render(replace(explanation(), dump=str(tmp_path / "none")))


# --- in a browser -------------------------------------------------------------------------------

in_browser = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is one")


@pytest.fixture(scope="module", params=[(390, 844), (1280, 900)], ids=["phone", "desktop"])
def window(request: pytest.FixtureRequest) -> Iterator[Browser]:
    with Browser(*request.param) as opened:
        yield opened


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Everything at once, with names and lines that no screen has room for."""
    run = explanation(str(write_source(tmp_path)))
    layers = (*run.layers, layer("a" * 300, "rejected", "no_space_" * 40), *llama(12)[16:])
    broken = replace(run.breaks[1], reason="R" * 300, user=Frame("/" + "d" * 300, 3, "", "x" * 300))
    file = tmp_path / "page.html"
    run = replace(run, layers=layers, breaks=(*run.breaks, broken))
    file.write_text(html.render(run, missed=MISSED), encoding="utf-8")
    return file


def overflow(window: Browser) -> int:
    widest: int = window.run("return document.documentElement.scrollWidth")
    return widest - window.size["width"]


def column(window: Browser, table: str, index: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
        ".map(row => row.cells[arguments[1]].textContent.trim())"
    )
    cells: list[str] = window.run(script, table, index)
    return cells


@in_browser
def test_no_horizontal_scrolling_and_no_errors(window: Browser, page: Path) -> None:
    window.open(page)
    assert overflow(window) <= 0
    window.run("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert overflow(window) <= 0
    assert window.run("return performance.getEntriesByType('resource').length") == 0
    assert window.console() == []


@in_browser
def test_a_head_sorts_its_table(window: Browser, page: Path) -> None:
    window.open(page)
    head = "#phases th:nth-child(3)"
    assert column(window, "#phases", 2) == ["8.50", "10.00"]  # as numbers: as text 10 is less
    window.click(f"{head} button")
    assert column(window, "#phases", 2) == ["8.50", "10.00"]
    state = "return document.querySelector(arguments[0]).getAttribute('aria-sort')"
    assert window.run(state, head) == "ascending"
    window.click(f"{head} button")
    assert column(window, "#phases", 2) == ["10.00", "8.50"]
    assert column(window, "#phases", 0) == ["dynamo", "backend_compile"]
    assert window.run(state, head) == "descending"
    window.type("#phases th:nth-child(1) button", ENTER)
    assert column(window, "#phases", 0) == ["backend_compile", "dynamo"]
    assert window.run(state, head) == "none"
    assert window.console() == []


@in_browser
def test_module_paths_sort_by_their_numbers(window: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(html.render(replace(clean(), layers=llama(12)[::-1])), encoding="utf-8")
    window.open(file)
    window.run("document.querySelector('.every').open = true")
    window.click("#layers th:first-child button")
    indices = [int(path.split(".")[4]) for path in column(window, "#layers", 0)]
    assert indices == sorted(indices) and indices[-1] == 11


@in_browser
def test_tree_nodes_open_and_close(window: Browser, page: Path) -> None:
    window.open(page)
    # What is not fused is open from the start; what is fused is closed below the top.
    shown = "return [...document.querySelectorAll('#tree .path')].filter(x => x.checkVisibility())"
    names = f"{shown}.map(x => x.textContent)"
    assert "down_proj" in window.run(names)
    before = len(window.run(names))
    node = "#tree details:not([open]) > summary"
    window.run(f"document.querySelector('{node}').parentElement.id = 'node'")
    window.click("#node > summary")
    assert window.run("return document.querySelector('#node').open") is True
    assert len(window.run(names)) > before
    window.click("#node > summary")
    assert len(window.run(names)) == before
    window.click("button[data-open=false]")
    top_level = "return document.querySelectorAll('#tree > ul > li').length"
    assert len(window.run(names)) == window.run(top_level)
    window.click("button[data-open=true]")
    assert len(window.run(names)) == window.run(
        "return document.querySelectorAll('#tree .path').length"
    )
    assert window.console() == []


@in_browser
def test_light_and_dark_by_the_system_and_by_hand(window: Browser, page: Path) -> None:
    window.open(page)

    def luminance() -> float:
        color: str = window.run("return getComputedStyle(document.body).backgroundColor")
        red, green, blue = map(int, re.findall(r"\d+", color)[:3])
        return (red + green + blue) / 765

    for system, is_light in (("light", True), ("dark", False)):
        window.devtools(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": system}],
        )
        assert (luminance() > 0.5) is is_light
        window.click("#theme")
        assert (luminance() > 0.5) is not is_light
        window.click("#theme")
        assert (luminance() > 0.5) is is_light
        window.open(page)
    assert window.console() == []


@in_browser
def test_text_stands_out_from_its_ground(window: Browser, page: Path) -> None:
    """Contrast of at least 4.5 (WCAG AA) for every text, in both themes."""
    window.open(page)
    script = """
    const luminance = color => {
      const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = element => {
      const color = getComputedStyle(element).backgroundColor;
      return color === "rgba(0, 0, 0, 0)" ? ground(element.parentElement) : color;
    };
    const texts = [...document.querySelectorAll("body *")].filter(element =>
      [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())
      && !["SCRIPT", "STYLE"].includes(element.tagName));
    return texts.map(element => {
      const [a, b] = [luminance(getComputedStyle(element).color), luminance(ground(element))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.outerHTML.slice(0, 80)];
    }).sort((x, y) => x[0] - y[0])[0];
    """
    for _theme in ("the system's", "the other"):
        contrast, where = window.run(script)
        assert contrast >= 4.5, where
        window.click("#theme")


@in_browser
def test_a_script_in_a_name_does_not_run(window: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(html.render(hostile(explanation()), missed=(HOSTILE,)), encoding="utf-8")
    window.open(file)
    assert window.run("return window.hacked === undefined")
    # The second wall: markup that got in all the same is stopped by the policy.
    window.run("document.body.insertAdjacentHTML('beforeend', '<p id=odd onclick=\"hacked=1\">x')")
    window.click("#odd")
    assert window.run("return window.hacked === undefined")
    assert any("Content Security Policy" in line for line in window.console())


@in_browser
def test_the_meant_line_is_marked(window: Browser, page: Path) -> None:
    window.open(page)
    lines = window.run("return [...document.querySelectorAll('.meant')].map(x => x.textContent)")
    assert "    if loss.item() > 10:" in lines
    assert REASON in window.run("return document.body.textContent")
