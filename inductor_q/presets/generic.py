"""Presets that belong to no GPU architecture: the neutral one, the empty one, the CPU."""

from __future__ import annotations

from dataclasses import replace

from inductor_q.presets.preset import Entry, Preset

GENERIC = Preset(name="generic")

# Asked for by name only: nothing is set, whatever the device.
NONE = replace(GENERIC, name="none")

CPU = replace(
    GENERIC,
    name="cpu",
    thresholds={
        "canonicalize.min_rows": Entry(
            value=0,
            evidence="on a CPU bitsandbytes 0.50 runs gemm_4bit as dequantize_4bit and F.linear "
            "(backends/default/ops.py): there is no faster kernel to keep for few rows",
        ),
    },
)
