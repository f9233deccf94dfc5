"""Benchmarks of whole training steps, and of what trainers do, run on the smallest sizes."""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from benchmarks import (  # noqa: E402
    bench_layers,
    bench_memory,
    bench_parts,
    bench_ranks,
    bench_recipe,
    bench_step,
    bench_trainers,
    bench_walks,
    harness,
)
from benchmarks.peers import peer_options  # noqa: E402
from benchmarks.recipes import RECIPES, Recipe  # noqa: E402
from inductor_q import testing  # noqa: E402
from tests.support.benchmark_runs import CPU, check_file  # noqa: E402
from tests.support.processes import environment  # noqa: E402


@pytest.mark.slow
def test_bench_trainers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    out = tmp_path / "trainers.json"
    command = ["--device", "cpu", "--scripts", "Trainer", "--steps", "4", "--out", str(out)]
    command += ["--caches", str(tmp_path / "caches")]
    peers = ["qfuse", "eager", "eager[no cuDNN]"]
    bench_trainers.main([*command, "--together", "--backends", *peers])
    eager, ours, same = json.loads(out.read_text())["rows"]
    assert ours["extra"]["cold"]
    bench_trainers.main([*command, "--backends", "qfuse"])
    [again] = json.loads(out.read_text())["rows"]
    assert not again["extra"]["cold"]
    assert again["extra"]["compile_s"] < ours["extra"]["compile_s"]
    assert (eager["peer"], ours["peer"]) == ("eager", "qfuse")
    assert same["extra"]["loss_deviation"] == 0  # a CPU has no cuDNN
    assert ours["extra"]["loss_deviation"] < 0.01 and ours["extra"]["compile_s"] > 0
    assert "14 of 14 quantized layers fused" in ours["extra"]["line"]


@pytest.mark.slow
def test_bench_layers(tmp_path: Path) -> None:
    out = tmp_path / "layers.json"
    command = ["--device", "cpu", "--quick", "--recipes", "benchmark", "--out", str(out)]
    bench_layers.main([*command, "--layers", "3"])
    stock, whole, layers = json.loads(out.read_text())["rows"]
    assert [row["peer"] for row in (stock, whole, layers)] == ["inductor", "model", "layers"]
    assert [row["extra"]["graphs"] for row in (stock, whole, layers)] == [2, 1, 1]
    assert whole["extra"]["loss"] == pytest.approx(layers["extra"]["loss"], rel=1e-3)
    assert layers["extra"]["breaks"] == 0 and layers["case"]["recipe"] == "benchmark"
    with pytest.raises(ValueError, match="no peer 'blocks'; known: eager, inductor, model, layers"):
        bench_layers.main([*command, "--backends", "blocks"])


def test_a_deviation_is_not_relative_to_a_loss_of_nothing() -> None:
    assert bench_trainers.deviation([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    assert bench_trainers.deviation([2.0, 1e-3], [2.0, 0.0, 5.0]) == pytest.approx(0.05)


def test_padded_scripts_need_a_file_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_trainers.main(["--device", "cpu", "--pad", "8"])
    assert "name a file by --out" in capsys.readouterr().err


def test_a_script_is_run_as_no_unknown_peer(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--out", str(tmp_path / "x.json"), "--backends", "nobody"]
    with pytest.raises(SystemExit, match="'nobody': there are eager"):
        bench_trainers.main(command)


def test_bench_walks(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "walks.json"
    bench_walks.main(["--device", "cpu", "--quick", "--rounds", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    calls = ("train", "num_parameters", "parameters", "zero_grad", "reference pass")
    expected = [(call, peer) for call in calls for peer in ("trainer", "qfuse")]
    assert [(row["case"]["call"], row["peer"]) for row in rows] == expected
    assert all(row["timing"]["best"] > 0 and row["case"]["layers"] == 1 for row in rows)


@pytest.mark.slow
def test_bench_recipe_trains_in_one_order_and_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers.models.qwen3_5")
    order: list[str] = []

    def compile_as(peer: str, fn: Any) -> Any:  # eager, and says so
        def call(*args: Any, **kwargs: Any) -> Any:
            if "logits" in kwargs:
                order.append(peer)
            return fn(*args, **kwargs)

        return call

    monkeypatch.setattr(harness, "compile_as", compile_as)
    out = tmp_path / "recipe.json"
    command = ["--device", "cpu", "--quick", "--steps", "2", "--out", str(out)]
    suite = bench_recipe.main(command)
    rows = check_file(out, "bench_recipe", {"inductor", "qfuse", "broken"})
    outside = bench_recipe._backend("broken")
    once = ["inductor", "qfuse", outside]
    stock, ours, broken = (4 * [peer] for peer in once)
    assert order == [*once, *stock, *ours, *broken, *broken, *ours, *stock]
    # A layer of each kind, and the loss. The triangular system is solved by torch's operator.
    assert suite.settings["breaks"] == 0
    assert len(suite.settings["nodes"]) == 3
    assert max(suite.settings["nodes"]) < 400
    # Out of the graph: the MLP of both layers, and q, k, v and o of one.
    assert suite.settings["broken"]["calls_outside_of_the_graph"] == 6
    assert [row["extra"]["breaks"] for row in rows] == [0, 0, suite.settings["broken"]["breaks"]]
    reasons = suite.settings["broken"]["break_reasons"]
    assert len(reasons) >= 6 and all("torch.compiler.disable" in text for text in reasons)
    for row in rows:
        assert len(row["extra"]["steps_per_s"]) == len(row["extra"]["speedup"]) == 2
        assert row["extra"]["final_loss"] < row["extra"]["first_loss"]
        assert row["extra"]["loss_deviation"] == row["extra"]["round_deviation"] == 0
    assert [note.partition(":")[0] for note in suite.notes] == [
        "round 1, steps/s",
        "round 2, steps/s",
        "qfuse / inductor",
        "qfuse / broken",
        "broken / inductor",
    ]


@pytest.mark.slow
def test_layers_share_the_code_around_a_break_and_peers_do_not() -> None:
    """A recompilation for each layer would end in eager, or here in an error, at 24 of them."""
    pytest.importorskip("transformers.models.qwen3_5")
    ran: list[int] = []

    def backend_of(peer: str) -> Any:
        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            def run(*args: Any) -> Any:
                ran.append(1)
                return graph.forward(*args)

            return run

        return functools.partial(torch.compile, backend=backend, dynamic=False)

    def recompiles(layers: int) -> int:
        config = bench_recipe._config(layers, on_gpu=False)
        model = testing.qlora_model(config, r=4)
        model.enable_input_require_grads()
        entry = functools.partial(
            bench_recipe._entry, model=model, put=bench_recipe._exits(model), whole=False
        )
        torch.compiler.reset()
        ids = torch.zeros(1, 8, dtype=torch.long)
        with bench_recipe._tracing(["inductor", "broken"]), testing.CompileTrace() as trace:
            stock = entry(backend_of("inductor"))
            broken = entry(backend_of("broken"), outside=True)
            for enter, graphs in ((stock, layers + 1), (broken, 0), (stock, layers + 1)):
                ran.clear()
                enter()(input_ids=ids, labels=ids)
                assert len(ran) == graphs or (not graphs and len(ran) > 2 * layers)
        return len(trace.recompiles)

    assert recompiles(12) == recompiles(8)


def test_stock_inductor_is_two_backends_to_dynamo() -> None:
    """Of equal backends it runs code of one for the other, also where the one broke its graph."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    options = peer_options(bench_recipe._backend("broken"))
    stock, broken = wrapper(None, None, False), wrapper(None, options, False)
    assert stock == wrapper(None, None, False) and stock != broken
    assert torch._inductor.config.triton.cudagraphs is False, "the option is at its default"


@pytest.mark.slow
def test_bench_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.models.qwen3_5")
    monkeypatch.setenv("QFUSE_STRICT", "1")  # every linear of both kinds of layer is fused
    out = tmp_path / "recipe.json"
    peers = ["eager", "inductor", "qfuse", "broken"]
    command = ["--device", "cpu", "--quick", "--steps", "5", "--out", str(out)]
    bench_recipe.main([*command, "--backends", *peers])
    rows = check_file(out, "bench_recipe", set(peers))
    assert [row["extra"]["graphs"] for row in rows[:3]] == [0, 3, 3]
    assert [row["extra"]["breaks"] for row in rows[:3]] == [0, 0, 0]
    assert rows[3]["extra"]["graphs"] > rows[3]["extra"]["breaks"] // 2 > 2
    assert all(row["extra"]["loss_deviation"] < 0.01 for row in rows)
    assert all(row["extra"]["compile_s"] > 0 for row in rows[1:])


@pytest.mark.parametrize(
    ("recipe", "base", "adapters", "checkpointed"),
    [
        ("trainer", torch.bfloat16, torch.float32, False),
        ("checkpointed", torch.bfloat16, torch.float32, True),
        ("prepared", torch.float32, torch.float32, True),
        ("trl", torch.float32, torch.bfloat16, True),
    ],
)
def test_recipes_of_bench_step_train_the_model_of_their_name(
    recipe: str, base: torch.dtype, adapters: torch.dtype, checkpointed: bool
) -> None:
    chosen = RECIPES[recipe]
    arguments = argparse.Namespace(rank=4, adapter_dtype=chosen.adapters, seed=0)
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    model = bench_step._model(arguments, config, CPU, chosen)
    assert {p.dtype for p in testing.adapter_parameters(model)} == {adapters}
    assert model.get_input_embeddings().weight.dtype == base
    assert model.is_gradient_checkpointing == checkpointed
    ids = torch.randint(0, 64, (2, 14))
    assert chosen.inputs(ids)["attention_mask"].sum() == 26
    seen: list[torch.dtype] = []  # of what flows from layer to layer
    layer = model.base_model.model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    bench_step.loss_of(model, chosen)(ids).backward()
    assert set(seen) == {base}
    assert all(p.grad is not None for p in testing.adapter_parameters(model))


def test_accumulated_batches_count_as_their_mean() -> None:
    """A step of the optimizer over three batches takes the mean of their gradients and losses."""
    weight = torch.nn.Parameter(torch.zeros(3))
    ids = torch.tensor([[1.0, 2.0, 6.0]])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen: list[list[float]] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch[0].tolist())
        return (batch[0] * weight).sum() + batch[0, 0]

    loss = bench_step.full_step(optimizer, step, ids, accumulated=3)()
    assert seen == [[1, 2, 6], [6, 1, 2], [2, 6, 1]]
    assert float(loss) == pytest.approx(3)
    assert weight.detach().tolist() == pytest.approx([-3, -3, -3])


def test_exposed_communication_is_what_nothing_else_covers() -> None:
    spans = [(True, 0, 10), (False, 2, 5), (False, 4, 6), (True, 8, 12), (False, 11, 20)]
    assert bench_ranks.exposed(spans) == 2 + (11 - 6)
    assert bench_ranks.exposed([(False, 0, 10)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, fused, tolerance",
    [
        (["--wraps", "fsdp2", "fsdp2-parts", "fsdp2-packed-kept-parts"], "7 of 7", 0.02),
        (["--wraps", "fsdp2", "--recipe", "trl"], "7 of 7", 0.1),  # other masks of dropout
        (["--large"], "7 of 7", 0.02),
        (["--wraps", "experts"], "6 of 6", 0.02),
    ],
    ids=["fsdp2", "trl", "large", "experts"],
)
def test_bench_ranks(options: list[str], fused: str, tolerance: float, tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    sizes = ["--device", "cpu", "--quick", "--layers", "1", "--steps", "2", "--threads", "1"]
    peers = ["--backends", "eager", "qfuse", "--out", str(out)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "benchmarks.bench_ranks", *sizes, *peers, *options]
    subprocess.run(command, env=environment(), check=True, timeout=500)
    rows = [row["extra"] for row in json.loads(out.read_text())["rows"]]
    for eager, qfuse in zip(rows[::2], rows[1::2], strict=True):
        assert (qfuse["breaks"], qfuse["graphs"], qfuse["fused"]) == (0, 1, fused)
        assert qfuse["loss"] == pytest.approx(eager["loss"], abs=tolerance)


@pytest.mark.slow
def test_bench_memory(tmp_path: Path) -> None:
    """Each peer has a row, alone and checkpointed; less budget plans less, and computes again."""
    out = tmp_path / "memory.json"
    bench_memory.main(["--device", "cpu", "--quick", "--backends", "qfuse", "--out", str(out)])
    names = ("qfuse", "qfuse at 0.35", "qfuse, checkpointed")
    whole, less, checkpointed = check_file(out, "bench_memory", set(names))
    assert [row["peer"] for row in (whole, less, checkpointed)] == list(names)
    assert whole["extra"]["recomputed_bytes"] == 0 < less["extra"]["recomputed_bytes"]
    assert less["extra"]["planned_bytes"] < whole["extra"]["planned_bytes"]
    assert "planned_bytes" not in checkpointed["extra"]


def test_recipes_give_the_masks_that_they_say() -> None:
    ids = torch.ones(2, 14, dtype=torch.long)
    assert "attention_mask" not in Recipe().inputs(ids)
    ones, padded = (Recipe(mask=mask).inputs(ids) for mask in ("ones", "padded"))
    assert bool(ones["attention_mask"].all()) and torch.equal(ones["labels"], ids)
    assert padded["attention_mask"].sum(1).tolist() == [14, 12]
    assert torch.equal(padded["labels"] == -100, padded["attention_mask"] == 0)


def test_parts_differ_in_dropout_and_share_their_tensors() -> None:
    """Without dropout the twin computes what a model that PEFT made without it does."""
    config = testing.tiny_qwen3_config(num_hidden_layers=1)
    model, plain = (testing.qlora_model(config, dropout=p) for p in (0.05, 0.0))
    twin = bench_parts.sharing(model, bench_parts.PLAIN)
    assert [*map(id, twin.parameters())] == [*map(id, model.parameters())]
    assert repr(twin) == repr(plain) != repr(model)
    ids = torch.arange(8)[None]
    assert torch.equal(twin(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.slow
def test_bench_parts(tmp_path: Path) -> None:
    """Each peer has a row for each variant, over its plain step, and each goal has its ratio."""
    out, peers = tmp_path / "parts.json", {"inductor", "qfuse"}
    before = counters["stats"]["unique_graphs"]
    suite = bench_parts.main(["--device", "cpu", "--quick", "--out", str(out)])
    rows = check_file(out, "bench_parts", peers)
    found = [(row["case"]["variant"], row["peer"]) for row in rows]
    assert found == [(name, peer) for name in bench_parts.VARIANTS for peer in sorted(peers)]
    assert [row["extra"]["time_over_plain"] for row in rows[:2]] == [1, 1]
    # The two kinds of mask share theirs, and none is compiled again while steps take turns.
    assert counters["stats"]["unique_graphs"] - before == len(peers) * (
        len(bench_parts.VARIANTS) - 1
    )
    assert len(suite.notes) == len(bench_parts.GOALS) * len(peers)


@pytest.mark.slow
def test_bench_step(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--loss-steps", "3"]
    bench_step.main([*command, "--layers", "1", "--out", str(out)])
    rows = {row["peer"]: row for row in check_file(out, "bench_step", set(harness.PEERS))}
    for peer in ("inductor", "qfuse"):
        extra = rows[peer]["extra"]
        assert extra["breaks"] == 0
        assert extra["graphs"] <= 2
        assert extra["loss_deviation"] < 0.02
        assert extra["compile_s"] > 0
    saved = {peer: rows[peer]["extra"]["saved_bytes"] for peer in harness.PEERS}
    # Of rank 16 beside 64 channels, a low-rank tensor saved or recomputed is a visible share.
    assert saved["qfuse"] <= 1.05 * saved["inductor"] < saved["eager"]
