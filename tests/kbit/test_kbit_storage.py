"""Packed models in files: saved and loaded bit for bit; a damaged file changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from inductor_q import exc, kbit
from tests.support.kbit_models import IDS, Model, assert_same_state, model, quantized, unchanged


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("k", "absmax"), [(2, "e4m4"), (5, "fp16")])
def test_save_and_load(tmp_path: Path, k: int, absmax: str, tied: bool) -> None:
    m = quantized(k, absmax, tied=tied)
    kbit.save(m, tmp_path / "m.safetensors")
    with kbit.meta_parameters():
        empty = Model(tied=tied).to(torch.bfloat16)
    for into in (model(seed=1, tied=tied), quantized(k, absmax, seed=1, tied=tied), empty):
        kbit.load(into, tmp_path / "m.safetensors")
        assert_same_state(into, m)
        assert torch.equal(into(IDS), m(IDS))
        tensors = {id(into.lm_head.weight), id(into.embed.weight)}
        assert len(tensors) == (1 if tied else 2)
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_the_state_dict_is_plain_safetensors(tmp_path: Path) -> None:
    """What others write and read: no wrapper, no pickled state, no shared memory."""
    m = quantized(3)
    safetensors.torch.save_file(m.state_dict(), tmp_path / "m.safetensors")
    other = quantized(3, seed=1)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "m.safetensors"))
    assert_same_state(other, m)
    kbit.save(m, tmp_path / "n.safetensors")
    assert safetensors.torch.load_file(tmp_path / "n.safetensors").keys() == m.state_dict().keys()


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    kbit.save(quantized(3), path)
    before = path.read_bytes()

    def full(tensors: Any, file: str, metadata: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        kbit.save(quantized(4), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def rewritten(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a file and keep its header's entries."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata)


DAMAGE: list[tuple[str, Callable[[Path], Any], type[exc.QfuseError], str]] = [
    (
        "cut off",
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        exc.WrongCheckpoint,
        "incomplete",
    ),
    ("empty", lambda path: path.write_bytes(b""), exc.WrongCheckpoint, "header"),
    ("gone", lambda path: path.unlink(), exc.WrongCheckpoint, "No such file"),
    (
        "not ours",
        lambda path: safetensors.torch.save_file(model().state_dict(), path),
        exc.WrongCheckpoint,
        "save did not write it",
    ),
    (
        "packed length",
        lambda path: rewritten(
            path, lambda t: t.update({"layers.1.up.qweight": t["layers.1.up.qweight"][:-3]})
        ),
        exc.CorruptQuantState,
        r"layers.1.up.qweight should be torch.int32 \(192,\), is torch.int32 \(189,\)",
    ),
    (
        "scales lost",
        lambda path: rewritten(path, lambda t: t.pop("layers.1.up.absmax")),
        exc.WrongCheckpoint,
        "layers.1.up.absmax is not in it",
    ),
    (
        "norm lost",
        lambda path: rewritten(path, lambda t: t.pop("layers.1.norm.weight")),
        exc.WrongCheckpoint,
        "layers.1.norm.weight is not in it",
    ),
    (
        "one too many",
        lambda path: rewritten(path, lambda t: t.update({"more": torch.ones(1)})),
        exc.WrongCheckpoint,
        "more is not in the model",
    ),
    (
        "another shape",
        lambda path: rewritten(path, lambda t: t.update({"embed.weight": torch.ones(3, 32)})),
        exc.WrongCheckpoint,
        r"embed.weight is \(3, 32\) in it, \(40, 32\) here",
    ),
]


@pytest.mark.parametrize(
    ("damage", "kind", "text"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE]
)
def test_a_damaged_file_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], Any], kind: type[exc.QfuseError], text: str
) -> None:
    path = tmp_path / "m.safetensors"
    kbit.save(quantized(3), path)
    damage(path)
    for into in (model(seed=1), quantized(3, seed=1)):

        def call(into: Model = into) -> None:
            with pytest.raises(kind, match=text):
                kbit.load(into, path)

        unchanged(into, call)


def test_a_file_of_another_k_changes_nothing(tmp_path: Path) -> None:
    kbit.save(quantized(3), tmp_path / "m.safetensors")
    into = quantized(4, seed=1)

    def call() -> None:
        with pytest.raises(exc.CorruptQuantState, match="should be kbit4_e4m4, is kbit3_e4m4"):
            kbit.load(into, tmp_path / "m.safetensors")

    unchanged(into, call)
