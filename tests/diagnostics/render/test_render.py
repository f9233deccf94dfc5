"""The renderers: what each says of a run, and that nothing is lost or let through."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest

from inductor_q.diagnostics.explanation import Explanation, Frame, GraphBreak, Layer, Step
from inductor_q.diagnostics.render import github, schema, text, tree, words
from inductor_q.diagnostics.render import json as as_json
from inductor_q.exc import NotAReport, UnknownReportVersion
from inductor_q.files import write_whole
from tests.support.explanations import REASON, attention, clean, explanation, layer, llama

# --- JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [explanation(), clean(), Explanation(target="t.py")])
def test_json_round_trip(run: Explanation) -> None:
    text = as_json.to_json(run)
    assert as_json.from_json(text) == run
    jsonschema.validate(json.loads(text), schema.schema())


def test_the_schema_is_one_and_catches_a_wrong_report() -> None:
    jsonschema.Draft202012Validator.check_schema(schema.schema())
    for change in (
        {"breaks": [{"count": 1}]},
        {"seconds": "12"},
        {"schema_version": 2},
        {"layers": [{**asdict(explanation().layers[0]), "status": "melted"}]},
    ):
        data = {**json.loads(as_json.to_json(explanation())), **change}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data, schema.schema())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("step 1: loss 2.3", "it is not JSON"),
        ("[1]", "it has no schema_version"),
        ('{"schema_version": 1}', "missing 1 required positional argument: 'target'"),
        ('{"schema_version": 1, "target": 3}', "report.target is int 3"),
        (
            '{"schema_version": 1, "target": "t", "layers": [{"module": "a", "kind": "b", '
            '"format": "c", "status": "melted"}]}',
            "report.layers[0].status is 'melted', not one of fused, left, canonical",
        ),
        (
            '{"schema_version": 1, "target": "t", "saved": [{"op": "mm", "count": true, '
            '"bytes": 1}]}',
            "report.saved[0].count is bool True",
        ),
    ],
)
def test_what_is_not_a_report_is_told(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(NotAReport) as error:
        as_json.read(str(file))
    assert str(file) in str(error.value)
    assert problem in str(error.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotAReport, match="cannot be read"):
        as_json.read(str(tmp_path / "none.json"))


def test_another_version_is_told() -> None:
    with pytest.raises(UnknownReportVersion, match="schema_version 7, this qfuse reads 1"):
        as_json.from_json('{"schema_version": 7}')


def test_a_field_of_a_later_version_is_left_out() -> None:
    data = {**json.loads(as_json.to_json(clean())), "weather": "fine"}
    assert as_json.from_json(json.dumps(data)) == clean()


def test_a_report_is_as_readable_as_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_whole(tmp_path / "reports" / "a.json", as_json.to_json(clean()))
    assert as_json.read(str(tmp_path / "reports" / "a.json")) == clean()
    modes = {p.stat().st_mode for p in (tmp_path / "other", tmp_path / "reports" / "a.json")}
    assert len(modes) == 1
    assert len(list((tmp_path / "reports").iterdir())) == 1


# --- the module tree ----------------------------------------------------------------------------


def names(branches: tuple[tree.Branch, ...], depth: int = 0) -> list[str]:
    return [
        line
        for branch in branches
        for line in (
            f"{'  ' * depth}{branch.name} {branch.fused}/{len(branch.layers)}",
            *names(branch.children, depth + 1),
        )
    ]


def test_equal_layers_fold_into_one_branch() -> None:
    assert names(tree.build(llama(32))) == [
        "base_model.model.model.layers.0-31 128/128",
        "  self_attn 64/64",
        "    q_proj, k_proj 64/64",
        "  mlp 64/64",
        "    gate_proj, down_proj 64/64",
    ]


def test_a_layer_that_fared_otherwise_stands_alone() -> None:
    branches = tree.build(llama(4, broken={"2.mlp.down_proj": REASON}))
    assert names(branches) == [
        "base_model.model.model.layers 15/16",
        "  0-1, 3 12/12",
        "    self_attn 6/6",
        "      q_proj, k_proj 6/6",
        "    mlp 6/6",
        "      gate_proj, down_proj 6/6",
        "  2 3/4",
        "    self_attn 2/2",
        "      q_proj, k_proj 2/2",
        "    mlp 1/2",
        "      gate_proj 1/1",
        "      down_proj 0/1",
    ]
    assert branches[0].status == "canonical"


def test_chains_below_numbers_fold_and_keep_their_tail() -> None:
    found = tree.build([layer(f"experts.{i}.w.proj") for i in range(3)])
    assert names(found) == ["experts.0-2.w.proj 3/3"]
    mixed = tree.build([layer("experts.0.up"), layer("experts.1.down")])
    assert names(mixed) == ["experts 2/2", "  0.up 1/1", "  1.down 1/1"]


def test_every_layer_is_in_the_tree_once() -> None:
    layers = (*llama(3, broken={"1.mlp.gate_proj": REASON}), layer("lm_head"), layer(""))
    layers += (layer("lm_head.inner"),)  # a quantized layer that holds another
    branches = tree.build(layers)
    found = [x.module for branch in branches for x in branch.layers]
    assert sorted(found) == sorted(x.module for x in layers)


# --- text ---------------------------------------------------------------------------------------


def printed(run: Explanation, *, missed: tuple[str, ...] = ()) -> str:
    file = io.StringIO()
    text.write(run, file, missed=missed)
    return file.getvalue()


@pytest.mark.parametrize("run", [explanation(), clean(), Explanation(target="t.py")])
def test_text_on_a_pipe_is_plain_and_fits_80_columns(run: Explanation) -> None:
    out = printed(run, missed=("4 graph breaks, at most 0 allowed (--max-breaks 0)",))
    assert max(map(len, out.splitlines())) <= 80
    assert out.isascii() and out.isprintable() is False and "\x1b" not in out
    assert not re.search(r" $", out, re.MULTILINE)


def test_text_says_everything_in_the_order_of_what_to_do() -> None:
    out = printed(explanation(), missed=("4 graph breaks, at most 0 allowed",))
    order = [
        "qfuse explain train.py --steps 3",
        "4 graph breaks (2 distinct), 8 recompiles (1 distinct)",
        "the target raised ValueError: diverged",
        "Budgets missed\n  4 graph breaks, at most 0 allowed",
        "Graph breaks: 2\n  Unsupported Tensor.item() call",
        "(x3) GB0124",
        "at  train.py:7 in step\n          if loss.item() > 10:",
        "in  your code",
        "fix Compare on the device with torch._assert_async",
        "in  peft 0.21.2 peft/tuners/lora/layer.py:2412 in forward",
        "Recompiles\n  tensor 'batch' size mismatch at index 0: 16 -> 24 (x8)",
        "the limit was reached",
        "Left in eager mode\n  recompile limit of 8 reached",
        "Suppressed errors\n  BackendCompilerFailed",
        "CUDA graphs skipped\n  mutated inputs (x2)",
        "Fusion: 15 of 16 quantized layers fused",
        "12 layers fused by canonicalize (cpp),",
        "recognized, not fused: the adapter's product is",
        "Attention: 3 of 4 masks left out",
        "0-2.self_attn 3 layers fused by causal_attention (sdpa, grouped keys)",
        "3.self_attn still masked: the mask depends on the input attention_mask",
        "Saved for backward: 4.0 MiB\n  aten.mm    3.0 MiB  x4",
        "Memory\n  memory planned 1.10 GB of 2.00 GB",
        "Compile time (phases nest)\n  backend_compile   8.5 s  x2",
        "Options that were set\n  qfuse.numerics  strict  user\n\n",
        "Warnings\n  torch.compile was called twice",
        "Run with\n  torch 2.13.0+cpu, peft 0.21.2, device cpu",
    ]
    flat = " ".join(out.split())  # where a line wraps is not the matter here
    places = [flat.find(" ".join(part.split())) for part in order]
    assert -1 not in places, order[places.index(-1)] + "\n" + out
    assert places == sorted(places)


def test_a_fix_of_several_breaks_is_told_once() -> None:
    first, second = explanation().breaks
    again = replace(first, reason="another reason", origin=Frame("/lib/x.py", 3))
    out = printed(replace(clean(), breaks=(first, second, again)))
    assert out.count("Compare on the device") == out.count("if loss.item() > 10:") == 1
    assert out.count("fix as above") == 1


def test_long_tables_are_cut_in_text() -> None:
    saved = tuple(replace(clean().saved[0], op=f"aten.op{i}") for i in range(text.MOST_ROWS + 3))
    out = printed(replace(clean(), saved=saved))
    assert f"aten.op{text.MOST_ROWS - 1} " in out and f"aten.op{text.MOST_ROWS} " not in out
    assert "\n  and 3 more\n" in out


def test_a_clean_run_has_no_empty_sections() -> None:
    run = replace(clean(), attention=(), phases=(), saved=(), options={}, environment={})
    out = printed(run)
    assert out == (
        "qfuse explain train.py --steps 3\n"
        "no graph breaks, no recompiles, 16 of 16 quantized layers fused\n\n"
        "Fusion: 16 of 16 quantized layers fused\n"
        "  base_model.model.model.layers.0-3  16 layers fused by canonicalize (cpp),\n"
        "                                     fold_lora, extend_k, keep_packed\n"
    )


def test_what_qfuse_would_do_is_told_as_such() -> None:
    run = replace(
        clean(),
        layers=tuple(replace(x, would=True) for x in llama(2)),
        attention=tuple(replace(x, would=True) for x in attention(2)),
    )
    assert "8 of 8 quantized layers would be fused" in printed(run)
    assert "Attention: 2 of 2 masks would be left out" in printed(run)


def test_a_pass_that_stood_back_from_fused_layers_is_told_once() -> None:
    def with_step(run_layer: Layer, rows: int) -> Layer:
        step = Step("extend_k", rejected=f"{rows} rows, fewer than 999", by_choice=True)
        return replace(run_layer, steps=(*run_layer.steps, step))

    layers = tuple(with_step(x, 32 * (i + 1)) for i, x in enumerate(llama(1)))
    out = printed(replace(clean(), layers=layers))
    assert out.count("no extend_k in 4 layers: 32 rows, fewer than 999") == 1
    assert "64 rows" not in out


def test_a_part_that_holds_others_is_told_with_its_own_reason() -> None:
    """Attention keeps less than the adapters inside of it do; what is kept is called kept."""
    own, *_ = attention(1)
    kept = replace(layer(f"{own.module}.q_proj"), kind="checkpointing")
    again = replace(own, kind="checkpointing", status="canonical", reason="too large")
    run = replace(clean(), checkpointing=(again, kept))
    lines = [line.split() for line in printed(run).splitlines()]
    assert any(line[-4:] == ["1", "of", "2", "kept"] for line in lines)
    assert ["(itself)", "computed", "again:", "too", "large"] in lines


def test_the_merged_report_of_a_launch_names_its_ranks() -> None:
    assert printed(replace(clean(), world_size=8)).startswith(
        "qfuse explain train.py --steps 3 (8 ranks)\n"
    )


def test_nothing_compiled_is_said() -> None:
    assert "nothing was compiled" in printed(Explanation(target="t.py"))


def test_text_of_others_is_neither_markup_nor_an_escape_sequence() -> None:
    run = replace(clean(), breaks=(GraphBreak(reason="[red]x[/red] \x1b[31mred\x07"),))
    out = printed(run)
    assert "[red]x[/red]" in out
    assert "\x1b" not in out and "\x07" not in out


def test_a_terminal_gets_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    text.write(explanation(), file)
    assert "\x1b[31m" in file.getvalue()
    shown = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
    assert 80 < max(map(len, shown.splitlines())) <= text.WIDEST


# --- words --------------------------------------------------------------------------------------


def test_sizes_and_ranges() -> None:
    assert [words.size(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.00 GiB",
    ]
    assert words.numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


# --- annotations --------------------------------------------------------------------------------


def parse(line: str) -> tuple[str, dict[str, str], str]:
    """As the runner reads a workflow command."""
    found = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
    assert found, line

    def decode(value: str) -> str:
        for code, char in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
            value = value.replace(code, char)
        return value

    pairs = (pair.split("=", 1) for pair in found[2].split(","))
    return found[1], {k: decode(v) for k, v in pairs}, decode(found[3])


def test_annotations_name_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    lines = github.annotate(explanation(str(tmp_path / "src" / "train.py")), ["4 breaks, not 0"])
    parsed = [parse(line) for line in lines]
    assert parsed[0] == ("error", {"title": "budget missed"}, "4 breaks, not 0")
    level, properties, message = parsed[1]
    assert level == "error"
    assert properties == {"file": "src/train.py", "line": "7", "title": "graph break GB0124"}
    assert message.startswith("Unsupported Tensor.item()") and "\nCompare on" in message
    assert parsed[3][1]["title"] == "recompiled x8"
    assert parsed[4][1]["title"] == "error suppressed x1"
    assert parsed[4][2].startswith("BackendCompilerFailed: no C++ compiler\n")
    assert parsed[5][1:] == ({"title": "CUDA graph skipped x2"}, "mutated inputs")
    assert REASON in parsed[6][2] and "layers.2.mlp.down_proj" in parsed[6][2]
    assert len(parsed) == 7


def test_without_a_missed_budget_annotations_are_warnings() -> None:
    assert {parse(line)[0] for line in github.annotate(explanation())} == {"warning"}
    assert github.annotate(clean()) == []


def test_annotations_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    odd = tmp_path / "a,b%3A:c.py"
    item = GraphBreak(reason="100 %\r\n::error::no", user=Frame(str(odd), 3), gb_id="a:b,c")
    [line] = github.annotate(replace(clean(), breaks=(item,)))
    assert "\n" not in line and "\r" not in line
    level, properties, message = parse(line)
    assert (level, properties["file"], properties["line"]) == ("warning", odd.name, "3")
    assert properties["title"] == "graph break a:b,c"
    assert message == item.reason


def test_a_file_outside_of_the_checkout_stands_in_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "repository"))
    item = GraphBreak(reason="print", user=Frame("/elsewhere/train.py", 3, "step"))
    [line] = github.annotate(replace(clean(), breaks=(item,)))
    assert parse(line)[1] == {"title": "graph break"}
    assert parse(line)[2] == "print\n/elsewhere/train.py:3 in step"


# --- what a threshold leaves to its library -----------------------------------------------------

LEFT = "2 rows, fewer than canonicalize.min_rows=4 of the preset"


def test_layers_left_to_their_library_are_counted_apart() -> None:
    left = [replace(layer(f"m.{name}", reason=LEFT), status="left", steps=()) for name in "abc"]
    run = Explanation("t.py", layers=(layer("m.d"), *left))
    assert words.coverage(run) == "1 of 4 quantized layers fused, 3 left to their library"
    assert run.fused_share == 0.25
    assert words.outcome(left[0]) == f"left to its library: {LEFT}"
    assert words.refusals(run) == []
    (branch,) = tree.build(run.layers)
    assert (branch.status, branch.fused) == ("left", 1)
    told = io.StringIO()
    text.write(run, told)
    assert "3 layers left to its library" in re.sub(r"\s+", " ", told.getvalue())
    assert as_json.from_json(as_json.to_json(run)) == run
    assert github.annotate(run) == [], "a threshold is no fault"
    (_, annotation) = github.annotate(run, ["1 of 4 quantized layers fused"])
    assert "m.a, m.b, m.c" in annotation
    would = replace(run, layers=tuple(replace(one, would=True) for one in run.layers))
    assert words.coverage(would).startswith("1 of 4 quantized layers would be fused, 3 left")
