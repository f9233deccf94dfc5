"""Write Triton code on a CPU, without a GPU to run it on: graphs run op by op instead."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

_LAUNCH = re.compile(r"^\s+(triton_\w+)\.run\(", re.MULTILINE)


class _Target:
    """Name a GPU for which Triton code is written."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def is_active() -> bool:
        return True


@contextlib.contextmanager
def triton_code() -> Iterator[list[str]]:
    """Compile graphs of CPU tensors to Triton; yield the code of each graph, in their order."""
    from triton.runtime import driver

    written: list[str] = []

    def to_module(lowered: GraphLowering) -> Any:
        code, _ = lowered.codegen()
        written.append(code.value)
        graph = torch.fx.Interpreter(lowered.module)
        lowered.cache_path, lowered.cache_linemap = __file__, []
        return SimpleNamespace(call=lambda args: graph.run(*args), __file__=__file__)

    settings = {"cpu_backend": "triton", "force_disable_caches": True}
    with (
        # Without a GPU there is no driver that could be asked for, nor put back.
        mock.patch.object(driver, "_active", _Target()),
        inductor_config.patch(settings),
        mock.patch.object(GraphLowering, "compile_to_module", to_module),
    ):
        yield written


def launches(code: str) -> list[str]:
    """Return the names of the kernels that code launches, without the numbers behind them."""
    return [re.sub(r"_\d+$", "", name) for name in _LAUNCH.findall(code)]
