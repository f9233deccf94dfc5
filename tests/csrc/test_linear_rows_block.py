"""csrc/linear_rows.cu on a CPU: the CUDA source compiled as C++, a program of fibers (block.h).

What it finds out about lanes, warps, tiles, turns and edges, it finds without a GPU: copies arrive
as late as they may, or at once, and warps go on in any order.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inductor_q.formats import FORMATS
from inductor_q.kernels import linear_rows_cuda
from tests.support.emulated import built, needs_compiler
from tests.support.few_rows import error, made

ROOT = Path(__file__).parents[2]
MOST_SHARED = 227 << 10  # of an H100
KERNELS = [
    *(
        f"linear<BFloat16, {scale}, {together}, {gated}, {height}>"
        for scale in ("Plain", "Nested")
        for gated in ("false", "true")
        for together, height in ((1, 1), (1, 2), (2, 1))
    ),
    *(f"project<BFloat16, {wide}, {rows}>" for wide in ("false", "true") for rows in (1, 8)),
]
#: What stands for each instruction of the source.
INSTRUCTIONS = {
    "mma.sync": "block::multiply(sum, a0, a1, a2, a3, b0, b1);",
    "cp.async.cg": "block::copy16(to, from);",
    "cp.async.ca": "block::copy4(to, from, count);",
    "cp.async.wait": "block::wait();",
    "ld.shared": "std::memcpy(&value, shared + address, 4);",
    "griddepcontrol": "",
}

SLOW = pytest.mark.slow

pytestmark = needs_compiler


def as_cpp(source: str) -> str:
    def stand_in(found: re.Match[str]) -> str:
        return next(text for name, text in INSTRUCTIONS.items() if name in found.group())

    return re.sub(r"\basm\b[^;]*?\(\".*?\);\n", stand_in, source, flags=re.DOTALL).replace(
        "extern __shared__", "extern"
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("block")
    text = as_cpp((ROOT / "csrc" / "linear_rows.cu").read_text())
    lines = ['#include "block.h"', text]
    for i, kernel in enumerate(KERNELS):
        arguments = "Arguments" if kernel.startswith("linear") else "Projections"
        lines.append(
            f"EXPORT void run{i}(int columns, int rows, const {arguments}* given, int at_once)"
            " { block::at_once = at_once;"
            f" block::run(columns, rows, [=] {{ {kernel}(*given); }}); }}"
        )
    return built(folder, lines)


@pytest.fixture(
    params=[pytest.param(False, id="late"), pytest.param(True, id="at once", marks=SLOW)]
)
def kernel(
    request: pytest.FixtureRequest, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The provider, whose launches of two or three programs run here."""

    def prepared(
        name: str, _: Any, grid: Any, pointers: int, numbers: tuple[int, ...], *__: Any
    ) -> Callable[..., None]:
        columns, rows = grid[:2] if isinstance(grid, tuple) else (grid, 1)

        def launch(*given: int) -> None:
            assert len(given) == pointers
            values = (ctypes.c_int64 * (pointers + len(numbers)))(*given, *numbers)
            library[f"run{KERNELS.index(name)}"](columns, rows, values, int(request.param))

        return launch

    monkeypatch.setattr(linear_rows_cuda, "_prepared", prepared)
    monkeypatch.setattr(linear_rows_cuda, "_most_shared", lambda _: MOST_SHARED)
    monkeypatch.setattr(linear_rows_cuda, "_programs", lambda tiles, _: min(tiles, 3))
    return linear_rows_cuda.KERNEL


#: Format, shape, ranks, dtype of the adapters, gated.
CASES: dict[str, tuple[Any, ...]] = {
    "plain": ("nf4_b64", (40, 320), (0,), None, False),
    "nested": ("nf4_b64_nested", (70, 4160), (0,), None, False),
    "three": ("nf4_b64_nested", (40, 320), (8, 0, 64), torch.bfloat16, False),
    "four": ("nf4_b64_nested", (17, 4096), (16, 8, 16, 4), torch.float32, False),
    "pair": ("nf4_b64_nested", (70, 320), (16, 0), torch.bfloat16, True),
    "long pair": ("nf4_b64_nested", (20, 4160), (32, 8), torch.float32, True),
}


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=SLOW), 9, pytest.param(18, marks=SLOW)])
@pytest.mark.parametrize("case", CASES)
def test_the_source_against_float64(kernel: Any, case: str, rows: int) -> None:
    name, shape, ranks, adapter, gated = CASES[case]
    bias = rows in (3, 9)
    call, exact = made(
        FORMATS[name],
        shape,
        rows,
        torch.bfloat16,
        ranks=ranks,
        adapter=adapter,
        gated=gated,
        bias=bias,
    )
    for mine, result in zip(kernel.run(call), exact, strict=True):
        assert error(mine, result) < 5e-3
