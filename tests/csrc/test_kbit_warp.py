"""csrc/kbit.cu on a CPU: the CUDA source compiled as C++, a warp of fibers in step (warp.h).

Slow, and without fp16; but what it finds out about lanes, bits and edges, it finds without a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inductor_q.formats import FORMATS
from inductor_q.kernels import dequantize_reference
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.quantize_kbit_reference import allocate, reference
from tests.kbit.test_kbit import KBITS, KINDS, codebook, weight
from tests.support.emulated import built, needs_compiler
from tests.support.quantized import assert_same_bits

ROOT = Path(__file__).parents[2]
TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16"}
LAYOUTS = ("kElements", "kRows", "kFlat")

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every instance as a C function `dequantize_4_Float32_kFlat(warps, pointers..., sizes...)`."""
    folder = tmp_path_factory.mktemp("warp")
    lines = ['#include "warp.h"', '#include "kbit.cu"']
    for k, dtype in itertools.product(KBITS, TYPES.values()):
        raw = f"{dtype}::Raw"
        lines += [
            f"EXPORT void dequantize_{k}_{dtype}_{layout}(int n, uint32* q, uint8* a, float* b,"
            f" {raw}* out, int64 numel, int64 cols, int64 stride) {{ warp::run(n, [=] {{"
            f" dequantize<{k}, E4M4, {dtype}, {layout}>(q, a, b, out, numel, cols, stride); }}); }}"
            for layout in LAYOUTS
        ]
        lines += [
            f"EXPORT void quantize_{k}_{dtype}_{vector}(int n, {raw}* x, float* b, uint32* q,"
            f" uint8* a, int64 numel) {{ warp::run(n, [=] {{"
            f" quantize<{k}, E4M4, {dtype}, {vector}>(x, b, q, a, numel); }}); }}"
            for vector in ("true", "false")
        ]
    return built(folder, lines)


def call(function: ctypes._FuncPtr, blocks: int, tensors: list[Tensor], *sizes: int) -> None:  # type: ignore[name-defined]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    function(-(-blocks // 32), *pointers, *map(ctypes.c_int64, sizes))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("k", KBITS)
def test_quantize(kernels: ctypes.CDLL, k: int, dtype: torch.dtype) -> None:
    for numel, kind in itertools.product((1, 33, 1000, 1024 + 40), KINDS):
        x = weight(numel, dtype, seed=numel) * 10.0 ** (numel % 5 - 2)
        x[: numel // 8] = 0
        x[-1] = -0.0 if numel > 1 else 40.0
        expected = reference(x, codebook(k, kind), k, "e4m4")
        for vector in ("true", "false") if numel % 8 == 0 else ("false",):
            actual = [t.fill_(7) for t in allocate(x, k, "e4m4")]
            function = kernels[f"quantize_{k}_{TYPES[dtype]}_{vector}"]
            call(function, actual[1].numel(), [x, codebook(k, kind), *actual], numel)
            for mine, right in zip(actual, expected, strict=True):
                assert torch.equal(mine, right), f"{numel=} {kind=} {vector=}"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("k", KBITS)
def test_dequantize(kernels: ctypes.CDLL, k: int, dtype: torch.dtype) -> None:
    fmt = FORMATS[f"kbit{k}_e4m4"]
    for (rows, cols), extra in itertools.product([(5, 7), (9, 72), (33, 40)], (0, 8)):
        book = codebook(k, "skewed")
        operands = [*reference(weight(rows * cols, seed=cols), book, k, "e4m4"), book]
        expected = torch.empty(rows, cols, dtype=dtype)
        dequantize_reference.KERNEL.run(Dequantize(operands, fmt, expected))
        for layout in LAYOUTS:
            if (layout != "kElements" and cols % 8) or (layout == "kFlat" and extra):
                continue
            wide = torch.full((rows, cols + extra), 7.0, dtype=dtype)
            sizes = (rows * cols, cols, cols + extra)
            function = kernels[f"dequantize_{k}_{TYPES[dtype]}_{layout}"]
            call(function, operands[1].numel(), [*operands, wide], *sizes)
            assert_same_bits(wide[:, :cols], expected)
            assert (wide[:, cols:] == 7.0).all(), "wrote beside its columns"
