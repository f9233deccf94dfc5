"""Write files that others read meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, fsync: bool = False) -> Iterator[Path]:
    """Give a path to write a file to, which takes the place of `path` when the block ends.

    A reader of `path` sees all of the file or none; after an exception `path` is as it was before.
    The permissions are those of any new file, where `tempfile` would keep it to its owner. With
    `fsync` the file is on the disk before it is in place, so a power cut leaves one of both whole.
    """
    # Processes of several machines or containers may share the folder, and a process id.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    try:
        yield scratch
        if fsync:
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file, and make its folder, by `replacing` it; or what a link points to. A device or a
    pipe is written to.

    Raises:
        OSError: the file is then as it was before.
    """
    path, given = path.resolve(), data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():
        path.write_bytes(given)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        scratch.write_bytes(given)


def check_writable(folder: Path) -> None:
    """Make the folder if it is missing, and in it a file that is removed at once.

    Raises:
        OSError: that cannot be done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder):
        pass
