"""Formats: every value is bitwise bitsandbytes' own, whatever the blocksize, dtype and storage."""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import inductor_q
from inductor_q import exc, ops
from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.decode.eager import Eager
from inductor_q.formats import FORMATS, get_format
from inductor_q.formats.bnb import BLOCKSIZES, BNB_FORMATS, BNB_QUANT_TYPES, bnb_format_name
from inductor_q.formats.codec import Codebook, Table
from inductor_q.formats.kbit import KBIT_FORMATS
from inductor_q.formats.layout import HIGH_FIRST, LOW_FIRST
from inductor_q.formats.mx import E2M1_VALUES
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import BlockScale, NestedScale
from tests.support.quantized import (
    AT_LEAST_0_50,
    DTYPES,
    QUANT_TYPES,
    assert_same_as_native,
    assert_same_bits,
    bnb,
    by_table,
    needs_0_50,
    quantize,
    sample,
)

STORAGES = (torch.uint8, *DTYPES)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes compiles its generic decode for each shape; the same function, uncompiled."""
    from bitsandbytes.backends.default import ops as default

    for name in ("_dequantize_4bit_compute", "_dequantize_blockwise_compute"):
        compiled = getattr(default, name, None)
        if compiled is not None:
            monkeypatch.setattr(default, name, getattr(compiled, "__wrapped__", compiled))


def decode(fmt: QuantFormat, operands: list[Tensor], numel: int) -> Tensor:
    """Float32 values straight from the description, by its eager interpreter."""
    interpreter = Eager(dict(zip(fmt.operands, operands, strict=True)))
    values = fmt.decode(interpreter, torch.arange(numel))
    assert isinstance(values, Tensor)
    return values


# --- bitwise equality with bitsandbytes ---------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_equals_bitsandbytes(quant_type: str, blocksize: int, nested: bool) -> None:
    if blocksize >= 2048 and not AT_LEAST_0_50:
        pytest.skip("bitsandbytes < 0.50 rounds the table before the product there")
    for dtype, storage in itertools.product(DTYPES, STORAGES):
        w = quantize(
            (12, 2 * blocksize),
            quant_type,
            blocksize=blocksize,
            nested=nested,
            dtype=dtype,
            storage=storage,
        )
        assert w.packed.dtype == storage
        assert_same_as_native(inductor_q.dequantize(w.packed, w.state), w.packed, w.state)
        assert_same_bits(inductor_q.dequantize(w.packed, w.state), by_table(w.packed, w.state))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized_from", DTYPES)
def test_dtype_may_differ_from_the_quantized_one(
    quantized_from: torch.dtype, dtype: torch.dtype
) -> None:
    w = quantize((24, 128), dtype=quantized_from)
    actual = inductor_q.dequantize(w.packed, w.state, dtype=dtype)
    w.state.dtype = dtype
    assert_same_as_native(actual, w.packed, w.state)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_under_every_scale_code(quant_type: str, dtype: torch.dtype) -> None:
    """16 codes x 256 scale codes: all that a nested weight can consist of."""
    w = quantize((256, 64), quant_type, dtype=dtype)
    w.state.absmax = torch.arange(256, dtype=torch.uint8)
    byte = torch.arange(32, dtype=torch.uint8) % 8
    w.packed.copy_((((2 * byte) << 4) | (2 * byte + 1)).repeat(256).reshape(w.packed.shape))
    actual = inductor_q.dequantize(w.packed, w.state)
    assert_same_as_native(actual, w.packed, w.state)
    scale = w.state.state2.code * w.state.state2.absmax + w.state.offset
    table = bnb.get_4bit_type(quant_type, device="cpu")
    expected = (scale[:, None] * table.repeat(4)).to(dtype)
    assert_same_bits(actual, expected)


def test_a_tie_goes_to_the_even_float16() -> None:
    """Halfway between two float16 values; bitsandbytes' CUDA builds round these away on a CPU."""
    w = quantize((64, 64), nested=False, dtype=torch.float16)
    odd = 2 * torch.arange(64, dtype=torch.float32) + 1
    w.state.absmax = 1 + odd * 2.0**-11
    w.packed.fill_(0xFF)  # every code is 15, the value 1.0
    actual = inductor_q.dequantize(w.packed, w.state)
    assert (actual.view(torch.int16) & 1 == 0).all()
    assert_same_as_native(actual, w.packed, w.state)
    with pytest.raises(AssertionError):
        assert_same_as_native(torch.nextafter(actual, torch.tensor(2).half()), w.packed, w.state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_zeros_and_tiny_weights(quant_type: str, nested: bool, dtype: torch.dtype) -> None:
    """A block of zeros has a zero scale; signs of zeros and denormals count."""
    w = torch.zeros(4, 64)
    w[1] = torch.linspace(-1e-38, 1e-38, 64)
    w[2] = torch.linspace(-1e-42, 1e-42, 64)
    w[3, 0] = -1e-30
    packed, state = bnb.quantize_4bit(
        w, blocksize=64, quant_type=quant_type, compress_statistics=nested
    )
    state.dtype = dtype
    assert_same_bits(inductor_q.dequantize(packed, state), by_table(packed, state))


# bitsandbytes' native CPU kernel, where the row length is no multiple of the blocksize ----------


def native_cpu_restarts_its_blocks() -> bool:
    """Whether this bitsandbytes has the defect: 0.50 with its native library does."""
    w = quantize((2, 96), nested=False, dtype=torch.float32)
    return not torch.equal(bnb.dequantize_4bit(w.packed, w.state), by_table(w.packed, w.state))


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("cols", [32, 96, 160])
def test_rows_that_are_no_multiple_of_the_blocksize(cols: int, nested: bool) -> None:
    """Blocks run on through the rows: bitsandbytes' quantizer, CUDA and generic code say so.

    Its native CPU kernel restarts them at each row, and so is far from the weight. Ours is not.
    """
    w = quantize((6, cols), blocksize=64, nested=nested, dtype=torch.float32)
    ours = inductor_q.dequantize(w.packed, w.state)
    assert_same_bits(ours, by_table(w.packed, w.state))
    native = bnb.dequantize_4bit(w.packed, w.state)
    if native_cpu_restarts_its_blocks():
        assert not torch.equal(native, ours)
        assert (ours - w.original).norm() < 0.8 * (native - w.original).norm()
    else:
        assert_same_bits(ours, native)


@pytest.mark.parametrize("shape", [(6, 96), (5, 7), (3, 1), (1, 1), (129,)])
def test_equals_the_generic_implementation_of_bitsandbytes(shape: tuple[int, ...]) -> None:
    from bitsandbytes.backends.default import ops as default

    generic = getattr(default, "_dequantize_4bit_compute", None)
    if generic is None:
        pytest.skip("bitsandbytes < 0.50 has no generic implementation of its own in float32")
    for quant_type, dtype in itertools.product(QUANT_TYPES, DTYPES):
        w = quantize(shape, quant_type, nested=False, dtype=dtype)
        expected = generic(
            w.packed.reshape(-1), w.state.absmax, w.state.code, 64, w.state.shape, dtype
        )
        assert_same_bits(
            inductor_q.dequantize(w.packed, w.state).reshape(shape), expected.reshape(shape)
        )


# --- shapes -------------------------------------------------------------------------------------


@needs_0_50
@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    quant_type=st.sampled_from(QUANT_TYPES),
    blocksize=st.sampled_from(BLOCKSIZES),
    nested=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape(
    shape: list[int], quant_type: str, blocksize: int, nested: bool, dtype: torch.dtype
) -> None:
    w = quantize(shape, quant_type, blocksize=blocksize, nested=nested, dtype=dtype)
    operands, name, logical = w.operands
    actual = ops.dequantize(operands, name, logical, dtype)
    assert list(actual.shape) == shape
    assert actual.is_contiguous()
    assert_same_bits(actual, by_table(w.packed, w.state))
    values = decode(get_format(name), operands, actual.numel())
    assert_same_bits(actual, values.reshape(shape).to(dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 64), (64, 0), (2, 0, 3)])
def test_empty(shape: tuple[int, ...]) -> None:
    w = quantize(shape, nested=False)
    actual = inductor_q.dequantize(w.packed, w.state)
    assert (tuple(actual.shape), actual.dtype) == (shape, torch.bfloat16)


@needs_0_50
@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar(dtype: torch.dtype) -> None:
    w = quantize((1,), dtype=dtype, nested=False)
    operands, name, _ = w.operands
    assert_same_bits(ops.dequantize(operands, name, (), dtype)[None], w.original)


def test_absmax_in_half_precision() -> None:
    """Some checkpoints store it so; bitsandbytes reads it as float32."""
    for dtype in (torch.float16, torch.bfloat16):
        w = quantize((8, 64), nested=False)
        w.state.absmax = w.state.absmax.to(dtype)
        expected = bnb.dequantize_4bit(w.packed, w.state)
        assert_same_bits(inductor_q.dequantize(w.packed, w.state), expected)


# --- the description ----------------------------------------------------------------------------


def test_registry() -> None:
    expected = {
        f"{quant_type}_b{blocksize}{suffix}"
        for quant_type in ("nf4", "fp4")
        for blocksize in (32, 64, 128, 256, 512, 1024, 2048, 4096)
        for suffix in ("", "_nested")
    } | {f"kbit{k}_{absmax}" for k in (2, 3, 4, 5) for absmax in ("e4m4", "fp16")}
    expected |= {"mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4", "nvfp4_rows", "nvfp4_tiles"}
    expected |= {"int4_g32", "int4_g64", "int4_g128", "fp8_e4m3_128x128", "nvfp4_divided_rows"}
    expected |= {
        f"int{of}_g{group}" for of in ("4_plain", "4_tiles", "8") for group in (32, 64, 128, 256)
    }
    expected |= {"int8_row", "int8_tensor", "int8_absmax", "nf4_tensor_b64"}
    hqq = ("hqq2_g16", "hqq2_g64", "hqq3_g64", "hqq4_g64", "hqq8_g64")
    expected |= {f"{of}_{dtype}" for of in hqq for dtype in ("bf16", "fp16")}
    expected |= {f"fp8_{number}_{of}" for number in ("e4m3", "e5m2") for of in ("row", "tensor")}
    assert set(FORMATS) == expected
    assert all(fmt.name == name for name, fmt in FORMATS.items())
    assert all(get_format(name) is fmt for name, fmt in FORMATS.items())
    assert inductor_q.FORMATS is FORMATS
    assert inductor_q.QuantFormat is QuantFormat
    assert len(set(FORMATS.values())) == len(FORMATS)  # hashable, and no two the same


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_tables_are_bitsandbytes_tables(quant_type: str) -> None:
    table = torch.tensor(BNB_QUANT_TYPES[quant_type].values, dtype=torch.float32)
    assert_same_bits(table, bnb.get_4bit_type(quant_type, device="cpu"))


@needs_0_50
def test_blocksizes_are_those_of_bitsandbytes() -> None:
    for blocksize in BLOCKSIZES:
        bnb.quantize_4bit(torch.zeros(1, blocksize), blocksize=blocksize)
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        bnb.quantize_4bit(torch.zeros(1, 64), blocksize=16)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_operands_are_found_by_running_decode(fmt: QuantFormat) -> None:
    read: set[str] = set()

    class Recorder(Eager):
        def load(self, name: str, i: Tensor) -> Tensor:
            read.add(name)
            return super().load(name, i)

        def gather(self, name: str, code: Tensor, size: int) -> Tensor:
            read.add(name)
            return super().gather(name, code, size)

    block = 64
    operands, values = sample(fmt, (2, block))
    recorder = Recorder(dict(zip(fmt.operands, operands, strict=True)), block, 2)
    decoded = fmt.decode(recorder, torch.arange(2 * block))
    assert_same_bits(decoded.reshape(2, block), values)
    assert read == set(fmt.operands)
    assert fmt.operands[0] == "qweight"
    if fmt in (*BNB_FORMATS, *KBIT_FORMATS):
        assert fmt.operands[1] == "absmax"
    required = fmt.requirements((2, block))
    assert tuple(operand.name for operand in required) == fmt.operands
    for operand, tensor in zip(required, operands, strict=True):
        assert str(tensor.dtype).removeprefix("torch.") in (operand.dtypes or ("uint8",))
        assert tensor.numel() == operand.numel


def test_operands_of_a_new_format() -> None:
    """Nothing about operands is written by hand: a format made of other parts has its own."""
    fmt = QuantFormat(
        name="two_tables",
        packing=BytePacking(bits=4, order=LOW_FIRST),
        codec=Table("values", 16),
        shared=(NestedScale("s", 2, Table("t", 256), BlockScale("outer", 2), "shift"),),
    )
    assert fmt.operands == ("qweight", "s", "t", "outer", "shift", "values")
    plain = replace(fmt, shared=(BlockScale("s", 2),))
    assert plain.operands == ("qweight", "s", "values")
    assert [(o.name, o.numel) for o in plain.requirements((5,))] == [
        ("qweight", 3),
        ("s", 3),
        ("values", 16),
    ]
    values = torch.arange(16.0)
    operands = [torch.tensor([0x21, 0x43], dtype=torch.uint8), torch.tensor([1.0, 10.0]), values]
    assert decode(plain, operands, 4).tolist() == [1.0, 2.0, 30.0, 40.0]


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        (BytePacking(bits=4, order=HIGH_FIRST), [1, 2, 3, 4]),
        (BytePacking(bits=4, order=LOW_FIRST), [2, 1, 4, 3]),
        (BytePacking(bits=2, order=HIGH_FIRST), [0, 1, 0, 2, 0, 3, 1, 0]),
        (BytePacking(bits=2, order=LOW_FIRST), [2, 0, 1, 0, 0, 1, 3, 0]),
        (BytePacking(bits=8), [0x12, 0x34]),
    ],
    ids=str,
)
def test_packing(packing: BytePacking, expected: list[int]) -> None:
    data = torch.tensor([0x12, 0x34], dtype=torch.uint8)
    codes = packing.code(Eager({"qweight": data}), torch.arange(len(expected)))
    assert codes.tolist() == expected
    by_shift = [
        (int(byte) >> packing.bits * place) & ((1 << packing.bits) - 1)
        for byte in data
        for place in packing.order.places(packing.per_byte)
    ]
    assert by_shift == expected


def test_codebook_in_loops_selects_every_value() -> None:
    """The lowering's select tree against the table, also where the size is no power of two."""
    from torch._inductor.virtualized import V

    from inductor_q.decode.loops import Loops

    class Python:
        """Inductor's loop ops on plain numbers."""

        def __getattr__(self, name: str) -> Any:
            import operator

            def constant(value: float, dtype: torch.dtype) -> float:
                assert value != 0 or math.copysign(1.0, value) > 0, "Triton reads it as 0.0"
                return value

            table: dict[str, Any] = {
                "constant": constant,
                "to_dtype_bitcast": lambda value, dtype, from_dtype: struct.unpack(
                    "f", struct.pack("i", value)
                )[0],
                "ne": operator.ne,
                "bitwise_and": operator.and_,
                "where": lambda condition, a, b: a if condition else b,
            }
            return table[name]

    for values in (
        BNB_QUANT_TYPES["nf4"].values,
        BNB_QUANT_TYPES["fp4"].values,
        tuple(map(float, range(8))),
        (5.0, 7.0),
        E2M1_VALUES.values,  # -0.0 is one of them
    ):
        with V.set_ops_handler(cast(Any, Python())):
            found = [Loops({}, "cpu").codebook(values, code) for code in range(len(values))]
        assert [repr(value.value) for value in found] == list(map(repr, values))


def test_loops_round_products_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would contract `code * outer + offset` of a nested scale to an FMA, eager does not.
    The instruction is PTX, which AMD's GPUs, "cuda" to torch, have not."""
    from torch._inductor.ops_handler import MockHandler
    from torch._inductor.virtualized import V

    from inductor_q.decode.loops import Loops

    handler = cast(Any, MockHandler())
    with V.set_ops_handler(handler):
        assert str(Loops({}, "cpu").mul("a", "b")) == str(handler.mul("a", "b"))
        monkeypatch.setattr(torch.version, "hip", None)
        assert "mul.rn.f32" in str(Loops({}, "cuda").mul("a", "b"))
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert str(Loops({}, "cuda").mul("a", "b")) == str(handler.mul("a", "b"))


# --- errors -------------------------------------------------------------------------------------


def test_unknown_format() -> None:
    with pytest.raises(exc.UnknownFormat) as error:
        get_format("nf4_b46")
    near = str(error.value).partition("did you mean ")[2].partition("?")[0].split(" or ")
    assert set(near) < {repr(name) for name in FORMATS}
    assert str(error.value) == (
        f"no quantization format 'nf4_b46'; did you mean {' or '.join(near)}? "
        f"Known: {', '.join([*FORMATS][:20])}, and {len(FORMATS) - 20} more"
    )
    with pytest.raises(KeyError):  # the builtin that a caller without us would catch
        get_format("int3")


def test_unknown_quant_type() -> None:
    w = quantize((4, 64))
    w.state.quant_type = "nf5"
    with pytest.raises(exc.UnknownFormat) as error:
        inductor_q.dequantize(w.packed, w.state)
    assert str(error.value) == ("no quantization format 'nf5'; did you mean 'nf4'? Known: nf4, fp4")


def test_unsupported_blocksize() -> None:
    w = quantize((4, 64))
    w.state.blocksize = 16
    with pytest.raises(exc.UnsupportedBlocksize) as error:
        bnb_operands(w.packed, w.state)
    text = (
        "blocksize 16 is not supported. "
        "Quantize again with one of 32, 64, 128, 256, 512, 1024, 2048, 4096"
    )
    assert str(error.value) == text
    with pytest.raises(exc.UnsupportedBlocksize, match="blocksize 48 is not supported"):
        bnb_format_name("nf4", 48, nested=False)


def test_unsupported_nested_blocksize() -> None:
    w = quantize((4, 64))
    w.state.state2.blocksize = 128
    with pytest.raises(exc.CorruptQuantState) as error:
        bnb_operands(w.packed, w.state)
    assert str(error.value) == (
        "corrupt quantization state: blocksize of the nested absmax should be 256, is 128. "
        "Quantize again with compress_statistics=True."
    )


# --- the tests themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"packing": BytePacking(bits=4, order=LOW_FIRST)},
        {"codec": Codebook(tuple(reversed(BNB_QUANT_TYPES["nf4"].values)))},
        {"shared": (BlockScale("absmax", 32),)},
    ],
    ids=lambda part: next(iter(part)),
)
def test_another_description_gives_other_values(part: dict[str, Any]) -> None:
    """Each part counts: with one of them wrong, equality with bitsandbytes is lost."""
    fmt = replace(FORMATS["nf4_b64"], **part)
    w = quantize((4, 64), nested=False, dtype=torch.float32)
    operands, _, _ = w.operands
    operands[1] = operands[1].repeat(2)  # enough scales for the smaller block
    wrong = decode(fmt, operands, 256).reshape(4, 64)
    assert not torch.equal(wrong, bnb.dequantize_4bit(w.packed, w.state))
