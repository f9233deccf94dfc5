"""Kernels: each provider writes, bit for bit, what the description of the format says."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import inductor_q
from inductor_q import ops
from inductor_q.csrc import build, driver
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.formats.bnb import BLOCKSIZES
from inductor_q.formats.codec import Codebook, Table
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.scale import BlockScale, NestedScale
from inductor_q.kernels import (
    DEQUANTIZE,
    OPS,
    DequantizeKernel,
    choose,
    dequantize_cpp,
    dequantize_reference,
    dequantize_triton,
    provider_names,
    providers,
    refusal,
    triton_launch,
)
from inductor_q.lowerings.calls import qfuse_dequantize
from inductor_q.ops.dequantize import write
from tests.compile_triton import compiled
from tests.fake_driver import FakeDriver
from tests.quantized import (
    DTYPES,
    QUANT_TYPES,
    assert_same_bits,
    bnb,
    by_table,
    forget_kernels,
    needs_0_50,
    quantize,
    sample,
)
from tests.test_kbit import CASES as KBIT_CASES
from tests.test_kbit import KINDS

ROOT = Path(__file__).parents[1]
needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="Triton is not installed"
)
CPU_KERNELS = [pytest.param(k, id=k.name) for k in DEQUANTIZE["cpu"]]
#: (rows, cols, extra columns of the output's rows)
LAYOUTS = [(4, 128, 0), (4, 128, 64), (3, 96, 5), (5, 7, 0), (5, 7, 2), (6, 1, 3), (1, 1, 0)]


def check(
    kernel: DequantizeKernel,
    fmt: QuantFormat,
    layout: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    storage: torch.dtype = torch.uint8,
) -> None:
    """`kernel` against the reference, into rows of their own length or of a wider matrix."""
    rows, cols, extra = layout
    operands, values = sample(fmt, (rows, cols), storage=storage)
    expected = torch.empty(rows, cols, dtype=dtype)
    dequantize_reference.KERNEL.launch(operands, fmt, expected)
    assert_same_bits(expected, values.to(dtype))
    wide = torch.full((rows, cols + extra), 7.0, dtype=dtype, device=device)
    out = wide[:, :cols]
    moved = [t.to(device) for t in operands]
    assert kernel.supports(moved, fmt, out) == ""
    kernel.launch(moved, fmt, out)
    assert_same_bits(out.cpu(), expected)
    assert (wide[:, cols:] == 7.0).all(), "wrote beside its columns"


def decoded_by(kernel: DequantizeKernel) -> list[str]:
    """The names of the formats that `kernel` knows."""
    return [fmt.name for fmt in FORMATS.values() if not kernel.decodes(fmt)]


# --- every kernel, every format -----------------------------------------------------------------


@needs_0_50
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_kernel_equals_the_reference(kernel: DequantizeKernel, fmt: QuantFormat) -> None:
    if refused := kernel.decodes(fmt):
        pytest.skip(refused)
    for layout in LAYOUTS:
        for dtype in DTYPES:
            check(kernel, fmt, layout, dtype)


@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_kernel_reads_any_storage(kernel: DequantizeKernel, storage: torch.dtype) -> None:
    for name in ("nf4_b64", "fp4_b64_nested"):
        check(kernel, FORMATS[name], (4, 128, 3), torch.bfloat16, storage=storage)


@needs_0_50
@given(
    layout=st.tuples(st.integers(1, 9), st.integers(1, 200), st.integers(0, 70)),
    name=st.sampled_from(
        [f.name for f in FORMATS.values() if not dequantize_cpp.KERNEL.decodes(f)]
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_cpp_on_any_layout(layout: tuple[int, int, int], name: str, dtype: torch.dtype) -> None:
    check(dequantize_cpp.KERNEL, FORMATS[name], layout, dtype)


def test_every_list_ends_with_the_reference() -> None:
    for device_type, kernels in DEQUANTIZE.items():
        assert kernels[-1] is dequantize_reference.KERNEL, device_type
        names = [kernel.name for kernel in kernels]
        assert len(set(names)) == len(names)
    assert OPS == {"dequantize": DEQUANTIZE}


def test_provider_names() -> None:
    assert provider_names() == {
        "dequantize": ("inductor", "cpp", "reference", "cuda", "triton"),
        "scatter2scatter": (
            *("reference", "grouped_mm", "dequantize", "merged", "cuda", "triton", "triton_tuned"),
        ),
    }
    assert providers("dequantize", "cpu") == ["cpp"]  # the reference is no provider of speed
    assert providers("dequantize", "xpu") == []


def test_reference_decodes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are decoded some rows at a time: also one row, also strided."""
    for numel in (1, 300, 128 * 3):
        monkeypatch.setattr(dequantize_reference, "ROWS_AT_ONCE_NUMEL", numel)
        for layout in ((7, 128, 0), (7, 128, 4)):
            check_parts(layout)


def check_parts(layout: tuple[int, int, int]) -> None:
    rows, cols, extra = layout
    w = quantize((rows, cols), nested=True)
    operands, name, _ = w.operands
    out = torch.empty(rows, cols + extra)[:, :cols]
    dequantize_reference.KERNEL.launch(operands, FORMATS[name], out)
    assert_same_bits(out, by_table(w.packed, w.state, torch.float32))


# --- what a kernel refuses, and who serves then -------------------------------------------------

_FMT = FORMATS["nf4_b64"]
_EIGHT_BITS = QuantFormat(
    "i8", BytePacking(8, True), Table("values", 256), BlockScale("absmax", 64)
)
_TABLE = QuantFormat("t4", BytePacking(4, True), Table("values", 16), BlockScale("absmax", 64))
_ODD_NEST = QuantFormat(
    "odd",
    BytePacking(4, True),
    Codebook((0.0,) * 16),
    NestedScale("absmax", 64, Table("t", 256), BlockScale("outer", 100), "offset"),
)


def _operands() -> list[Tensor]:
    return quantize((4, 64), nested=False).operands[0]


@pytest.mark.parametrize(
    ("fmt", "out", "reason"),
    [
        (_EIGHT_BITS, torch.empty(4, 64), "csrc/dequantize.cpp decodes 4-bit codebooks, not i8"),
        (_TABLE, torch.empty(4, 64), "csrc/dequantize.cpp decodes 4-bit codebooks, not t4"),
        (_ODD_NEST, torch.empty(4, 64), "the nested blocksize is not a power of two"),
        (
            _FMT,
            torch.empty(4, 64, device="meta"),
            "the C++ kernel runs on a CPU, not on meta",
        ),
        (
            _FMT,
            torch.empty(4, 64, dtype=torch.float64),
            "output dtype torch.float64 is not one of float32, bfloat16, float16",
        ),
        (_FMT, torch.empty(64, 4).t(), "the output is not a matrix with unit column stride"),
        (_FMT, torch.empty(2, 2, 64), "the output is not a matrix with unit column stride"),
    ],
)
def test_cpp_refuses(fmt: QuantFormat, out: Tensor, reason: str) -> None:
    assert dequantize_cpp.KERNEL.supports(_operands(), fmt, out) == reason


@pytest.mark.parametrize(
    ("fmt", "out", "reason"),
    [
        (_EIGHT_BITS, torch.empty(4, 64), "the Triton kernel decodes 4-bit codes, i8 has 8"),
        (
            _FMT,
            torch.empty(4, 64, dtype=torch.float64),
            "output dtype torch.float64 is not one of float32, bfloat16, float16",
        ),
        (_FMT, torch.empty(64, 4).t(), "the output is not a matrix with unit column stride"),
        (_FMT, torch.empty(2, 2, 64), "the output is not a matrix with unit column stride"),
    ],
)
def test_triton_refuses(fmt: QuantFormat, out: Tensor, reason: str) -> None:
    assert dequantize_triton.KERNEL.supports(_operands(), fmt, out) == reason


def test_triton_refuses_strided_operands() -> None:
    operands = _operands()
    operands[1] = torch.stack([operands[1], operands[1]], 1)[:, 0]
    out = torch.empty(4, 64)
    assert dequantize_triton.KERNEL.supports(operands, _FMT, out) == (
        "an operand is not contiguous"
    )


def _without_cpp(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(dequantize_cpp, "_function", lambda: reason)
    forget_kernels(monkeypatch)


def test_without_the_kernel_the_reference_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _without_cpp(monkeypatch, "no C++ compiler: set CXX or install g++")
    w = quantize((4, 64))
    with caplog.at_level(logging.WARNING, "inductor_q"):
        for _ in range(3):
            assert_same_bits(inductor_q.dequantize(w.packed, w.state), by_table(w.packed, w.state))
    assert caplog.messages == [
        "dequantize: kernel 'cpp' not used: no C++ compiler: set CXX or install g++; "
        "another one serves the call"
    ]
    assert providers("dequantize", "cpu") == []
    assert choose("dequantize", "cpu", "cpp") == "inductor"


def test_compiled_code_is_served_by_a_kernel_that_can() -> None:
    """Never by the name of one that is not there: the report says who serves."""
    fastest = choose("dequantize", "cpu")
    assert fastest in ("cpp", "inductor")  # by whether there is a compiler
    assert choose("dequantize", "cpu", "triton") == fastest
    assert choose("dequantize", "xpu", "cpp") == "inductor"
    for name in ("reference", "inductor"):
        assert choose("dequantize", "cpu", name) == name
    crumbs = replace(FORMATS["nf4_b64"], packing=BytePacking(bits=2, high_first=True))
    assert choose("dequantize", "cpu", "cpp", crumbs) == "inductor"
    assert refusal("dequantize", "cpu", "cpp", crumbs)
    assert refusal("dequantize", "cpu", "triton") == "there is none of that name for cpu tensors"


def test_a_named_kernel_that_the_device_lacks_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_kernels(monkeypatch)
    w = quantize((4, 64))
    operands, name, _ = w.operands
    out = torch.empty(4, 64, dtype=w.state.dtype)
    with caplog.at_level(logging.WARNING, "inductor_q"):
        for _ in range(2):
            write(operands, FORMATS[name], out, "triton")
    assert_same_bits(out, by_table(w.packed, w.state))
    assert caplog.messages == [
        "dequantize: kernel 'triton' not used: there is none of that name for cpu tensors; "
        "another one serves the call"
    ]


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_strided_and_half_precision_operands(kernel: DequantizeKernel) -> None:
    """Views of larger tensors, and scales in the dtype that some checkpoints store."""
    w = quantize((64, 128), nested=True)
    operands, name, shape = w.operands
    expected = ops.dequantize(operands, name, shape, torch.float32)
    views = [torch.stack([t.reshape(-1), t.reshape(-1)], 1)[:, 0] for t in operands]
    assert not any(t.is_contiguous() for t in views if t.numel() > 1)
    out = torch.empty(64, 128)
    kernel.launch(views, FORMATS[name], out)
    assert_same_bits(out, expected)
    half = [*operands[:2], *(t.to(torch.bfloat16) for t in operands[2:])]
    rounded = [*operands[:2], *(t.float() for t in half[2:])]
    kernel.launch(half, FORMATS[name], out)
    assert_same_bits(out, ops.dequantize(rounded, name, shape, torch.float32))


# --- the C++ kernel -----------------------------------------------------------------------------

_DENORMAL = torch.tensor([1e-38, 3e-39, 1e-40, 1.4e-45, 1e-30, 9e-31, 1e-37, 0.0])
_EXTREME = torch.tensor([float("inf"), -float("inf"), float("nan"), 3e38, 65504.0, 1e5, -0.0, 1.0])
#: 1.0 * scale lies halfway between two bfloat16 (or float16) numbers, the even one below or above;
#: the last is a NaN that rounding would carry over into -0.0.
_TIES = torch.tensor(
    [
        0x3F808000,
        0x3F818000,
        0x3F801000,
        0x3F803000,
        0x00008000,
        0x00018000,
        0x33000000,
        0x7FFFFFFF,
    ],
    dtype=torch.int32,
).view(torch.float32)
_SCALES = {"denormal": _DENORMAL, "extreme": _EXTREME, "ties": _TIES}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [64, 33], ids=["vector", "scalar"])
@pytest.mark.parametrize("absmax", _SCALES.values(), ids=list(_SCALES))
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
    dequantize_cpp.KERNEL.launch(operands, fmt, out)
    dequantize_reference.KERNEL.launch(operands, fmt, expected)
    assert_same_bits(out, expected)


@needs_0_50
@pytest.mark.parametrize("flag", ["-mno-avx512bf16", "-mno-avx512f"])
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
    function = dequantize_cpp._function.__wrapped__()
    assert not isinstance(function, str), function
    monkeypatch.setattr(dequantize_cpp, "_function", lambda: function)
    planes = dequantize_cpp._kbit_function.__wrapped__()
    assert not isinstance(planes, str), planes
    monkeypatch.setattr(dequantize_cpp, "_kbit_function", lambda: planes)
    for name in ("nf4_b64", "fp4_b32_nested", "kbit3_fp16", "kbit5_e4m4"):
        for dtype in DTYPES:
            check(dequantize_cpp.KERNEL, FORMATS[name], (4, 128, 64), dtype)
            check(dequantize_cpp.KERNEL, FORMATS[name], (5, 7, 2), dtype)
    for dtype in DTYPES:
        for absmax in _SCALES.values():
            test_cpp_on_denormal_and_extreme_scales(absmax, 64, dtype)


def test_cpp_on_a_large_weight_in_threads() -> None:
    """Above the size at which rows are shared among threads."""
    check(dequantize_cpp.KERNEL, FORMATS["nf4_b64_nested"], (300, 256, 64), torch.bfloat16)


# --- the Triton kernel --------------------------------------------------------------------------


@needs_0_50
def test_triton_in_the_interpreter() -> None:
    """Real kernel, CPU tensors; a process of its own, since Triton reads the variable once."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.interpret_triton"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    decoded, encoded = map(int, run.stdout.split())
    assert decoded == 8 * len(decoded_by(dequantize_triton.KERNEL))
    assert encoded == 3 * len(KBIT_CASES) * len(KINDS)


class Jit:
    """A kernel of Triton that keeps what it is called with, and the code that it would return."""

    def __init__(self, pointers: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        types = ["u64"] * pointers + ["u32"] * 4 + [*triton_launch.SCRATCH]
        ptx = ".entry k(" + ",".join(f" .param .{t} k_{i}" for i, t in enumerate(types)) + ")"
        metadata = SimpleNamespace(num_ctas=1, num_warps=1, shared=0)
        self.compiled = SimpleNamespace(metadata=metadata, asm={"ptx": ptx}, function=0)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self

    def __call__(self, *given: Any, **constants: Any) -> Any:
        self.calls.append(given)
        return self.compiled


def served_by_triton(monkeypatch: pytest.MonkeyPatch, fmt: QuantFormat) -> tuple[Jit, FakeDriver]:
    """CPU tensors go to the Triton kernel, whose compiled code and driver are not there."""
    printed = dequantize_triton._kernel(fmt, 8)
    jit = Jit(3 + len(printed.scale_operands))
    kernel = replace(printed, function=jit)
    monkeypatch.setattr(dequantize_triton, "_kernel", lambda *_: kernel)
    monkeypatch.setitem(DEQUANTIZE, "cpu", (dequantize_triton.KERNEL, dequantize_reference.KERNEL))
    return jit, FakeDriver(monkeypatch)


@needs_triton
@pytest.mark.parametrize("name", ["nf4_b64_nested", "nf4_b64", "kbit4_e4m4"])
def test_later_launches_go_through_the_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls, compiled code or eager, with the pointers of that call."""
    fmt, launches = FORMATS[name], forget_kernels(monkeypatch)
    jit, cuda = served_by_triton(monkeypatch, fmt)
    book = dequantize_triton._codebook(fmt, torch.device("cpu"))
    seen = []
    for seed in range(4):
        operands, _ = sample(fmt, (48, 256), seed=seed)
        if seed % 2:
            out = ops.dequantize(operands, name, (48, 256), torch.bfloat16)
        else:
            out = torch.empty(48, 256, dtype=torch.bfloat16)
            qfuse_dequantize(operands, name, "auto", out=out)
        named = dict(zip(fmt.operands, operands, strict=True))
        given = [out, named["qweight"], named.get("codebook", book)]
        given += [named[n] for n in fmt.operands if n not in ("qweight", "codebook")]
        seen.append([t.data_ptr() for t in given])
    units = 48 * 256 // 8
    (first,) = jit.calls
    assert [t.data_ptr() for t in first[:-4]] == seen[0]
    sizes = (units, 48 * 256, 256, 256)
    assert first[-4:] == sizes
    assert cuda.launched == [(*pointers, *sizes, 0, 0) for pointers in seen[1:]]
    [plan] = launches.values()
    plan.by_jit(operands, out)  # what bench_launch compares with
    assert [t.data_ptr() for t in jit.calls[1][:-4]] == seen[-1]
    assert len(cuda.launched) == 3


@needs_triton
def test_a_prepared_launch_serves_only_what_is_like_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan keeps the kernel that was compiled for its first call: for float32 scales, say."""
    fmt, launches = FORMATS["nf4_b64"], forget_kernels(monkeypatch)
    jit, cuda = served_by_triton(monkeypatch, fmt)
    packed, absmax = (torch.cat([t, t[:8]]) for t in sample(fmt, (4, 64))[0])
    numels = (128, 4)
    memory = torch.empty(8 * 72)

    def call(*, start: int = 0, at: int = 0, dtype: torch.dtype = torch.float32, **to: Any) -> None:
        operands = [packed[start:][: numels[0]], absmax.to(dtype)[at:][: numels[1]]]
        out = memory.view(to.get("as_dtype", torch.float32))[to.get("offset", 0) :]
        out = out.as_strided((4, 64), (to.get("stride", 64), 1))
        write(operands, fmt, out, to.get("provider", "auto"))

    others: list[dict[str, Any]] = [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"start": 4},
        {"at": 1},
        {"offset": 1},
        {"stride": 72},
        {"as_dtype": torch.bfloat16},
        {"provider": "triton"},
    ]
    for _ in range(2):
        for other in others:
            call(**other)
    assert len(jit.calls) == len(cuda.launched) == len(launches) == len(others)


def test_a_format_of_the_same_name_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels(monkeypatch)
    fmt = FORMATS["nf4_b64"]
    assert isinstance(fmt.codec, Codebook)
    other = replace(fmt, codec=Codebook(tuple(-v for v in fmt.codec.values)))
    operands, values = sample(fmt, (4, 64))
    out = torch.empty(4, 64)
    write(operands, fmt, out)
    assert_same_bits(out, values)
    write(operands, other, out)
    assert torch.equal(out, -values)


def test_a_kernel_is_asked_once_for_calls_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels(monkeypatch)
    asked: list[QuantFormat] = []

    class Counting(dequantize_reference.Reference):
        def supports(self, operands: Any, fmt: QuantFormat, out: Tensor) -> str:
            asked.append(fmt)
            return ""

    monkeypatch.setitem(DEQUANTIZE, "cpu", (Counting(),))
    for seed in range(3):
        operands, values = sample(_FMT, (5, 64), seed=seed)
        assert_same_bits(ops.dequantize(operands, _FMT.name, (5, 64), torch.float32), values)
    assert asked == [_FMT]
    with pytest.raises(inductor_q.exc.CorruptQuantState):  # what has passed once is no excuse
        ops.dequantize(operands, _FMT.name, (5, 128), torch.float32)
    with pytest.raises(inductor_q.exc.CorruptQuantState):
        ops.dequantize([operands[0][:32], operands[1]], _FMT.name, (5, 64), torch.float32)
    assert ops.dequantize(operands, _FMT.name, (5, 64), torch.float32).shape == (5, 64)


@pytest.mark.parametrize("name", ["nf4_b64_nested", "fp4_b32", "kbit3_e4m4"])
def test_parameters_of_a_compiled_kernel(name: str) -> None:
    """Those that a launch through the driver fills in: pointers, integers, and Triton's own."""
    kernel = dequantize_triton._kernel(FORMATS[name], 8)
    pointers = ["out", "qweight", "codebook", *kernel.scale_operands]
    constants = {"BLOCK": 128, "FLAT": True, "WHOLE": True, "WIDE": False}
    types = {**dict.fromkeys(pointers, "*fp32"), "qweight": "*u8", "out": "*bf16", "absmax": "*u8"}
    found = triton_launch.parameters(compiled(kernel.function, constants, types).asm["ptx"])
    assert found == ["u64"] * len(pointers) + ["u32"] * 4 + [*triton_launch.SCRATCH]


@pytest.mark.parametrize(
    ("change", "pointers", "numbers"),
    [
        ({}, 2, (1, 7)),  # Triton leaves out an integer of 1
        ({}, 3, (64, 64)),
        ({}, 2, (2**31, 64)),
        ({"num_ctas": 2}, 2, (64, 64)),
        ({"global_scratch_size": 16}, 2, (64, 64)),
        ({"launch_pdl": True}, 2, (64, 64)),
    ],
    ids=str,
)
def test_what_is_left_to_triton(
    change: dict[str, Any], pointers: int, numbers: tuple[int, ...]
) -> None:
    numbered = enumerate(["u64"] * 2 + ["u32"] * (2 - numbers.count(1)) + [*triton_launch.SCRATCH])
    ptx = ".visible .entry k(" + ",".join(f" .param .{t} k_param_{i}" for i, t in numbered) + ")"
    metadata = SimpleNamespace(**{"num_ctas": 1, "num_warps": 1, "shared": 0, **change})
    kernel = SimpleNamespace(metadata=metadata, asm={"ptx": ptx}, function=0)
    assert triton_launch.prepared(kernel, 0, (1, 1, 1), pointers, numbers) is None


def test_printed_source() -> None:
    """What the device functions of a nested format look like: each operation once, no format
    name, scales found once for all the codes of a lane."""
    from inductor_q.decode.triton import device_functions

    printed = device_functions(FORMATS["nf4_b64_nested"])
    assert printed.scale_operands == (
        "absmax",
        "nested_codebook",
        "nested_absmax",
        "nested_offset",
    )
    assert printed.codebook == FORMATS["nf4_b64"].codec.values  # type: ignore[attr-defined]
    assert printed.source == (
        "@triton.jit\n"
        "def scale_fn(i, mask, absmax, nested_codebook, nested_absmax, nested_offset):\n"
        "    t0 = i // 64\n"
        "    t1 = tl.load(absmax + t0, mask=mask, other=0)\n"
        "    t2 = tl.load(nested_codebook + t1.to(tl.int32), mask=mask, other=0)\n"
        "    t3 = t0 // 256\n"
        "    t4 = tl.load(nested_absmax + t3, mask=mask, other=0)\n"
        "    t5 = t4.to(tl.float32)\n"
        "    t6 = t2 * t5\n"
        "    t7 = t0 * 0\n"
        "    t8 = tl.load(nested_offset + t7, mask=mask, other=0)\n"
        "    t9 = t6 + t8\n"
        "    return t9\n"
        "\n\n"
        "@triton.jit\n"
        "def value_fn(code, scale, codebook):\n"
        "    t0 = tl.load(codebook + code)\n"
        "    t1 = t0 * scale\n"
        "    return t1\n"
    )


# --- on a GPU -----------------------------------------------------------------------------------


def positive_zero(x: Tensor) -> Tensor:
    """bitsandbytes' CUDA kernel decodes fp4's code 8 to -0.0, its other kernels to 0.0."""
    return x + 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [pytest.param(k, id=k.name) for k in DEQUANTIZE["cuda"]])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_gpu_kernel_equals_the_reference(fmt: QuantFormat, kernel: DequantizeKernel) -> None:
    if refused := kernel.decodes(fmt):
        pytest.skip(refused)
    for layout in [*LAYOUTS, (64, 4096, 0), (64, 4096, 64)]:
        for dtype in DTYPES:
            check(kernel, fmt, layout, dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("storage", DTYPES)
def test_gpu_kernel_reads_any_storage(storage: torch.dtype) -> None:
    for layout in ((4, 128, 3), (4, 128, 8), (4, 128, 0)):
        check(
            dequantize_triton.KERNEL,
            FORMATS["nf4_b64_nested"],
            layout,
            torch.bfloat16,
            device="cuda",
            storage=storage,
        )


@pytest.mark.gpu
def test_gpu_kernel_reads_scales_of_any_dtype_in_turn() -> None:
    weight = quantize((64, 128), nested=False, device="cuda")
    (packed, absmax), name, shape = weight.operands
    expected = [
        ops.dequantize([packed.cpu(), absmax.cpu().to(d)], name, shape, torch.float32)
        for d in DTYPES
    ]
    for dtype, values in [*zip(DTYPES, expected, strict=True)] * 2:
        actual = ops.dequantize([packed, absmax.to(dtype)], name, shape, torch.float32)
        assert_same_bits(actual.cpu(), values)


@pytest.mark.gpu
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_gpu_equals_bitsandbytes(quant_type: str, blocksize: int, nested: bool) -> None:
    for dtype in DTYPES:
        for shape in ((48, 2 * blocksize), (5, 96), (3, 7)):
            w = quantize(
                shape, quant_type, blocksize=blocksize, nested=nested, dtype=dtype, device="cuda"
            )
            expected = bnb.dequantize_4bit(w.packed, w.state)
            assert_same_bits(inductor_q.dequantize(w.packed, w.state), positive_zero(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nf4_b64", "nf4_b64_nested", "kbit4_e4m4"])
@pytest.mark.parametrize("pad", [0, 64])
def test_gpu_later_launches_go_through_the_driver(
    name: str, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With operands and outputs at other addresses, and bit for bit the same."""
    launches = forget_kernels(monkeypatch)
    for seed in range(3):
        operands, _ = sample(FORMATS[name], (48, 256), seed=seed)
        expected = torch.empty(48, 256, dtype=torch.bfloat16)
        dequantize_reference.KERNEL.launch(operands, FORMATS[name], expected)
        there = [operand.cuda() for operand in operands]
        out = torch.full((48, 256 + pad), 7.0, dtype=torch.bfloat16, device="cuda")
        inside = out[:, :256]
        write(there, FORMATS[name], inside, "triton")
        assert_same_bits(inside.cpu(), expected)
        assert (out[:, 256:] == 7).all()
    [plan] = launches.values()
    assert isinstance(plan._again, driver.Launch)


@pytest.mark.gpu
def test_gpu_launch_on_a_device_that_is_not_current() -> None:
    """Also the later launches, which go past Triton."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    operands, values = sample(FORMATS["nf4_b64_nested"], (64, 256))
    for _ in range(3):
        for index in (1, 0):
            with torch.cuda.device(1 - index):
                there = [t.to(f"cuda:{index}") for t in operands]
                out = torch.empty(64, 256, device=f"cuda:{index}")
                write(there, FORMATS["nf4_b64_nested"], out, "triton")
                assert torch.cuda.current_device() == 1 - index
            assert_same_bits(out.cpu(), values)


@pytest.mark.gpu
def test_gpu_launches_from_threads_of_their_own() -> None:
    """One prepared launch, filled in by several threads at a time, some new to CUDA."""
    name = "nf4_b64_nested"
    cases = [sample(FORMATS[name], (64, 256), seed=seed) for seed in range(4)]
    there = [[t.cuda() for t in operands] for operands, _ in cases]
    write(there[0], FORMATS[name], torch.empty(64, 256, device="cuda"))
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run(i: int) -> None:
        outs = [torch.empty(64, 256, device="cuda") for _ in range(200)]
        for out in outs:
            write(there[i], FORMATS[name], out)
        torch.cuda.synchronize()
        wrong.extend(i for out in outs if not torch.equal(out.cpu(), cases[i][1]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_gpu_denormal_and_extreme_scales() -> None:
    scales = torch.cat(list(_SCALES.values())).repeat_interleave(2)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (scales.numel() * 32,), dtype=torch.uint8, generator=generator)
    for dtype in DTYPES:
        expected = torch.empty(scales.numel(), 64, dtype=dtype)
        dequantize_reference.KERNEL.launch([packed, scales], _FMT, expected)
        out = torch.empty(scales.numel(), 64, dtype=dtype, device="cuda")
        dequantize_triton.KERNEL.launch([packed.cuda(), scales.cuda()], _FMT, out)
        assert_same_bits(out.cpu(), expected)


@pytest.mark.gpu
def test_gpu_side_stream() -> None:
    """The launch follows the current stream: it sees what that stream wrote before it."""
    w = quantize((1024, 1024), device="cuda")
    expected = inductor_q.dequantize(w.packed, w.state)
    source = w.packed.clone()
    w.packed.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # longer than a launch on another stream would wait
        w.packed.copy_(source)
        actual = inductor_q.dequantize(w.packed, w.state)
    side.synchronize()
    assert_same_bits(actual, expected)


@pytest.mark.gpu
def test_gpu_never_synchronizes() -> None:
    w = quantize((256, 256), device="cuda")
    inductor_q.dequantize(w.packed, w.state)  # compiles, and puts the codebook on the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        inductor_q.dequantize(w.packed, w.state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_graph_capture() -> None:
    """Captured after a warm-up, a replay decodes what the operands hold then."""
    first, second = (quantize((128, 256), seed=seed, device="cuda") for seed in (1, 2))
    expected = inductor_q.dequantize(second.packed, second.state)
    operands, name, shape = first.operands
    ops.dequantize(operands, name, shape, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.dequantize(operands, name, shape, torch.bfloat16)
    for mine, new in zip(operands, second.operands[0], strict=True):
        mine.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out, expected)


@pytest.mark.gpu
def test_gpu_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    w = quantize((64, 128))
    operands, name, shape = w.operands
    expected = ops.dequantize(operands, name, shape, torch.bfloat16)
    with torch.cuda.device(0):
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            out = ops.dequantize([t.to(device) for t in operands], name, shape, torch.bfloat16)
            assert out.device == torch.device(device)
            assert_same_bits(out.cpu(), expected)
            assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_gpu_strided_operands_go_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_kernels(monkeypatch)
    w = quantize((64, 128), nested=False, device="cuda")
    operands, name, shape = w.operands
    expected = ops.dequantize(operands, name, shape, torch.bfloat16)
    operands[1] = torch.stack([operands[1], operands[1]], 1)[:, 0]
    with caplog.at_level(logging.WARNING, "inductor_q"):
        assert_same_bits(ops.dequantize(operands, name, shape, torch.bfloat16), expected)
    assert caplog.messages == [
        "dequantize: kernel 'triton' not used: an operand is not contiguous; "
        "another one serves the call"
    ]


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_offsets_beyond_int32() -> None:
    """More than 2**31 values: the last rows are where a 32-bit offset would go wrong."""
    rows, cols, tail = 2**16 + 8, 2**15, 8
    packed = torch.randint(256, (rows * cols // 2,), dtype=torch.uint8, device="cuda")
    absmax = torch.rand(rows * cols // 64, device="cuda")
    out = ops.dequantize([packed, absmax], _FMT.name, [rows, cols], torch.bfloat16)
    last = [packed[-tail * cols // 2 :], absmax[-tail * cols // 64 :]]
    expected = torch.empty(tail, cols, dtype=torch.bfloat16, device="cuda")
    dequantize_reference.KERNEL.launch(last, _FMT, expected)
    assert_same_bits(out[-tail:], expected)
