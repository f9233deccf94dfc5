"""k-bit weights: tensors, linear layers and whole models in 2 to 5 bits. See docs/kbit.md."""

from inductor_q.kbit.linear import KBitLinear
from inductor_q.kbit.model import dequantize_model, quantize_model
from inductor_q.kbit.storage import load, save
from inductor_q.kbit.tensor import (
    KBitTensor,
    decode_absmax_e4m4,
    dequantize,
    encode_absmax_e4m4,
    normal_float_codebook,
    quantize,
)
from inductor_q.loading.files import meta_parameters

__all__ = [
    "KBitLinear",
    "KBitTensor",
    "decode_absmax_e4m4",
    "dequantize",
    "dequantize_model",
    "encode_absmax_e4m4",
    "load",
    "meta_parameters",
    "normal_float_codebook",
    "quantize",
    "quantize_model",
    "save",
]
