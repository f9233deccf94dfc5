"""Every Triton kernel compiles for GPUs that this machine does not have.

The interpreter runs a kernel's Python as it stands; only the compiler knows Triton's own rules.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from inductor_q.formats import FORMATS
from inductor_q.kernels import (
    adapter_grads_kernels_triton,
    adapter_grads_triton,
    add_product_triton,
    attention_rows_triton,
    dequantize_triton,
    dropout_kernels_triton,
    dropout_triton,
    expert_rows_triton,
    grouped_gram_triton,
    quantize_kbit_triton,
    requantize_triton,
    softmax_loss_triton,
)
from tests.kbit.test_kbit import CASES
from tests.support.compile_triton import compiled
from tests.support.tile_cases import DEVICES

pytest.importorskip("triton")

POINTERS = {
    "out": "*bf16",
    "qweight": "*i32",
    "codebook": "*fp32",
    "x": "*bf16",
    "thresholds": "*fp32",
}


def ptx(kernel: Any, constants: dict[str, int | bool], pointers: dict[str, str]) -> str:
    """`kernel` for sm_90; what is neither a constant nor a pointer is an int32."""
    text: str = compiled(kernel, constants, POINTERS | pointers, num_warps=4).asm["ptx"]
    return text


@pytest.mark.parametrize(("k", "absmax"), CASES)
def test_quantize_kbit(k: int, absmax: str) -> None:
    constants = {"K": k, "E4M4": absmax == "e4m4", "BLOCKS": 32, "WIDE": False}
    scale = "*u8" if absmax == "e4m4" else "*fp16"
    text = ptx(quantize_kbit_triton._kernel(), constants, {"absmax": scale})
    assert "div.rn.f32" in text
    assert "fma" not in text


@pytest.mark.parametrize(("k", "absmax"), CASES)
def test_dequantize_kbit(k: int, absmax: str) -> None:
    kernel = dequantize_triton._kernel(FORMATS[f"kbit{k}_{absmax}"], 8)
    constants = {"BLOCK": 128, "FLAT": False, "WHOLE": True, "ALIGN": 8, "WIDE": True}
    ptx(kernel.function, constants, {"absmax": "*u8" if absmax == "e4m4" else "*fp16"})


@pytest.mark.parametrize("gradient", [False, True])
def test_softmax_loss(gradient: bool) -> None:
    constants = {"GRADIENT": gradient, "BLOCK": softmax_loss_triton.BLOCK}
    pointers = {"logits": "*bf16", "labels": "*i64", "losses": "*fp32", "scale": "*fp32"}
    text = ptx(softmax_loss_triton._kernel(), constants, pointers)
    assert ("st.global.v4" in text) == gradient


@pytest.mark.parametrize("config", [adapter_grads_triton.WIDE, adapter_grads_triton.NARROW])
@pytest.mark.parametrize("rank", [16, adapter_grads_triton.MOST])
@pytest.mark.parametrize("arch", [80, 90])
def test_adapter_grads(arch: int, rank: int, config: adapter_grads_triton.Config) -> None:
    """Within the shared memory of an A100 and an H100; NARROW within that of a GeForce."""
    ranks = {"RANK": rank, "LANES": rank}
    tile = {"ROWS": config.rows, "COLUMNS": config.columns, "STEPS": 8, "STAGES": config.stages}
    pointers = dict.fromkeys(("grad", "p", "b"), "*bf16")
    pointers |= dict.fromkeys(("parts_p", "parts_b"), "*fp32")
    kernels, options = adapter_grads_kernels_triton, {"num_warps": config.warps}
    made = compiled(kernels.multiply, {**ranks, **tile}, pointers, arch=arch, **options)
    limit = 99 << 10 if config is adapter_grads_triton.NARROW else {80: 163, 90: 227}[arch] << 10
    assert made.metadata.shared <= limit
    assert re.search(r"mma\.sync|wgmma", made.asm["ptx"])
    assert " local " not in made.asm["ptx"]
    factors = {"WIDTH": 64, "SPREAD": 64, "FACTOR_P": 2.0, "FACTOR_B": 0.5}
    constants: Any = {**ranks, **factors, "BLOCK": adapter_grads_triton.BLOCK}
    pointers = dict.fromkeys(("parts_p", "parts_b"), "*fp32")
    ptx(kernels.finish, constants, pointers | dict.fromkeys(("of_p", "of_b"), "*bf16"))


@pytest.mark.parametrize("rank", [16, add_product_triton.MOST])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("arch", [80, 90])
def test_add_product(arch: int, by_columns: bool, rank: int) -> None:
    tile = {"ROWS": add_product_triton.ROWS, "COLUMNS": add_product_triton.COLUMNS}
    constants = {"BY_COLUMNS": by_columns, **tile, "RANK": rank, "ALPHA": 2.0}
    pointers = dict.fromkeys(("base", "a", "b"), "*bf16")
    kernel = add_product_triton._kernel()
    options = {"num_warps": add_product_triton.WARPS}
    made = compiled(kernel, constants, pointers, arch=arch, **options)
    assert made.metadata.shared <= 48 << 10
    assert re.search(r"mma\.sync|wgmma", made.asm["ptx"])


@pytest.mark.parametrize(("rows", "features", "dtype"), [(16, 128, "bf16"), (16, 256, "fp32")])
def test_attention_rows(rows: int, features: int, dtype: str) -> None:
    """Within the shared memory of every GPU; bfloat16 by tensor cores, float32 as it is."""
    attend, join = attention_rows_triton._kernels()
    pointers = dict.fromkeys(("query", "key", "value", "out"), f"*{dtype}") | {"mask": "*u8"}
    pointers |= dict.fromkeys(("highest", "totals", "values"), "*fp32")
    constants = {"ROWS": rows, "FEATURES": features, "BLOCK": 32, "SCALE": 0.1}
    made = compiled(attend, constants, pointers, num_warps=4)
    assert made.metadata.shared <= 64 << 10
    assert ("mma.sync" in made.asm["ptx"]) == (dtype == "bf16")
    taken = {name: pointer for name, pointer in pointers.items() if name in join.arg_names}
    ptx(join, {"PARTS": 32, "FEATURES": features}, taken)


@pytest.mark.parametrize("codes", [2, 8])
def test_dequantize_nf4(codes: int) -> None:
    kernel = dequantize_triton._kernel(FORMATS["nf4_b64"], codes)
    constants = {"BLOCK": 128, "FLAT": True, "WHOLE": True, "ALIGN": codes, "WIDE": False}
    ptx(kernel.function, constants, dict.fromkeys(kernel.pointers, "*fp32"))


PRINTED = {
    "mxfp4": (8, 2, 1),
    "nvfp4": (8,),
    "int4_g128": (8, 1),
    "int4_plain_g32": (8,),
    "int4_tiles_g128": (32, 1),
    "hqq4_g64_bf16": (8, 1),
    "hqq3_g64_fp16": (8,),
    "int8_g32": (4, 1),
    "nf4_tensor_b64": (8, 1),
    "fp8_e4m3_row": (4, 1),
    "nf4_b64_nested": (1,),
    "kbit3_e4m4": (1,),
}


@pytest.mark.parametrize(
    ("name", "codes"), [(name, codes) for name, widths in PRINTED.items() for codes in widths]
)
def test_dequantize_families(name: str, codes: int) -> None:
    """By the word, by the byte and by the element; subnormal scales are not flushed to zero."""
    fmt = FORMATS[name]
    kernel = dequantize_triton._kernel(fmt, codes)
    constants = {"BLOCK": 128, "FLAT": False, "WHOLE": codes > 1, "ALIGN": codes}
    constants["WIDE"] = codes == 1
    types = {
        "uint8": "*u8",
        "int8": "*i8",
        "bfloat16": "*bf16",
        "float16": "*fp16",
        "float32": "*fp32",
        "int32": "*i32",
    }
    required = [operand for operand in fmt.requirements((64, 256)) if operand.dtypes]
    text = ptx(kernel.function, constants, {o.name: types[o.dtypes[0]] for o in required})
    assert not re.search(r"\.ftz|fma\.rn\.f32", text)


@pytest.mark.parametrize("flat", [True, False])
def test_dequantize_tiles(flat: bool) -> None:
    """A lane loads the four words of 32 columns, a scale and a zero point, all of them once; what
    it has decoded is stored in 16 bytes at a time, also in rows that are longer by a LoRA's rank.
    """
    fmt = FORMATS["int4_tiles_g128"]
    words = len(fmt.places)
    constants = {"BLOCK": 32, "FLAT": flat, "WHOLE": True, "ALIGN": 16, "WIDE": False}
    kernel = dequantize_triton._kernel(fmt, words).function
    pointers = POINTERS | {"scale_and_zero": "*bf16"}
    text: str = compiled(kernel, constants, pointers, num_warps=1).asm["ptx"]
    loads, stores = (re.findall(rf"{op}\.global\.\S+", text) for op in ("ld", "st"))
    assert sorted(loads) == ["ld.global.b16"] * 2 + ["ld.global.b32"] * 4
    assert stores == ["st.global.v4.b32"] * (words // 8)


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [("*fp8e4nv", 89), ("*fp8e4nv", 90), *(("*i8", arch) for arch in (75, 80, 86, 90))],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_requantize(transposed: bool, dtype: str, arch: int) -> None:
    """A lane writes 8 or 16 bytes at a time, also of a tile that shared memory transposes."""
    fmt = FORMATS["nf4_b64"]
    kernel = requantize_triton._kernel(fmt, 8)
    config = requantize_triton.TRANSPOSED if transposed else requantize_triton.PLAIN
    constants = {
        "ROWS": config.rows,
        "UNITS": config.columns // 8,
        "TRANSPOSED": transposed,
        "WIDE": False,
    }
    pointers = {**POINTERS, "out": dtype, "row_scale": "*fp32", "absmax": "*fp32"}
    made = compiled(kernel.function, constants, pointers, arch=arch, num_warps=config.num_warps)
    stores = set(re.findall(r"st\.global\.\S+", made.asm["ptx"]))
    assert stores <= {"st.global.v2.b32", "st.global.v4.b32"}
    assert stores


@pytest.mark.parametrize("dtype", ["*bf16", "*fp16"])
@pytest.mark.parametrize("rank", [8, 64, 96, 128, 200])
def test_dropout(rank: int, dtype: str) -> None:
    """Three adapters; with a tile of A in shared memory two programs share a processor."""
    tiles, ranks = dropout_triton._ranks(3 * rank, 3)
    assert ranks["LANES"] * ranks["BLOCKS"] >= rank and ranks["LANES"] <= dropout_triton.MAX_LANES
    assert ranks["LANES"] * tiles.columns <= 64 * 128  # elements of a tile of A
    constants = {**ranks, "PART": tiles.part, "COLUMNS": tiles.columns, "WHOLE": True}
    of_x = {n: c for n, c in constants.items() if n not in ("TOTAL", "PART")}
    types = {**dict.fromkeys(("x", "a", "of_low", "of_x"), dtype), "seeds": "*i64"}
    for kernel, given in (
        (dropout_kernels_triton.project, constants),
        (dropout_kernels_triton.grad_a, constants),
        (dropout_kernels_triton.grad_x, {**of_x, "SCALE": 2.0, "COUNT": 3, "ADDS": False}),
        (dropout_kernels_triton.grad_x, {**of_x, "SCALE": 2.0, "COUNT": 3, "ADDS": True}),
    ):
        pointers = {**types, "partial": "*fp32"}
        pointers = {name: pointers[name] for name in kernel.arg_names if name in pointers}
        made = compiled(kernel, given, pointers, num_warps=dropout_triton.WARPS, num_stages=2)
        assert made.metadata.shared <= 48 << 10


@pytest.mark.parametrize("top_k", [0, 8])
def test_collect(top_k: int) -> None:
    constants = {"TOP_K": top_k, "ROWS": 8, "WIDTH": 256}
    ptx(expert_rows_triton.collect, constants, {"order": "*i64"})


@pytest.mark.parametrize(("rank", "top_k"), [(16, (0, 8)), (64, (8, 0)), (16, (0, 0))], ids=str)
@pytest.mark.parametrize("arch", [80, 90])
def test_gram(arch: int, rank: int, top_k: tuple[int, int]) -> None:
    constants = {
        "ROWS": grouped_gram_triton.ROWS,
        "RANK": rank,
        "WIDTH": grouped_gram_triton.WIDTH,
        "NARROW_TOP_K": top_k[0],
        "WIDE_TOP_K": top_k[1],
    }
    pointers = {**dict.fromkeys(("narrow", "wide", "out"), "*bf16"), "order": "*i64"}
    pointers["offsets"] = "*i32"
    options = {"num_warps": 4, "num_stages": 4}
    result = compiled(expert_rows_triton.gram, constants, pointers, arch=arch, **options)
    assert result.metadata.shared <= DEVICES[arch]
    assert re.search(r"mma\.sync|wgmma", result.asm["ptx"])
