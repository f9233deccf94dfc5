"""Describe quantized weights: every format that the library knows, by name."""

from inductor_q.formats.bnb import BNB_FORMATS, INT8
from inductor_q.formats.fp8 import FP8_FORMATS
from inductor_q.formats.hqq import HQQ_FORMATS
from inductor_q.formats.intx import INTX_FORMATS
from inductor_q.formats.kbit import KBIT_FORMATS
from inductor_q.formats.mx import MX_FORMATS
from inductor_q.formats.nf4_tensor import NF4_TENSOR_FORMATS
from inductor_q.formats.quant_format import QuantFormat, lookup

FORMATS: dict[str, QuantFormat] = {
    fmt.name: fmt
    for formats in (
        *(BNB_FORMATS, (INT8,), KBIT_FORMATS, INTX_FORMATS, FP8_FORMATS, MX_FORMATS),
        *(NF4_TENSOR_FORMATS, HQQ_FORMATS),
    )
    for fmt in formats
}

__all__ = ["FORMATS", "QuantFormat", "get_format"]


def get_format(name: str) -> QuantFormat:
    """Return the format called `name`; raise `UnknownFormat` with the known names."""
    return lookup(FORMATS, name)
