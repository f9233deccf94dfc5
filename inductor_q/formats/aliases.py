"""Short names of formats, each for what its library takes by default.

Those of `OF_TORCHAO` mean something else where torchao is asked for them by name.
"""

from __future__ import annotations

from inductor_q.formats.bnb import INT8
from inductor_q.formats.kbit import KBITS, kbit_format_name
from inductor_q.formats.nf4_tensor import BLOCK

ALIASES = {
    "nf4": "nf4_b64_nested",
    "fp4": "fp4_b64_nested",
    "int8": "int8_row",
    "llm_int8": INT8.name,
    "fp8": "fp8_e4m3_row",
    "fp8_row": "fp8_e4m3_row",
    "fp8_tensor": "fp8_e4m3_tensor",
    "fp8_128x128": "fp8_e4m3_128x128",
    "nvfp4": "nvfp4_tiles",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8_e4m3",
    "int4": "int4_tiles_g128",
    **{f"int4_g{group}": f"int4_tiles_g{group}" for group in (32, 64, 128, 256)},
    **{f"kbit{k}": kbit_format_name(k, "e4m4") for k in KBITS},
}

OF_TORCHAO = {"nf4": f"nf4_tensor_b{BLOCK}"}
