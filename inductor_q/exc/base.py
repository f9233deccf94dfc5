"""What every error of this library is: a message template and the fields it speaks of."""

from __future__ import annotations

import difflib
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from typing_extensions import dataclass_transform


class _Template(string.Formatter):
    """Format with `str.format` over the attributes of an error; `!j` joins items by commas."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(args[0], str(key))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "j":
            return ", ".join(map(str, value))
        return super().convert_field(value, conversion)


@dataclass_transform(kw_only_default=True, eq_default=False)
class QfuseError(Exception):
    """The base of every error that a user of qfuse can cause.

    Subclasses also derive from the builtin that a caller would catch without knowing us: ValueError
    for a value, TypeError for a dtype, KeyError for a name that is in no registry.
    """

    message: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(kw_only=True, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        self.args = (str(self),)

    def __str__(self) -> str:  # first in the MRO, so KeyError does not quote the message
        return _Template().vformat(self.message, (self,), {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})  # type: ignore[arg-type]


def _rebuild(cls: type[QfuseError], values: Mapping[str, Any]) -> QfuseError:
    return cls(**values)


class Sourced(QfuseError):
    """`source` says where a value was read, when not in the call ("environment variable X")."""

    source: str = ""

    @property
    def where(self) -> str:
        return f" in {self.source}" if self.source else ""


class UnknownName(Sourced, ValueError, KeyError):
    name: str
    known: Collection[str]
    most: ClassVar[int] = 12  # of the known names, that `some` lists

    @property
    def some(self) -> Collection[str]:
        return first_few(self.known, self.most)

    @property
    def hint(self) -> str:
        near = difflib.get_close_matches(self.name, list(self.known), n=3, cutoff=0.6)
        return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def first_few(items: Collection[str], most: int = 12) -> list[str]:
    """Return the items, or as many as one reads and the number of the others."""
    known = list(items)
    return known if len(known) <= most else [*known[:most], f"and {len(known) - most} more"]
