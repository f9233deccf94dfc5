"""The Triton kernels of scatter2scatter: interpreted and compiled here, and run on a GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from inductor_q.formats import FORMATS
from inductor_q.kernels import nibbles, scatter2scatter_triton, tiles
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.scatter2scatter_triton import KERNEL
from tests.support.compile_triton import compiled
from tests.support.gpu_experts import (
    assert_never_synchronizes_and_is_captured,
    assert_serves_a_form,
    assert_serves_as_near_as_the_loop,
    assert_zero_where_nobody_is,
)
from tests.support.moe import GROUPED, Sizes, layer
from tests.support.processes import interpreted
from tests.support.tile_cases import BF16, DEVICES, FIT, FP16, TILED, WORK, device, on_gpu

triton = pytest.importorskip("triton")

#: Codes of a byte each: a scale for a tile, a row, 32 of a row.
BYTES = ("fp8_e4m3_128x128", "fp8_e4m3_row", "fp8_e5m2_row", "int8_absmax", "mxfp8_e5m2")
SHAPES = {
    **TILED,
    "features no multiple of a tile": replace(FIT, in_features=320, out_features=200),
    "wide rank": replace(FIT, rank=100),
    "most experts empty": replace(FIT, experts=200, tokens=9),
}


# --- without a GPU --------------------------------------------------------------------------------


def test_in_the_interpreter() -> None:
    """Real kernels, on CPU tensors."""
    assert interpreted("interpret_scatter2scatter")[0] > 30


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ["nf4_b64", "fp4_b64", "mxfp4"])
def test_printed_look_up_has_the_value_of_every_code(name: str, dtype: torch.dtype) -> None:
    """All 256 bytes, through the PTX that a GPU is given; the codes of a byte in their order."""
    import numpy as np

    from tests.support import ptx

    table, shifts = FORMATS[name].lut16, FORMATS[name].nibbles
    assert table is not None and shifts is not None
    values, _ = nibbles.fit(table, dtype)
    match = re.search(
        r'"""(.*?)"""', scatter2scatter_triton._printed_look_up(values, shifts), re.DOTALL
    )
    assert match
    registers = ptx.run(match[1], [np.arange(256, dtype=np.uint8).view(np.uint32)], 4)
    even, odd = (
        torch.from_numpy(np.stack(registers[i : i + 2], -1).view(np.int16).reshape(-1))
        for i in (0, 2)
    )
    byte = torch.arange(256)
    for found, shift in zip((even, odd), shifts, strict=True):
        assert torch.equal(found, values.view(torch.int16)[byte >> shift & 15])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("weight", ["nf4_b64", "fp8_e4m3_128x128", DENSE])
@pytest.mark.parametrize(("arch", "even"), [(75, True), (80, True), (90, False), (120, True)])
def test_compiles_and_takes_no_more_than_was_computed(
    arch: int, even: bool, weight: str, transposed: bool
) -> None:
    from inductor_q.kernels.expert_gemm_triton import expert_gemm

    bits, group = {"nf4_b64": (4, 64), DENSE: (16, 0)}.get(weight, (8, 128))
    work = replace(WORK, weight_bits=bits, group=group, transposed=transposed)
    tile = tiles.start(work, device(arch))
    dtype, name = (FP16, "*fp16") if arch == 75 else (BF16, "*bf16")
    kernel = scatter2scatter_triton._kernel(FORMATS[weight], dtype) if group else None
    constants = {
        "PARTS": 2,
        "ROWS": tile.rows,
        "FEATURES": tile.features,
        "DEPTH": tile.depth,
        "RANK": work.rank,
        "GROUP": work.group,
        "DECODE": kernel.decode if kernel else None,
        "BYTES": bits == 8,
        "TRANSPOSED": transposed,
        "TOP_K": 8 if transposed else 0,
        "BIAS": not transposed,
        "EVEN": even,
    }
    pointers = dict.fromkeys(("out", "x", "projected", "factor", "bias"), name) | {
        "tiles": "*i32",
        "order": "*i64",
        "weight": "*u8" if group else name,
        "scales": "*fp32",
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    result = compiled(expert_gemm, constants, pointers, arch=arch, **options)
    assert result.metadata.shared <= tiles.shared_bytes(tile, work) + tiles.SLACK_BYTES
    if arch > 75:  # the loop copies ahead, and multiplies matrices
        assert re.search(r"cp\.async", result.asm["ptx"])
        assert re.search(r"mma\.sync|wgmma", result.asm["ptx"])


def assert_scales_expand(name: str) -> None:
    """Compile the kernel that writes the scales of a format, in float32 and as pairs."""
    from inductor_q.kernels import expert_scales_triton

    function, _ = expert_scales_triton.kernel(FORMATS[name])
    pointers = {"offsets": "*i32"}
    pointers |= dict.fromkeys(("absmax", "scale"), "*u8")
    floats = ("nested_codebook", "nested_absmax", "nested_offset", "global_scale", "global_divisor")
    pointers |= dict.fromkeys(floats, "*fp32")
    constants = {"GROUP": 16, "ROWS": 64, "GROUPS": 32, "FACTOR": 0.75, "WIDE": False}
    for pairs, out in ((False, "*fp32"), (True, "*i32")):
        compiled(function, {**constants, "PAIRS": pairs}, {**pointers, "out": out}, arch=80)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nvfp4_rows", "nvfp4_divided_rows"])
def test_scales_of_checkpoints_expand(name: str) -> None:
    assert_scales_expand(name)


@pytest.mark.parametrize("name", ["nf4_b64", "nf4_b64_nested"])
def test_what_surrounds_the_product_compiles(name: str) -> None:
    from inductor_q.kernels import expert_rows_triton

    assert_scales_expand(name)
    pointers = dict.fromkeys(("offsets", "tiles"), "*i32")
    for experts in (1, 128):
        sizes = {"HEIGHT": 128, "STEP": 16, "EXPERTS": experts}
        compiled(expert_rows_triton.tile_map, sizes, pointers, arch=80)
    project: dict[str, Any] = {"PARTS": 1, "ROWS": 64, "RANK": 128, "DEPTH": 64, "TOP_K": 8}
    pointers |= {**dict.fromkeys(("x", "out", "scaled"), "*bf16"), "a": "*fp32", "order": "*i64"}
    result = compiled(expert_rows_triton.project, project, pointers | {"scaling": "fp32"}, arch=89)
    assert result.metadata.shared <= DEVICES[89]


# --- refusals -------------------------------------------------------------------------------------


def test_refuses_what_it_does_not_fit_with_a_reason() -> None:
    case = layer(FIT, dtype=BF16)
    assert "cpu tensors" in KERNEL.refuses(case.call())
    assert "float32" in KERNEL.refuses(layer(FIT).call())
    assert "nibbles" in KERNEL.refuses(case.call(format="kbit4_e4m4"))
    assert "rows of 40" in KERNEL.refuses(layer(replace(FIT, in_features=40), dtype=BF16).call())
    assert "rank 129" in KERNEL.refuses(layer(replace(FIT, rank=129), dtype=BF16).call())
    operands = [case.operands[0].expand(2, -1, -1)[:, ::2], *case.operands[1:]]
    assert "qweight is not contiguous" in KERNEL.refuses(case.call(operands=operands))


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gpu_kernel_is_as_near_as_the_loop(sizes: Sizes, dtype: torch.dtype) -> None:
    assert_serves_as_near_as_the_loop(KERNEL, sizes, dtype=dtype, grouped=(False, True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 900], ids=["few rows", "many rows"])
@pytest.mark.parametrize("quant, nested, blocksize", [
    (quant, nested, blocksize)
    for quant, nested in (("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True))
    for blocksize in (32, 64, 128, 4096)
] + [(DENSE, False, 64)])  # fmt: skip
def test_gpu_every_format(quant: str, nested: bool, blocksize: int, rows: int) -> None:
    sizes = replace(FIT, tokens=rows)
    form: dict[str, Any] = {"quant": quant, "nested": nested, "blocksize": blocksize}
    assert_serves_as_near_as_the_loop(
        KERNEL, sizes, lora=blocksize != 128, adapter=torch.float32, **form
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nvfp4_rows"])
def test_gpu_codes_with_the_low_nibble_first(name: str) -> None:
    assert_serves_as_near_as_the_loop(KERNEL, FIT, quant=name, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", BYTES)
def test_gpu_codes_of_a_byte_each(name: str, transposed: bool, dtype: torch.dtype) -> None:
    form: dict[str, Any] = {"quant": name, "transposed": transposed, "dtype": dtype}
    assert_serves_as_near_as_the_loop(KERNEL, FIT, bias=True, **form)


@pytest.mark.gpu
@pytest.mark.parametrize("grouped", GROUPED)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("quant", ["nf4", DENSE])
def test_gpu_every_form(
    quant: str, gates: bool, transposed: bool, grouped: tuple[bool, bool]
) -> None:
    form: dict[str, Any] = {"transposed": transposed, "grouped": grouped, "gates": gates}
    assert_serves_a_form(KERNEL, quant=quant, **form)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_gpu_codes_stored_as_floats(storage: torch.dtype) -> None:
    case = on_gpu(FIT, grouped=(False, True))
    wide = replace(case, operands=[case.operands[0].flatten().view(storage), *case.operands[1:]])
    assert torch.equal(case(provider="triton"), wide(provider="triton"))


@pytest.mark.gpu
def test_gpu_every_candidate_gives_the_result() -> None:
    """Whatever tile is chosen: all that fit, forward and transposed."""
    for transposed, tokens in itertools.product([False, True], [9, 300]):
        case = on_gpu(replace(FIT, tokens=tokens), grouped=(False, True), transposed=transposed)
        call = case.call()
        work, limits = scatter2scatter_triton.work(call), tiles.limits(case.x.device)
        fit = tiles.pruned(tiles.candidates(work), work, limits.shared_bytes)
        with torch.no_grad():
            exact = case.double().loop()
            peer = float((case.loop().double() - exact).norm())
            for tile in fit[::5]:
                y, _ = KERNEL.run(call, tile)
                assert float((y.double() - exact).norm()) <= 1.25 * peer, tile


@pytest.mark.gpu
def test_gpu_nobodys_rows_and_empty_experts_are_exactly_zero() -> None:
    case = on_gpu(replace(FIT, experts=64, tokens=9), grouped=(False, True), sentinel=-1)
    assert_zero_where_nobody_is(case, "triton")


@pytest.mark.gpu
def test_gpu_never_synchronizes_and_runs_in_a_captured_graph() -> None:
    assert_never_synchronizes_and_is_captured(on_gpu(FIT, grouped=(False, True)), "triton")
