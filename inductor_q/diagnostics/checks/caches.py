"""Check that compiled code can be kept: Inductor's cache folder, and ours inside it.

Nothing of torch is imported here: `torch._dynamo` makes the folder as it is imported, and cannot be
imported where that fails.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.files import check_writable

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
ENOUGH = 2**30  # a large model's kernels, graphs and autotuning results take hundreds of MB
ELSEWHERE = f"export {VARIABLE}=/a/folder/that/can/be/written"


def check() -> Iterator[Finding]:
    """Write a file into both folders, and check the space left."""
    yield writable("inductor cache", folder())
    yield writable("qfuse cache", folder() / "qfuse")


def folder() -> Path:
    """Return Inductor's folder for compiled code, by the rule of torch's cache_dir_utils."""
    if given := os.environ.get(VARIABLE):
        return Path(given).absolute()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = f"uid_{os.getuid()}"
    safe = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir(), f"torchinductor_{safe}")


def writable(name: str, folder: Path) -> Finding:
    """Check that a file can be made in `folder`, which is created as the compile would."""
    try:
        check_writable(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(name, "fail", f"{folder} cannot be written: {error.strerror}", ELSEWHERE)
    if free < ENOUGH:
        left = f"{folder} has {free / 2**20:.0f} MiB left"
        return Finding(name, "warn", left, ELSEWHERE)
    return Finding(name, "ok", str(folder))


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """Provide a folder meanwhile where there is none, so that the other checks can import torch."""
    if writable("", folder()).status != "fail":
        yield
        return
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[VARIABLE] = scratch
        try:
            yield
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before
