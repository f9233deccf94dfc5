"""Make docs/explain.schema.json from the dataclasses of explanation.py (`make docs` writes it)."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

from inductor_q.diagnostics.explanation import SCHEMA_VERSION, Explanation

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema() -> dict[str, Any]:
    """Make the JSON Schema (2020-12) for `render.json.to_json`: every field of every class."""
    definitions: dict[str, Any] = {}
    _define(Explanation, definitions)
    top = definitions.pop(Explanation.__name__)
    top["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A report of qfuse explain",
        **top,
        "$defs": dict(sorted(definitions.items())),
    }


def _define(kind: type, definitions: dict[str, Any]) -> None:
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    description = inspect.getdoc(kind)
    assert description and not description.startswith(f"{kind.__name__}("), f"describe {kind=}"
    definitions[kind.__name__] = {
        "description": " ".join(description.split()),
        "type": "object",
        "properties": {name: _type(hints[name], definitions) for name in fields},
        "required": fields,
    }


def _type(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        if kind.__name__ not in definitions:
            _define(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is tuple:
        return {"type": "array", "items": _type(args[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(args[1], definitions)}
    if origin is typing.Literal:
        return {"enum": list(args)}
    return {"type": _SCALARS[kind]}
