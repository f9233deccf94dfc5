"""Files that others read while they are written."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file, and its folder, so that a reader sees all of it or none.

    Its permissions are those of any new file, where `tempfile` would keep it to its owner.

    Raises:
        OSError: the file is then as it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        scratch.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
