"""``python -m benchmarks``: every benchmark, at the sizes this machine can take."""

from __future__ import annotations

import argparse
import subprocess
import sys

NAMES = (
    "bench_attention",
    "bench_dequantize",
    "bench_experts",
    "bench_explain",
    "bench_kbit",
    "bench_launch",
    "bench_linear",
    "bench_moe",
    "bench_moe_model",
    "bench_recipe",
    "bench_step",
    "bench_thresholds",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    arguments, rest = parser.parse_known_args()
    # A process each: a benchmark must not inherit the compiled code or the memory of the one
    # before.
    codes = [
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *rest]).returncode
        for name in arguments.only
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
