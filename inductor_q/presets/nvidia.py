"""NVIDIA architectures that were measured, by exact compute capability, oldest first.

Measurements of the compile options are those of axolotl#3692: Qwen3-8B, LoRA r=16, bf16, sdpa,
sequence 2048, gradient checkpointing, alpaca, 2 seeds, a fresh process per run, median of the last
100 steps, torch 2.11+cu130.
"""

from __future__ import annotations

from dataclasses import replace

from inductor_q.presets.generic import GENERIC
from inductor_q.presets.preset import Entry

_SM_86_AUTOTUNE = Entry(
    value=True,
    evidence="+13 % step time on sm_86, where a GEMM template has at most 101,376 B of shared "
    "memory (axolotl#3692)",
)

SM_86 = replace(
    GENERIC,
    name="sm_86",
    arch=(8, 6),
    losses={"max_autotune_gemm": _SM_86_AUTOTUNE, "max_autotune": _SM_86_AUTOTUNE},
    facts=(
        "compiling at all: -14.25 % step time on RTX 3090, -16.55 % on RTX 3090 Ti (axolotl#3692)",
        "coordinate_descent_tuning and triton.cudagraphs: a wash, for 10 to 30 s of compile time a "
        "kernel signature and a peak of 20,207 MB with the graphs' pool (axolotl#3692)",
        "shape_padding, epilogue_fusion, comprehensive_padding, fx_graph_cache: on by default "
        "(axolotl#3692)",
    ),
)

_H200 = "one H200, torch 2.11.0+cu130, 2026-11-21, benchmarks/results/thresholds-h200.json"
_LARGE = "one H200, torch 2.11.0+cu130, 2026-11-29, benchmarks/results"

SM_90 = replace(
    GENERIC,
    name="sm_90",
    arch=(9, 0),
    thresholds={
        "canonicalize.min_rows": Entry(
            value=4,
            evidence="gemm_4bit of bitsandbytes 0.50.2 against dequantize and GEMM, N=12288 "
            f"K=4096: 30, 45, 59, 69 us at M=1, 2, 3, 4 against 69 throughout ({_H200})",
        ),
        "linear_rows.max_rows": Entry(
            value=32,
            evidence="a linear layer of 12288x4096 in nf4, nested, and 1, 16 or 32 rows: 18, 24, "
            "47 us against 30, 71, 73 us of bitsandbytes and 70, 69, 69 us of dequantization and a "
            "product; a later kernel takes 39 us with 32 rows. It takes no more: up to 256 rows "
            "decoding first is faster than bitsandbytes (one H200, torch 2.11.0+cu130, 2026-11-24 "
            "and 26, benchmarks/results/rows-h200.json and rows_many-h200.json)",
        ),
        "extend_k.min_rows": Entry(
            value=256,
            evidence="two layers of Qwen3-8B, r=16, forward and backward, GPU time with and "
            "without extend_k: 1.99 / 2.10 ms at 256 rows, 2.58 / 2.72 at 512, 4.05 / 4.29 at "
            f"1024, 7.61 / 7.99 at 2048; fewer rows not measured ({_H200})",
        ),
        "fuse_scatter2scatter.min_elements_of_large": Entry(
            value=15 << 20,
            evidence="experts' first projection in NF4, r=16, forward, 2,048 rows each, decoded "
            "first and in the product: 12.6 / 12.3 ms in Qwen3-235B-A22B (3072 x 4096), 3.78 / "
            "3.77 ms with the sizes of gpt-oss-20b (5760 x 2880), 6.34 / 7.21 ms in Mixtral "
            f"(28672 x 4096) ({_LARGE}/moe_large-h200.json and moe_large_first-h200.json)",
        ),
        "fuse_scatter2scatter.min_rows_of_large": Entry(
            value=2048,
            evidence="the same with 1,024, 2,048 and 4,096 rows each: 2.09 / 1.95, 3.47 / 3.74, "
            "6.62 / 7.64 ms in gpt-oss-20b in MXFP4; in NF4, with its sizes, 2.23 / 2.00, 3.78 / "
            "3.77, 7.24 / 7.59 ms, so with 2,048 rows that is no gain for the memory "
            f"({_LARGE}/moe_large-h200.json and moe_mxfp4_large-h200.json)",
        ),
        "fuse_scatter2scatter.min_elements_of_large_transposed": Entry(
            value=7 << 24,
            evidence="the gradient of x in NF4, 4,096 rows each: 8.16 / 8.12 ms with the sizes of "
            f"gpt-oss-20b, 13.0 / 13.7 ms in Mixtral ({_LARGE}/moe_large-h200.json)",
        ),
        "fuse_scatter2scatter.min_rows_of_large_transposed": Entry(
            value=4096,
            evidence="the gradient of x in NF4 with 2,048, 4,096 and 8,192 rows each: 6.92 / 6.92, "
            f"13.0 / 13.7, 26.9 / 28.6 ms in Mixtral ({_LARGE}/moe_large-h200.json)",
        ),
        "attention_rows.min_keys": Entry(
            value=1024,
            evidence="a decoding step of 8 layers of Qwen3-8B, a cache of 1,024 keys, with and "
            "without it: 0.72 / 0.88 ms at batch 1, 1.09 / 1.08 at batch 16; with adapters 0.82 / "
            "1.09, 1.21 / 1.20; fewer keys not measured (one H200, torch 2.11.0+cu130, "
            "2026-11-24, benchmarks/results/decode_guards-h200.json)",
        ),
        "chunk_loss.elements": Entry(
            value=80 << 20,
            evidence="4,096 rows of a vocabulary of 151,936, forward and backward, whole, in "
            "chunks of 512, 1,024 and 2,048: 15.8 / 14.3 / 14.4 / 15.0 ms; 512 take the least "
            "memory (one H200, torch 2.11.0+cu130, 2026-11-23, "
            "benchmarks/results/loss-h200.json)",
        ),
        "chunk_loss.elements_of_rounded": Entry(
            value=320 << 20,
            evidence="4,096 rows of a vocabulary of 151,936, forward and backward, whole, in "
            "chunks of 512, 1,024 and 2,048: 15.9 / 29.5 / 21.7 / 17.9 ms and 5.25 / 2.99 / 3.15 / "
            "3.48 GB (one H200, torch 2.11.0+cu130, 2026-11-28, "
            "benchmarks/results/loss_float32-h200.json)",
        ),
        "recompute_products.max_kept": Entry(
            value=5,
            evidence="with 8192 tokens all products of a decoder layer of Qwen3-8B but one of "
            "gate_proj's and up_proj's are kept: the whole step takes less time and memory than "
            "stock Inductor's, which keeps them all; with 6 the first layer kept both (one "
            "H200, torch 2.11.0+cu130, 2026-11-24, benchmarks/results/step_packed-h200.json)",
        ),
    },
)

_SM_120_AUTOTUNE = Entry(
    value=32_000_000_000,
    evidence="-2.57 % step time on RTX 5090 for +2.2 GB of peak memory, 21,836 MB in all: wants a "
    "card of 32 GB (axolotl#3692)",
)

SM_120 = replace(
    GENERIC,
    name="sm_120",
    arch=(12, 0),
    min_memory={"max_autotune_gemm": _SM_120_AUTOTUNE, "max_autotune": _SM_120_AUTOTUNE},
    facts=(
        "compiling at all: -19.06 % step time on RTX 5090, peak 19,992 -> 19,614 MB (axolotl#3692)",
        "max_autotune_gemm: -2.57 % step time, best as the only option; left to the user for its "
        "+2.2 GB and its compile time (axolotl#3692)",
        "ms a step on RTX 5090: eager 928.9, fused attention 936.2, compiled 757.8, and with "
        "coordinate descent 763.0, padding and epilogues 756.0, max_autotune_gemm 738.3, "
        "cudagraphs 757.7, all ten options 752.6 (axolotl#3692)",
    ),
)

NVIDIA = (SM_86, SM_90, SM_120)
