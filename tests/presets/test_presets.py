"""Presets: the right one for each device, evidence behind each entry, no idle entry."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inductor_q import inductor_config
from inductor_q.exc import InvalidTunedFile, UnknownOption, UnknownPass, UnknownPreset
from inductor_q.options import resolve
from inductor_q.presets import (
    MAPPINGS,
    NONE,
    PRESETS,
    THRESHOLDS,
    Entry,
    FrozenMap,
    Preset,
    select,
    tuning,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
KNOWN = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
# A newer member of a known family, an older card, an embedded one, one that does not exist yet.
OTHERS = [(7, 0), (8, 7), (9, 1), (10, 1), (11, 0), (12, 2), (13, 0)]

FakeGpu = Callable[..., None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    def install(capability: tuple[int, int], *, hip: str | None = None) -> None:
        properties = SimpleNamespace(total_memory=24e9, gcnArchName="gfx90a:sramecc+:xnack-")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return install


# --- which one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", KNOWN, ids=str)
def test_exact_capability(gpu: FakeGpu, capability: tuple[int, int]) -> None:
    gpu(capability)
    preset = select(CUDA)
    assert preset.name == "sm_{}{}".format(*capability)
    assert preset.arch == capability
    assert preset.reason == f"the device is Some GPU, {preset.name}"


@pytest.mark.parametrize("capability", OTHERS, ids=str)
def test_other_capability_is_generic_and_says_why(
    gpu: FakeGpu, capability: tuple[int, int]
) -> None:
    gpu(capability)
    preset = select(CUDA)
    assert preset.name == "generic"
    version = "{}.{}".format(*capability)
    assert preset.reason == f"no measurement exists for compute capability {version} (Some GPU)"
    assert preset.thresholds == PRESETS["generic"].thresholds


def test_amd_numbers_are_not_nvidia_capabilities(gpu: FakeGpu) -> None:
    gpu((9, 0), hip="6.4")
    preset = select(CUDA)
    assert preset.name == "generic"
    assert preset.reason == "no measurement exists for AMD gfx90a (Some GPU)"


def test_cpu() -> None:
    preset = select(CPU)
    assert (preset.name, preset.reason) == ("cpu", "the device is a CPU, cpu")


def test_other_device_type() -> None:
    preset = select(torch.device("meta"))
    assert preset.name == "generic"
    assert preset.reason == "no measurement exists for devices of type meta"


def test_by_name(gpu: FakeGpu) -> None:
    gpu((8, 6))
    preset = select(CUDA, "sm_90")
    assert (preset.name, preset.reason) == ("sm_90", "asked for by name on sm_86")
    with pytest.raises(UnknownPreset, match="unknown preset 'sm90'; did you mean 'sm_90'"):
        select(CUDA, "sm90")


def test_none_sets_nothing() -> None:
    preset = select(CPU, "none")
    assert (preset.name, preset.reason) == ("none", "asked for by name")
    assert not (preset.inductor or preset.passes or preset.kernels or preset.losses)
    assert resolve(None, {"qfuse.preset": "none"}, device=CPU).inductor == {}


# --- what they hold ------------------------------------------------------------------------------

ALL = [*PRESETS.values(), NONE]
PRESET = pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)


def idle_entries(preset: Preset) -> list[str]:
    """Entries that leave everything as it is without them, or name a key that torch lacks."""
    schema = inductor_config.schema()
    from torch._inductor import config

    idle = [
        name
        for name, entry in preset.inductor.items()
        if name not in schema or entry.value == config._config[name].default  # type: ignore[attr-defined]
    ]
    idle += [name for name, entry in preset.passes.items() if entry.value is True]
    idle += [op for op, entry in preset.kernels.items() if entry.value == "auto"]
    idle += [
        name
        for name, entry in preset.thresholds.items()
        if entry is not THRESHOLDS[name] and entry.value == THRESHOLDS[name].value
    ]
    return idle


@PRESET
def test_no_idle_entries(preset: Preset) -> None:
    assert idle_entries(preset) == []


def test_idle_entries_are_found() -> None:
    entry = Entry(value=True, evidence="none")
    preset = replace(
        PRESETS["sm_90"],
        inductor={"shape_padding": entry, "freezing": entry, "gone": entry},
        passes={"fold_lora": entry},
        kernels={"dequantize": Entry(value="auto", evidence="none")},
        thresholds={"extend_k.min_rows": Entry(value=1024, evidence="again")},
    )
    found = ["shape_padding", "gone", "fold_lora", "dequantize", "extend_k.min_rows"]
    assert idle_entries(preset) == found


@PRESET
def test_every_key_exists_and_has_evidence(preset: Preset) -> None:
    schema = inductor_config.schema()
    for section in MAPPINGS:
        for entry in getattr(preset, section).values():
            assert len(entry.evidence) > 20
            assert entry.origin == "preset"
    assert {*preset.inductor, *preset.losses, *preset.min_memory} <= set(schema)
    assert set(preset.thresholds) == set(THRESHOLDS)
    assert all(type(entry.value) is int for entry in preset.thresholds.values())


@PRESET
def test_resolves(preset: Preset) -> None:
    resolved = resolve(None, {"qfuse.preset": preset.name}, device=CPU)
    assert resolved.preset.name == preset.name
    assert resolved.inductor == {name: entry.value for name, entry in preset.inductor.items()}


def test_names_match_architectures() -> None:
    named = {preset.arch: name for name, preset in PRESETS.items() if preset.arch}
    assert named == {arch: "sm_{}{}".format(*arch) for arch in KNOWN}
    assert set(PRESETS) == {*named.values(), "cpu", "generic"}


def test_shared_memory_limits() -> None:
    limits = {name: preset.smem_bytes for name, preset in PRESETS.items() if preset.arch}
    assert limits == {
        "sm_75": 65_536,
        "sm_80": 166_912,
        "sm_86": 101_376,
        "sm_89": 101_376,
        "sm_90": 232_448,
        "sm_100": 232_448,
        "sm_103": 232_448,
        "sm_120": 101_376,
        "sm_121": 101_376,
    }


@pytest.mark.gpu
def test_shared_memory_limit_of_this_device() -> None:
    preset = select(CUDA)
    properties: Any = torch.cuda.get_device_properties(CUDA)
    assert preset.smem_bytes in (None, properties.shared_memory_per_block_optin)


def test_evidence_stays_on_its_architecture() -> None:
    assert "+13 %" in PRESETS["sm_86"].losses["max_autotune_gemm"].evidence
    assert "-2.57 %" in PRESETS["sm_120"].min_memory["max_autotune_gemm"].evidence
    assert any("928.9" in fact for fact in PRESETS["sm_120"].facts)
    for name in ("sm_80", "sm_89", "sm_121", "generic"):
        assert not (PRESETS[name].losses or PRESETS[name].min_memory or PRESETS[name].facts)


def test_presets_are_read_only_yet_travel() -> None:
    with pytest.raises(TypeError):
        PRESETS["new"] = NONE  # type: ignore[index]
    with pytest.raises(TypeError):
        PRESETS["cpu"].thresholds["new"] = 1  # type: ignore[index]
    preset = PRESETS["sm_86"]
    assert copy.deepcopy(preset) == pickle.loads(pickle.dumps(preset)) == preset
    assert FrozenMap({"a": 1}) == {"a": 1}


# --- tuned files ---------------------------------------------------------------------------------


def write(path: Path, data: object) -> None:
    path.write_text(data if isinstance(data, str) else json.dumps(data))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
    return tmp_path


TUNED = {
    "inductor": {"freezing": {"value": True, "evidence": "measured here"}},
    "passes": {"extend_k": {"value": False, "evidence": "slower here"}},
    "thresholds": {"extend_k.min_rows": {"value": 64, "evidence": "crossover here"}},
}


def test_tuned_entries_lie_over_the_preset(directory: Path) -> None:
    write(directory / "cpu.json", TUNED)
    resolved = resolve(None, None, device=CPU)
    preset = resolved.preset
    assert preset.reason == "the device is a CPU, cpu, with cpu.json of this machine"
    assert preset.thresholds["extend_k.min_rows"].value == 64
    assert (
        preset.thresholds["canonicalize.min_rows"]
        == PRESETS["cpu"].thresholds["canonicalize.min_rows"]
    )
    assert resolved.inductor == {"freezing": True}
    assert resolved.sources["freezing"] == "tuned cpu: measured here"
    assert "extend_k" not in resolved.passes
    assert resolved.sources["qfuse.passes.extend_k"] == "tuned cpu: slower here"
    assert "freezing" not in PRESETS["cpu"].inductor


def test_user_wins_over_tuned_over_preset(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(directory / "cpu.json", TUNED)
    monkeypatch.setenv("QFUSE_PASSES", "+extend_k")
    resolved = resolve(None, {"freezing": False}, device=CPU)
    assert resolved.inductor == {"freezing": False}
    assert resolved.sources["freezing"] == "user"
    assert "extend_k" in resolved.passes
    assert resolved.sources["qfuse.passes.extend_k"] == "environment"


def test_tuned_file_of_a_capability_without_preset(gpu: FakeGpu, directory: Path) -> None:
    gpu((8, 7))
    write(directory / "sm_87.json", TUNED)
    preset = select(CUDA)
    assert preset.name == "generic"
    assert preset.inductor["freezing"].value is True


def test_tuned_file_does_not_reach_none(directory: Path) -> None:
    write(directory / "cpu.json", TUNED)
    write(directory / "none.json", TUNED)
    assert resolve(None, {"qfuse.preset": "none"}, device=CPU).inductor == {}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("{", "not JSON"),
        ([], "expected an object of sections"),
        ({"inductr": {}}, "unknown section 'inductr', expected inductor, passes, kernels"),
        ({"inductor": {"freezing": True}}, r"inductor.freezing: expected \{value, evidence\}"),
        (
            {"inductor": {"freezing": {"value": True, "evidence": " "}}},
            "inductor.freezing: without evidence",
        ),
        (
            {"thresholds": {"extend_k.rows": {"value": 1, "evidence": "x"}}},
            "no such threshold, known: extend_k.min_rows",
        ),
        (
            {"thresholds": {"extend_k.min_rows": {"value": True, "evidence": "x"}}},
            "expected a number of rows, got True",
        ),
        ({"passes": {"extend_k": {"value": 0, "evidence": "x"}}}, "expected true or false, got 0"),
        (
            {"kernels": {"dequantize": {"value": 1, "evidence": "x"}}},
            "expected the name of a provider, got 1",
        ),
    ],
)
def test_malformed_tuned_file(directory: Path, data: object, problem: str) -> None:
    write(directory / "cpu.json", data)
    with pytest.raises(InvalidTunedFile, match=problem) as caught:
        resolve(None, None, device=CPU)
    assert caught.value.path == str(directory / "cpu.json")
    assert "Correct it or delete the file" in str(caught.value)


def test_tuned_file_with_names_that_do_not_exist(directory: Path) -> None:
    entry = {"value": True, "evidence": "from another version"}
    write(directory / "cpu.json", {"inductor": {"gone": entry}})
    with pytest.raises(UnknownOption, match="unknown option 'gone' in tuned cpu"):
        resolve(None, None, device=CPU)
    write(directory / "cpu.json", {"passes": {"fold": entry}})
    with pytest.raises(UnknownPass, match="unknown pass 'fold' in tuned cpu"):
        resolve(None, None, device=CPU)
