"""Integers, fp8, MX formats and NVFP4: every code under every scale, by whoever decodes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from inductor_q import exc, ops
from inductor_q.backend import qfuse
from inductor_q.decode.eager import Eager
from inductor_q.experts.packing import pack
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.formats.codec import Table, rounded
from inductor_q.formats.encode import ENCODED
from inductor_q.formats.layout import HIGH_FIRST, LOW_FIRST, Interleaved, Tiles128x4
from inductor_q.formats.minifloat import E2M1, E4M3, E4M4, E5M2, E8M0, Minifloat
from inductor_q.formats.mx import E2M1_VALUES
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.scale import BlockScale, GroupScale, NestedScale, ProductScale
from inductor_q.kernels import (
    dequantize_cuda,
    dequantize_triton,
    scatter2scatter_cuda,
    scatter2scatter_triton,
)
from inductor_q.kernels.dequantize import compiled_by
from inductor_q.kernels.expert_weights import ExpertWeights
from tests.support import formulas
from tests.support.processes import FEW_OR_ALL, interpreted
from tests.support.quantized import DTYPES, assert_same_bits, sample

NAMES = list(formulas.FORMULAS)

# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (E2M1, formulas.E2M1),
        (E4M3, formulas.E4M3),
        (E5M2, formulas.E5M2),
        (E8M0, formulas.E8M0),
        (E4M4, formulas.E4M4),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_minifloat(kind: Minifloat, table: Tensor) -> None:
    decoded = kind.decode(Eager({}), torch.arange(len(table)).to(torch.uint8))
    assert_same_bits(decoded, table.float())
    finite = table[table.isfinite()].abs()
    assert finite.max() == kind.largest
    e = torch.arange(len(table)) % kind.magnitudes >> kind.mantissa_bits
    normal = table[e > 0] if kind.subnormal else table
    assert normal[normal.isfinite()].abs().min() == kind.smallest_normal


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2"), (E8M0, "float8_e8m0fnu")],
    ids=str,
)
def test_minifloats_are_those_of_torch(kind: Minifloat, dtype: str) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    codes = torch.arange(256).to(torch.uint8)
    expected = codes.view(getattr(torch, dtype)).float()
    assert_same_bits(kind.decode(Eager({}), codes), expected)


def test_the_table_of_e2m1() -> None:
    assert_same_bits(torch.tensor(E2M1_VALUES.values), formulas.E2M1.float())


# --- every code under every scale ---------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_eager(name: str) -> None:
    for operands, shape in formulas.cases(name):
        expected = formulas.values(name, operands, shape)
        for dtype in DTYPES:
            assert_same_bits(ops.dequantize(operands, name, shape, dtype), expected.to(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_lowered(name: str, device: str) -> None:
    """In Inductor's loops, which are all that compiled code has where it calls no kernel."""
    assert compiled_by("cpu", fmt=FORMATS[name], barred="a C++ wrapper") == "inductor"
    cases = formulas.cases(name)
    weights = [[operand.to(device) for operand in operands] for operands, _ in cases]

    def every(weights: list[list[Tensor]]) -> list[Tensor]:
        return [
            ops.dequantize(operands, name, cases[0][1], dtype)
            for operands in weights
            for dtype in DTYPES
        ]

    torch.compiler.reset()
    options: Any = {"qfuse.kernels": {"dequantize": "inductor"}}
    compiled: Any = torch.compile(every, backend=qfuse, fullgraph=True, options=options)
    found = iter(compiled(weights))
    for operands, shape in cases:
        expected = formulas.values(name, operands, shape)
        for dtype in DTYPES:
            assert_same_bits(next(found).cpu(), expected.to(dtype))


@pytest.mark.parametrize("few", FEW_OR_ALL)
def test_in_the_interpreter_of_triton(few: tuple[str, ...]) -> None:
    """The printed decode of a format, and the kernel on every code under every scale."""
    by_element, by_kernel = interpreted("interpret_formats", *few)
    assert by_element == 2 * len(few or FORMATS)
    with_formula = [name for name in NAMES if name in (few or NAMES)]
    assert by_kernel == 2 * sum(len(formulas.cases(name)) for name in with_formula)


# --- shapes, dtypes, the op ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 7), (3, 40), (2, 3, 48), (1, 1), (200,), (2, 130)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_any_length(name: str, shape: tuple[int, ...]) -> None:
    """Groups begin anew in each row, and the last of a row may be shorter; of a stack, too."""
    operands, values = sample(FORMATS[name], shape)
    assert_same_bits(ops.dequantize(operands, name, shape, torch.float32), values)


@pytest.mark.parametrize("name", NAMES)
def test_columns_may_be_symbolic(name: str) -> None:
    def decode(operands: list[Tensor], like: Tensor) -> Tensor:
        return ops.dequantize(operands, name, like.shape, torch.float32)

    torch.compiler.reset()
    compiled: Any = torch.compile(decode, backend=qfuse, fullgraph=True, dynamic=True)
    for shape in ((5, 34), (3, 272), (8, 64)):
        operands, values = sample(FORMATS[name], shape)
        assert_same_bits(compiled(operands, torch.empty(shape)), values)


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_of_experts(name: str) -> None:
    """Rows of one expert have scales of their own; a number for the whole tensor is shared."""
    for shape in ((3, 8, 80), (3, 5, 7)):
        operands, values = sample(FORMATS[name], shape)
        weights = ExpertWeights(operands, FORMATS[name], shape, torch.float32)
        assert_same_bits(weights.all(), values)
        assert_same_bits(weights.some(torch.tensor([2, 0])), values[[2, 0]])
        assert_same_bits(weights[1], values[1])


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    operands, _ = sample(FORMATS[name], (6, 48))
    operands = [t & 0xF7 if t.dtype == torch.uint8 else t for t in operands]  # NaN equals nothing
    opcheck(torch.ops.qfuse.dequantize.default, (operands, name, [6, 48], torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
def test_operands_that_do_not_fit(name: str) -> None:
    operands, _ = sample(FORMATS[name], (6, 256))
    for index in range(len(operands)):
        wrong = [*operands]
        wrong[index] = operands[index][:-1] if operands[index].numel() > 1 else operands[index][:0]
        with pytest.raises(exc.CorruptQuantState):
            ops.dequantize(wrong, name, (6, 256), torch.float32)


def test_codes_in_the_dtype_of_their_numbers() -> None:
    """float8_e4m3fn holds the bytes of a weight as well as uint8 does, compiled code included."""
    operands, values = sample(FORMATS["fp8_e4m3_row"], (6, 48))
    operands[0] = operands[0].view(torch.float8_e4m3fn)

    def decode(operands: list[Tensor]) -> Tensor:
        return ops.dequantize(operands, "fp8_e4m3_row", (6, 48), torch.float32)

    compiled: Any = torch.compile(decode, backend=qfuse, fullgraph=True)
    assert_same_bits(decode(operands), values)
    assert_same_bits(compiled(operands), values)


def test_scales_in_half_precision() -> None:
    operands, _ = sample(FORMATS["int4_g128"], (4, 256))
    operands[1] = operands[1].to(torch.bfloat16)
    expected = formulas.values("int4_g128", operands, (4, 256))
    assert_same_bits(ops.dequantize(operands, "int4_g128", (4, 256), torch.float32), expected)


# --- who serves ---------------------------------------------------------------------------------


def test_kernels_that_refuse_say_why() -> None:
    for name in NAMES:
        fmt = FORMATS[name]
        other_packing = f"csrc/kbit.cu decodes 2 to 5 bit planes, {name} has another packing"
        assert dequantize_cuda.KERNEL.unknown(fmt) == other_packing
        expected = f"{name} is not packed as nibbles"
        if fmt.nibbles:
            expected = "" if fmt.lut16 else f"{name} has no fixed codebook of 16 values"
        assert scatter2scatter_triton.KERNEL.unknown(fmt) == ("" if fmt.scaled_bytes else expected)
        is_e4m3 = fmt.scaled_bytes and "e4m3" in name
        assert scatter2scatter_cuda.KERNEL.unknown(fmt) == ("" if is_e4m3 else expected)


@pytest.mark.parametrize(
    ("name", "shape", "codes"),
    [
        ("mxfp4", (4, 64), 8),
        ("nvfp4", (4, 64), 8),
        ("int4_g128", (4, 64), 8),
        ("int4_g128", (4, 20), 2),  # eight neighbours may lie in two rows
        ("mxfp4", (4, 33), 1),  # and so may two
        ("fp8_e4m3_row", (4, 64), 8),
        ("fp8_e4m3_row", (4, 68), 1),
        ("int8_tensor", (4, 64), 8),
        ("int8_g32", (4, 66), 1),  # the last of a row's groups has two
        ("int8_row", (4, 67), 1),
        ("nf4_b64", (5, 7), 2),  # blocks run on through the rows
        ("kbit4_e4m4", (5, 7), 8),
        ("int4_tiles_g32", (4, 64), 32),
        ("int4_tiles_g32", (4, 48), 1),  # a row ends in the middle of its words
    ],
)
def test_elements_in_a_lane_share_their_scales(
    name: str, shape: tuple[int, int], codes: int
) -> None:
    operands, _ = sample(FORMATS[name], shape)
    out = torch.empty(shape)
    found = dequantize_triton.codes_of_a_lane(operands[0], FORMATS[name], out, True, shape[1])
    assert found == codes


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name] not in ENCODED])
def test_experts_are_not_quantized_to_a_format_that_is_only_read(name: str) -> None:
    with pytest.raises(exc.NoQuantizer, match=f"^{name} is a format to read; nothing here"):
        pack(torch.zeros(2, 4, 128), name)


# --- layouts ------------------------------------------------------------------------------------


def to_tiles(scales: Tensor) -> Tensor:
    """[rows, columns] as tensor cores read them, by reshapes (cuBLAS' block scaling layout)."""
    rows, columns = (-(-scales.shape[0] // 128), -(-scales.shape[1] // 4))
    padded = scales.new_zeros(rows * 128, columns * 4)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    tiles = padded.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1)


@pytest.mark.parametrize("shape", [(128, 64), (3, 16), (130, 80), (300, 272)], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_scales_in_tiles(name: str, shape: tuple[int, int]) -> None:
    """The same format with another map: what is laid out in tiles decodes to the same values."""
    fmt = FORMATS[name]
    operands, values = sample(fmt, shape)
    (scale,) = fmt.shared
    inner = scale.first if isinstance(scale, ProductScale) else scale
    assert isinstance(inner, GroupScale)
    tiled: Any = replace(inner, layout=Tiles128x4())
    if isinstance(scale, ProductScale):
        tiled = replace(scale, first=tiled)
    other = replace(fmt, name=f"{name}_tiles", shared=(tiled,))
    operands[1] = to_tiles(operands[1].reshape(shape[0], -1))
    assert other.requirements(shape)[1].numel == operands[1].numel()
    decoded = other.decode(
        Eager(dict(zip(other.operands, operands, strict=True)), shape[1]),
        torch.arange(values.numel()),
    )
    assert_same_bits(decoded.reshape(shape), values)
    assert other.period(shape[1]) == 128 * shape[1]  # a tile holds scales of 128 rows


@pytest.mark.parametrize("order", [LOW_FIRST, HIGH_FIRST, Interleaved(2), Interleaved(4)], ids=str)
@pytest.mark.parametrize(("bits", "word"), [(4, 1), (4, 4), (2, 1), (2, 4)])
def test_order_of_codes_in_a_word(order: Any, bits: int, word: int) -> None:
    packing = BytePacking(bits, order, word)
    per_word = 8 * word // bits
    if isinstance(order, Interleaved) and per_word % order.ways:
        pytest.skip("that many ways do not fit")
    codes = torch.randint(2**bits, (5, per_word), generator=torch.Generator().manual_seed(0))
    places = order.places(per_word)
    assert sorted(places) == list(range(per_word))
    words = [sum(c << bits * p for c, p in zip(row, places, strict=True)) for row in codes.tolist()]
    data = b"".join(number.to_bytes(word, "little") for number in words)
    qweight = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert packing.operands(5, per_word)[0].numel == qweight.numel()
    found = packing.code(Eager({"qweight": qweight}), torch.arange(5 * per_word))
    assert torch.equal(found.reshape(5, per_word).long(), codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_zero_point_of_hqq(dtype: torch.dtype) -> None:
    """Codes of 4 bits minus each finite zero point: rounded as torch rounds in that dtype."""
    zeros = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    zeros = zeros[zeros.isfinite()]
    codes = torch.arange(16)[:, None]
    found = rounded(Eager({}), codes.float() - zeros.float(), str(dtype).removeprefix("torch."))
    expected = codes.to(dtype) - zeros
    fits = expected.isfinite()
    assert fits.float().mean() > 0.99
    assert_same_bits(found[fits].to(dtype), expected[fits])
    assert torch.equal(found[fits], found[fits].to(dtype).float())  # nothing is left to round


def test_the_order_of_awq() -> None:
    assert Interleaved(2).places(8) == (0, 4, 1, 5, 2, 6, 3, 7)


# --- what kernels ask ---------------------------------------------------------------------------


def test_what_formats_answer() -> None:
    answers = {
        name: (fmt.nibbles, fmt.planes, fmt.lut16 is not None, fmt.group(96), fmt.by_rows)
        for name, fmt in FORMATS.items()
        if name in (*NAMES, "nf4_b64", "fp4_b4096_nested", "kbit3_e4m4")
    }
    assert answers == {
        "nf4_b64": ((4, 0), 0, True, 32, False),
        "fp4_b4096_nested": ((4, 0), 0, True, 32, False),
        "kbit3_e4m4": (None, 3, False, 32, False),
        "mxfp4": ((0, 4), 0, True, 32, True),
        "nvfp4": ((0, 4), 0, True, 16, True),
        "nvfp4_rows": ((0, 4), 0, True, 16, True),
        "nvfp4_divided_rows": ((0, 4), 0, True, 16, True),
        "int4_g128": ((0, 4), 0, False, 32, True),
        "int4_plain_g32": ((0, 4), 0, False, 32, True),
        "hqq4_g64_bf16": ((0, 4), 0, False, 32, False),
        "int8_g32": (None, 0, False, 32, True),
        "int8_absmax": (None, 0, False, 96, True),
        "mxfp8_e4m3": (None, 0, False, 32, True),
        "fp8_e4m3_row": (None, 0, False, 96, True),
        "fp8_e4m3_128x128": (None, 0, False, 32, True),
        "fp8_e5m2_tensor": (None, 0, False, 96, False),
    }


def test_a_nested_scale_without_an_offset() -> None:
    scale = NestedScale("s", 2, Table("t", 4), BlockScale("outer", 2))
    fmt = QuantFormat("n", BytePacking(4), E2M1_VALUES, (scale,))
    assert fmt.operands == ("qweight", "s", "t", "outer")
    assert fmt.blockwise is None  # no kernel has code for it
    operands = {
        "qweight": torch.tensor([0x22, 0x22, 0x22, 0x22], dtype=torch.uint8),  # 1.0
        "s": torch.tensor([0, 1, 2, 3], dtype=torch.uint8),
        "t": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "outer": torch.tensor([10.0, 100.0]),
    }
    decoded = fmt.decode(Eager(operands), torch.arange(8))
    assert decoded.tolist() == [10.0, 10.0, 20.0, 20.0, 300.0, 300.0, 400.0, 400.0]


def test_rows_need_to_be_known() -> None:
    operands, _ = sample(FORMATS["mxfp4"], (2, 64))
    with pytest.raises(AssertionError, match="no number of columns"):
        FORMATS["mxfp4"].decode(
            Eager(dict(zip(("qweight", "scale"), operands, strict=True))), torch.arange(4)
        )
