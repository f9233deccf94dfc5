"""Which provider takes weights in which format: pinned, since tests skip what a kernel refuses."""

from __future__ import annotations

import pytest

from inductor_q.formats import FORMATS
from inductor_q.kernels import PROVIDERS
from inductor_q.kernels.calls import DENSE

NIBBLES = {
    f"{quant}_b{blocksize}{nested}"
    for quant in ("nf4", "fp4")
    for blocksize in (32, 64, 128, 256, 512, 1024, 2048, 4096)
    for nested in ("", "_nested")
}
HQQ_DTYPES = ("bf16", "fp16")
PLANES = {f"kbit{k}_{scale}" for k in (2, 3, 4, 5) for scale in ("e4m4", "fp16")}
OTHERS = {
    *("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4", "nvfp4_rows", "nvfp4_divided_rows"),
    *("nvfp4_tiles", "int4_g32", "int4_g64", "int4_g128", "fp8_e4m3_128x128"),
    *("int8_row", "int8_tensor", "int8_absmax", "nf4_tensor_b64"),
    *(f"int{of}_g{group}" for of in ("4_plain", "4_tiles", "8") for group in (32, 64, 128, 256)),
    *(f"hqq{of}_{d}" for of in ("2_g16", "2_g64", "3_g64", "4_g64", "8_g64") for d in HQQ_DTYPES),
    *(f"fp8_{number}_{of}" for number in ("e4m3", "e5m2") for of in ("row", "tensor")),
}
E2M1 = {"mxfp4", "nvfp4", "nvfp4_rows", "nvfp4_divided_rows", "nvfp4_tiles"}
INT4 = {
    *("int4_g32", "int4_g64", "int4_g128"),
    *(f"int4_plain_g{group}" for group in (32, 64, 128, 256)),
}
E4M3 = {"fp8_e4m3_128x128", "fp8_e4m3_row", "fp8_e4m3_tensor"}
#: A byte each, with one scale.
BYTES = E4M3 | {"fp8_e5m2_row", "fp8_e5m2_tensor", "mxfp8_e4m3", "mxfp8_e5m2", "int8_absmax"}
EVERY = NIBBLES | PLANES | OTHERS

SERVED: dict[tuple[str, str, str], set[str]] = {
    ("dequantize", "cpu", "cpp"): EVERY,
    ("dequantize", "cpu", "reference"): EVERY,
    ("dequantize", "cuda", "cuda"): PLANES,
    ("dequantize", "cuda", "triton"): EVERY,
    ("dequantize", "cuda", "reference"): EVERY,
    ("scatter2scatter", "cpu", "reference"): EVERY | {DENSE},
    ("scatter2scatter", "cpu", "grouped_mm"): {DENSE},
    ("scatter2scatter", "cpu", "dequantize"): EVERY | {DENSE},
    ("scatter2scatter", "cuda", "cuda"): NIBBLES | E2M1 | E4M3 | {"mxfp8_e4m3"},
    ("scatter2scatter", "cuda", "triton"): NIBBLES | E2M1 | BYTES | {DENSE},
    ("scatter2scatter", "cuda", "grouped_mm"): {DENSE},
    ("scatter2scatter", "cuda", "dequantize"): EVERY | {DENSE},
    ("scatter2scatter", "cuda", "reference"): EVERY | {DENSE},
    ("linear_rows", "cpu", "cpp"): NIBBLES | INT4 | E2M1 | PLANES,
    ("linear_rows", "cpu", "reference"): EVERY,
    ("linear_rows", "cuda", "cuda"): {n for n in NIBBLES if "_b32" not in n} | PLANES,
    ("linear_rows", "cuda", "triton"): EVERY,
    ("linear_rows", "cuda", "reference"): EVERY,
    ("requantize", "cpu", "reference"): EVERY,
    ("requantize", "cuda", "cuda"): {n for n in NIBBLES if "_b32" not in n},
    ("requantize", "cuda", "triton"): EVERY,
    ("requantize", "cuda", "reference"): EVERY,
}


def test_every_format_and_provider_is_pinned() -> None:
    assert set(FORMATS) == EVERY
    assert set(SERVED) == {
        (op, device, provider.name)
        for op in ("dequantize", "scatter2scatter", "linear_rows", "requantize")
        for device, listed in PROVIDERS[op].items()
        for provider in listed
    }


@pytest.mark.parametrize("place", SERVED, ids="-".join)
def test_a_provider_takes_these_formats(place: tuple[str, str, str]) -> None:
    op, device, name = place
    (provider,) = (p for p in PROVIDERS[op][device] if p.name == name)
    taken = {fmt.name for fmt in FORMATS.values() if not provider.unknown(fmt)}
    if op == "scatter2scatter" and not provider.unknown(None):
        taken.add(DENSE)
    assert taken == SERVED[place]
