"""Write an `Explanation` as JSON and read it back. The form is docs/explain.schema.json.

Reports are compared across commits and versions, so: within a `schema_version` fields are only
added; a reader leaves out what it does not know and takes the default of what is not there.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from inductor_q.diagnostics.explanation import SCHEMA_VERSION, Explanation
from inductor_q.exc import NotAReport, UnknownReportVersion


def to_json(explanation: Explanation) -> str:
    """Return the text of a report file, from which `from_json` makes an equal explanation."""
    return json.dumps(dataclasses.asdict(explanation), indent=1, ensure_ascii=False) + "\n"


def from_json(text: str, *, path: str = "the text") -> Explanation:
    """Return the explanation that `text` holds; `path` is what errors call it.

    Raises:
        NotAReport: the text is not JSON, or a field is missing or of another type.
        UnknownReportVersion: a report of another `schema_version`.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise NotAReport(path=path, problem=f"it is not JSON ({error})") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise NotAReport(path=path, problem="it has no schema_version")
    if data["schema_version"] != SCHEMA_VERSION:
        raise UnknownReportVersion(path=path, version=data["schema_version"], known=SCHEMA_VERSION)
    try:
        explanation: Explanation = _build(Explanation, data, "report")
    except _Mismatch as mismatch:
        raise NotAReport(path=path, problem=str(mismatch)) from None
    return explanation


def read(path: str) -> Explanation:
    """Return the explanation in a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotAReport(path=path, problem=f"it cannot be read ({error})") from None
    return from_json(text, path=path)


class _Mismatch(Exception):
    """Raised for a value that is not of its field's type; the text says where."""


def _build(kind: Any, value: Any, where: str) -> Any:
    """Build from `value`, as `json` gives it, what an annotation `kind` of explanation.py names."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return _record(kind, _checked(dict, value, where), where)
    if origin is tuple:
        items = enumerate(_checked(list, value, where))
        return tuple(_build(args[0], item, f"{where}[{i}]") for i, item in items)
    if origin is dict:
        items = _checked(dict, value, where).items()
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in items}
    if origin is typing.Literal:
        if value not in args:
            raise _Mismatch(f"{where} is {value!r}, not one of {', '.join(args)}")
        return value
    if kind is float:
        return float(_checked((int, float), value, where))
    return _checked(kind, value, where)


def _record(kind: type, value: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {
        field.name: _build(hints[field.name], value[field.name], f"{where}.{field.name}")
        for field in dataclasses.fields(kind)
        if field.name in value
    }
    try:
        return kind(**known)
    except TypeError as error:  # a field without a default is not there
        raise _Mismatch(f"{where}: {error}") from None


def _checked(kind: type | types.UnionType | tuple[type, ...], value: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _Mismatch(f"{where} is {type(value).__name__} {value!r}"[:120])
    return value
