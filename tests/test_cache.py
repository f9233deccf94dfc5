"""torch's caches across processes: hit by the same model, missed by what changes the code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import ROOT, environment

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse

options = json.loads(sys.argv[1])
train = sys.argv[2] == "train"
module = testing.lora_linear(128, 64, adapter_dtype=torch.bfloat16).train(train)
x = torch.ones(2, 48, 64, dtype=torch.bfloat16, requires_grad=train)
with torch.set_grad_enabled(train):
    y = torch.compile(module, backend=qfuse, options=options)(x)
    if train:
        y.sum().backward()
aot, fx = counters["aot_autograd"], counters["inductor"]
report = inductor_q.last_report()
assert report is not None
print(json.dumps({
    "aot": [aot["autograd_cache_hit"], aot["autograd_cache_miss"], aot["autograd_cache_bypass"]],
    "fx": [fx["fxgraph_cache_hit"], fx["fxgraph_cache_miss"], fx["fxgraph_cache_bypass"]],
    "cached": report.cached,
    "sites": [(s.pass_name, s.module, s.rejected) for s in report.sites],
    "summary": report.summary(),
    "sum": float(y.float().sum()),
}))
"""

SMALL = {"qfuse.thresholds": {"extend_k.min_rows": 1}}
HIT, MISS = [1, 0, 0], [0, 1, 0]


def copy_of(source: Path, package: Path) -> Path:
    """The sources at another place: an edit of the checkout does not reach a test that runs."""
    for name in ("inductor_q", "passes", "lowerings", "csrc"):
        shutil.copytree(
            source / name, package / name, symlinks=True, ignore=shutil.ignore_patterns("__pyc*")
        )
    return package


def run(
    cache: Path,
    options: dict[str, Any] | None = None,
    *,
    package: Path,
    train: bool = True,
) -> Any:
    """One process: counters as [hit, miss, bypass] and its report."""
    env = environment(package, TORCHINDUCTOR_CACHE_DIR=str(cache))
    arguments = [json.dumps({**SMALL, **(options or {})}), "train" if train else "infer"]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=env,
        cwd=package,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(ROOT, tmp_path_factory.mktemp("checkout") / "package")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, package: Path) -> tuple[Path, Any]:
    """A cache that one training process has filled, and what that process told."""
    cache = tmp_path_factory.mktemp("inductor")
    return cache, run(cache, package=package)


def test_the_first_process_misses_and_stores(filled: tuple[Path, Any]) -> None:
    _, first = filled
    assert first["aot"] == MISS
    assert first["fx"] == [0, 2, 0]  # forward and backward
    assert not first["cached"]
    assert {name for name, _, _ in first["sites"]} >= {"canonicalize", "extend_k", "keep_packed"}


def test_a_second_process_hits_and_tells_the_first_ones_report(
    filled: tuple[Path, Any], package: Path
) -> None:
    """Also with bitsandbytes' autograd.Function in the graph, which torch bypasses by default."""
    cache, first = filled
    second = run(cache, package=package)
    assert second["aot"] == HIT
    assert second["fx"][1:] == [0, 0]
    assert second["cached"]
    assert second["sites"] == first["sites"]
    assert second["summary"] == first["summary"] + "; from the cache"
    assert second["sum"] == first["sum"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"qfuse.numerics": "strict"}, marks=pytest.mark.slow),
        pytest.param({"qfuse.preset": "none"}, marks=pytest.mark.slow),
        pytest.param({"qfuse.passes": {"stack_gradients": False}}, marks=pytest.mark.slow),
        {"qfuse.kernels": {"dequantize": "inductor"}},
        {"qfuse.thresholds": {"extend_k.min_rows": 2}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_changed_option_misses(
    filled: tuple[Path, Any], package: Path, options: dict[str, Any]
) -> None:
    other = run(filled[0], options, package=package)
    assert other["aot"] == MISS
    assert not other["cached"]


def test_where_the_report_goes_changes_no_code(
    filled: tuple[Path, Any], package: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    again = run(filled[0], {"qfuse.report": str(path)}, package=package)
    assert again["aot"] == HIT
    (written,) = json.loads(path.read_text())["compiles"]
    assert written["cached"]
    assert [s["pass_name"] for s in written["sites"]] == [name for name, _, _ in again["sites"]]


def test_a_lost_report_is_told(filled: tuple[Path, Any], package: Path) -> None:
    cache, first = filled
    shutil.rmtree(cache / "qfuse")
    second = run(cache, package=package)
    assert second["aot"] == HIT and second["cached"] and second["sites"] == []
    assert "what became of 1 quantized layer is not known" in second["summary"]
    assert second["sum"] == first["sum"]


def test_under_strict_a_graph_is_cached_together_with_its_report(
    tmp_path: Path, package: Path
) -> None:
    """Without the report nobody knows what was fused: it is compiled, and judged, again."""
    first, second = (
        run(tmp_path, {"qfuse.strict": True}, train=False, package=package) for _ in range(2)
    )
    assert (first["aot"], second["aot"]) == (MISS, HIT)
    assert second["sites"] == first["sites"] != []
    shutil.rmtree(tmp_path / "qfuse")
    third = run(tmp_path, {"qfuse.strict": True}, train=False, package=package)
    assert third["aot"] == MISS
    assert third["sites"] == first["sites"]


@pytest.fixture(scope="module")
def inferred(tmp_path_factory: pytest.TempPathFactory, package: Path) -> tuple[Path, Any]:
    """The same of a process that only infers: a graph, and a compile, of half the size."""
    cache = tmp_path_factory.mktemp("inference")
    return cache, run(cache, train=False, package=package)


def test_inference_is_cached_as_well(inferred: tuple[Path, Any], package: Path) -> None:
    cache, first = inferred
    second = run(cache, train=False, package=package)
    assert first["aot"] == MISS and second["aot"] == HIT
    assert second["sites"] == first["sites"] and second["cached"]


def test_a_changed_source_misses(inferred: tuple[Path, Any], package: Path, tmp_path: Path) -> None:
    """Any file of the package counts: torch has lowerings and kernels in no key of its own."""
    other = copy_of(package, tmp_path / "package")
    unchanged = run(inferred[0], train=False, package=other)
    assert unchanged["aot"] == HIT
    with open(other / "lowerings" / "dequantize.py", "a") as file:
        file.write("\n# changed\n")
    changed = run(inferred[0], train=False, package=other)
    assert changed["aot"] == MISS
    assert changed["sum"] == unchanged["sum"]


def test_reports_are_kept_by_all_that_a_compile_depends_on() -> None:
    from inductor_q.cache import report_key
    from inductor_q.context import Context, new_report
    from inductor_q.options import resolve

    gm = torch.fx.symbolic_trace(torch.nn.Tanh())
    resolved = resolve(None, None, device=torch.device("cpu"), dynamic=False)
    context = Context(resolved, new_report(resolved, torch.device("cpu")), [])
    x = torch.ones(4, 4)
    inputs = [x, x.t()[:2], x.t()[:2].contiguous(), x.clone().requires_grad_(), x.double()]
    assert len({report_key(gm, [one], context) for one in inputs}) == len(inputs)
    assert report_key(gm, [x], context) == report_key(gm, [torch.zeros(4, 4)], context)
