"""torchao's `NF4Tensor`: NF4 codes, the first of a pair high, under scales that are quantized.

The table of 16 values is an operand, since torchao rounds it to the dtype of the weight. All is in
bfloat16, each step of a decode included: a scale is `code / factor + mean`, and a value in bfloat16
is bitwise torchao's.
"""

from __future__ import annotations

from inductor_q.formats.codec import Number, Table
from inductor_q.formats.layout import HIGH_FIRST
from inductor_q.formats.packing import BytePacking
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import BlockScale, CenteredScale

BLOCK, SCALER_BLOCK = 64, 256

NF4_TENSOR_FORMATS = (
    QuantFormat(
        name=f"nf4_tensor_b{BLOCK}",
        packing=BytePacking(bits=4, order=HIGH_FIRST),
        codec=Table("codebook", 16),
        shared=(
            CenteredScale(
                operand="absmax",
                block=BLOCK,
                factor=BlockScale("factor", SCALER_BLOCK, Number(("bfloat16",))),
                mean="mean",
            ),
        ),
    ),
)
