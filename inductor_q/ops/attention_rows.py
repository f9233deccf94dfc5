"""`qfuse::attention_rows`: attention of a few queries that see the same keys, as in decoding.

The queries of a group of heads are rows beside each other, and a mask says which keys all of them
see. It is `scaled_dot_product_attention` of them without gradients, with one reading of the keys
and values that are seen, and of no others.
"""

from __future__ import annotations

from torch import Tensor

from inductor_q.kernels.calls import schema
from inductor_q.kernels.dispatch import serve
from inductor_q.kernels.rows_calls import AttentionRows
from inductor_q.ops.library import define


def _attention_rows(*args: object) -> Tensor:
    call = AttentionRows(*args)  # type: ignore[arg-type]
    call.check()
    result: Tensor = serve("attention_rows", call)
    return result


def _fake(*args: object) -> Tensor:
    call = AttentionRows(*args)  # type: ignore[arg-type]
    call.check()
    return call.result()


def define_attention_rows() -> None:
    define(schema("attention_rows", AttentionRows, "Tensor"), _attention_rows, _fake)
