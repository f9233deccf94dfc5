"""Kernels behind the ops, by op and device type, the preferred first.

The eager reference is in every list, so that nothing is ever unserved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inductor_q.formats import QuantFormat
from inductor_q.kernels import (
    grouped_gram_triton,
    quantize_kbit_cuda,
    quantize_kbit_triton,
    scatter2scatter_cuda,
    scatter2scatter_dequantize,
    scatter2scatter_grouped_mm,
    scatter2scatter_reference,
    scatter2scatter_triton,
    tile_map_triton,
)
from inductor_q.kernels.dequantize import DEQUANTIZE
from inductor_q.kernels.kernel import (
    DequantizeKernel,
    GroupedGramKernel,
    QuantizeKbitKernel,
    Scatter2ScatterKernel,
    TileMapKernel,
)

if TYPE_CHECKING:
    from inductor_q.kernels.calls import Scatter2Scatter

#: By device type; where none supports the call, `quantize_kbit_reference` serves it.
QUANTIZE_KBIT: dict[str, tuple[QuantizeKbitKernel, ...]] = {
    "cuda": (quantize_kbit_cuda.KERNEL, quantize_kbit_triton.KERNEL),
}

#: On a CPU, those after the reference, which serves every call, are asked only by name.
SCATTER2SCATTER: dict[str, tuple[Scatter2ScatterKernel, ...]] = {
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
}

GROUPED_GRAM: dict[str, tuple[GroupedGramKernel, ...]] = {
    "cpu": (scatter2scatter_reference.GRAM,),
    "cuda": (
        grouped_gram_triton.KERNEL,
        scatter2scatter_grouped_mm.GRAM,
        scatter2scatter_reference.GRAM,
    ),
}

#: By device type; where there is none, `tile_map.reference` serves.
TILE_MAP: dict[str, tuple[TileMapKernel, ...]] = {"cuda": (tile_map_triton.KERNEL,)}

#: What compiled code chooses among.
OPS: dict[str, dict[str, tuple[DequantizeKernel, ...]]] = {"dequantize": DEQUANTIZE}

#: The provider that is no kernel: Inductor's own loops, fused with their neighbours.
POINTWISE = "inductor"

__all__ = [
    "DEQUANTIZE",
    "GROUPED_GRAM",
    "OPS",
    "POINTWISE",
    "QUANTIZE_KBIT",
    "SCATTER2SCATTER",
    "TILE_MAP",
    "DequantizeKernel",
    "GroupedGramKernel",
    "QuantizeKbitKernel",
    "Scatter2ScatterKernel",
    "TileMapKernel",
    "candidates",
    "choose",
    "provider_names",
    "providers",
    "refusal",
    "scatter2scatter_kernels",
]


def candidates(op: str, device_type: str, wanted: str = "auto") -> list[DequantizeKernel]:
    """The kernels of `op` in the order in which they are asked, `wanted` first."""
    table = OPS[op]
    kernels = table.get(device_type, table["cpu"][-1:])
    return sorted(kernels, key=lambda kernel: kernel.name != wanted)


def scatter2scatter_kernels(
    device_type: str, wanted: str, call: Scatter2Scatter | None = None
) -> list[Scatter2ScatterKernel]:
    """The kernels of scatter2scatter in the order in which they are asked, `wanted` first.

    With a `call`, Triton's comes just before the reference where it is expected to be slower.
    """
    kernels = list(SCATTER2SCATTER.get(device_type, SCATTER2SCATTER["cpu"]))
    late = scatter2scatter_triton.KERNEL
    if call is not None and late in kernels and not scatter2scatter_triton.is_preferred(call):
        kernels.remove(late)
        kernels.insert(kernels.index(scatter2scatter_reference.KERNEL), late)
    return sorted(kernels, key=lambda kernel: kernel.name != wanted)


def choose(op: str, device_type: str, wanted: str = "auto", fmt: QuantFormat | None = None) -> str:
    """The provider of `op` in compiled code: `wanted` where it can serve, else the fastest that
    can."""
    if wanted == POINTWISE or not refusal(op, device_type, wanted, fmt):
        return wanted
    names = providers(op, device_type)
    return next((n for n in names if not refusal(op, device_type, n, fmt)), POINTWISE)


def refusal(op: str, device_type: str, name: str, fmt: QuantFormat | None = None) -> str:
    """Empty when the kernel called `name` can serve `op` here, else the reason why not.

    Without `fmt`, whether it could serve some format.
    """
    for kernel in candidates(op, device_type):
        if kernel.name == name:
            return kernel.available() or (kernel.decodes(fmt) if fmt is not None else "")
    return f"there is none of that name for {device_type} tensors"


def providers(op: str, device_type: str) -> list[str]:
    """Names of the kernels of `op` that can run on this machine, without the reference."""
    return [k.name for k in OPS[op].get(device_type, ())[:-1] if not k.available()]


def provider_names() -> dict[str, tuple[str, ...]]:
    """Every provider of every op that compiled code may ask for, on whatever device."""
    names = {
        op: (POINTWISE, *dict.fromkeys(k.name for kernels in table.values() for k in kernels))
        for op, table in OPS.items()
    }
    experts = dict.fromkeys(k.name for kernels in SCATTER2SCATTER.values() for k in kernels)
    return {**names, "scatter2scatter": tuple(experts)}
