"""bitsandbytes' formats: nf4 and fp4, plain and double-quantized (nested), every blocksize; int8.

The values are those of `get_4bit_type` of bitsandbytes (MIT) and its kernels; NF4 is from QLoRA,
arXiv 2305.14314, appendix E. The first element of a pair lies in the high nibble. An integer of
LLM.int8, arXiv 2208.07339, is multiplied with a 127th of the largest magnitude of its row.
"""

from __future__ import annotations

from inductor_q.exc import UnsupportedBlocksize
from inductor_q.formats.codec import Codebook, Integer, Number, Table
from inductor_q.formats.layout import HIGH_FIRST
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import BlockScale, NestedScale, RowScale, Scale

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCKSIZE = 256

NF4 = Codebook(
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    )
)  # fmt: skip

FP4 = Codebook(
    tuple(
        sign * magnitude + 0.0  # code 8 is +0, as code 0
        for sign in (1.0, -1.0)
        for magnitude in (
            0.0,
            0.0052083334885537624,
            0.6666666865348816,
            1.0,
            0.3333333432674408,
            0.5,
            0.1666666716337204,
            0.25,
        )
    )
)

BNB_QUANT_TYPES: dict[str, Codebook] = {"nf4": NF4, "fp4": FP4}


def bnb_format_name(quant_type: str, blocksize: int, nested: bool) -> str:
    """Name the format of bitsandbytes' `quant_type` at `blocksize`, one of BLOCKSIZES."""
    for known in BLOCKSIZES:
        if blocksize == known:  # `known` is a number also where `blocksize` is symbolic
            return f"{quant_type}_b{known}" + ("_nested" if nested else "")
    raise UnsupportedBlocksize(blocksize=blocksize, supported=BLOCKSIZES)


def _scale(blocksize: int, nested: bool) -> Scale:
    if not nested:
        return BlockScale("absmax", blocksize)
    return NestedScale(
        operand="absmax",
        block=blocksize,
        codec=Table("nested_codebook", 256),
        outer=BlockScale("nested_absmax", NESTED_BLOCKSIZE),
        offset="nested_offset",
    )


BNB_FORMATS = tuple(
    QuantFormat(
        name=bnb_format_name(quant_type, blocksize, nested),
        packing=BytePacking(bits=4, order=HIGH_FIRST),
        codec=codebook,
        shared=(_scale(blocksize, nested),),
    )
    for quant_type, codebook in BNB_QUANT_TYPES.items()
    for blocksize in BLOCKSIZES
    for nested in (False, True)
)

#: What bitsandbytes writes for a 127th, which float32 rounds.
INT8_FACTOR = 1.0 / 127.0

INT8 = QuantFormat(
    name="int8_absmax",
    packing=BytePacking(bits=8),
    codec=Integer(),
    shared=(RowScale("absmax", Number(("float32",), INT8_FACTOR)),),
)
