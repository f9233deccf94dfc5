"""The benchmark of first steps, and what it says of packed caches and of layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from benchmarks import bench_start  # noqa: E402
from tests.support.compiling import no_codegen  # noqa: E402

SPEC: dict[str, Any] = {
    "shapes": bench_start.TINY,
    "recipe": "trainer",
    "batch": 2,
    "length": 16,
    "device": "cpu",
    "threads": None,
    "seed": 0,
    "steps": 1,
}


@pytest.mark.parametrize("peer, graphs", [("qfuse", 1), ("inductor", 2)])
def test_a_first_step_of_layers_and_what_it_took(peer: str, graphs: int) -> None:
    """Stock Inductor has a graph for the first layer, whose input requires no gradient."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with no_codegen():
        seen = bench_start.first_step(**SPEC, peer=peer, regions="layers", layers=2)
    assert (seen["graphs"], seen["breaks"]) == (graphs, 0)
    assert 0 < seen["dynamo_s"] < seen["first_s"]
    assert (seen["passes_s"] > 0) == (peer == "qfuse")
    assert 0 < seen["step_s"] < seen["first_s"]


def test_seconds_of_a_process_that_is_still_alive_count() -> None:
    work = "while time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", f"import time\n{work}"]
    before = bench_start.cpu_seconds()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert bench_start.cpu_seconds() - before > 0.45
        process.communicate(b"\n")
    assert 0.45 < bench_start.cpu_seconds() - before < 2


@pytest.mark.slow
def test_packed_caches_serve_checkpointed_layers(tmp_path: Path) -> None:
    """Nothing is compiled, and nothing traced but by Dynamo; torch passed over such graphs."""
    out = tmp_path / "start.json"
    command = ["--quick", "--device", "cpu", "--backends", "qfuse", "--out", str(out)]
    bench_start.main([*command, "--layers", "2", "--recipe", "checkpointed"])
    [row] = json.loads(out.read_text())["rows"]
    cold, warm = row["extra"], row["extra"]["warm"]
    counted = [(each["autograd_hit"], each["autograd_miss"]) for each in (cold, warm)]
    assert counted == [(0, 1), (1, 0)]
    assert [each["fxgraph_miss"] for each in (cold, warm)] == [2, 0]
    assert [each["autograd_bypass"] for each in (cold, warm)] == [0, 0]
    assert (cold["graphs"], warm["graphs"], warm["passes_s"]) == (1, 1, 0)
    assert warm["cpu_s"] < 0.5 * cold["cpu_s"]
