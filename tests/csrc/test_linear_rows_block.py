"""csrc/linear_rows*.cu on a CPU: CUDA sources compiled as C++, a program of fibers (block.h).

What it finds out about lanes, warps, tiles, turns and edges, it finds without a GPU: copies arrive
as late as they may, or at once, and warps go on in any order.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inductor_q.formats import FORMATS
from inductor_q.formats.kbit import KBITS
from inductor_q.kernels import linear_rows_cuda
from tests.support.emulated import built, needs_compiler
from tests.support.few_rows import error, made

ROOT = Path(__file__).parents[2]
MOST_SHARED = 227 << 10  # of an H100
FORMS = ((1, 1), (1, 2), (2, 1))  # mmas for each decoded weight, and strips of a tile
GATED = ("false", "true")
KERNELS = {
    "linear_rows.cu": [
        *(
            f"linear<BFloat16, {scale}, {together}, {gated}, {height}>"
            for scale in ("Plain", "Nested")
            for gated in GATED
            for together, height in FORMS
        ),
        *(f"project<BFloat16, {wide}, {rows}>" for wide in GATED for rows in (1, 8)),
    ],
    "linear_rows_kbit.cu": [
        f"linear<BFloat16, {k}, {scale}, {together}, {gated}, {height}>"
        for k in KBITS
        for scale in ("E4M4", "Float16")
        for gated in GATED
        for together, height in ((0, 1), (0, 2), *FORMS)
    ],
}
#: What stands for each instruction of the sources.
INSTRUCTIONS = {
    "mma.sync": "block::multiply(sum, a0, a1, a2, a3, b0, b1);",
    "cp.async.cg": "block::copy16(to, from);",
    "cp.async.ca": "block::copy4(to, from, count);",
    "cp.async.wait_all": "block::wait_for_all();",
    "ld.shared.v2": "std::memcpy(&value, shared + address, 8);",
    "ld.shared": "std::memcpy(&value, shared + address + kFrom, 4);",
    "prmt": "return block::permute(low, high, places);",
    "cvt.f32.f16": "value = block::half(raw);",
    "cvt.rn.f16": "std::abort();",
    "griddepcontrol": "",
}

SLOW = pytest.mark.slow

pytestmark = needs_compiler


def as_cpp(source: str) -> str:
    """A source of csrc/ with its headers in it, as C++."""

    def stand_in(found: re.Match[str]) -> str:
        return next((text for name, text in INSTRUCTIONS.items() if name in found.group()), "")

    def with_headers(name: str) -> str:
        text = (ROOT / "csrc" / name).read_text().replace("#pragma once", "")
        return re.sub(r'#include "(.*)"\n', lambda found: header(found[1]), text)

    def header(name: str) -> str:
        text = "" if name in included else with_headers(name)
        included.add(name)
        return text

    included: set[str] = set()
    text = with_headers(source)
    return re.sub(r"\basm\b[^;]*?\(\".*?\);\n", stand_in, text, flags=re.DOTALL).replace(
        "extern __shared__", "extern"
    )


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    found = {}
    for source, kernels in KERNELS.items():
        lines = ['#include "block.h"', as_cpp(source)]
        for i, kernel in enumerate(kernels):
            arguments = "Arguments" if kernel.startswith("linear") else "Projections"
            lines.append(
                f"EXPORT void run{i}(int columns, int rows, const {arguments}* given, int at_once)"
                " { block::at_once = at_once;"
                f" block::run(columns, rows, [=] {{ {kernel}(*given); }}); }}"
            )
        found[source] = built(tmp_path_factory.mktemp("block"), lines)
    return found


@pytest.fixture(
    params=[pytest.param(False, id="late"), pytest.param(True, id="at once", marks=SLOW)]
)
def kernel(
    request: pytest.FixtureRequest,
    libraries: dict[str, ctypes.CDLL],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """The provider, whose launches of two or three programs run here."""

    def prepared(
        of: tuple[str, str], _: Any, grid: Any, pointers: int, numbers: tuple[int, ...], *__: Any
    ) -> Callable[..., None]:
        source, name = of
        columns, rows = grid[:2] if isinstance(grid, tuple) else (grid, 1)

        def launch(*given: int) -> None:
            assert len(given) == pointers
            values = (ctypes.c_int64 * (pointers + len(numbers)))(*given, *numbers)
            run = libraries[source][f"run{KERNELS[source].index(name)}"]
            run(columns, rows, values, int(request.param))

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
    "2 bits": ("kbit2_e4m4", (70, 4224), (0,), None, False),
    "3 bits": ("kbit3_e4m4", (17, 384), (8, 0, 64), torch.bfloat16, False),
    "4 bits": ("kbit4_e4m4", (70, 8320), (0,), None, False),
    "5 bits": ("kbit5_e4m4", (40, 4224), (16, 8, 16, 4), torch.float32, False),
    "fp16": ("kbit4_fp16", (40, 128), (8, 0), torch.bfloat16, False),
    "pair of planes": ("kbit5_fp16", (70, 384), (16, 0), torch.bfloat16, True),
    "long pair of planes": ("kbit2_fp16", (70, 4224), (0, 8), torch.bfloat16, True),
    "long pair": ("nf4_b64_nested", (20, 4160), (32, 8), torch.float32, True),
}


@pytest.mark.parametrize(
    "rows", [1, pytest.param(2, marks=SLOW), 3, 9, pytest.param(18, marks=SLOW)]
)
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


@pytest.mark.parametrize("rows", [1, 3])
def test_a_weight_without_rows_does_not_hide_another_codebook(
    kernel: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is between two others, and has the codebook of the second."""
    monkeypatch.setattr(linear_rows_cuda, "_programs", lambda *_: 1)
    fmt = FORMATS["kbit4_e4m4"]
    call, exact = made(fmt, (16, 384), rows, torch.bfloat16, ranks=(0, 0, 0))
    first, _, last = call.weights
    empty = [o if name == "codebook" else o[:0] for name, o in zip(fmt.operands, last, strict=True)]
    found = kernel.run(replace(call, weights=[first, empty, last], features=[16, 0, 16]))
    assert not torch.equal(first[-1], last[-1]) and not found[1].numel()
    assert max(error(found[i], exact[i]) for i in (0, 2)) < 5e-3
