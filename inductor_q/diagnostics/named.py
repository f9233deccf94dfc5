"""Find what `package.module:path.to.function` names."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


class NotNamed(Exception):
    """A name names no function; the text says why."""


def named(name: str) -> Callable[..., Any]:
    """Return the function of that name. What its module raises when it is imported is not caught.

    Raises:
        NotNamed: there is none.
    """
    module, _, path = name.partition(":")
    if not module or not path:
        raise NotNamed("no function is named")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there and lacks something itself
        raise NotNamed(f"there is no module {error.name!r}") from error
    try:
        found = functools.reduce(getattr, path.split("."), found)
    except AttributeError as error:
        raise NotNamed(str(error)) from error
    if not callable(found):
        raise NotNamed(f"a {type(found).__name__} cannot be called")
    function: Callable[..., Any] = found
    return function
