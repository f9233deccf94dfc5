"""Kernels behind the ops, by op and device type, the preferred first.

The eager reference closes every list, so that nothing is ever unserved.
"""

from __future__ import annotations

from inductor_q.kernels import dequantize_cpp, dequantize_reference, dequantize_triton
from inductor_q.kernels.kernel import DequantizeKernel

DEQUANTIZE: dict[str, tuple[DequantizeKernel, ...]] = {
    "cpu": (dequantize_cpp.KERNEL, dequantize_reference.KERNEL),
    "cuda": (dequantize_triton.KERNEL, dequantize_reference.KERNEL),
}

__all__ = ["DEQUANTIZE", "DequantizeKernel", "providers"]


def providers(op: str, device_type: str) -> list[str]:
    """Names of the kernels of `op` that can run on this machine, without the reference."""
    table = {"dequantize": DEQUANTIZE}[op]
    return [k.name for k in table.get(device_type, ())[:-1] if not k.available()]
