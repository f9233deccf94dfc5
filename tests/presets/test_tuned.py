"""Tuned presets: "auto" takes the one of this place, a name takes what ships, no other counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inductor_q import cli
from inductor_q.exc import UnknownOption, UnreadablePreset
from inductor_q.files import write_whole
from inductor_q.options import resolve
from inductor_q.presets import PRESETS, Entry, select, tuned

CPU = torch.device("cpu")
TRUE: dict[str, Any] = {"value": True, "evidence": ""}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_options: None) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def written() -> Path:
    """A tuned preset of this place."""
    place = tuned.place_of(CPU)
    base = PRESETS["cpu"]
    preset = replace(
        base,
        thresholds={**base.thresholds, "extend_k.min_rows": Entry(value=96, evidence="9 of 10 ms")},
        options={"max_autotune_gemm": Entry(value=True, evidence="8 of 10 ms")},
        kernels={"dequantize": Entry(value="inductor", evidence="7 of 10 ms")},
        facts=("epilogue_fusion: no gain",),
    )
    path = tuned.path_of(place)
    tuned.write(path, place, preset, base="cpu")
    return path


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_auto_takes_the_one_of_this_place(written: Path, config: Path) -> None:
    assert config in written.parents
    resolved = resolve(None, None, device=CPU)
    preset = resolved.preset
    assert preset.name == "tuned"
    assert preset.reason == f"measured by qfuse tune over cpu: {tuned.place_of(CPU)}"
    assert preset.thresholds["extend_k.min_rows"] == Entry(value=96, evidence="9 of 10 ms")
    others = set(preset.thresholds) - {"extend_k.min_rows"}
    assert all(preset.thresholds[n] == PRESETS["cpu"].thresholds[n] for n in others)
    assert dict(resolved.inductor) == {"max_autotune_gemm": True}
    assert resolved.sources["max_autotune_gemm"] == "preset tuned"
    assert dict(resolved.kernels) == {"dequantize": "inductor"}
    assert resolved.sources["qfuse.kernels.dequantize"] == "preset tuned"
    assert preset.facts == ("epilogue_fusion: no gain",)


def test_no_cuda_graphs_of_a_preset_without_gradients() -> None:
    """What a model predicts is kept from batch to batch, and a graph would overwrite it."""
    place, on = tuned.place_of(CPU), Entry(value=True, evidence="8 of 10 ms")
    preset = replace(PRESETS["cpu"], options={"triton.cudagraphs": on, "max_autotune_gemm": on})
    tuned.write(tuned.path_of(place), place, preset, base="cpu")
    assert "triton.cudagraphs" in resolve(None, None, device=CPU).inductor
    with torch.no_grad():
        assert dict(resolve(None, None, device=CPU).inductor) == {"max_autotune_gemm": True}
        assert resolve(None, {"triton.cudagraphs": True}, device=CPU).inductor["triton.cudagraphs"]


def test_a_file_holds_what_differs_from_its_base(written: Path) -> None:
    document = json.loads(written.read_text())
    assert document["base"] == "cpu"
    assert list(document["thresholds"]) == ["extend_k.min_rows"]


def test_the_user_is_heard_before_it(written: Path) -> None:
    options: dict[str, Any] = {"qfuse.thresholds": {"extend_k.min_rows": 7}}
    options |= {"max_autotune_gemm": False, "qfuse.kernels": {"dequantize": "auto"}}
    resolved = resolve(None, options, device=CPU)
    assert dict(resolved.inductor) == {"max_autotune_gemm": False}
    assert dict(resolved.kernels) == {"dequantize": "auto"}
    assert resolved.sources["max_autotune_gemm"] == "user"
    assert resolved.preset.thresholds["extend_k.min_rows"].value == 7


@pytest.mark.parametrize("name", ["cpu", "sm_90", "generic", "none"])
def test_a_name_takes_what_ships(name: str, written: Path) -> None:
    resolved = resolve(None, {"qfuse.preset": name}, device=CPU)
    assert resolved.preset.name == name
    assert resolved.inductor == {}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"device": "another"}, "it is for another, torch "),
        ({"torch": "2.0"}, "torch 2.0, qfuse"),
        ({"version": "9"}, "qfuse 9, not "),
        ({"qfuse_preset": 99}, "it is no tuned preset of version 1"),
        ({"base": "sm_1"}, "its base is 'sm_1'; expected sm_86, "),
        ({"thresholds": []}, "'list' object has no attribute 'items'"),
        ({"thresholds": {"extend_k.rows": {"value": 1, "evidence": ""}}}, "is no threshold"),
        ({"thresholds": {"extend_k.min_rows": {"value": "1", "evidence": ""}}}, "is no threshold"),
        ({"options": {"max_autotune": {"value": True}}}, "it has no 'evidence'"),
        ({"facts": [1]}, "1 is no text"),
        ({"options": {"no_such": TRUE}}, "unknown option 'no_such'"),
        ({"options": {"max_autotune": TRUE | {"value": "yes"}}}, "'yes' is not True or False"),
        ({"options": {"qfuse.strict": TRUE}}, "qfuse.strict is for the user to set"),
        ({"kernels": {"nosuch": TRUE | {"value": "triton"}}}, "unknown op 'nosuch'"),
        ({"kernels": {"dequantize": TRUE | {"value": "nosuch"}}}, "no provider 'nosuch'"),
        ({"kernels": {"dequantize": TRUE}}, "is not a dict of ops"),
    ],
)
def test_a_foreign_file_is_ignored_and_named_once(
    fields: dict[str, Any], problem: str, written: Path, told: list[str]
) -> None:
    change(written, **fields)
    for _ in range(2):
        assert resolve(None, None, device=CPU).preset.name == "cpu"
    [message] = told
    assert message.startswith(f"a tuned preset is ignored: {written}: ")
    assert problem in message
    assert message.endswith("Remove it, or write it again with qfuse tune")


def test_who_has_no_home_has_no_tuned_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert tuned.find(torch.device("cpu")) is None and not tuned.everything()
    with pytest.raises(NotADirectoryError):
        write_whole(tuned.folder() / "tuned" / "x.json", "")


@pytest.mark.parametrize("text", ['{"qfuse_preset": 1, "dev', "[" * 200_000])
def test_a_damaged_file_is_ignored_and_named(text: str, written: Path, told: list[str]) -> None:
    written.write_text(text)
    assert select(CPU).name == "cpu"
    assert len(told) == 1 and str(written) in told[0]


def test_by_its_path(written: Path, config: Path) -> None:
    path = written.rename(config / "mine.json")
    change(path, device="another")  # who names the file has it, on whatever device
    preset = select(CPU, str(path))
    assert preset.name == "tuned" and f"the path {path}" in preset.reason
    assert preset.thresholds["extend_k.min_rows"].value == 96
    with pytest.raises(UnreadablePreset, match=r"none\.json"):
        select(CPU, str(config / "none.json"))


def test_an_option_that_this_torch_lacks(written: Path, config: Path) -> None:
    change(written, options={"no_such_option": {"value": True, "evidence": ""}})
    with pytest.raises(UnknownOption, match="no_such_option"):
        resolve(None, {"qfuse.preset": str(written)}, device=CPU)


def test_other_devices_have_none() -> None:
    assert tuned.find(torch.device("meta")) is None


def test_presets_prints_the_evidence(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "tuned"]) == 0
    out = capsys.readouterr().out
    assert "9 of 10 ms" in out and "8 of 10 ms" in out and "sm_120" not in out
    assert str(written) in out.replace("\n", "")
    assert cli.main(["presets", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"table": "tuned", "name": "max_autotune_gemm"}.items() <= rows[-3].items()


def test_a_page_has_what_ships(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "--markdown"]) == 0
    assert "tuned" not in capsys.readouterr().out
