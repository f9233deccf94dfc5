"""inductor_q.files: all of a file or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inductor_q.files import check_writable, replacing, write_whole


@pytest.mark.parametrize("fsync", [False, True])
def test_a_file_is_replaced_when_the_block_ends(fsync: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path, fsync=fsync) as scratch:
        scratch.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as scratch:
        scratch.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "any").write_text("")
    with replacing(tmp_path / "file") as scratch:
        scratch.write_text("")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_whole(link, "after")
    assert link.is_symlink() and target.read_text() == "after"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "sent")
    assert os.read(reader, 9) == b"sent" and pipe.is_fifo()
    os.close(reader)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert os.listdir(tmp_path / "new" / "folder") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        check_writable(tmp_path / "file" / "folder")
