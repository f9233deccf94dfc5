"""Define every op, once per process."""

from __future__ import annotations

import functools

from inductor_q.ops.adapter_grads import define_adapter_grads
from inductor_q.ops.add_product import define_add_product
from inductor_q.ops.attention import define_attention
from inductor_q.ops.attention_rows import define_attention_rows
from inductor_q.ops.compare import define_compare
from inductor_q.ops.copies import define_copies
from inductor_q.ops.dequantize import define_dequantize
from inductor_q.ops.dropout import define_dropout
from inductor_q.ops.eight_bits import define_eight_bits
from inductor_q.ops.exchange import define_exchange
from inductor_q.ops.extend import define_extend
from inductor_q.ops.flash_backward import define_flash_backward
from inductor_q.ops.grouped_gram import define_grouped_gram
from inductor_q.ops.linear import define_linear
from inductor_q.ops.linear_cross_entropy import define_linear_cross_entropy
from inductor_q.ops.linears import define_linears
from inductor_q.ops.lora_linear import define_lora_linear
from inductor_q.ops.materialize import define_materialize
from inductor_q.ops.quantize_kbit import define_quantize_kbit
from inductor_q.ops.scatter2scatter import define_scatter2scatter
from inductor_q.ops.tile_map import define_tile_map


@functools.cache
def define_ops() -> None:
    """Define the `qfuse::` ops (further calls do nothing)."""
    for define in (
        define_adapter_grads,
        define_add_product,
        define_attention,
        define_attention_rows,
        define_compare,
        define_copies,
        define_dequantize,
        define_dropout,
        define_eight_bits,
        define_exchange,
        define_extend,
        define_flash_backward,
        define_grouped_gram,
        define_linear,
        define_linear_cross_entropy,
        define_linears,
        define_lora_linear,
        define_materialize,
        define_quantize_kbit,
        define_scatter2scatter,
        define_tile_map,
    ):
        define()
