"""Find what `package.module:path.to.function` names."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inductor_q.exc import NotAModelFactory

if TYPE_CHECKING:
    from torch import nn


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


def build(name: str) -> nn.Module:
    """Build the model with the function `package.module:function`.

    As with `python -m`, modules of the current folder can be imported. What the user's code raises
    is not caught.
    """
    from torch import nn

    sys.path.insert(0, "")
    try:
        factory = named(name)
    except NotNamed as error:
        raise NotAModelFactory(name=name, problem=str(error)) from None
    try:
        inspect.signature(factory, follow_wrapped=False).bind()
    except TypeError as error:
        raise NotAModelFactory(name=name, problem=f"it takes arguments ({error})") from None
    except ValueError:
        pass  # a callable in C that does not say what it takes
    model = factory()
    if not isinstance(model, nn.Module):
        raise NotAModelFactory(name=name, problem=f"it returned a {type(model).__name__}")
    return model
