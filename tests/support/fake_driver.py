"""Stand in for CUDA's driver: write down what a prepared launch calls."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inductor_q.csrc import driver


class FakeDriver:
    """Take the place of the driver and of torch's current device.

    launched: pointers and numbers of each launch. configured: of those with attributes, the sizes
    and the first attribute with its value. current: the device that was current then. streams:
    where they were launched, `stream` being current. codes: what the next launches return, the last
    of them for good.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int | None = None) -> None:
        self.launched: list[tuple[int, ...]] = []
        self.configured: list[tuple[int, ...]] = []
        self.current: list[int | None] = []
        self.streams: list[int | None] = []
        self.stream = 0
        self.codes = [0]
        self.device = device
        device_of, stream_of = "_cuda_getDevice", "_cuda_getCurrentRawStream"
        monkeypatch.setattr(torch._C, device_of, lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, stream_of, lambda _: self.stream, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self._switched)
        monkeypatch.setattr(driver, "_cuda", lambda: self)
        monkeypatch.setattr(driver, "_context", lambda _: None)

    @contextlib.contextmanager
    def _switched(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:
        places = [ctypes.cast(place, ctypes.POINTER(ctypes.c_int64)) for place in arguments._obj]
        self.launched.append(tuple(place.contents.value for place in places))
        self.current.append(self.device)
        words = ctypes.cast(config, ctypes.POINTER(ctypes.c_uint))
        pointers = ctypes.cast(config, ctypes.POINTER(ctypes.c_void_p))
        self.streams.append(pointers[4])
        if words[12]:
            attribute = ctypes.cast(pointers[5], ctypes.POINTER(ctypes.c_int))
            self.configured.append((*words[:7], attribute[0], attribute[2]))
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

    def __getattr__(self, name: str) -> Any:
        return lambda *given: 0
