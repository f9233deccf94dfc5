"""benchmarks/foreign.py: kernels of other projects on the model of a benchmark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

for extra in ("bitsandbytes", "peft", "rich", "transformers"):
    pytest.importorskip(extra)

from benchmarks import bench_step, foreign  # noqa: E402
from benchmarks.recipes import RECIPES  # noqa: E402
from inductor_q import testing  # noqa: E402

#: What the functions of axolotl/kernels/lora.py are, in the layers' own words.
LORA = """
from axolotl.utils.logging import get_logger

calls = []


def linear(layer, x):
    calls.append(type(layer).__name__)
    name = "default"
    low = layer.lora_B[name](layer.lora_A[name](layer.lora_dropout[name](x)))
    return layer.base_layer(x) + SCALE * layer.scaling[name] * low


def apply_lora_qkv(self, x, inplace=True):
    return linear(self.q_proj, x), linear(self.k_proj, x), linear(self.v_proj, x)


def apply_lora_o(self, x):
    return linear(self.o_proj, x)


def apply_lora_mlp_swiglu(self, x, inplace=True):
    return linear(self.down_proj, self.act_fn(linear(self.gate_proj, x)) * linear(self.up_proj, x))
"""


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Path]:
    """Give a checkout whose kernels add what its file's SCALE says of each adapter."""
    (tmp_path / "src/axolotl/kernels").mkdir(parents=True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("axolotl"):
            del sys.modules[name]


def write(sources: Path, scale: float) -> Path:
    (sources / "src/axolotl/kernels/lora.py").write_text(f"SCALE = {scale}\n{LORA}")
    return sources


def small(recipe: str = "benchmark") -> tuple[Any, torch.Tensor]:
    chosen = RECIPES[recipe]
    model = testing.qlora_model(
        testing.tiny_qwen3_config(num_hidden_layers=2),
        adapter_dtype=torch.bfloat16,
        dropout=0.5,
    )
    if chosen.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("recipe", ["benchmark", "surogate-checkpointed"])
def test_kernels_run_on_parameters_of_the_model(recipe: str, sources: Path) -> None:
    """Also when a checkpoint computes again; the model itself runs as it did."""
    model, ids = small(recipe)
    kernels = foreign.load("axolotl", write(sources, 1.0))
    calls = sys.modules["axolotl.kernels.lora"].calls
    other = foreign.adopt(model, kernels)
    assert [id(p) for p in other.parameters()] == [id(p) for p in model.parameters()]
    eager = bench_step.loss_of(model, RECIPES[recipe])
    step = bench_step.loss_of(other, RECIPES[recipe])
    start = testing.adapter_state(model)
    found = foreign.compare(step, eager, ids, (model, other))
    assert len(calls) == 2 * 7 * (1 + RECIPES[recipe].checkpointed)
    assert found["loss_deviation"] < 1e-3 and found["gradient_deviation"] < 0.02
    assert foreign.agrees(found)
    assert all(map(torch.equal, testing.adapter_state(model), start))
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}
    calls.clear()
    eager(ids)
    assert not calls


def test_kernels_that_leave_the_adapter_out_are_found(sources: Path) -> None:
    """B is 0 in a new adapter, so the comparison gives it other values."""
    model, ids = small()
    other = foreign.adopt(model, foreign.load("axolotl", write(sources, 0.0)))
    step, eager = bench_step.loss_of(other), bench_step.loss_of(model)
    found = foreign.compare(step, eager, ids, (model, other))
    assert not foreign.agrees(found)
    assert found["gradient_deviation"] > 0.9


def test_what_cannot_be_loaded(sources: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--unsloth takes the root of its repository"):
        foreign.load("unsloth", sources)
    foreign.load("axolotl", write(sources, 1.0))
    with pytest.raises(ImportError, match="axolotl is imported already"):
        foreign.load("axolotl", sources)
    with pytest.raises(SystemExit):  # their kernels take 16 bits
        bench_step.main(["--quick", "--recipe", "trl", "--axolotl", str(sources)])


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_bench_step_times_only_what_computes_the_same(
    scale: float, sources: Path, tmp_path: Path
) -> None:
    out = tmp_path / "step.json"
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--loss-steps", "2", "--layers", "1"]
    options = ["--backends", "eager", "--recipe", "surogate", "--axolotl", str(sources)]
    write(sources, scale)
    suite = bench_step.main([*command, *options, "--seq-len", "64", "--out", str(out)])
    rows = {row.peer: row.extra for row in suite.rows}
    assert ("axolotl" in rows) == bool(scale)
    assert any("axolotl is not timed" in note for note in suite.notes) == (not scale)
    assert all(row["tokens_per_second"] > 0 and 0 < row["mfu"] < 1 for row in rows.values())
    assert suite.cases() == [{"model": "qwen3", "layers": 1, "tokens": "2 x 64 x 4"}]
    if scale:
        assert rows["axolotl"]["breaks"] == 0
        assert rows["axolotl"]["loss_deviation"] < 0.02
