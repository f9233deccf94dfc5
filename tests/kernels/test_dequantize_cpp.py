"""The C++ kernel: any layout, operands and scale, any processor and number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inductor_q import ops
from inductor_q.csrc import build
from inductor_q.decode import cpp
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.formats.bnb import NF4
from inductor_q.formats.codec import Table
from inductor_q.formats.layout import HIGH_FIRST, Interleaved
from inductor_q.formats.minifloat import E4M3
from inductor_q.formats.operand import FLOATS
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.scale import BlockScale, GroupScale, NestedScale
from inductor_q.kernels import dequantize_cpp, dequantize_reference
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.dequantize import write
from inductor_q.kernels.dispatch import preferring
from inductor_q.kernels.provider import REFERENCE
from tests.support.dequantize_kernels import LAYOUTS, SCALES, check
from tests.support.quantized import DTYPES, assert_same_bits, forget_kernels, needs_0_50, sample

_FMT = FORMATS["nf4_b64"]
SEEDED = torch.Generator().manual_seed(0)

#: One of each packing, codec and kind of scale.
NAMES = (
    *("nf4_b64_nested", "int8_absmax", "kbit3_e4m4", "kbit5_fp16", "int4_g32", "int8_g64"),
    *("int8_tensor", "int4_plain_g32", "int4_tiles_g32", "fp8_e4m3_row", "fp8_e5m2_tensor"),
    *("fp8_e4m3_128x128", "mxfp4", "mxfp8_e4m3", "nvfp4_rows", "nvfp4_divided_rows"),
    *("nvfp4_tiles", "nf4_tensor_b64", "hqq2_g16_bf16", "hqq4_g64_fp16"),
)


@needs_0_50
@given(
    layout=st.tuples(st.integers(1, 9), st.integers(1, 600), st.integers(0, 70)),
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(DTYPES),
)
def test_cpp_on_any_layout(layout: tuple[int, int, int], name: str, dtype: torch.dtype) -> None:
    check(dequantize_cpp.KERNEL, FORMATS[name], layout, dtype)


#: Compositions that no library writes.
OTHERS = (
    QuantFormat("i8", BytePacking(8), Table("values", 256), (BlockScale("absmax", 64),)),
    QuantFormat("t2", BytePacking(2, HIGH_FIRST), Table("values", 4), (BlockScale("absmax", 24),)),
    QuantFormat("w4", BytePacking(4, Interleaved(2), 4), NF4, (GroupScale("scale", 32, E4M3),)),
    QuantFormat(
        "odd",
        BytePacking(4, HIGH_FIRST),
        NF4,
        (NestedScale("absmax", 64, Table("t", 256), BlockScale("outer", 100), "offset"),),
    ),
)


@pytest.mark.parametrize("fmt", OTHERS, ids=[fmt.name for fmt in OTHERS])
def test_cpp_decodes_formats_that_no_library_writes(fmt: QuantFormat) -> None:
    for layout in LAYOUTS:
        check(dequantize_cpp.KERNEL, fmt, layout, torch.bfloat16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_cpp_reads_numbers_of_any_dtype(dtype: str) -> None:
    fmt, shape = FORMATS["int4_plain_g32"], (4, 96)
    operands, _ = sample(fmt, shape)
    operands[1:] = [operand.to(getattr(torch, dtype)) for operand in operands[1:]]
    out, expected = torch.empty(shape), torch.empty(shape)
    dequantize_cpp.KERNEL.run(Dequantize(operands, fmt, out))
    dequantize_reference.KERNEL.run(Dequantize(operands, fmt, expected))
    assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [64, 33], ids=["vector", "scalar"])
@pytest.mark.parametrize("absmax", SCALES.values(), ids=list(SCALES))
def test_cpp_on_denormal_and_extreme_scales(
    absmax: Tensor, cols: int, dtype: torch.dtype, fmt: QuantFormat = _FMT
) -> None:
    """AVX-512's bfloat16 conversion flushes denormals; the kernel must not use it there."""
    scales = torch.cat([absmax, -absmax, absmax * 0.37]).repeat_interleave(2)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (scales.numel() * 32,), dtype=torch.uint8, generator=generator)
    rows = scales.numel() * 64 // cols
    operands = [packed, scales]
    out, expected = torch.empty(rows, cols, dtype=dtype), torch.empty(rows, cols, dtype=dtype)
    dequantize_cpp.KERNEL.run(Dequantize(operands, fmt, out))
    dequantize_reference.KERNEL.run(Dequantize(operands, fmt, expected))
    assert_same_bits(out, expected)


@needs_0_50
@pytest.mark.parametrize("flag", ["-mno-avx512bf16", "-mno-avx512bw", "-mno-avx512f", "-mno-avx2"])
def test_cpp_as_other_processors_run_it(
    flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The paths that this machine's own instruction set would hide."""
    import platform

    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the flags are x86's")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, flag))
    monkeypatch.setattr(build, "load", build.load.__wrapped__)
    functions = {name: _built(name) for name in (_FMT.name, "int8_g64", "nvfp4_rows", "kbit5_fp16")}
    monkeypatch.setattr(dequantize_cpp, "_function", lambda fmt: functions[fmt.name])
    for name in functions:
        for dtype in DTYPES:
            check(dequantize_cpp.KERNEL, FORMATS[name], (4, 128, 64), dtype)
            check(dequantize_cpp.KERNEL, FORMATS[name], (5, 7, 2), dtype)
    for dtype in DTYPES:
        for absmax in SCALES.values():
            test_cpp_on_denormal_and_extreme_scales(absmax, 64, dtype)


def _built(name: str) -> object:
    function = dequantize_cpp._function.__wrapped__(FORMATS[name])
    assert not isinstance(function, str), function
    return function


def test_a_format_that_does_not_compile_is_served_by_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if dequantize_cpp.KERNEL.missing():
        pytest.skip("no C++ compiler here")
    source = {dequantize_cpp.PROBE: cpp.source(dequantize_cpp.PROBE)}
    monkeypatch.setattr(cpp, "source", lambda fmt: source.get(fmt, "this is no C++;\n"))
    monkeypatch.setattr(dequantize_cpp, "_function", dequantize_cpp._function.__wrapped__)
    forget_kernels(monkeypatch)
    fmt = FORMATS["int8_g64"]
    operands, values = sample(fmt, (4, 128))
    out = torch.empty(4, 128)
    write(operands, fmt, out)
    assert_same_bits(out, values)
    (told,) = caplog.messages
    assert told.startswith("dequantize: provider 'cpp' is not used: ")
    assert "failed on dequantize.cpp: " in told


@pytest.mark.parametrize("name", ["cpp", REFERENCE])
@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "fp8_e5m2_tensor", "kbit4_e4m4"])
def test_codes_of_small_numbers_where_float32_has_no_subnormal_ones(fmt: str, name: str) -> None:
    """They are subnormal for their format alone: 2^-9 of E4M3 is an ordinary float32 number."""
    found = FORMATS[fmt]
    operands = dict(zip(found.operands, found.sample((256, 256), SEEDED), strict=True))
    for operand, every in ((operands["qweight"], 256), (operands.get("absmax"), 100)):
        if operand is not None and operand.dtype is torch.uint8:
            operand.copy_((torch.arange(operand.numel()) % every).view_as(operand))
    values = {}
    try:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            with preferring("dequantize", name):
                values[flush] = ops.dequantize(
                    list(operands.values()), fmt, (256, 256), torch.float32
                )
    finally:
        torch.set_flush_denormal(False)
    subnormal = values[False].abs() < torch.finfo(torch.float32).tiny
    assert_same_bits(values[True].where(~subnormal, 0), values[False].where(~subnormal, 0))
    assert (values[False] == 0).float().mean() < 0.1


def test_cpp_follows_torchs_number_of_threads() -> None:
    """Also of a thread that is not Python's main one, whose OpenMP has a number of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    command = [sys.executable, "-c", THREADS]
    told = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert told.stdout.split() == ["0"], told.stderr


THREADS = """
import os, threading, torch
from inductor_q import ops
from inductor_q.formats import FORMATS
torch.set_num_threads(1)
fmt = FORMATS["nf4_b64"]
operands = fmt.sample((1024, 1024), torch.Generator().manual_seed(0))
def decode():
    before = len(os.listdir("/proc/self/task"))
    ops.dequantize(operands, fmt.name, (1024, 1024), torch.float32)
    print(len(os.listdir("/proc/self/task")) - before)
ops.dequantize(operands, fmt.name, (1024, 1024), torch.float32)
other = threading.Thread(target=decode)
other.start()
other.join()
"""


def test_cpp_on_a_large_weight_in_threads() -> None:
    """Above the size at which rows are shared among threads."""
    check(dequantize_cpp.KERNEL, FORMATS["nf4_b64_nested"], (300, 256, 64), torch.bfloat16)
