"""The providers of the ops, by op and device type, the preferred first.

The eager reference is in every list, so that every call is served; providers behind it run only
where they are named.
"""

from __future__ import annotations

from collections.abc import Mapping

from inductor_q.kernels import (
    adapter_grads_reference,
    adapter_grads_triton,
    add_product_reference,
    add_product_triton,
    attention_rows_reference,
    attention_rows_triton,
    dropout_reference,
    dropout_triton,
    expert_calls,
    grouped_gram_triton,
    linear_rows_cpp,
    linear_rows_cuda,
    linear_rows_reference,
    linear_rows_triton,
    quantize_kbit_cuda,
    quantize_kbit_reference,
    quantize_kbit_triton,
    requantize_cuda,
    requantize_reference,
    requantize_triton,
    scatter2scatter_cuda,
    scatter2scatter_dequantize,
    scatter2scatter_fp8,
    scatter2scatter_grouped_mm,
    scatter2scatter_reference,
    scatter2scatter_triton,
    softmax_loss_reference,
    softmax_loss_triton,
    tile_map_reference,
    tile_map_triton,
)
from inductor_q.kernels.dequantize import DEQUANTIZE, POINTWISE
from inductor_q.kernels.provider import REFERENCE, Late, Provider, Table

#: Providers by op and device type. A device type that is not listed has the reference.
PROVIDERS: dict[str, Table] = {
    "dequantize": DEQUANTIZE,
    "requantize": {
        "cpu": (requantize_reference.KERNEL,),
        "cuda": (requantize_cuda.KERNEL, requantize_triton.KERNEL, requantize_reference.KERNEL),
    },
    "quantize_kbit": {
        "cpu": (quantize_kbit_reference.KERNEL,),
        "cuda": (
            quantize_kbit_cuda.KERNEL,
            quantize_kbit_triton.KERNEL,
            quantize_kbit_reference.KERNEL,
        ),
    },
    "scatter2scatter": {
        "cpu": (
            scatter2scatter_reference.KERNEL,
            scatter2scatter_grouped_mm.KERNEL,
            scatter2scatter_dequantize.KERNEL,
        ),
        "cuda": (
            scatter2scatter_cuda.KERNEL,
            scatter2scatter_triton.KERNEL,
            scatter2scatter_grouped_mm.KERNEL,
            scatter2scatter_dequantize.KERNEL,
            scatter2scatter_reference.KERNEL,
        ),
    },
    expert_calls.IN_FP8: {
        "cpu": (scatter2scatter_reference.KERNEL,),
        "cuda": (scatter2scatter_fp8.KERNEL, scatter2scatter_reference.KERNEL),
    },
    "grouped_gram": {
        "cpu": (scatter2scatter_reference.GRAM,),
        "cuda": (
            grouped_gram_triton.KERNEL,
            scatter2scatter_grouped_mm.GRAM,
            scatter2scatter_reference.GRAM,
        ),
    },
    "linear_rows": {
        "cpu": (linear_rows_cpp.KERNEL, linear_rows_reference.KERNEL),
        "cuda": (
            linear_rows_cuda.KERNEL,
            linear_rows_triton.KERNEL,
            linear_rows_reference.KERNEL,
        ),
    },
    "attention_rows": {
        "cpu": (attention_rows_reference.KERNEL,),
        "cuda": (attention_rows_triton.KERNEL, attention_rows_reference.KERNEL),
    },
    "softmax_loss": {
        "cpu": (softmax_loss_reference.KERNEL,),
        "cuda": (softmax_loss_triton.KERNEL, softmax_loss_reference.KERNEL),
    },
    "dropout_project": {
        "cpu": (dropout_reference.PROJECT,),
        "cuda": (dropout_triton.PROJECT, dropout_reference.PROJECT),
    },
    "dropout_grad_a": {
        "cpu": (dropout_reference.GRAD_A,),
        "cuda": (dropout_triton.GRAD_A, dropout_reference.GRAD_A),
    },
    "dropout_grad_x": {
        "cpu": (dropout_reference.GRAD_X,),
        "cuda": (dropout_triton.GRAD_X, dropout_reference.GRAD_X),
    },
    "add_product": {
        "cpu": (add_product_reference.KERNEL,),
        "cuda": (add_product_triton.KERNEL, add_product_reference.KERNEL),
    },
    "adapter_grads": {
        "cpu": (adapter_grads_reference.KERNEL,),
        "cuda": (adapter_grads_triton.KERNEL, adapter_grads_reference.KERNEL),
    },
    "tile_map": {
        "cpu": (tile_map_reference.KERNEL,),
        "cuda": (tile_map_triton.KERNEL, tile_map_reference.KERNEL),
    },
}

#: The policy, by op and provider: the calls for which the provider comes last but the reference.
LATE: Mapping[str, Late] = {"scatter2scatter": {"triton": scatter2scatter_triton.is_slow}}

#: Ops whose provider a compile chooses (`qfuse.kernels`), and names that it has besides kernels'.
CHOSEN: Mapping[str, tuple[str, ...]] = {
    "dequantize": (POINTWISE,),
    "requantize": (POINTWISE,),
    "scatter2scatter": (),
}

__all__ = ["CHOSEN", "LATE", "POINTWISE", "PROVIDERS", "Provider", "names_on", "provider_names"]


def names_on(op: str, device_type: str) -> tuple[str, ...]:
    """Name the providers of an op that this machine has for a type of device, but the reference."""
    listed = PROVIDERS[op].get(device_type, ())
    return tuple(p.name for p in listed if p.name != REFERENCE and not p.missing())


def provider_names() -> dict[str, tuple[str, ...]]:
    """Name every provider, on whatever device, of every op that `qfuse.kernels` may name."""
    return {
        op: (*others, *dict.fromkeys(p.name for listed in PROVIDERS[op].values() for p in listed))
        for op, others in CHOSEN.items()
    }
