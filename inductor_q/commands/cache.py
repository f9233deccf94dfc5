"""`qfuse cache pack|unpack FILE` carries compiled code to other machines that are alike."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers

FINGERPRINT = "fingerprint.json"
DIFFERS = 1

#: Libraries whose code is in the graphs, and so in the keys of the caches.
LIBRARIES = ("torch", "triton", "bitsandbytes", "peft", "transformers", "torchao")
#: What a process makes for itself: headers are only read by the compiler.
_LEFT_OUT = frozenset({"precompiled_headers", "locks"})
#: Begins the name of Triton's list of a kernel's files, which lie beside it. It has whole paths.
_GROUP = "__grp__"
_CHILDREN = "child_paths"

EPILOG = """\
The file has what Inductor, AOTAutograd, Triton and qfuse keep for the next
process in $TORCHINDUCTOR_CACHE_DIR, and a fingerprint of versions, processor,
GPU and compiler. Where one of them differs here, nothing in the file would be
found: unpack says which, unpacks nothing, and ends with status 1. A first step
that finds its graphs compiles nothing. The files are code that torch will run:
unpack those that you trust.
"""


def register(subparsers: Subparsers) -> None:
    about = "pack the compile caches into a file, or unpack them on a machine alike"
    parser = subparsers.add_parser(
        "cache",
        help=about,
        description=about,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("file", type=Path, metavar="FILE", help="such as caches.tar.gz")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    from inductor_q.exc import QfuseError, UnusableCaches

    try:
        return pack(args.file) if args.verb == "pack" else unpack(args.file)
    except QfuseError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        raise UnusableCaches(path=str(args.file), problem=str(error)) from None


def pack(path: Path) -> int:
    """Write all that Inductor's cache folder has, and the fingerprint before it."""
    import io

    from inductor_q.exc import UnusableCaches
    from inductor_q.files import replacing

    if not path.parent.is_dir():
        raise UnusableCaches(path=str(path), problem=f"there is no folder {path.parent}")
    root = _folder()
    files = [file for file in sorted(root.rglob("*")) if _travels(file, root)]
    if not files:
        raise UnusableCaches(path=str(path), problem=f"{root} is empty: compile something before")
    told = json.dumps(fingerprint(), indent=1).encode()
    with replacing(path) as scratch, tarfile.open(scratch, "w:gz", compresslevel=1) as archive:
        head = tarfile.TarInfo(FINGERPRINT)
        head.size = len(told)
        archive.addfile(head, io.BytesIO(told))
        for file in files:
            archive.add(file, f"cache/{file.relative_to(root)}", recursive=False)
    if elsewhere := _elsewhere(root):
        print(f"left out: Triton's kernels, which are in {elsewhere}")
    print(f"packed {len(files)} files of {root}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


def unpack(path: Path) -> int:
    """Put the files into Inductor's cache folder, where they are not there already."""
    from inductor_q.exc import UnusableCaches
    from inductor_q.files import write_whole

    root, written = _folder(), 0
    with tarfile.open(path, "r:gz") as archive:
        head = archive.next()
        if head is None or head.name != FINGERPRINT or not head.isfile():
            raise UnusableCaches(path=str(path), problem="it has no fingerprint")
        told = json.loads(_read(archive, head))
        if not isinstance(told, dict):
            raise UnusableCaches(path=str(path), problem="its fingerprint is damaged")
        differing = list(_differing(told, fingerprint()))
        if differing:
            print("nothing unpacked, since nothing would be found:", *differing, sep="\n  ")
            return DIFFERS
        for member in archive:
            if member is head:  # iterating begins anew
                continue
            target = (root / member.name.removeprefix("cache/")).resolve()
            if not member.isfile() or not target.is_relative_to(root.resolve()):
                raise UnusableCaches(path=str(path), problem=f"it has {member.name!r}")
            if not target.exists():  # a process may run what is there
                data = _read(archive, member)
                write_whole(target, _moved(data, target.parent) if _is_group(target) else data)
                written += 1
    if elsewhere := _elsewhere(root):
        print(f"Triton's kernels in it are not found: Triton looks for them in {elsewhere}")
    print(f"unpacked {written} files into {root}")
    return 0


def fingerprint() -> dict[str, str]:
    """Return what has to be equal for the caches of one machine to be found on another."""
    import torch

    from inductor_q.cache import source_digest
    from inductor_q.csrc.build import compiler, toolchain

    devices = range(torch.cuda.device_count())
    gpus = {str(torch.cuda.get_device_properties(i).name) for i in devices}
    return {
        "python": platform.python_version().rpartition(".")[0],
        "machine": platform.machine(),
        **{name: _version(name) for name in LIBRARIES},
        "qfuse": source_digest()[:16],
        "CUDA": str(torch.version.cuda),
        "GPU": ", ".join(sorted(gpus)) or "none",
        "compiler and processor": toolchain(compiler()),
    }


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _differing(packed: dict[str, str], here: dict[str, str]) -> Iterator[str]:
    for part in sorted({*packed, *here}):
        there, own = packed.get(part, "none"), here.get(part, "none")
        if there != own:
            yield f"{part}: {there} in the file, {own} here"


def _travels(file: Path, root: Path) -> bool:
    inside = file.relative_to(root)
    return (
        file.is_file()
        and not file.is_symlink()
        and file.suffix != ".lock"
        and not file.name.startswith(".")  # what a process is writing
        and _LEFT_OUT.isdisjoint(inside.parts)
    )


def _is_group(file: Path) -> bool:
    return file.name.startswith(_GROUP)


def _moved(group: bytes, folder: Path) -> bytes:
    """Let Triton's list of a kernel's files name those in `folder`; to Triton a damaged one is
    none."""
    try:
        told = json.loads(group)
        children = {name: str(folder / Path(path).name) for name, path in told[_CHILDREN].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return group
    return json.dumps({**told, _CHILDREN: children}).encode()


def _elsewhere(root: Path) -> str:
    """Return where Triton keeps kernels by its variable; "" where that is in Inductor's folder."""
    from inductor_q.kept import TRITON

    given = os.environ.get(TRITON)
    inside = not given or Path(given).resolve().is_relative_to(root.resolve())
    return "" if inside else f"{given} (${TRITON})"


def _folder() -> Path:
    from inductor_q import kept

    return kept.folder().parent


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, f"{member.name=} is a file"
    return file.read()
