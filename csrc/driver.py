"""Load compiled kernels into a device and launch them, through CUDA's driver interface.

A launch costs the host a few microseconds: arguments are packed once, pointers are filled in. It
goes to torch's current stream of its device, whichever is current, and waits for nothing.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from inductor_q.csrc import nvrtc

_INVALID_CONTEXT, _INVALID_HANDLE = 201, 400
_CAPTURE_RELAXED = 2
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


@functools.cache
def _cuda() -> Any:
    """Return the driver, which torch has loaded already."""
    import sys

    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(function: str, *arguments: object) -> None:
    code = getattr(_cuda(), function)(*arguments)
    if code:
        raise RuntimeError(f"{function}: {_error(code)}")


def _error(code: int) -> str:
    name = ctypes.c_char_p()
    _cuda().cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"CUDA error {code}"


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    """Return the device's primary context, which is torch's."""
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuDeviceGet", ctypes.byref(ordinal), device)
    _check("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    return context


@contextmanager
def _current(device: int) -> Iterator[None]:
    """Enter `device`'s context and a mode in which a thread that captures a graph may load code."""
    _check("cuCtxPushCurrent_v2", _context(device))
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    try:
        _check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            _check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    finally:
        _check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


_lock = threading.Lock()
_functions: dict[tuple[str, str, int, str], ctypes.c_void_p | str] = {}


def function(source: str, kernel: str, device: int, arch: str = "") -> ctypes.c_void_p | str:
    """Compile `kernel` of `csrc/<source>` and load it into a CUDA device; return it or why not.

    arch: the architecture to compile for, as "sm_90a"; the device's own if empty.
    """
    key = (source, kernel, device, arch)
    with _lock:
        if key not in _functions:
            _functions[key] = _load(*key)
        return _functions[key]


def _load(source: str, kernel: str, device: int, arch: str) -> ctypes.c_void_p | str:
    arch = arch or nvrtc.arch_of(torch.cuda.get_device_capability(device))
    cubin = nvrtc.compile(source, kernel, arch)
    if isinstance(cubin, str):
        return cubin
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        with _current(device):
            _check("cuModuleLoadData", ctypes.byref(module), cubin.image)
            name = cubin.name.encode()
            _check("cuModuleGetFunction", ctypes.byref(handle), module, name)
    except (OSError, RuntimeError) as error:
        return f"csrc/{source} for {arch} was not loaded into device {device}: {error}"
    return handle


def _allow_shared(handle: ctypes.c_void_p, device: int, count: int) -> None:
    """Let `handle` be launched with `count` bytes of dynamic shared memory, or more if it may."""
    limit = ctypes.c_int()
    with _current(device):
        which = _MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check("cuFuncGetAttribute", ctypes.byref(limit), which, handle)
        if count > limit.value:
            _check("cuFuncSetAttribute", handle, which, count)


class _Attribute(ctypes.Structure):
    """A CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """A CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),  # of the grid, of a block, of its shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Launch:
    """A kernel with its grid and arguments, of which `pointers` pointers come first and vary.

    grid: programs along x, or along x, y and z. numbers: int64, behind the pointers. shared: bytes
    of dynamic shared memory. early: the kernel may begin while the one before it in the stream runs
    (from sm_90 on), and waits by itself before it reads what that one writes.

    Raises RuntimeError where the device has less shared memory than that.
    """

    def __init__(
        self,
        handle: ctypes.c_void_p,
        device: int,
        *,
        grid: int | tuple[int, int, int],
        threads: int,
        pointers: int,
        numbers: Sequence[int],
        shared: int = 0,
        early: bool = False,
    ) -> None:
        if isinstance(grid, int):
            grid = (grid, 1, 1)
        _allow_shared(handle, device, shared)
        self._values = (ctypes.c_int64 * (pointers + len(numbers)))(*[0] * pointers, *numbers)
        start, step = ctypes.addressof(self._values), ctypes.sizeof(ctypes.c_int64)
        places = [start + i * step for i in range(len(self._values))]
        arguments = (ctypes.c_void_p * len(places))(*places)
        self._config = _Config((ctypes.c_uint * 7)(*grid, threads, 1, 1, shared))
        if early and torch.cuda.get_device_capability(device) >= (9, 0):
            attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
            attribute.value[0] = 1
            self._config.attributes, self._config.count = ctypes.pointer(attribute), 1
        self._device = device
        self._pack = struct.Struct(f"{pointers}Q").pack_into
        # Drivers have it since CUDA 11.8, so all that torch 2.11 runs on do. ctypes hands on
        # references as they are where a function has no types of arguments.
        self._call = _cuda().cuLaunchKernelEx
        function: Any = ctypes.c_void_p.from_param(handle.value)
        self._given = (ctypes.byref(self._config), function, ctypes.byref(arguments), None)
        self._lock = threading.Lock()  # threads share the pointers and the stream

    def __call__(self, *pointers: int) -> None:
        """Launch on the device's current stream."""
        device = self._device
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return self(*pointers)
        with self._lock:
            self._config.stream = torch._C._cuda_getCurrentRawStream(device)
            self._pack(self._values, 0, *pointers)
            code = self._call(*self._given)
            if code in (_INVALID_CONTEXT, _INVALID_HANDLE):  # a thread new to CUDA
                _check("cuCtxSetCurrent", _context(device))
                code = self._call(*self._given)
        if code:
            raise RuntimeError(f"cuLaunchKernelEx: {_error(code)}")
