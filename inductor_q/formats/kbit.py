"""k-bit weights, K = 2 to 5: bit planes in blocks of 32, any codebook, and one absmax per block.

`value = codebook[code] * absmax`. A block is a warp: packing is a ballot, and reading a code takes
no shared memory. The codebook is an operand, so a weight may bring its own. The absmax is fp16, or
E4M4: 8 bits with four of exponent and four of mantissa, bias 11, which are steps of 2^-14 up to
2^-10, then 16 steps per octave up to 31. An element takes K + 0.25 bits with E4M4, K + 0.5 with
fp16.
"""

from __future__ import annotations

import functools
import statistics

from inductor_q.formats.codec import Codec, Number, Table
from inductor_q.formats.minifloat import E4M4
from inductor_q.formats.packing import BitPlanes
from inductor_q.formats.quant_format import QuantFormat
from inductor_q.formats.scale import BlockScale

KBITS = (2, 3, 4, 5)
BLOCK = BitPlanes.block

#: The codecs in which a scale may be stored.
KBIT_SCALES: dict[str, Codec] = {"e4m4": E4M4, "fp16": Number(("float16",))}


def kbit_format_name(k: int, absmax: str) -> str:
    """Name the format of K = `k`, one of KBITS, with `absmax`, one of KBIT_SCALES."""
    return f"kbit{k}_{absmax}"


@functools.cache
def normal_float(k: int) -> tuple[float, ...]:
    """Return the default codebook: 2**k quantiles of N(0, 1), evenly spaced, over the last.

    It is evenly spaced in probability, symmetric, from -1 to 1, and without a zero (unlike NF4,
    which spends an entry on it).
    """
    n = 2**k
    inverse_cdf = statistics.NormalDist().inv_cdf
    quantiles = [inverse_cdf((i + 0.5) / n) for i in range(n)]
    return tuple(q / quantiles[-1] for q in quantiles)


KBIT_FORMATS = tuple(
    QuantFormat(
        name=kbit_format_name(k, absmax),
        packing=BitPlanes(bits=k),
        codec=Table("codebook", 2**k),
        shared=(BlockScale("absmax", BLOCK, stored),),
    )
    for k in KBITS
    for absmax, stored in KBIT_SCALES.items()
)
