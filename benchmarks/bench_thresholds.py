"""Measure from how many rows on a plan pays: the evidence behind a preset's thresholds.

Three questions, each over a range of rows. `canonicalize.min_rows`: bitsandbytes' gemm_4bit, which
reads packed weights, against a dequantization and a product (no adapter, forward).
`extend_k.min_rows`: a training step of one or two decoder layers with the adapter in the main
product, and with `extend_k` off. `fuse_dropout.min_rows`: such a step under LoRA
dropout with the masks made in the adapters' kernels, and with `fuse_dropout` off; ``--dropout``
asks this question alone. ``--wide`` measures `widen_products.min_rows` instead, on a CPU that is
slow in bfloat16: `x @ W'` in bfloat16, and in float32 with casts around it; and both ways `dY @ W`,
whose right operand has contiguous rows, so that the threshold does not apply.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from inductor_q import testing

GEMM_ROWS = {"cuda": (1, 2, 3, 4, 8, 16, 64, 256), "cpu": (1, 4, 16, 64, 256)}
GEMM_SHAPES = {"cuda": ((12_288, 4096), (4096, 4096), (4096, 12_288)), "cpu": ((2048, 2048),)}
STEP_ROWS = {"cuda": (256, 512, 1024, 2048), "cpu": (64, 512, 2048)}
WIDE_ROWS = (1, 4, 16, 32, 64, 256)
STEP_LAYERS = {"cuda": 2, "cpu": 1}  # a layer takes two cores 15 s to compile
EXTENDED = "qfuse[qfuse.thresholds=extend_k.min_rows=1]"
PLAIN = "qfuse[qfuse.passes=-extend_k]"
FUSED = "qfuse[qfuse.thresholds=fuse_dropout.min_rows=1]"
WRITTEN = "qfuse[qfuse.passes=-fuse_dropout]"
CPU_SHAPES = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=("inductor", PLAIN, EXTENDED))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--dropout", action="store_true")
    which.add_argument("--wide", action="store_true")
    arguments = parser.parse_args(argv)
    asked = "_dropout" if arguments.dropout else "_wide" if arguments.wide else ""
    name = "bench_thresholds" + asked
    suite = harness.start(name, arguments)
    kind = suite.device.type
    quick = arguments.quick
    if arguments.dropout:
        for m in STEP_ROWS[kind][: 1 if quick else None]:
            _step(suite, arguments, ("inductor", WRITTEN, FUSED), m, dropout=0.05)
        harness.finish(suite, arguments)
        return suite
    if arguments.wide:
        for m in WIDE_ROWS[: 2 if quick else None]:
            _wide(suite, arguments, *GEMM_SHAPES[kind][0], m)
        harness.finish(suite, arguments)
        return suite
    for n, k in GEMM_SHAPES[kind][: 1 if quick else None]:
        for m in GEMM_ROWS[kind][: 2 if quick else None]:
            _gemm(suite, arguments, n, k, m)
    peers = harness.available(arguments.backends)
    for m in STEP_ROWS[kind][: 1 if quick else None]:
        _step(suite, arguments, peers, m)
    harness.finish(suite, arguments)
    return suite


def _gemm(suite: harness.Suite, arguments: argparse.Namespace, n: int, k: int, m: int) -> None:
    weight = torch.randn(n, k, device=suite.device, dtype=torch.bfloat16) * k**-0.5
    linear = testing.quantized_linear(weight)
    packed, state = linear.weight.data, linear.weight.quant_state
    x = torch.randn(m, k, device=suite.device, dtype=torch.bfloat16)
    matmul_4bit = testing.bitsandbytes().matmul_4bit

    def dequantize_and_product() -> torch.Tensor:
        import inductor_q

        return x @ inductor_q.dequantize(packed, state).t()

    candidates: dict[str, Callable[[], object]] = {
        "gemm_4bit": functools.partial(matmul_4bit, x, packed, quant_state=state),
        "dequantize + mm": dequantize_and_product,
    }
    with torch.no_grad():
        timings = harness.time_kernels(candidates, suite.device, rounds=arguments.rounds or 3)
    suite.add({"what": "gemm", "N": n, "K": k, "rows": m}, timings)


def _wide(suite: harness.Suite, arguments: argparse.Namespace, n: int, k: int, m: int) -> None:
    options: dict[str, Any] = {"device": suite.device, "dtype": torch.bfloat16}
    weight, x = torch.randn(n, k, **options), torch.randn(m, k, **options)
    grad = torch.randn(m, n, **options)

    def in_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.float() @ b.float()).to(a.dtype)

    for what, a, b in (("x W'", x, weight.t()), ("dY W", grad, weight)):
        candidates: dict[str, Callable[[], object]] = {
            "bfloat16": functools.partial(torch.matmul, a, b),
            "float32": functools.partial(in_float32, a, b),
        }
        timings = harness.time_kernels(candidates, suite.device, rounds=arguments.rounds or 3)
        suite.add({"what": what, "N": n, "K": k, "rows": m}, timings)


def _step(
    suite: harness.Suite,
    arguments: argparse.Namespace,
    peers: Sequence[str],
    m: int,
    dropout: float = 0.0,
) -> None:
    config: Any
    layers = STEP_LAYERS[suite.device.type]
    if suite.device.type == "cuda":
        config = testing.qwen3_8b_config(num_hidden_layers=layers, vocab_size=4096)
    else:
        config = testing.tiny_qwen3_config(**CPU_SHAPES, num_hidden_layers=layers)
    model = testing.qlora_model(
        config,
        adapter_dtype=torch.bfloat16,
        dropout=dropout,
        device=suite.device,
        seed=arguments.seed,
    )
    ids = torch.randint(0, 64, (1, m), device=suite.device)

    def step(call: Callable[..., Any]) -> None:
        call(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    candidates: dict[str, Callable[[], object]] = {}
    for peer in peers:
        candidates[peer] = functools.partial(step, harness.compile_as(peer, model))
        candidates[peer]()
    timings = harness.time_kernels(candidates, suite.device, rounds=arguments.rounds or 3)
    suite.add({"what": f"step, {layers} layers", "N": "", "K": "", "rows": m}, timings)
    torch.compiler.reset()


if __name__ == "__main__":
    main()
