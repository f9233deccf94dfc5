"""Models packed straight from a checkpoint, a weight at a time."""

from __future__ import annotations

import copy
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from inductor_q import exc, kbit
from inductor_q.loading import files as checkpoint_module
from tests.support.kbit_models import (
    IDS,
    LAYERS,
    Model,
    assert_same_state,
    model,
    quantized,
    unchanged,
)


def shards(m: nn.Module, folder: Path, *, drop: str = "") -> Path:
    """The state of `m` in three files and an index, as transformers saves it."""
    state = {name: t for name, t in m.state_dict().items() if name != drop}
    if m.get_parameter("lm_head.weight") is m.get_parameter("embed.weight"):
        del state["lm_head.weight"]
    index = {name: f"model-{i % 3 + 1}-of-3.safetensors" for i, name in enumerate(state)}
    for file in set(index.values()):
        part = {name: state[name] for name, where in index.items() if where == file}
        safetensors.torch.save_file(part, folder / file)
    (folder / checkpoint_module.INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["folder", "index", "file", "folder of one"])
def test_from_a_checkpoint(tmp_path: Path, kind: str, tied: bool) -> None:
    plain = model(tied=tied)
    path = tmp_path
    if kind in ("folder", "index"):
        shards(plain, tmp_path)
        path = tmp_path / (checkpoint_module.INDEX if kind == "index" else "")
    else:
        state = plain.state_dict()
        if tied:
            del state["lm_head.weight"]
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
        path = tmp_path / ("model.safetensors" if kind == "file" else "")
    with kbit.meta_parameters():
        m = Model(tied=tied).to(torch.bfloat16)
    assert all(p.is_meta for p in m.parameters())
    kbit.quantize_model(m, 3, checkpoint=path, progress=False)
    assert_same_state(m, kbit.quantize_model(plain, 3, progress=False))
    assert torch.equal(m(IDS), plain(IDS))
    assert (m.lm_head.weight is m.embed.weight) == tied


@pytest.mark.parametrize("arguments", [{"k": 3}, {"bits": 3.5}], ids=["k", "bits"])
def test_one_weight_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    """What the reader hands out is freed before the next is read: counted, not believed."""
    path = shards(model(), tmp_path)
    alive: dict[str, weakref.ref[Tensor]] = {}
    most = 0
    read = checkpoint_module.Checkpoint.read

    def counted(self: checkpoint_module.Checkpoint, name: str) -> Tensor:
        nonlocal most
        tensor = read(self, name)
        alive[name] = weakref.ref(tensor)
        held = [n for n, ref in alive.items() if ref() is not None and n in weights]
        most = max(most, len(held))
        return tensor

    weights = {f"{name}.weight" for name in LAYERS}
    monkeypatch.setattr(checkpoint_module.Checkpoint, "read", counted)
    with kbit.meta_parameters():
        m = Model().to(torch.bfloat16)
    kbit.quantize_model(m, checkpoint=path, progress=False, **arguments)
    assert weights < set(alive)
    assert most == 1
    held = sum(t.nbytes for n, t in m.state_dict().items() if n.rpartition(".")[0] in LAYERS)
    assert held < 0.5 * sum(model().get_parameter(n).nbytes for n in weights)


@pytest.mark.parametrize("name", ["layers.1.up.weight", "layers.1.up.bias", "embed.weight"])
def test_a_checkpoint_without_a_tensor_changes_nothing(tmp_path: Path, name: str) -> None:
    path = shards(model(), tmp_path, drop=name)
    with kbit.meta_parameters():
        m = Model().to(torch.bfloat16)

    def call() -> None:
        with pytest.raises(exc.WrongCheckpoint, match=f"left as it was:\n  {name} is not in it"):
            kbit.quantize_model(m, 3, checkpoint=path, progress=False)

    unchanged(m, call)


@pytest.mark.parametrize("bad", ["nan", "shape", "missing file", "index"])
def test_a_bad_checkpoint_changes_nothing(tmp_path: Path, bad: str) -> None:
    plain = model()
    with torch.no_grad():
        if bad == "nan":
            plain.get_parameter("layers.1.down.weight")[0, 0] = math.nan
    path = shards(plain, tmp_path)
    with kbit.meta_parameters():
        m = Model(16 if bad == "shape" else 32).to(torch.bfloat16)
    if bad == "missing file":
        (path / "model-2-of-3.safetensors").unlink()
    if bad == "index":
        (path / checkpoint_module.INDEX).write_text("{")

    def call() -> None:
        kind = exc.NotFinite if bad == "nan" else exc.WrongCheckpoint
        with pytest.raises(kind):
            kbit.quantize_model(m, 3, checkpoint=path, progress=False)

    unchanged(m, call)


def test_a_buffer_without_a_value_is_an_error(tmp_path: Path) -> None:
    path = shards(model(), tmp_path)
    with torch.device("meta"):
        m = Model().to(torch.bfloat16)
    with pytest.raises(exc.WrongCheckpoint, match="the buffer positions is on the meta device"):
        kbit.quantize_model(m, 3, checkpoint=path, progress=False)


@pytest.mark.gpu
def test_gpu_from_a_checkpoint_and_from_a_file(tmp_path: Path) -> None:
    """Everything lands on the device, what is in no checkpoint too; the bits are those of a CPU."""
    expected = quantized(3)
    with kbit.meta_parameters():
        m = Model().to(torch.bfloat16)
        into = Model().to(torch.bfloat16)
    path = shards(model(), tmp_path)
    kbit.quantize_model(m, 3, checkpoint=path, device="cuda", progress=False)
    kbit.save(m, tmp_path / "m.safetensors")
    kbit.load(into, tmp_path / "m.safetensors", device="cuda")
    for made in (m, into):
        assert {t.device.type for t in (*made.parameters(), *made.buffers())} == {"cuda"}
        torch.testing.assert_close(made(IDS.cuda()).cpu(), expected(IDS), atol=0.05, rtol=0.05)
        assert_same_state(copy.deepcopy(made).cpu(), expected)


def test_meta_parameters_end_with_the_block() -> None:
    with pytest.raises(RuntimeError, match="inside"), kbit.meta_parameters():
        assert nn.Linear(4, 4).weight.is_meta
        raise RuntimeError("inside")
    assert not nn.Linear(4, 4).weight.is_meta
