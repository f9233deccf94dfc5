"""Keep files for the next process, beside Inductor's cache: compiled kernels and reports.

A file ends in the digest of what precedes it and appears by an atomic rename, so processes may race
or die, and a damaged file counts as none. Where the folder cannot be written, nothing is kept: that
is logged once, and is no error. What Triton compiles it keeps itself, and is told where.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from inductor_q.files import write_whole
from inductor_q.log import warn_once

if TYPE_CHECKING:
    import torch

#: The variable that says where Triton keeps kernels.
TRITON = "TRITON_CACHE_DIR"


def folder() -> Path:
    """Return the folder, which may not exist yet.

    Raises:
        OSError: the folder around it, which is Inductor's, cannot be made.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "qfuse"


def read(name: str) -> bytes | None:
    """Return what was kept under `name`; None where there is nothing, or not what was written."""
    try:
        content = (folder() / name).read_bytes()
    except OSError:
        return None
    data, _, seal = content.rpartition(b"\n")
    return data if seal == _seal(data) else None


def is_there(name: str) -> bool:
    """Return whether there is a file for `name`, whole or damaged."""
    try:
        return (folder() / name).exists()
    except OSError:
        return False


def keep(name: str, data: bytes) -> Path | None:
    """Keep `data` under `name`, and return its path; None where that cannot be done."""
    try:
        path = folder() / name
        write_whole(path, data + b"\n" + _seal(data))
    except OSError as error:
        _tell(error)
        return None
    return path


def keep_triton_kernels(device: torch.device) -> None:
    """Have Triton keep what it compiles on a GPU in Inductor's folder, unless a folder is set.

    Inductor sets the same variable, for the GPU of the first kernel that it makes. A process that
    finds all of its graphs in the cache makes none, and would compile our kernels again.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    if device.type != "cuda":
        return
    try:
        os.environ.setdefault(TRITON, triton_cache_dir(device.index or 0))
    except OSError as error:
        _tell(error)


def _tell(error: OSError) -> None:
    warn_once(f"nothing is kept for the next process: {error.strerror or error}")


def _seal(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
