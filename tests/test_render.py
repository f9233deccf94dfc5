"""The renderers: what each says of a run, and that nothing is lost or let through."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import jsonschema
import pytest

from inductor_q.diagnostics.explanation import Explanation
from inductor_q.diagnostics.render import json as as_json
from inductor_q.diagnostics.render import schema
from inductor_q.exc import NotAReport, UnknownReportVersion
from tests.explanations import clean, explanation

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
            "report.layers[0].status is 'melted', not one of fused, canonical",
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
