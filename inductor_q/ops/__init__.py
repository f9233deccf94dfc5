"""The `qfuse::` ops: schema, eager semantics, fake and autograd of each.

The functions here work in eager mode and under `torch.compile`. Importing `inductor_q` defines
nothing; importing this package defines the ops in torch's registry, once.
"""

from inductor_q.ops.dequantize import dequantize
from inductor_q.ops.extend import extend
from inductor_q.ops.linear import linear
from inductor_q.ops.lora_linear import lora_linear
from inductor_q.ops.quantize_kbit import quantize_kbit
from inductor_q.ops.registry import define_ops
from inductor_q.ops.scatter2scatter import scatter2scatter

__all__ = ["dequantize", "extend", "linear", "lora_linear", "quantize_kbit", "scatter2scatter"]

define_ops()
