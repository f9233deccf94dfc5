"""Presets that belong to no GPU architecture: the neutral one, the empty one, the CPU."""

from __future__ import annotations

from dataclasses import replace

from inductor_q.presets.preset import Entry, Preset

GENERIC = Preset(name="generic")

# This one is chosen by name only: nothing is set, whatever the device.
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
        "linear_rows.max_rows": Entry(
            value=32,
            evidence="a linear layer of 4096x4096 in nf4, nested, bfloat16 and 1, 8 or 32 rows: "
            "1.9, 2.4, 3.9 ms against 22.6, 31.1, 23.9 ms of bitsandbytes and 3.5, 4.2, 4.6 ms of "
            "a weight in bfloat16; the kernel takes no more rows (one thread on a busy Intel Xeon "
            "with AMX, torch 2.13.0, 2026-11-23, benchmarks/results/rows-cpu.json); with mxfp4 "
            "1.3, 1.7, 5.3 ms against 3.3, 3.4, 5.1 ms of dequantization and a product, with codes "
            "of 4 bits in planes 1.4, 1.8, 5.5 ms against 4.6, 4.8, 6.5 ms (one thread on an AMD "
            "EPYC with AVX512-BF16, 2026-11-26, benchmarks/results/rows_small-cpu.json)",
        ),
        "causal_attention.min_positions": Entry(
            value=1 << 20,
            evidence="not settled, so masks are kept: forward and backward of attention with the "
            "mask and as it is meant, 21.3 / 15.4 ms under padding and 25.8 / 29.6 in documents, "
            "for which FlexAttention has no backward here (two cores of a busy AMD EPYC, torch "
            "2.13.0, 2026-11-22, benchmarks/results/attention-cpu.json)",
        ),
        "chunk_loss.min_logits": Entry(
            value=1 << 40,
            evidence="no number of logits from which on it pays in time: 1,024 rows of a "
            "vocabulary of 32,000, forward and backward, whole, in chunks of 512 and of 128: "
            "239 / 443 / 948 ms in bfloat16, 638 / 856 / 1243 ms in float32 (two cores of a busy "
            "Intel Xeon, torch 2.13.0, 2026-11-22, benchmarks/results/loss-cpu.json)",
        ),
        "chunk_loss.elements": Entry(
            value=1 << 24,
            evidence="512 rows of that vocabulary: with more the loss was as fast, with 128 slower "
            "(benchmarks/results/loss-cpu.json)",
        ),
        "chunk_loss.elements_of_rounded": Entry(
            value=1 << 24,
            evidence="as many as of another head, which alone was measured "
            "(benchmarks/results/loss-cpu.json)",
        ),
        "fuse_dropout.min_rows": Entry(
            value=1 << 20,
            evidence="no number of rows from which on it pays: for a CPU the ops have no kernel of "
            "their own, and the step of a decoder layer is several times slower with them at 64, "
            "512 and 2048 rows (benchmarks/results/thresholds_dropout-cpu.json)",
        ),
        "widen_products.min_rows": Entry(
            value=16,
            evidence="a weight of 2048x2048 in bfloat16, x W' as it is and in float32 with its "
            "casts: 0.95 / 3.14 ms at 1 row, 2.15 / 5.24 at 4, 7.94 / 5.49 at 16, 48.4 / 17.1 at "
            "64 (two cores of an AMD EPYC without AVX-512, torch 2.13.0, 2026-11-27, "
            "benchmarks/results/thresholds_wide-cpu.json)",
        ),
        "extend_k.min_rows": Entry(
            value=1 << 20,
            evidence="no number of rows from which on it pays: a decoder layer of width 512, r=16, "
            "forward and backward, with and without extend_k: 11.7 / 12.1 ms at 64 rows, "
            "45.7 / 44.3 at 512, 223 / 218 at 2048 (two cores of an AMD EPYC, torch 2.13.0, "
            "2026-11-21, benchmarks/results/thresholds-cpu.json)",
        ),
    },
)
