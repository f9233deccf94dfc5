"""What is kept for the next process: whole or not at all, and never in the way of this one."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from inductor_q import kept
from inductor_q.log import warn_once


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of our own, and nothing told yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    warn_once.cache_clear()
    return tmp_path / "cache" / "qfuse"


@pytest.mark.parametrize("data", [b"", b"\n", b"two\nlines", bytes(range(256))])
def test_what_was_kept_is_read(data: bytes, cache: Path) -> None:
    assert kept.read("a/file") is None and not kept.is_there("a/file")
    assert kept.keep("a/file", data) == cache / "a" / "file"
    assert kept.read("a/file") == data


def test_a_damaged_file_counts_as_none_until_it_is_kept_again(cache: Path) -> None:
    whole = (kept.keep("file", b"some text") or cache).read_bytes()
    for damaged in (*(whole[:n] for n in range(len(whole))), b"S" + whole[1:], whole + b"\n"):
        (cache / "file").write_bytes(damaged)
        assert kept.read("file") is None and kept.is_there("file")
    kept.keep("file", b"some text")
    assert kept.read("file") == b"some text"


def test_a_full_disk_is_said_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert kept.keep("a", b"") is None and kept.keep("b", b"") is None
    assert told == ["nothing is kept for the next process: No space left on device"]
    assert list(cache.iterdir()) == []


def test_the_folder_of_the_cache_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert kept.read("a") is None and not kept.is_there("a")
    assert kept.keep("a", b"") is None


def test_processes_of_two_machines_with_one_id(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks in containers share the folder, and often their process ids."""
    replace = os.replace
    waiting: list[tuple[Any, Any]] = []
    monkeypatch.setattr(os, "replace", lambda a, b: waiting.append((a, b)))
    kept.keep("file", b"the first")
    kept.keep("file", b"the second")
    for paths in waiting:
        replace(*paths)
        assert kept.read("file") in (b"the first", b"the second")


def test_triton_keeps_its_kernels_where_inductor_does(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = kept.TRITON
    monkeypatch.setenv(variable, "")  # so that it is put back
    monkeypatch.delenv(variable)
    kept.keep_triton_kernels(torch.device("cpu"))
    assert variable not in os.environ
    kept.keep_triton_kernels(torch.device("cuda:3"))
    assert os.environ[variable] == str(cache.parent / "triton" / "3")
    kept.keep_triton_kernels(torch.device("cuda:1"))
    assert os.environ[variable].endswith("3"), "what is set stays"


def test_triton_has_no_folder_where_none_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    monkeypatch.setenv(kept.TRITON, "")
    monkeypatch.delenv(kept.TRITON)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    kept.keep_triton_kernels(torch.device("cuda:0"))
    assert kept.TRITON not in os.environ
    assert told == ["nothing is kept for the next process: Not a directory"]
