"""Compile a CUDA source of this folder at first use with NVRTC, cached by content.

NVRTC comes with every CUDA build of torch, so no nvcc is needed, and it compiles for a device that
this machine does not have. One kernel is compiled at a time, for one exact architecture. The result
is kept (`inductor_q.kept`) under a name that hashes source, headers, options, architecture and
compiler; where it cannot be kept it stays in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import hashlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from inductor_q import kept

#: Products and sums are not contracted: results equal the eager reference bit for bit.
OPTIONS = ("--std=c++17", "--fmad=false")


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel, and the mangled name it has there."""

    name: str
    image: bytes


_lock = threading.Lock()
_compiled: dict[tuple[str, str, str], Cubin | str] = {}


def compile(source: str, kernel: str, arch: str) -> Cubin | str:
    """Compile `kernel`, an expression as "f<4, true>", of `csrc/<source>` for `arch`, as "sm_90".

    Where that fails, return the reason: no NVRTC, an unknown architecture, the compiler's log.
    """
    key = (source, kernel, arch)
    with _lock:  # threads that want the same kernel wait for it instead of compiling it again
        if key not in _compiled:
            _compiled[key] = _load_or_compile(source, kernel, arch)
        return _compiled[key]


def arch_of(capability: tuple[int, int]) -> str:
    """Return the architecture to compile for: the device's own, or the newest of its major version
    that the compiler knows, whose code it runs too. With "a" behind it ("sm_90a") it also has the
    instructions that no other architecture has (wgmma).
    """
    nvrtc = library()
    exact = 10 * capability[0] + capability[1]
    if isinstance(nvrtc, str):
        return f"sm_{exact}"
    usable = [a for a in nvrtc.archs if a // 10 == capability[0] and a <= exact]
    return f"sm_{max(usable, default=exact)}"


def _load_or_compile(source: str, kernel: str, arch: str) -> Cubin | str:
    nvrtc = library()
    if isinstance(nvrtc, str):
        return nvrtc
    folder = Path(__file__).parent
    text = (folder / source).read_bytes()
    headers = {path.name: path.read_bytes() for path in sorted(folder.glob("*.cuh"))}
    options = (f"--gpu-architecture={arch}", *OPTIONS)
    name = _file_name(source, text, headers, (*nvrtc.version, kernel, *options))
    found = _read(name)
    if found is None:
        try:
            found = nvrtc.compile(source, text, headers, kernel, options)
        except RuntimeError as error:
            return f"csrc/{source} was not compiled for {arch} ({kernel}): {error}"
        kept.keep(name, found.name.encode() + b"\0" + found.image)
    return found


# --- the cache ----------------------------------------------------------------------------------


def _file_name(source: str, text: bytes, headers: dict[str, bytes], rest: Sequence[object]) -> str:
    digest = hashlib.sha256()
    for part in (text, *(b for item in headers.items() for b in (item[0].encode(), item[1]))):
        digest.update(hashlib.sha256(part).digest())
    digest.update(repr(tuple(rest)).encode())
    return f"{Path(source).stem}-{digest.hexdigest()[:20]}.cubin"


def _read(name: str) -> Cubin | None:
    body = kept.read(name)
    if body is None:
        return None
    mangled, _, image = body.partition(b"\0")
    return Cubin(mangled.decode(), image)


# --- the compiler -------------------------------------------------------------------------------


class Nvrtc:
    """The functions of one NVRTC library."""

    def __init__(self, path: str) -> None:
        # The compiler looks for its built-in functions by name alone; loaded, they are found.
        if os.sep in path:
            for builtins in sorted(Path(path).parent.glob("*nvrtc-builtins*")):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.path = path
        self.version = (major.value, minor.value)
        self.archs = tuple(archs)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            reason = self._library.nvrtcGetErrorString(code).decode()
            raise RuntimeError(f"{function}: {reason}")

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        """Return what `nvrtcGet<what>` writes into a buffer of `nvrtcGet<what>Size`."""
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def compile(
        self,
        source: str,
        text: bytes,
        headers: dict[str, bytes],
        kernel: str,
        options: Sequence[str],
    ) -> Cubin:
        """Compile one kernel; raise RuntimeError with the compiler's log."""
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            text,
            source.encode(),
            len(headers),
            _strings(headers.values()),
            _strings(name.encode() for name in headers),
        )
        try:
            self._call("nvrtcAddNameExpression", program, kernel.encode())
            try:
                flags = _strings(option.encode() for option in options)
                self._call("nvrtcCompileProgram", program, len(options), flags)
            except RuntimeError as error:
                said = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise RuntimeError(f"{error}\n{said.strip()}") from None
            name = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(name))
            assert name.value is not None
            return Cubin(name.value.decode(), self._text(program, "CUBIN"))
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))


def _strings(items: Iterable[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    values = list(items)
    return (ctypes.c_char_p * len(values))(*values)


@functools.cache
def library() -> Nvrtc | str:
    """Load NVRTC from torch's wheels, the toolkit or the system; else return why there is none."""
    failed = []
    for path in _places():
        found = _open(path)
        if isinstance(found, Nvrtc):
            return found
        failed.append(found)
    where = f": {'; '.join(failed)}" if failed else ""
    return f"NVRTC was not found (torch for CUDA brings it, as does nvidia-cuda-nvrtc){where}"


def missing() -> str:
    """Return why there is no NVRTC; empty where there is one."""
    found = library()
    return found if isinstance(found, str) else ""


def _open(path: str) -> Nvrtc | str:
    try:
        return Nvrtc(path)
    except (OSError, AttributeError, RuntimeError) as error:
        return f"{path}: {error}"


def _places() -> Iterator[str]:
    """Yield the files that NVRTC may be in, first those of the CUDA that torch was built for."""
    import torch

    folders: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += [*Path(root).glob("*/lib"), *Path(root).glob("*/bin")]
    folders.append(Path(torch.__file__).parent / "lib")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    folders += [Path(home, "lib64"), Path(home, "bin")]
    found = [p for f in folders for pattern in _NAMES for p in sorted(f.glob(pattern))]
    major = (torch.version.cuda or "").partition(".")[0]
    yield from map(str, sorted(found, key=lambda p: major not in re.findall(r"\d+", p.name)))
    if system := ctypes.util.find_library("nvrtc"):
        yield system


_NAMES = ("libnvrtc.so*", "nvrtc64_*_0.dll")
