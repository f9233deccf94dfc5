"""The C++ kernel: any layout, any scale, any processor and number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inductor_q.csrc import build
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.kernels import dequantize_cpp, dequantize_reference
from inductor_q.kernels.calls import Dequantize
from tests.support.dequantize_kernels import SCALES, check
from tests.support.quantized import DTYPES, assert_same_bits, needs_0_50

_FMT = FORMATS["nf4_b64"]


@needs_0_50
@given(
    layout=st.tuples(st.integers(1, 9), st.integers(1, 200), st.integers(0, 70)),
    name=st.sampled_from(
        [f.name for f in FORMATS.values() if not dequantize_cpp.KERNEL.unknown(f)]
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_cpp_on_any_layout(layout: tuple[int, int, int], name: str, dtype: torch.dtype) -> None:
    check(dequantize_cpp.KERNEL, FORMATS[name], layout, dtype)


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
        for absmax in SCALES.values():
            test_cpp_on_denormal_and_extreme_scales(absmax, 64, dtype)


def test_cpp_on_a_large_weight_in_threads() -> None:
    """Above the size at which rows are shared among threads."""
    check(dequantize_cpp.KERNEL, FORMATS["nf4_b64_nested"], (300, 256, 64), torch.bfloat16)
