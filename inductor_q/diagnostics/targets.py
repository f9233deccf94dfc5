"""Run a target in this process as Python itself would.

A target is a script, `-m module`, `module:callable` or a pytest node. sys.argv, sys.path[0],
`__main__`, the output, the exit status, the traceback and the death by a signal are the target's;
what was there before comes back afterwards.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import importlib.util
import inspect
import io
import linecache
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inductor_q.diagnostics.explanation import Exit
from inductor_q.diagnostics.named import NotNamed, build, named
from inductor_q.exc import InvalidInputs, MissingExtra, QfuseError, UnknownTarget

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Target:
    """Name what to run: `kind` is "script", "module", "callable" or "pytest"."""

    kind: str
    name: str
    args: tuple[str, ...] = ()
    inputs: str = ""

    @classmethod
    def parse(cls, command: Sequence[str], *, inputs: str = "") -> Target:
        """Read a target from the words of the command line.

        These are `script.py a b`, `-m module a b`, `package.module:callable` or
        `tests/test_x.py::test_y`.
        """
        name, *args = command or ("",)
        kind = "script"
        if name == "-m":
            if not args:
                raise UnknownTarget(target="-m", problem="no module is named after it")
            kind, name, args = "module", args[0], args[1:]
        elif "::" in name:
            kind = "pytest"
        elif ":" in name and not os.path.exists(name):
            kind = "callable"
        if inputs and kind != "callable":
            raise UnknownTarget(target=name, problem="--inputs is for a target module:callable")
        return cls(kind, name, tuple(args), inputs)

    def __str__(self) -> str:
        return f"-m {self.name}" if self.kind == "module" else self.name

    def run(self, *, at_end: Callable[[], object] = lambda: None) -> Exit:
        """Run it to its end and return how it ended.

        Errors of the target are printed as Python prints them; those of the call (no such file)
        raise.

        Args:
            at_end: called when the target is over and its `__main__` still there.

        Raises:
            UnknownTarget, InvalidInputs: it cannot be run at all.
            MissingExtra: a pytest node without pytest.
        """
        prepare = {
            "script": _script,
            "module": _module,
            "callable": _callable,
            "pytest": _pytest,
        }[self.kind]
        with _restored():
            body = prepare(self)
            process = os.getpid()
            ended = _guarded(body)
            if os.getpid() != process:  # a child that the target forked came back through us
                raise SystemExit(ended.status)
            at_end()
            return ended


# --- the four kinds -------------------------------------------------------------------------------


def _script(target: Target) -> Callable[[], Any]:
    path = target.name
    if not os.path.exists(path):
        raise UnknownTarget(target=path, problem="no such file")
    _set_argv(path, target.args)
    _set_path(os.path.dirname(os.path.realpath(path)))
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        return lambda: runpy.run_path(path, run_name="__main__")
    module = _main_module(os.fspath(path))

    def body() -> None:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
        linecache.getlines(path)  # kept, should the script leave the folder of a relative path
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)

    return body


def _module(target: Target) -> Callable[[], Any]:
    _set_path(os.getcwd())
    spec = _find_spec(target.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{target.name}.__main__")
    get_code = getattr(getattr(spec, "loader", None), "get_code", None)
    if spec is None or get_code is None:
        raise UnknownTarget(target=f"-m {target.name}", problem="no module of that name to run")
    _set_argv(spec.origin or target.name, target.args)
    module = _main_module(spec.origin)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, spec.parent
    return lambda: exec(get_code(spec.name), module.__dict__)


def _callable(target: Target) -> Callable[[], Any]:
    _set_path(os.getcwd())
    _set_argv(target.name, target.args)

    def body() -> None:
        function = _named(target.name)
        args, kwargs = _arguments(target)
        _check_call(target, function, args, kwargs)
        function(*args, **kwargs)

    return body


def _pytest(target: Target) -> Callable[[], Any]:
    try:
        import pytest
    except ModuleNotFoundError as error:
        raise MissingExtra(package="pytest", extra="test", feature="running a test") from error
    _set_path(os.getcwd())
    _set_argv("pytest", (target.name, *target.args))
    return lambda: sys.exit(int(pytest.main([target.name, *target.args])))


def _find_spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent that is no package
        return None


def _named(name: str) -> Any:
    try:
        return named(name)
    except NotNamed as error:
        raise UnknownTarget(target=name, problem=str(error)) from error


def _arguments(target: Target) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the --inputs factory returns: a tuple of arguments, or (arguments, keywords)."""
    if not target.inputs:
        return (), {}
    found = _named(target.inputs)()
    match found:
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
        case tuple():
            return found, {}
    raise InvalidInputs(factory=target.inputs, got=type(found).__name__)


def _check_call(target: Target, function: Any, args: Any, kwargs: Any) -> None:
    """Check that the function takes the arguments that there are."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin may have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if target.inputs:
            raise InvalidInputs(
                factory=target.inputs, got=f"tuple that does not fit: {error}"
            ) from None
        hint = "--inputs MODULE:FUNCTION, before the target, names what makes its arguments"
        raise UnknownTarget(target=target.name, problem=f"{error}; {hint}") from None


# --- how it ends ----------------------------------------------------------------------------------


def _guarded(body: Callable[[], Any]) -> Exit:
    """Run `body` and turn whatever leaves it into an `Exit`."""
    before = set(threading.enumerate())
    try:
        try:
            body()
        finally:
            _join_threads(before)
    except SystemExit as error:
        return _system_exit(error)
    except (UnknownTarget, InvalidInputs):
        raise
    except KeyboardInterrupt as error:
        _print(error)
        return Exit(128 + signal.SIGINT, "KeyboardInterrupt", "SIGINT")
    except BaseException as error:
        _print(error)
        return Exit(1, _one_line(error))
    return Exit(0)


def built(name: str) -> nn.Module | None:
    """Build the model with the function `package.module:function`. Where the user's code fails, its
    error is printed as Python prints it, and there is no model.

    Raises:
        NotAModelFactory: it names no function, or that returns no model.
    """
    try:
        return build(name)
    except QfuseError:
        raise
    except Exception as error:
        _print(error)
        return None


def _system_exit(error: SystemExit) -> Exit:
    """Read a status as the interpreter does.

    None is 0, a number is itself, and anything else is printed and gives 1.
    """
    if error.code is None:
        return Exit(0)
    if isinstance(error.code, int):
        return Exit(error.code & 0xFF)
    print(error.code, file=sys.stderr)
    return Exit(1)


def _print(error: BaseException) -> None:
    """Print the traceback through the target's own hook, from its first frame on."""
    trace = _without_ours(error.__traceback__)
    sys.stdout.flush()
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.stderr.flush()


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of the observer.

    Those are the frames that ran the target, and the one around the call of a compiler.
    """
    kept = [t for t in _each(trace) if not _is_ours(t)]
    for outer, inner in zip(kept, [*kept[1:], None], strict=False):
        outer.tb_next = inner
    return kept[0] if kept else None


def _each(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(trace: types.TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return os.path.dirname(os.path.abspath(file)) == os.path.dirname(os.path.abspath(__file__))


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _join_threads(before: set[threading.Thread]) -> None:
    """Wait for the threads that the interpreter waits for on its way out: they may compile.

    The workers of a pool are left out, such as the one in which Inductor compiles C++: they wait
    for work until the interpreter, on its way out, signals them that none will come.
    """
    workers = concurrent.futures.thread._threads_queues
    left_alone = {*before, threading.current_thread(), *workers}
    for thread in threading.enumerate():
        if thread not in left_alone and not thread.daemon:
            thread.join()


# --- what a target may look at --------------------------------------------------------------------


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    argv, path, main = list(sys.argv), list(sys.path), sys.modules.get("__main__")
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main


def _set_argv(name: str, args: Sequence[str]) -> None:
    sys.argv[:] = [os.fspath(name), *args]


def _set_path(folder: str) -> None:
    if not sys.flags.safe_path if hasattr(sys.flags, "safe_path") else not sys.flags.isolated:
        sys.path[0] = folder


def _main_module(file: str | None) -> types.ModuleType:
    """Make a fresh `__main__`, which pickling and spawned processes look for."""
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=file, __builtins__=__builtins__, __cached__=None, __spec__=None, __package__=None
    )
    sys.modules["__main__"] = module
    return module


__all__ = ["Target"]
