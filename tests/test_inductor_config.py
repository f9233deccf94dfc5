"""Inductor's own keys and modes: what torch takes is taken, anything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from inductor_q import inductor_config, own_options
from inductor_q.exc import InvalidOptionValue, ModeConflict, UnknownMode, UnknownOption
from inductor_q.options import list_options
from tests.support.resolving import WELL_KNOWN, on_cpu

pytestmark = pytest.mark.usefixtures("default_options")


def test_well_known_flags_exist() -> None:
    schema = inductor_config.schema()
    for name in WELL_KNOWN:
        assert schema[name].declared is bool
        assert not (schema[name].alias or schema[name].deprecated)


def test_schema_is_torchs_list() -> None:
    """All of them, other spellings included, which torch's own list leaves out."""
    config: Any = torch._inductor.config
    aliases = {name for name, entry in config._config.items() if entry.alias}
    listed = set(torch._inductor.list_options())
    assert set(inductor_config.schema()) == (listed | aliases) - {"TYPE_CHECKING"}


def test_current_value_of_every_key_is_accepted() -> None:
    """The declared types are read as torch means them."""
    refused = [
        (name, key.declared, inductor_config.current(name))
        for name, key in inductor_config.schema().items()
        if key.declared is not type(None)
        and inductor_config.coerce(inductor_config.current(name), key.declared)
        is inductor_config.MISMATCH
    ]
    assert refused == []


@pytest.mark.parametrize("name", WELL_KNOWN)
@pytest.mark.parametrize("value", [True, False])
def test_well_known_flags_arrive(name: str, value: bool) -> None:
    resolved = on_cpu({name: value})
    assert resolved.inductor == whole({name: value})
    assert resolved.sources[name] == "user"


def test_all_flags_at_once() -> None:
    given = dict.fromkeys(WELL_KNOWN, True)
    assert on_cpu(given).inductor == whole(given)


def whole(given: Mapping[str, Any]) -> dict[str, Any]:
    """Add what goes with CUDA graphs."""
    return {**given, "graph_partition": False} if given.get("triton.cudagraphs") else {**given}


@pytest.mark.parametrize("given", [None, {}], ids=repr)
def test_nothing_given(given: dict[str, Any] | None) -> None:
    resolved = on_cpu(given)
    assert resolved.inductor == {}
    assert resolved.preset.name == "cpu"
    assert resolved.passes == own_options.pass_names()
    assert (resolved.numerics, resolved.kernels) == ("default", {})
    assert (resolved.report, resolved.strict) == (None, False)
    assert set(resolved.sources) == set(own_options.OPTIONS)
    assert set(resolved.sources.values()) == {"default"}


@pytest.mark.parametrize("name", ["shape_padding", "triton.cudagraphs", *own_options.OPTIONS])
@pytest.mark.parametrize("value", [None, {}], ids=repr)
def test_none_and_empty_mean_not_given(name: str, value: object) -> None:
    assert on_cpu({name: value}) == on_cpu()


def test_none_counts_where_torch_takes_it() -> None:
    assert on_cpu({"cpp.simdlen": None}).inductor == {"cpp.simdlen": None}


def test_unknown_key() -> None:
    with pytest.raises(UnknownOption) as caught:
        on_cpu({"shape_paddin": True})
    text = str(caught.value)
    assert text.startswith("unknown option 'shape_paddin'; did you mean 'shape_padding'")
    assert text.endswith("? List all: inductor_q.list_options()")
    with pytest.raises(UnknownOption, match=r"'triton\.cudagraph'; did you mean 'triton\.cudagr"):
        on_cpu({"triton.cudagraph": True})
    with pytest.raises(UnknownOption, match=r"'qfuse\.pases'; did you mean 'qfuse\.passes'"):
        on_cpu({"qfuse.pases": []})
    with pytest.raises(UnknownOption, match=r"unknown option 'zzz'\. List all"):
        on_cpu({"zzz": 1})
    with pytest.raises(UnknownOption, match="unknown option 'TYPE_CHECKING'"):
        on_cpu({"TYPE_CHECKING": True})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("shape_padding", 1, "True or False"),
        ("shape_padding", "true", "True or False"),
        ("cpp.threads", True, "a whole number"),
        ("cpp.threads", 1.5, "a whole number"),
        ("cpp.threads", "4", "a whole number"),
        ("cpp.threads", float("nan"), "a whole number"),
        ("max_autotune_gemm_backends", 3, "a string"),
        ("max_autotune_gemm_search_space", "default", "one of 'DEFAULT', 'EXHAUSTIVE'"),
        ("triton.multi_kernel", True, "one of 0, 1, 2, 3"),
        ("cpp.simdlen", "wide", "a whole number or None"),
        ("_fuse_ddp_bucket_size", False, "a whole number"),
        ("rocm.arch", "gfx90a", "a list, each a string"),
        ("rocm.arch", [1], "a list, each a string"),
        ("pre_grad_fusion_options", [], "a mapping"),
    ],
)
def test_wrong_type(name: str, value: object, expected: str) -> None:
    with pytest.raises(InvalidOptionValue) as caught:
        on_cpu({name: value})
    text = f"option {name!r}: {value!r} is not {expected}. Drop the option to keep the default"
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("cpp.threads", 4.0, 4),
        ("score_fusion_memory_threshold", 10, 10),
        ("max_autotune_subproc_result_timeout_seconds", 2, 2.0),
        ("rocm.arch", ("gfx90a",), ["gfx90a"]),
        ("cpp.simdlen", 256, 256),
        ("compile_threads", 1, 1),
    ],
)
def test_values_are_promoted(name: str, value: object, result: object) -> None:
    stored = on_cpu({name: value}).inductor[name]
    assert stored == result
    assert type(stored) is type(result)


def test_numpy_numbers_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    given = {
        "cpp.threads": numpy.int64(4),
        "max_autotune_subproc_result_timeout_seconds": numpy.float32(0.5),
    }
    assert [type(value) for value in on_cpu(given).inductor.values()] == [int, float]


def test_callables_and_objects_pass() -> None:
    def user_pass(graph: torch.fx.Graph) -> None: ...

    given = {"joint_custom_pre_pass": user_pass}
    assert on_cpu(given).inductor["joint_custom_pre_pass"] is user_pass
    with pytest.raises(InvalidOptionValue, match="'joint_custom_pre_pass': 3 is not a "):
        on_cpu({"joint_custom_pre_pass": 3})


def test_spellings() -> None:
    graphs = {"triton.cudagraphs": True}
    assert on_cpu({"triton": {"cudagraphs": True}}).inductor == whole(graphs)
    assert on_cpu({"shape-padding": False}).inductor == {"shape_padding": False}
    assert on_cpu({"qfuse": {"strict": True}}).strict
    with pytest.raises(UnknownOption, match=r"'triton\.cudagraf'; did you mean 'triton\.cudagr"):
        on_cpu({"triton": {"cudagraf": True}})


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key of the config as an alias, another as deprecated, whatever this torch has."""
    schema = dict(inductor_config.schema())
    schema["old_padding"] = inductor_config.Key(declared=bool, alias="shape_padding")
    schema["debug"] = inductor_config.Key(declared=bool, deprecated="use trace.enabled instead")
    monkeypatch.setattr(inductor_config, "schema", lambda: schema)


@pytest.mark.usefixtures("renamed")
def test_alias_is_translated_and_the_canonical_key_wins(told: list[str]) -> None:
    assert on_cpu({"old_padding": False}).inductor == {"shape_padding": False}
    assert told == []
    both = on_cpu({"old_padding": False, "shape_padding": True})
    assert both.inductor == {"shape_padding": True}
    assert told == [
        "old_padding and shape_padding are one option and differ: shape_padding=True holds"
    ]


@pytest.mark.usefixtures("renamed")
def test_deprecated_key_is_told_once(told: list[str]) -> None:
    for _ in range(2):
        assert on_cpu({"debug": True}).inductor == {"debug": True}
    assert told == ["the Inductor option debug is deprecated: use trace.enabled instead"]
    assert list_options()["debug"] == "Inductor: deprecated, use trace.enabled instead"


# --- modes ---------------------------------------------------------------------------------------

MODES = torch._inductor.list_mode_options()


@pytest.mark.parametrize("mode", MODES)
def test_mode_as_argument_or_option(mode: str) -> None:
    argument, option = on_cpu(mode=mode), on_cpu({"qfuse.mode": mode})
    assert argument == option == on_cpu({"qfuse.mode": mode}, mode=mode)
    assert argument.inductor == whole(MODES[mode])
    assert {argument.sources[name] for name in MODES[mode]} <= {f"mode {mode}"}
    assert argument.sources["qfuse.mode"] == "user"


def test_key_beside_a_mode_wins() -> None:
    given = {"qfuse.mode": "max-autotune", "triton.cudagraphs": False}
    resolved = on_cpu(given)
    assert resolved.inductor == {**MODES["max-autotune"], "triton.cudagraphs": False}
    assert resolved.sources["triton.cudagraphs"] == "user"


def test_mode_conflict() -> None:
    with pytest.raises(ModeConflict, match=r"mode='max-autotune'\) and .* 'default'\} differ"):
        on_cpu({"qfuse.mode": "default"}, mode="max-autotune")


def test_unknown_mode() -> None:
    with pytest.raises(UnknownMode, match="'max-autotun'; did you mean 'max-autotune'"):
        on_cpu(mode="max-autotun")
    with pytest.raises(UnknownMode):
        on_cpu({"qfuse.mode": "fast"})
    with pytest.raises(InvalidOptionValue, match="3 is not the name of a mode"):
        on_cpu({"qfuse.mode": 3})
