"""Import the libraries that only some builders need."""

from __future__ import annotations

import importlib
from typing import Any

from inductor_q.exc import MissingExtra


def bitsandbytes() -> Any:
    """Return bitsandbytes as Any.

    Its annotations are partial, and strict type checks would drown in them.
    """
    return imported("bitsandbytes", "bnb")


def imported(package: str, extra: str) -> Any:
    """Return a package that one of our extras installs, or say which one."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and lacks something itself
            raise
        raise MissingExtra(package=package, extra=extra, feature="building this model") from error
