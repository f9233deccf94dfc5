"""Presets: the right one for each device, evidence behind each entry, no idle entry."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inductor_q import inductor_config
from inductor_q.exc import UnknownPreset
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
)
from tests.support.processes import ROOT

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
MEASURED = [(8, 6), (9, 0), (12, 0)]
# Others of a measured family, older cards, an embedded one, one that does not exist yet.
OTHERS = [(7, 0), (7, 5), (8, 0), (8, 7), (8, 9), (9, 1), (10, 0), (11, 0), (12, 1), (13, 0)]

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


@pytest.mark.parametrize("capability", MEASURED, ids=str)
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
    assert not (preset.losses or preset.min_memory or preset.facts)
    assert preset.thresholds == THRESHOLDS
    assert resolve(None, {"qfuse.preset": "none"}, device=CPU).inductor == {}


# --- what they hold ------------------------------------------------------------------------------

ALL = [*PRESETS.values(), NONE]
PRESET = pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)


def idle_entries(preset: Preset) -> list[str]:
    """Entries that leave everything as it is without them."""
    return [
        name
        for name, entry in preset.thresholds.items()
        if entry is not THRESHOLDS[name] and entry.value == THRESHOLDS[name].value
    ]


@PRESET
def test_no_idle_entries(preset: Preset) -> None:
    assert idle_entries(preset) == []


def test_every_section_is_in_use() -> None:
    """What all presets leave empty is tested by nothing here, and serves nobody."""
    used = {name for preset in PRESETS.values() for name in MAPPINGS if getattr(preset, name)}
    assert used == set(MAPPINGS) - {"options", "kernels"}  # of what `qfuse tune` measured
    assert any(preset.facts for preset in PRESETS.values())


def test_idle_entries_are_found() -> None:
    again = Entry(value=1024, evidence="again")
    preset = replace(PRESETS["sm_90"], thresholds={"extend_k.min_rows": again})
    assert idle_entries(preset) == ["extend_k.min_rows"]


@pytest.mark.parametrize("preset", [p for p in PRESETS.values() if p.name != "generic"])
def test_no_preset_is_just_the_generic_one(preset: Preset) -> None:
    generic = PRESETS["generic"]
    assert replace(preset, name=generic.name, arch=None) != generic


#: What evidence has to name: a file of results, the measurement of others, a library's source.
ORIGIN = re.compile(r"benchmarks/results/[\w-]+\.json|\baxolotl#\d+|\bbackends/[\w/]+\.py")


@PRESET
def test_every_key_exists_and_has_evidence(preset: Preset) -> None:
    """An entry of a preset says where its number was measured, a default that none was."""
    schema = inductor_config.schema()
    for section in MAPPINGS:
        for name, entry in getattr(preset, section).items():
            if section == "thresholds" and entry is THRESHOLDS[name]:
                assert entry.evidence.startswith("a start value")
                continue
            origins = set(ORIGIN.findall(entry.evidence))
            assert origins, name
            for origin in origins:
                assert not origin.startswith("benchmarks") or (ROOT / origin).is_file()
    assert {*preset.losses, *preset.min_memory} <= set(schema)
    assert set(preset.thresholds) == set(THRESHOLDS)
    assert all(type(entry.value) is int for entry in preset.thresholds.values())


@PRESET
def test_resolves(preset: Preset) -> None:
    resolved = resolve(None, {"qfuse.preset": preset.name}, device=CPU)
    assert resolved.preset.name == preset.name
    assert resolved.inductor == {}


def test_names_match_architectures() -> None:
    named = {preset.arch: name for name, preset in PRESETS.items() if preset.arch}
    assert named == {arch: "sm_{}{}".format(*arch) for arch in MEASURED}
    assert set(PRESETS) == {*named.values(), "cpu", "generic"}


def test_evidence_stays_on_its_architecture() -> None:
    assert "+13 %" in PRESETS["sm_86"].losses["max_autotune_gemm"].evidence
    assert "-2.57 %" in PRESETS["sm_120"].min_memory["max_autotune_gemm"].evidence
    assert any("928.9" in fact for fact in PRESETS["sm_120"].facts)
    generic = PRESETS["generic"]
    assert not (generic.losses or generic.min_memory or generic.facts)


def test_presets_are_read_only_yet_travel() -> None:
    with pytest.raises(TypeError):
        PRESETS["new"] = NONE  # type: ignore[index]
    with pytest.raises(TypeError):
        PRESETS["cpu"].thresholds["new"] = 1  # type: ignore[index]
    preset = PRESETS["sm_86"]
    assert copy.deepcopy(preset) == pickle.loads(pickle.dumps(preset)) == preset
    assert FrozenMap({"a": 1}) == {"a": 1}
