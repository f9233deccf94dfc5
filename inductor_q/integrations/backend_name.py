"""Let accelerate take "qfuse" where it asks for the name of a backend.

Its names are an enumeration, which refuses every other one, backends that packages register with
torch among them (docs/upstream.md has a patch).
"""

from __future__ import annotations

from typing import Any

NAME = "QFUSE"


def name_backend() -> bool:
    """Make the name known; return whether it was not before."""
    from accelerate.utils.dataclasses import DynamoBackend

    if NAME in DynamoBackend._value2member_map_:
        return False
    member: Any = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    DynamoBackend._value2member_map_[NAME] = member
    return True


def forget_backend() -> None:
    """Undo `name_backend`."""
    from accelerate.utils.dataclasses import DynamoBackend

    DynamoBackend._value2member_map_.pop(NAME, None)
