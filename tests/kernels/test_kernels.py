"""Kernels: each writes, bit for bit, what the format's description says, or says why it cannot."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import inductor_q
from inductor_q import ops
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.kernels import (
    CHOSEN,
    PROVIDERS,
    dequantize_cpp,
    dequantize_reference,
    dequantize_triton,
    provider_names,
)
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.dequantize import DEQUANTIZE, compiled_by, kernels_of, refusal, write
from inductor_q.kernels.provider import REFERENCE, DequantizeProvider
from tests.support.dequantize_kernels import LAYOUTS, check
from tests.support.quantized import (
    DTYPES,
    assert_same_bits,
    by_table,
    forget_kernels,
    needs_0_50,
    quantize,
)

CPU_KERNELS = [pytest.param(k, id=k.name) for k in DEQUANTIZE["cpu"]]

# --- every kernel, every format -----------------------------------------------------------------


@needs_0_50
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_kernel_equals_the_reference(kernel: DequantizeProvider, fmt: QuantFormat) -> None:
    if refused := kernel.unknown(fmt):
        pytest.skip(refused)
    for layout in LAYOUTS:
        for dtype in DTYPES:
            check(kernel, fmt, layout, dtype)


@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_kernel_reads_any_storage(kernel: DequantizeProvider, storage: torch.dtype) -> None:
    for name in ("nf4_b64", "fp4_b64_nested"):
        check(kernel, FORMATS[name], (4, 128, 3), torch.bfloat16, storage=storage)


def test_every_list_has_the_reference_last_of_those_asked_by_default() -> None:
    for op, table in PROVIDERS.items():
        for device_type, listed in table.items():
            names = [provider.name for provider in listed]
            assert len(set(names)) == len(names)
            behind = names[names.index(REFERENCE) + 1 :]
            assert not behind or (op, device_type) == ("scatter2scatter", "cpu")
    assert PROVIDERS["dequantize"] is DEQUANTIZE and set(CHOSEN) < set(PROVIDERS)


def test_provider_names() -> None:
    assert provider_names() == {
        "dequantize": ("inductor", "cpp", "reference", "cuda", "triton"),
        "scatter2scatter": ("reference", "grouped_mm", "dequantize", "cuda", "triton"),
        "requantize": ("inductor", "reference", "cuda", "triton"),
    }
    assert kernels_of("cpu") == ["cpp"]  # the reference is no provider of speed
    assert kernels_of("xpu") == []


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
    dequantize_reference.KERNEL.run(Dequantize(operands, FORMATS[name], out))
    assert_same_bits(out, by_table(w.packed, w.state, torch.float32))


# --- what a kernel refuses, and who serves then -------------------------------------------------

_FMT = FORMATS["nf4_b64"]


def _operands() -> list[Tensor]:
    return quantize((4, 64), nested=False).operands[0]


@pytest.mark.parametrize(
    ("fmt", "out", "reason"),
    [
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
    assert dequantize_cpp.KERNEL.refuses(Dequantize(_operands(), fmt, out)) == reason


@pytest.mark.parametrize(
    ("fmt", "out", "reason"),
    [
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
    assert dequantize_triton.KERNEL.refuses(Dequantize(_operands(), fmt, out)) == reason


def test_triton_refuses_strided_operands() -> None:
    operands = _operands()
    operands[1] = torch.stack([operands[1], operands[1]], 1)[:, 0]
    out = torch.empty(4, 64)
    assert dequantize_triton.KERNEL.refuses(Dequantize(operands, _FMT, out)) == (
        "an operand is not contiguous"
    )


def _without_cpp(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(dequantize_cpp, "_function", lambda fmt: reason)
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
        "dequantize: provider 'cpp' is not used: no C++ compiler: set CXX or install g++"
    ]
    assert kernels_of("cpu") == []
    assert compiled_by("cpu", "cpp") == "inductor"


def test_compiled_code_is_served_by_a_kernel_that_can() -> None:
    """Never by the name of one that is not there: the report says who serves."""
    fastest = compiled_by("cpu")
    assert fastest in ("cpp", "inductor")  # by whether there is a compiler
    assert compiled_by("cpu", "triton") == fastest
    assert compiled_by("xpu", "cpp") == "inductor"
    for name in ("reference", "inductor"):
        assert compiled_by("cpu", name) == name
    assert refusal("cpu", "triton") == "there is none of that name for cpu tensors"


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
        "dequantize: provider 'triton' is not used: there is none of that name for cpu tensors"
    ]


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_strided_and_half_precision_operands(kernel: DequantizeProvider) -> None:
    """Views of larger tensors, and scales in the dtype that some checkpoints store."""
    w = quantize((64, 128), nested=True)
    operands, name, shape = w.operands
    expected = ops.dequantize(operands, name, shape, torch.float32)
    views = [torch.stack([t.reshape(-1), t.reshape(-1)], 1)[:, 0] for t in operands]
    assert not any(t.is_contiguous() for t in views if t.numel() > 1)
    out = torch.empty(64, 128)
    kernel.run(Dequantize(views, FORMATS[name], out))
    assert_same_bits(out, expected)
    half = [*operands[:2], *(t.to(torch.bfloat16) for t in operands[2:])]
    rounded = [*operands[:2], *(t.float() for t in half[2:])]
    kernel.run(Dequantize(half, FORMATS[name], out))
    assert_same_bits(out, ops.dequantize(rounded, name, shape, torch.float32))
