"""The Hopper kernels of scatter2scatter and grouped_gram: on a GPU, against float64 and the peer.

That csrc/scatter2scatter.cu compiles is tested without one, in test_nvrtc.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q import kernels
from inductor_q.csrc import generate_wgmma
from inductor_q.formats import FORMATS
from inductor_q.kernels import grouped_gram_triton, nibbles, scatter2scatter_cuda
from inductor_q.ops.routing import route
from tests.support.gpu_experts import (
    assert_never_synchronizes_and_is_captured,
    assert_serves_a_form,
    assert_serves_as_near_as_the_loop,
    assert_zero_where_nobody_is,
)
from tests.support.moe import (
    GROUPED,
    Layer,
    Sizes,
    assert_experts_alone_have_the_same_gram,
    gram,
    layer,
    results,
)
from tests.support.tile_cases import BF16, FIT, TILED, on_gpu

KERNEL = scatter2scatter_cuda.KERNEL
SHAPES = {
    **TILED,
    "features no multiple of a tile": replace(FIT, in_features=320, out_features=192),
    # More tiles than the 132 or 264 programs of an H200: some have a second and a third.
    "several narrow tiles a program": Sizes(64, 1024, 1280, 300, 3, 16),
    "several wide tiles a program": Sizes(16, 1024, 1280, 2000, 3, 16),
}


def refusal(case: Layer, **changes: Any) -> str:
    """Why the CUDA kernel would not serve `case`."""
    return KERNEL.refuses(case.call(**changes))


def test_header_is_what_its_generator_writes() -> None:
    from pathlib import Path

    written = Path(generate_wgmma.__file__).with_name("wgmma.cuh").read_text()
    assert written == generate_wgmma.header()


@pytest.mark.parametrize("transposed", [False, True])
def test_stages_fit_in_shared_memory(transposed: bool) -> None:
    """A block has 227 KiB at most, and a multiprocessor 228 with one of them kept of each block."""
    for configs, codes, most in (
        (scatter2scatter_cuda.CONFIGS, "kLowFirst", 4),
        (scatter2scatter_cuda.BYTE_CONFIGS, "kE4M3", 2),
    ):
        for config in configs:
            taken = scatter2scatter_cuda.shared_bytes(transposed, config, most, codes)
            assert taken <= 227 << 10
            assert config.programs * (taken + 1024) <= 228 << 10


def test_stretched_codebooks_are_close() -> None:
    for name, most in (("nf4_b64", 1.2e-3), ("fp4_b64", 1e-6)):
        table = FORMATS[name].lut16
        assert table is not None
        values = torch.tensor(table, dtype=torch.float64)
        rounded, stretch = nibbles.fit(table, BF16)
        assert 1 <= stretch < 2
        off = (rounded.double() / stretch - values).norm() / values.norm()
        assert off < most
        assert ((rounded == 0) == (values == 0)).all()


@pytest.mark.gpu
def test_scales_of_experts_without_rows_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    case = on_gpu(replace(FIT, experts=40, tokens=3))
    call = case.call()
    assert not KERNEL.refuses(call)
    from inductor_q.kernels.expert_scales_triton import ExpandScales

    scales, full = ExpandScales(call, 64, 1.0, pairs=True), torch.full
    monkeypatch.setattr(torch, "empty", lambda shape, **to: full(shape, 7, **to))
    written = (scales(call) != 7).flatten(1).any(1)
    assert torch.equal(written, call.offsets.diff() > 0)


@pytest.mark.skipif(bool(KERNEL.missing()), reason="NVRTC and Triton are not installed")
def test_refuses_what_it_does_not_fit_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = layer(FIT, dtype=BF16)
    assert "Hopper" in refusal(case)
    assert "bfloat16" in refusal(layer(FIT))
    assert "dense" in refusal(case, format="dense")
    assert "multiples" in refusal(layer(replace(FIT, in_features=96), dtype=BF16))
    assert "rank 65" in refusal(layer(replace(FIT, rank=65), dtype=BF16))
    monkeypatch.setattr(scatter2scatter_cuda, "group_of", lambda *_: 8)
    assert "new scale" in refusal(case)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "form",
    [
        {"quant": "nf4"},
        {"quant": "nf4", "nested": False},
        {"quant": "nf4", "blocksize": 128},
        {"quant": "fp4", "blocksize": 32},
        {"quant": "mxfp4"},
        {"quant": "nvfp4_rows"},
        {"quant": "fp8_e4m3_row"},
        {"quant": "mxfp8_e4m3"},
    ],
    ids=str,
)
def test_gpu_kernel_is_as_near_as_the_loop(sizes: Sizes, form: dict[str, Any]) -> None:
    assert_serves_as_near_as_the_loop(KERNEL, sizes, grouped=(False, True), **form)


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["mxfp4", "nvfp4_rows"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gpu_every_form_of_other_groups(quant: str, transposed: bool) -> None:
    assert_serves_a_form(KERNEL, quant=quant, transposed=transposed, gates=True)


#: With out-features of which a tile of 128 x 128 has all or none.
BYTES = {
    **{
        name: replace(sizes, in_features=max(128, sizes.in_features))
        for name, sizes in TILED.items()
    },
    "several narrow tiles a program": SHAPES["several narrow tiles a program"],
    "several wide tiles a program": SHAPES["several wide tiles a program"],
    "wide, then narrow": Sizes(40, 640, 384, 700, 4, 16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", BYTES.values(), ids=BYTES)
def test_gpu_bytes_of_e4m3_are_as_near_as_the_loop(sizes: Sizes, transposed: bool) -> None:
    sizes = replace(sizes, out_features=-(-sizes.out_features // 128) * 128)
    form: dict[str, Any] = {"quant": "fp8_e4m3_128x128", "transposed": transposed, "bias": True}
    assert_serves_as_near_as_the_loop(KERNEL, sizes, grouped=(False, True), **form)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_gpu_every_e4m3_is_decoded_exactly(transposed: bool) -> None:
    """The unit matrix times rows of every number, with scales of two bfloat16 each, of which the
    smaller is a power of two and so multiplies exactly; a NaN spoils every sum that it is in."""
    sizes = Sizes(experts=2, in_features=128, out_features=128, tokens=128, top_k=1, rank=0)
    form: dict[str, Any] = {"transposed": transposed, "lora": False, "grouped": (False, True)}
    case = on_gpu(sizes, quant="fp8_e4m3_row", **form)
    codes = torch.arange(256, device="cuda", dtype=torch.uint8).view(2, 1, 128).repeat(1, 128, 1)
    codes[:, ::2] += 128
    exponents = torch.arange(256, device="cuda") // 2 - 64
    steps = torch.arange(256, device="cuda") % 127
    scale = torch.ldexp(1 + steps / 128 + 2**-10, exponents)
    is_number = codes & 127 != 127
    for numbers in (torch.where(is_number, codes, 0), codes):
        for expert in range(2):
            unit = replace(
                case,
                x=torch.eye(128, device="cuda", dtype=BF16),
                operands=[numbers.flatten(), scale],
                routing=route(torch.full((128, 1), expert, device="cuda"), 2),
            )
            weight = unit.weight(BF16)[expert]
            expected = weight.t().where(weight.isfinite().all(1), torch.nan)
            assert not KERNEL.refuses(unit.call())
            got = unit(provider="cuda")
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("grouped", GROUPED)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gates", [False, True])
def test_gpu_every_form(grouped: tuple[bool, bool], transposed: bool, gates: bool) -> None:
    form: dict[str, Any] = {"transposed": transposed, "grouped": grouped, "gates": gates}
    assert_serves_a_form(KERNEL, **form)


@pytest.mark.gpu
def test_gpu_nobodys_rows_and_empty_experts_are_exactly_zero() -> None:
    case = on_gpu(replace(FIT, experts=64, tokens=9), grouped=(False, True), sentinel=-1)
    assert_zero_where_nobody_is(case, "cuda")


@pytest.mark.parametrize("tokens", [0, 9])
def test_no_row_of_any_expert(device: str, tokens: int) -> None:
    case = layer(replace(FIT, tokens=tokens), dtype=BF16, device=device, grouped=(False, True))
    nobody = torch.full((tokens, FIT.top_k), -1, device=device)
    case = replace(case, routing=route(nobody, FIT.experts))
    got = results(case, case(provider="reference" if device == "cpu" else "cuda"))
    assert got["y"].shape == (tokens * FIT.top_k, FIT.out_features)
    assert not any(value.any() for value in got.values())


@pytest.mark.gpu
def test_gpu_never_synchronizes_and_runs_in_a_captured_graph() -> None:
    assert_never_synchronizes_and_is_captured(on_gpu(FIT, grouped=(False, True)), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", [1, 5, 16, 64])
@pytest.mark.parametrize("grouped", GROUPED)
def test_gpu_gram_is_as_near_as_the_reference(narrow: int, grouped: tuple[bool, bool]) -> None:
    call = gram(on_gpu(FIT), 192, narrow, grouped)
    reference = kernels.PROVIDERS["grouped_gram"]["cpu"][0]
    double = replace(call, left=call.left.double(), right=call.right.double(), dtype=torch.float64)
    truth = reference.run(double)
    assert not grouped_gram_triton.KERNEL.refuses(call)
    got, peer = grouped_gram_triton.KERNEL.run(call), reference.run(call)

    def error(value: Tensor) -> float:
        return float((value.double() - truth).norm() / truth.norm())

    assert error(got) <= 1.25 * error(peer)


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", [5, 16, 64])
@pytest.mark.parametrize("grouped", GROUPED)
def test_gpu_gram_is_that_of_each_expert_alone(narrow: int, grouped: tuple[bool, bool]) -> None:
    call = gram(on_gpu(FIT), 192, narrow, grouped)
    assert_experts_alone_have_the_same_gram(grouped_gram_triton.KERNEL, call)
