"""Resolve options for a CPU, and list the keys of Inductor that users know."""

from __future__ import annotations

from typing import Any

import torch

from inductor_q.options import Resolved, resolve

CPU = torch.device("cpu")

# The flags that users of training frameworks set by name: a rename in torch has to be noticed here.
WELL_KNOWN = (
    "coordinate_descent_tuning",
    "coordinate_descent_check_all_directions",
    "shape_padding",
    "epilogue_fusion",
    "max_autotune_gemm",
    "fx_graph_cache",
    "assume_aligned_inputs",
    "comprehensive_padding",
    "decompose_mem_bound_mm",
    "triton.cudagraphs",
)


def on_cpu(given: dict[str, Any] | None = None, mode: str | None = None, **more: Any) -> Resolved:
    return resolve(mode, given, device=CPU, **more)
