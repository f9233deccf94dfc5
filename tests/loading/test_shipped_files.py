"""Files of a checkpoint: which are read, what is wrong in one, and which tensors nothing takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import inductor_q
from inductor_q import exc
from inductor_q.kbit import meta_parameters
from tests.support.shipped import CASES, INDEX, Net, fp8_tiles, fp8_whole, write
from tests.support.shipped import seed as seed


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", b"[]", r"config.json.*\n  it is no mapping"),
        ("config.json", b"\xff\xfe{}", r"config.json.*\n  'utf-8' codec can't decode"),
        ("config.json", b'{"text_config": "x"}', "its text_config is 'x', which is no mapping"),
        ("config.json", b'{"quantization_config": "fp8"}', "its quantization_config is 'fp8'"),
        ("hf_quant_config.json", b'{"quantization": 4}', "its quantization is 4, which is no map"),
        (INDEX, b"{}", r"index.json.*\n  it has no weight_map from names to files"),
        (INDEX, b"[]", r"index.json.*\n  it is no mapping"),
        (INDEX, b"{", r"index.json.*\n  Expecting property name"),
        (INDEX, b"\xff\xfe{}", r"index.json.*\n  'utf-8' codec can't decode"),
        (INDEX, b'{"weight_map": {"a": null}}', "its weight_map has None for a, which names no"),
    ],
)
def test_a_file_that_is_something_else_is_named(
    file: str, content: bytes, problem: str, tmp_path: Path
) -> None:
    config, state, _, _ = fp8_tiles()
    write(tmp_path, config, state)
    (tmp_path / file).write_bytes(content)
    if file == INDEX:
        (tmp_path / "model.safetensors").unlink()
    if file == "hf_quant_config.json":
        (tmp_path / "config.json").unlink()
    with pytest.raises(exc.WrongCheckpoint, match=problem):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


def test_one_file_is_taken_before_what_lies_beside_it(tmp_path: Path) -> None:
    """As transformers takes it: not another file's values, and no index of an earlier save."""
    config, state, values, _ = fp8_whole()
    rest = write(tmp_path, config, state)
    others = {name: torch.zeros_like(value) for name, value in rest.items()}
    save_file(others, tmp_path / "old.safetensors")
    for file in ("old.safetensors", "gone.safetensors"):
        index = {"weight_map": dict.fromkeys(rest, file)}
        (tmp_path / INDEX).write_text(json.dumps(index))
        net: Any = Net()
        inductor_q.load_checkpoint(net, tmp_path, progress=False)
        assert torch.equal(net.plain.weight, rest["plain.weight"])
        assert torch.equal(net.packed.dequantize(torch.float32), values)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    config, state, _, _ = fp8_whole()
    rest = write(tmp_path, config, state)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"plain.weight": rest["plain.weight"]}, tmp_path / "b.safetensors")
    with pytest.raises(
        exc.WrongCheckpoint, match=r"plain.weight is in a.safetensors and in b.safe"
    ):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


@pytest.mark.parametrize("case", CASES)
def test_what_nothing_takes_is_told_once(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a few names; not of what lies beside codes, nor of what transformers passes over."""
    config, state, _, _ = CASES[case]()
    write(tmp_path, config, {**state, "input_scale": torch.ones(1)})
    inductor_q.load_checkpoint(Net(), tmp_path, progress=False)
    assert not [r for r in caplog.records if r.name == "inductor_q"]
    rest = load_file(tmp_path / "model.safetensors")
    old = {"layers.0.rotary_emb.inv_freq": torch.ones(2), "plain.bias": torch.zeros(8)}
    others = {f"mtp.{i}.weight": torch.ones(2) for i in range(5)}
    save_file({**rest, **old, **others}, tmp_path / "model.safetensors")
    for _ in range(2):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)
    (record,) = [r for r in caplog.records if r.name == "inductor_q"]
    names = "mtp.0.weight, mtp.1.weight, mtp.2.weight, ..."
    assert f"5 of its tensors are not loaded, since nothing in Net takes them ({names})" in (
        record.getMessage()
    )


def test_a_checkpoint_that_is_not_packed(tmp_path: Path) -> None:
    net = Net()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    with meta_parameters():
        other = Net()
    inductor_q.load_checkpoint(other, tmp_path, progress=False)
    assert type(other.packed) is nn.Linear
    assert torch.equal(other.packed.weight, net.packed.weight)
