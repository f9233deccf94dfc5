"""Short names of formats, each for what its library takes by default."""

from __future__ import annotations

from inductor_q.formats.bnb import INT8
from inductor_q.formats.kbit import KBITS, kbit_format_name

ALIASES = {
    "nf4": "nf4_b64_nested",
    "fp4": "fp4_b64_nested",
    "int8": "int8_row",
    "llm_int8": INT8.name,
    "fp8": "fp8_e4m3_row",
    "fp8_row": "fp8_e4m3_row",
    "fp8_tensor": "fp8_e4m3_tensor",
    "nvfp4": "nvfp4_tiles",
    **{f"int4_g{group}": f"int4_tiles_g{group}" for group in (32, 64, 128, 256)},
    **{f"kbit{k}": kbit_format_name(k, "e4m4") for k in KBITS},
}
