"""Act as soon as a module has been imported, without importing it."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


@contextlib.contextmanager
def after_import(name: str, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` when module `name` has been executed inside the block; at once if it was before.

    So an observer is in place before anything of a library runs, and a library reads the
    environment variables that a target sets before its imports.
    """
    finder = on_import(name, act)
    try:
        yield
    finally:
        finder.leave()


def on_import(name: str, act: Callable[[], object]) -> Finder:
    """Call `act` once, when module `name` has been executed, or at once if it was before."""
    finder = Finder(name, act)
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, finder)
    return finder


class Finder(MetaPathFinder):
    """Find one module as everybody else does, and put our loader around its loader."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self.name = name
        self.act = act

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        self.leave()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.act)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, act: Callable[[], object]) -> None:
        self.loader = loader
        self.act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.act()
