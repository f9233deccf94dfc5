"""What the command line was given and cannot use: targets, outputs, reports, caches, runs."""

from __future__ import annotations

from inductor_q.exc.base import QfuseError


class UnknownTarget(QfuseError, ValueError):
    """The target to run cannot be found, or cannot be run."""

    target: str
    problem: str
    message = (
        "cannot run {target!r}: {problem}. Give a script, -m module, package.module:callable or a "
        "pytest node (tests/test_x.py::test_y)"
    )


class InvalidInputs(QfuseError, TypeError):
    """A factory of inputs returned neither arguments nor arguments and keywords."""

    factory: str
    got: str
    message = (
        "{factory} returned a {got}. Return a tuple of arguments, or a pair of a tuple and a dict "
        "of keywords"
    )


class UnwritableOutput(QfuseError, OSError):
    """A file or folder to report to cannot be written, found out before the target runs."""

    option: str
    path: str
    problem: str
    message = "{option} {path} cannot be written: {problem}. Nothing was run"


class ClosedOutput(QfuseError, OSError):
    """The process was started without a standard output, as by `>&-`."""

    message = "standard output is closed. Send it somewhere, such as > /dev/null"


class NotAReport(QfuseError, ValueError):
    """The file was not written by `qfuse explain --json`."""

    path: str
    problem: str
    message = "{path} is not a report: {problem}. Write one with: qfuse explain --json FILE TARGET"


class UnknownReportVersion(QfuseError, ValueError):
    path: str
    version: object
    known: int
    message = (
        "{path} has schema_version {version}, this qfuse reads {known}. "
        "Write it again with this version: qfuse explain --json FILE TARGET"
    )


class UnusableCaches(QfuseError, ValueError):
    """A file of `qfuse cache` cannot be written or read."""

    path: str
    problem: str
    message = "caches in {path}: {problem}"


class NotAModelFactory(QfuseError, ValueError):
    name: str
    problem: str
    message = (
        "{name!r} is no model factory: {problem}. "
        "Give package.module:function, a function without arguments that returns the model"
    )


class BaseFailed(QfuseError, RuntimeError):
    """`qfuse tune` has nothing to hold other conditions against."""

    problem: str
    message = "the preset that ships gives no measurement: {problem}. Run the model by itself first"


class UnusableRuns(QfuseError, OSError):
    """The file in which `qfuse tune` remembers its runs cannot be read or written."""

    path: str
    problem: str
    message = (
        "the runs of qfuse tune in {path}: {problem}. Move away what is in the way, or set "
        "XDG_CONFIG_HOME to a folder that can be written to"
    )
