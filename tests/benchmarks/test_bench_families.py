"""What qfuse makes of each family and kind of adapter in a trainer's step, without their code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from benchmarks import bench_families as families  # noqa: E402
from benchmarks import harness  # noqa: E402
from inductor_q import last_report, testing  # noqa: E402
from inductor_q.backend import qfuse  # noqa: E402
from tests.support.compiling import no_codegen  # noqa: E402

#: Sinks, biases and a window: others differ by less from what other tests compile.
QUICK = ("gpt-oss",)
#: Fused attention of a CPU cannot write its result beside an adapter's columns.
APART = {"Mistral": 2, "Gemma 3": 1}
OPTIONS: Any = {
    "qfuse.thresholds": {"extend_k.min_rows": 1, "causal_attention.min_positions": 0},
    "fx_graph_cache": False,
}


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in families.CASES],
)
def test_every_layer_of_a_family(name: str) -> None:
    """All of it in one graph, none refused; and the loss of eager, where nothing is dropped."""
    torch.compiler.reset()
    case = families.CASES[name]
    model = case.model(torch.device("cpu"), seed=0)
    ids = torch.randint(2, 64, (2, families.TOY_TOKENS))
    with no_codegen(), testing.CompileTrace() as trace:
        step = families.step_of(torch.compile(model, backend=qfuse, options=OPTIONS), case.dtype)
        step(ids).backward()
    report = last_report()
    assert report is not None
    found = families.coverage(model, report)
    assert found.pop("refused")[0] == 0
    adapters = found["adapters"]
    assert adapters[1] - adapters[0] == APART.get(name, 0)
    for applied, of in (found["layers"], found["attention"]):
        assert applied == of > 0
    assert (trace.graphs, trace.breaks) == (1, [])
    assert all(p.grad is not None for p in testing.adapter_parameters(model))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with no_codegen():
        torch.testing.assert_close(
            step(ids), families.step_of(model, case.dtype)(ids), rtol=1e-2, atol=0
        )


def test_the_benchmark_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARK_COMMIT", "0" * 40)
    out = tmp_path / "families.json"
    only = ["--only", "Qwen3, attention only", "--backends", "eager", "qfuse", "--loss-steps", "2"]
    with no_codegen():
        families.main(["--device", "cpu", "--quick", "--out", str(out), *only])
    (eager, ours) = json.loads(out.read_text())["rows"]
    assert (eager["peer"], ours["peer"], ours["extra"]["breaks"]) == ("eager", "qfuse", 0)
    assert ours["extra"]["layers"] == "14 of 14" and ours["extra"]["attention"] == "0 of 2"
    assert ours["extra"]["loss_deviation"] < 0.1


def test_a_run_that_is_cut_off_leaves_the_cases_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(suite: harness.Suite, name: str, *_: object) -> None:
        if name == "Llama":
            raise KeyboardInterrupt
        suite.add({"case": name}, {"qfuse": harness.Timing(4e-3, 3e-3, 5e-3, 2e-3, 9)}, roof=1e-3)

    monkeypatch.setenv("BENCHMARK_COMMIT", "0" * 40)
    monkeypatch.setattr(families, "_measure", measure)
    out = tmp_path / "families.json"
    with pytest.raises(KeyboardInterrupt):
        families.main(["--device", "cpu", "--out", str(out), "--only", "Qwen3", "Llama"])
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == [{"case": "Qwen3"}]
