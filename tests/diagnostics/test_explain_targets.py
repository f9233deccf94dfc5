"""`qfuse explain` on real targets, each run once in a process of its own: what it finds, whom it
blames, and that the target does not notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
import torch

from inductor_q import testing
from inductor_q.diagnostics.explanation import Explanation, GraphBreak
from inductor_q.diagnostics.observation import observe
from inductor_q.diagnostics.render.json import read
from inductor_q.diagnostics.summary import NO_GPU

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ROOT / "tests/targets"
SCHEMA = json.loads((ROOT / "docs/explain.schema.json").read_text())
EXPLAIN = ("-m", "inductor_q", "explain")


@dataclass(frozen=True)
class Run:
    """A finished target under `qfuse explain`."""

    name: str
    status: int
    out: str
    err: str
    report: Explanation

    def line(self, text: str) -> int:
        """Where the target's source says `text`."""
        lines = (TARGETS / f"{self.name}.py").read_text().splitlines()
        [number] = [n for n, line in enumerate(lines, 1) if text in line]
        return number


Explain = Callable[..., Run]


def environment() -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    quiet = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": path, **quiet}


@pytest.fixture(scope="module")
def explain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explain]:
    """Runs a target once a module for each set of arguments."""
    runs: dict[tuple[object, ...], Run] = {}

    def run(name: str, *args: str, options: tuple[str, ...] = ()) -> Run:
        key = (name, args, options)
        if key not in runs:
            file = tmp_path_factory.mktemp(name) / "report.json"
            command = [sys.executable, *EXPLAIN, "--json", str(file), *options]
            done = subprocess.run(
                [*command, str(TARGETS / f"{name}.py"), *args],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert file.exists(), done.stderr
            jsonschema.validate(json.loads(file.read_text()), SCHEMA)
            told = "".join(done.stderr.partition("qfuse explain ")[1:]).splitlines()
            assert told, done.stderr
            assert all(len(line) <= 80 for line in told if not line.startswith("::")), told
            runs[key] = Run(name, done.returncode, done.stdout, done.stderr, read(str(file)))
        return runs[key]

    yield run


def broken_at(run: Run, text: str) -> GraphBreak:
    """The one break of the report that the target's line `text` is blamed for."""
    [found] = [b for b in run.report.breaks if b.user.line == run.line(text)]
    assert Path(found.user.file) == TARGETS / f"{run.name}.py"
    assert found.user.text == text
    return found


# --- breaks -------------------------------------------------------------------------------------


def test_data_dependent_breaks(explain: Explain) -> None:
    run = explain("data_dependent", options=("--max-breaks", "3"))
    assert (run.status, run.out) == (1, "done\n"), "by the budget alone"
    assert "4 graph breaks, at most 3 allowed; first: " in run.err
    branch = broken_at(run, "if x.abs().max() > 1:")
    assert (branch.gb_id, branch.user.function, branch.library) == (
        "GB0170",
        "normalize",
        "your code",
    )
    assert "torch.where" in branch.fix
    item = broken_at(run, "factor = x.sum().item()")
    assert (item.gb_id, item.user.function) == ("GB0124", "scale")
    assert "capture_scalar_outputs" in item.fix
    # Each breaks where the call is inlined, then again where the function itself is compiled.
    assert [b.count for b in run.report.breaks] == [2, 2]
    assert not run.report.recompiles
    assert "4 graph breaks (2 distinct)" in run.err


def test_breaks_that_the_counters_miss(explain: Explain) -> None:
    run = explain("break_in_loop")
    assert run.out == "counted by torch: 0\n", "torch counts them by now: say so in the docs"
    assert run.report.break_count == 2
    assert broken_at(run, "torch._dynamo.graph_break()").user.function == "in_for"
    assert broken_at(run, "x = x * x.sum().item()").user.function == "in_try"
    assert {f.function for f in run.report.fallbacks} == {"in_for", "in_try"}
    assert not run.report.compiles


# --- recompiles ---------------------------------------------------------------------------------


def test_a_storm_of_shapes_until_the_limit(explain: Explain) -> None:
    run = explain("recompile_storm", options=("--max-breaks", "0", "--max-recompiles", "7"))
    assert (run.status, run.out) == (0, "twelve lengths\n")
    [storm] = run.report.recompiles
    assert (storm.function, storm.count, storm.hit_limit) == ("attend", 7, True)
    assert len(run.report.compiles) == 8  # torch's limit
    assert storm.guard.startswith("tensor 'x' size mismatch at index 0")
    assert (storm.before, storm.after.partition(",")[0]) == ("2", "3")
    assert "torch._dynamo.mark_dynamic(x, 0)" in storm.fix
    assert storm.where.file == str(TARGETS / "recompile_storm.py")
    [fallback] = run.report.fallbacks
    assert (fallback.function, "limit" in fallback.reason) == ("attend", True)


# --- what torch does not tell -------------------------------------------------------------------


def test_errors_that_the_target_suppresses(explain: Explain) -> None:
    """It ends well and fast, and nothing of it was compiled."""
    run = explain("suppressed_errors", options=("--max-breaks", "0", "--github"))
    assert (run.status, run.out) == (0, "ended well (8, 32)\n")
    report = run.report
    first = report.suppressed[0]
    assert (first.function, first.where.line) == ("step", run.line("@torch.compile"))
    assert first.error == (
        "BackendCompilerFailed: backend='no_kernel' raised: "
        "NotImplementedError: no kernel for this device"
    )
    # Torch then tries each function that step calls, and fails there too; not once more a call.
    assert all(s.count == 1 and s.error == first.error for s in report.suppressed)
    assert not report.compiles, "a graph that did not compile is none"
    [layer] = report.layers
    assert (layer.status, layer.module) == ("rejected", "0")
    assert layer.reason == f"its compile failed: {first.error}"
    assert not report.warnings, "no word of a backend that compiles without Inductor"
    assert f"{len(report.suppressed)} suppressed errors" in run.err
    assert "set it to False (and unset TORCHDYNAMO_SUPPRESS_ERRORS)" in " ".join(run.err.split())
    annotation = f"::warning file=tests/targets/suppressed_errors.py,line={first.where.line},"
    assert f"{annotation}title=error suppressed x1::{first.error}" in run.err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA graphs here")
def test_cuda_graphs_that_a_cpu_skips(explain: Explain) -> None:
    """Torch counts these and says nothing."""
    run = explain("reduce_overhead")
    assert (run.status, run.out) == (0, "one step\n")
    [skip] = run.report.cudagraph_skips
    assert (skip.reason, skip.count) == (NO_GPU, 2)  # a graph on each side of the break
    assert "CUDA graphs skipped" in run.err


def test_a_layer_that_a_function_finds_in_a_global(explain: Explain) -> None:
    """Its adapter's sites are named by the trace, its weight's by the source: one layer."""
    [layer] = explain("reduce_overhead").report.layers
    assert (layer.module, layer.status) == ("proj", "fused")
    assert {s.pass_name for s in layer.steps} >= {"canonicalize", "fold_lora"}


@pytest.mark.gpu
def test_cuda_graphs_that_a_gpu_records(explain: Explain) -> None:
    assert not explain("reduce_overhead").report.cudagraph_skips


# --- how a target ends --------------------------------------------------------------------------


def test_a_target_that_raises_still_gets_its_report(explain: Explain) -> None:
    run = explain("raises")
    assert (run.status, run.out) == (1, "before\n")
    assert run.report.exit.exception == "RuntimeError: the loss is nan"
    assert run.report.break_count == 1
    trace = run.err.partition("qfuse explain")[0]
    [shown] = [line for line in trace.splitlines() if line.startswith("  File ")]
    assert shown.startswith(f'  File "{TARGETS / "raises.py"}", line ')


def test_an_interrupted_target_still_gets_its_report(tmp_path: Path) -> None:
    """As without us: the signal reaches the target, and the process dies by it."""
    file = tmp_path / "report.json"
    target = str(TARGETS / "interrupted.py")
    status, out, err = interrupt([sys.executable, *EXPLAIN, "--json", str(file), target])
    assert (status, out) == (-signal.SIGINT, "waiting\n")
    assert "KeyboardInterrupt" in err
    report = read(str(file))
    assert (report.exit.signal, report.break_count) == ("SIGINT", 1)


def interrupt(command: list[str]) -> tuple[int, str, str]:
    """Run until it says something, send SIGINT, and give (status, stdout, stderr)."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, and what it starts, ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(0.2)  # until it sleeps
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, first + out, err


# --- a QLoRA model ------------------------------------------------------------------------------

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
LLAMA = {
    f"base_model.model.model.layers.{layer}.{block}.{name}"
    for layer in range(2)
    for block, names in PROJECTIONS.items()
    for name in names
}


@pytest.mark.slow
def test_llama_qlora_and_what_qfuse_would_do(explain: Explain) -> None:
    run = explain("llama_qlora", "--backend", "graphs", options=("--max-breaks", "0"))
    assert run.status == 0, run.err
    assert run.out.splitlines()[-1] == "argv ['--backend', 'graphs']"
    report = run.report
    assert report.argv == ("--backend", "graphs")
    assert not report.breaks
    [longer] = report.recompiles
    assert "'input_ids' size mismatch at index 1" in longer.guard
    assert (longer.before, longer.after, longer.count) == ("32", "48", 1)
    assert len(report.compiles) == 2
    assert {layer.module for layer in report.layers} == LLAMA
    assert all((y.status, y.format, y.would) == ("fused", "nf4", True) for y in report.layers)
    assert report.fused_share == 1.0
    assert [(y.module, y.status, y.would) for y in report.attention] == [
        (f"base_model.model.model.layers.{i}.self_attn", "fused", True) for i in range(2)
    ]
    assert all("canonicalize" in {s.pass_name for s in y.steps} for y in report.layers)
    assert 0 < report.saved_bytes < 2**20
    assert "14 of 14 quantized layers would be fused" in run.err
    assert "Attention: 2 of 2 masks would be left out" in run.err


@pytest.mark.slow
@pytest.mark.parametrize("forced", [False, True])
def test_llama_qlora_by_stock_inductor_and_by_force(explain: Explain, forced: bool) -> None:
    """Each layer is fused where qfuse compiles, and "would be" where it does not."""
    options = ("--backend", "qfuse", "--min-fused", "1.0") if forced else ()
    run = explain("llama_qlora", "--steps", "2", options=options)
    assert run.status == 0, run.err
    assert run.out.splitlines()[-1] == "argv ['--steps', '2']"
    report = run.report
    assert {c.backend for c in report.compiles} == {"qfuse" if forced else "inductor"}
    assert {layer.module for layer in report.layers} == LLAMA
    found = (*report.layers, *report.attention)
    assert all((y.status, y.would) == ("fused", not forced) for y in found)
    assert len(report.attention) == 2
    assert not report.breaks
    codegen = {phase.name for phase in report.phases}
    assert any("inductor" in name or "GraphLowering" in name for name in codegen)


@pytest.mark.slow
def test_moe_with_target_parameters(explain: Explain) -> None:
    """Dozens of breaks are few causes, and most of them are PEFT's."""
    run = explain("moe_target_parameters", options=("--max-breaks", "0"))
    assert run.status == 1
    report = run.report
    assert 20 <= report.break_count <= 40
    assert len(report.breaks) <= 8
    line = run.line("loss = compiled(")
    assert {b.user.line for b in report.breaks} == {line}, "one call of the user's"
    by_peft = [b for b in report.breaks if b.library.startswith("peft ")]
    assert sum(b.count for b in by_peft) > 0.8 * report.break_count
    activation = next(b for b in by_peft if b.origin.function == "_activate_lora")
    assert activation.count >= 10
    assert "target_parameters" in activation.fix
    assert f"{report.break_count} graph breaks, at most 0 allowed" in run.err


# --- several processes --------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_are_two_reports_and_a_merged_one(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *torchrun, *EXPLAIN, "--json", str(file)]
    done = subprocess.run(
        [*command, str(TARGETS / "ranks.py"), "--lr", "1"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank} of 2 argv ['--lr', '1']" for rank in range(2)]
    first, second = (read(str(tmp_path / f"report.rank{rank}.json")) for rank in range(2))
    assert [(r.rank, r.world_size, r.argv) for r in (first, second)] == [
        (rank, 2, ("--lr", "1")) for rank in range(2)
    ]
    assert [r.recompile_count for r in (first, second)] == [0, 2], "rank 1 saw another length"
    assert [r.break_count for r in (first, second)] == [1, 2], "it breaks in each compile"
    merged = read(str(file))
    assert merged.world_size == 2
    assert len(merged.breaks) == 1
    assert merged.break_count == 3
    assert merged.recompile_count == 2


@pytest.mark.slow
def test_a_rank_over_budget_does_not_end_one_that_still_works(tmp_path: Path) -> None:
    """torchrun terminates the other ranks when one fails; here rank 0 has a checkpoint to save."""
    script, file = tmp_path / "save.py", tmp_path / "report.json"
    script.write_text(
        "import os, time, torch\n"
        "@torch.compile(backend='eager')\n"
        "def step(x):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        torch._dynamo.graph_break()\n"
        "    return x + 1\n"
        "step(torch.ones(3))\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(4)\n"
        "    print('saved', flush=True)\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *torchrun, *EXPLAIN, "--max-breaks", "0", "--json", str(file)]
    done = subprocess.run(
        [*command, str(script)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (done.returncode, done.stdout) == (1, "saved\n"), done.stderr
    assert "rank 1: 1 graph break, at most 0 allowed" in done.stderr
    assert [run.rank for run in (read(str(tmp_path / f"report.rank{n}.json")) for n in (0, 1))] == [
        0,
        1,
    ]
    assert not read(str(file)).warnings[0].startswith("no report of rank")


# --- in this process ----------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [False, True])
def test_a_compile_in_this_process(forced: bool) -> None:
    """Stock Inductor, and the same call with qfuse by force; afterwards nothing is left of us."""
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    before = torch._inductor.config.save_config_portable()
    torch._dynamo.reset()
    try:
        with observe(target="here", backend="qfuse" if forced else None) as observation:
            layer = testing.lora_linear(64, 64, adapter_dtype=torch.bfloat16)
            compiled = torch.compile(layer, backend="inductor")
            compiled(x).sum().backward()
    finally:
        torch._dynamo.reset()
    report = observation.explanation()
    [found] = report.layers
    assert (found.status, found.would, found.format) == ("fused", not forced, "nf4")
    [compiled_graph] = report.compiles
    assert compiled_graph.backend == ("qfuse" if forced else "inductor")
    assert torch._inductor.config.save_config_portable() == before


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.projection(x)
        return projected


def test_parameters_of_other_shapes_in_one_function() -> None:
    """Layers compiled one by one share their class's forward; torch's guard says no more."""
    torch._dynamo.reset()
    try:
        with observe(target="here") as observation:
            layers = [Block(width) for width in (3, 5)]
            for layer in layers:
                layer.compile(backend="eager")
                layer(torch.ones(2, 4))
    finally:
        torch._dynamo.reset()
    [again] = observation.explanation().recompiles
    name = "self._modules['projection']._parameters['weight']"
    assert again.guard == f"tensor '{name}' size mismatch at index 0. expected 3, actual 5"
    assert (again.before, again.after) == ("3", "5")
    assert "torch._dynamo.config.recompile_limit" in again.fix
