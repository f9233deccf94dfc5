"""csrc/requantize.cu on a CPU: the CUDA source compiled as C++, a program of fibers (block.h).

What NVRTC makes of it for a GPU is looked at too: how many registers, and that none spill.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q.csrc import nvrtc
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.kernels import requantize_cuda, requantize_reference
from inductor_q.kernels.calls import Requantize
from inductor_q.kernels.requantize_cuda import DEFAULT, SOURCE, TYPES, Config
from tests.support.emulated import built, needs_compiler
from tests.support.quantized import sample

#: One for each arrangement of a warp's lanes, and one of other heights.
TILES = (DEFAULT, Config(columns=64), Config(rows=256, columns=64))
KERNELS = [
    kernel
    for types in itertools.product(("Plain", "Nested"), TYPES.values())
    for kernel in (
        f"requantize<{', '.join(types)}>",
        *(f"requantize_transposed<{', '.join(types)}, {t.rows}, {t.columns}>" for t in TILES),
    )
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every kernel as a C function `run<its place in KERNELS>(programs, threads, arguments)`."""
    lines = ['#include "block.h"', "#define asm(...) std::abort()", f'#include "{SOURCE}"']
    lines += [
        f"EXPORT void run{i}(int programs, int threads, const Arguments* given)"
        f" {{ block::count = threads; block::run(programs, 1, [=] {{ {kernel}(*given); }}); }}"
        for i, kernel in enumerate(KERNELS)
    ]
    lines.append("EXPORT void e4m3(int n, const float* x, uint16* out)")
    lines.append("{ for (int i = 0; i < n; ++i) out[i] = E4M3::pack(x[2 * i], x[2 * i + 1]); }")
    return built(tmp_path_factory.mktemp("block"), lines)


@pytest.fixture
def emulated(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the provider run here."""

    def prepared(
        kernel: str, _: Any, grid: int, threads: int, numbers: tuple[int, ...]
    ) -> Callable[..., None]:
        def launch(*pointers: int) -> None:
            assert len(pointers) == 7
            values = (ctypes.c_int64 * (7 + len(numbers)))(*pointers, *numbers)
            library[f"run{KERNELS.index(kernel)}"](grid, threads, values)

        return launch

    monkeypatch.setattr(requantize_cuda, "_prepared", prepared)


def check(
    fmt: QuantFormat,
    operands: list[Tensor],
    scale: Tensor,
    columns: int,
    dtype: torch.dtype,
    configs: tuple[Config | None, ...],
) -> None:
    """Compare with the reference: not transposed (None), and transposed with these tiles."""
    rows = scale.numel()
    for config in configs:
        shape = (rows, columns) if config is None else (columns, rows)
        # A row of numbers that no kernel may touch follows.
        out = torch.full((shape[0] + 1, shape[1]), 77, dtype=torch.uint8).view(dtype)
        call = Requantize(operands, fmt, scale, out[:-1], config is not None)
        requantize_cuda.Plan(call, config or Config(threads=64))(call)
        expected = torch.empty(shape, dtype=dtype)
        requantize_reference.KERNEL.run(replace(call, out=expected))
        differ = out[:-1].view(torch.uint8) != expected.view(torch.uint8)
        assert not differ.any(), f"{config=} {differ.nonzero()[:5]}"
        assert (out[-1].view(torch.uint8) == 77).all(), f"{config=}"


def row_scale(values: Tensor, dtype: torch.dtype) -> Tensor:
    largest = 448.0 if dtype.is_floating_point else 127.0
    return values.abs().amax(1).clamp_min(2.0**-100) / largest


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.values())
@pytest.mark.parametrize(
    "name",
    ["nf4_b64", "nf4_b64_nested", "fp4_b64", "fp4_b64_nested", "nf4_b256_nested", "fp4_b4096"],
)
def test_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    """Rows end inside of tiles and blocks; each scale has a column of blocks of its own."""
    for rows, columns in ((1, 64), (37, 320), (144, 192)):
        fmt = FORMATS[name]
        operands, values = sample(fmt, (rows, columns), seed=rows)
        check(fmt, operands, row_scale(values, dtype), columns, dtype, (None, *TILES))


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.values())
@pytest.mark.parametrize("name", ["nf4_b64_nested", "fp4_b64_nested"])
def test_every_code_under_every_scale(name: str, dtype: torch.dtype) -> None:
    """A row's four blocks have the same code of absmax, and its columns all 16 codes in turn."""
    fmt, rows, columns = FORMATS[name], 256, 256
    found = dict(zip(fmt.operands, sample(fmt, (rows, columns))[0], strict=True))
    codes = torch.arange(rows * columns // 2, dtype=torch.int64)
    found["qweight"] = (codes * 2 % 16 * 16 + (codes * 2 + 1) % 16).to(torch.uint8)
    found["absmax"] = torch.arange(rows).repeat_interleave(4).to(torch.uint8)
    found["nested_absmax"] = torch.tensor([1e-7, 0.3, 3.0, 1e5])
    found["nested_offset"] = torch.tensor([0.01])
    operands = [found[operand] for operand in fmt.operands]
    out = torch.empty(rows, columns)
    whole = Requantize(operands, fmt, torch.ones(rows), out, False)
    requantize_reference.KERNEL.run(whole)
    check(fmt, operands, row_scale(out, dtype), columns, dtype, (None, DEFAULT))


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("rows", [(48, 128, 16), (37, 16)])
def test_weights_side_by_side(rows: tuple[int, ...]) -> None:
    """Each is written to its columns of one matrix, also where these are not aligned."""
    fmt, columns, dtype = FORMATS["nf4_b64_nested"], 192, torch.float8_e4m3fn
    made = [sample(fmt, (n, columns), seed=n) for n in rows]
    operands = [operand for given, _ in made for operand in given]
    scale = torch.cat([row_scale(values, dtype) for _, values in made])
    out = torch.full((columns, sum(rows)), 77, dtype=torch.uint8).view(dtype)
    expected = out.clone()
    for call in Requantize(operands, fmt, scale, out, True).parts(rows):
        requantize_cuda.Plan(call)(call)
    for call in Requantize(operands, fmt, scale, expected, True).parts(rows):
        requantize_reference.KERNEL.run(call)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


@needs_compiler
def test_e4m3_is_rounded_as_torch_does(library: ctypes.CDLL) -> None:
    """Both sides of every tie and number, subnormal ones too; what is larger saturates."""
    steps = torch.arange(0, 0x7E00, dtype=torch.int32) << 16  # of bfloat16
    near = torch.cat([steps + d for d in (-1, 0, 1)]).clamp(0).view(torch.float32)
    near = near[near < 464]  # beyond, torch's are NaN
    x = torch.cat([near, -near, torch.tensor([1e4, -1e4, math.inf, math.nan])])
    x = x[: x.numel() // 2 * 2]
    out = torch.empty(x.numel() // 2, dtype=torch.int16)
    library.e4m3(x.numel() // 2, ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


#: What a cubin says of its one kernel.
REGISTERS, STACK = 0x2F, 0x12


def said(image: bytes) -> dict[int, int]:
    """Return the numbers of section .nv.info, by attribute."""
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQ", image, start + i * size) for i in range(count)]
    found = {}
    for name, _, _, _, at, length in sections:
        if image.startswith(b".nv.info\0", sections[names][4] + name):
            end = at + length
            while at < end:
                form, attribute, value = struct.unpack_from("<BBH", image, at)
                if form == 4:  # so many bytes follow: a symbol, a number
                    found[attribute] = struct.unpack_from("<I", image, at + 8)[0]
                at += 4 + (value if form == 4 else 0)
    return found


@pytest.mark.skipif(bool(nvrtc.missing()), reason="needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if "128" in k or "_t" not in k])
def test_registers(kernel: str, arch: str) -> None:
    """Nothing spills, and 40 warps fit a multiprocessor of 64K registers."""
    found = nvrtc.compile(SOURCE, kernel, arch)
    assert isinstance(found, nvrtc.Cubin), found
    numbers = said(found.image)
    assert numbers[STACK] == 0
    assert 16 <= numbers[REGISTERS] <= 48
