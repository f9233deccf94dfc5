"""Options: what is accepted, what is refused and how, who wins, and that nothing global moves."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inductor_q import inductor_config, options, own_options
from inductor_q.exc import (
    InvalidOptionValue,
    ModeConflict,
    NeedsRelaxed,
    QfuseError,
    UnknownMode,
    UnknownOp,
    UnknownOption,
    UnknownPass,
    UnknownPreset,
    UnknownProvider,
)
from inductor_q.options import Resolved, list_options, resolve
from tests.processes import environment

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)

# The flags that users of training frameworks set by name: a rename in torch has to be noticed here.
WELL_KNOWN = (
    "coordinate_descent_tuning",
    "coordinate_descent_check_all_directions",
    "shape_padding",
    "epilogue_fusion",
    "max_autotune_gemm",
    "fx_graph_cache",
    "assume_aligned_inputs",
    "comprehensive_padding",
    "decompose_mem_bound_mm",
    "triton.cudagraphs",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("QFUSE_"):
            monkeypatch.delenv(name)
    options._tell.cache_clear()


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the logger "inductor_q" said."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("inductor_q").addHandler(handler)
    yield messages
    logging.getLogger("inductor_q").removeHandler(handler)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(capability: tuple[int, int], memory: float = 80e9) -> None:
        properties = SimpleNamespace(total_memory=int(memory))
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return install


def on_cpu(given: dict[str, Any] | None = None, mode: str | None = None, **more: Any) -> Resolved:
    return resolve(mode, given, device=CPU, **more)


# --- Inductor's keys -----------------------------------------------------------------------------


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
    assert resolved.inductor == {name: value}
    assert resolved.sources[name] == "user"


def test_all_flags_at_once() -> None:
    given = dict.fromkeys(WELL_KNOWN, True)
    assert on_cpu(given).inductor == given


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
    assert on_cpu({"triton": {"cudagraphs": True}}).inductor == {"triton.cudagraphs": True}
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
    assert argument.inductor == MODES[mode]
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


# --- ours ----------------------------------------------------------------------------------------

PASSES = own_options.pass_names()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"extend_k": False}, [name for name in PASSES if name != "extend_k"]),
        ({"extend_k": True}, PASSES),
        (["keep_packed", "canonicalize"], ["canonicalize", "keep_packed"]),
        ("keep_packed, canonicalize", ["canonicalize", "keep_packed"]),
        ("fold_lora,-extend_k", [name for name in PASSES if name != "extend_k"]),
        (["-extend_k", "-fold_lora"], [n for n in PASSES if n not in ("extend_k", "fold_lora")]),
        ("+extend_k", PASSES),
        ("all", PASSES),
        ("none", []),
        ([], []),
    ],
    ids=repr,
)
def test_passes(given: object, expected: list[str]) -> None:
    resolved = on_cpu({"qfuse.passes": given})
    assert resolved.passes == tuple(expected)
    assert resolved.sources["qfuse.passes"] == "user"


@pytest.mark.parametrize("given", [3, True, {"extend_k": 1}, [1], {"extend_k": None}], ids=repr)
def test_passes_of_a_wrong_type(given: object) -> None:
    with pytest.raises(InvalidOptionValue, match="is not a dict of pass names to True or False"):
        on_cpu({"qfuse.passes": given})


@pytest.mark.parametrize("given", ["fold_loras", ["fold_loras"], {"fold_loras": False}], ids=repr)
def test_unknown_pass(given: object) -> None:
    with pytest.raises(UnknownPass, match="'fold_loras'; did you mean 'fold_lora'"):
        on_cpu({"qfuse.passes": given})


@pytest.mark.parametrize("numerics", ["strict", "default", "relaxed"])
def test_numerics(numerics: str) -> None:
    assert on_cpu({"qfuse.numerics": numerics}).numerics == numerics


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("qfuse.numerics", "fast", "one of 'strict', 'default', 'relaxed'"),
        ("qfuse.preset", 90, "the name of a preset"),
        ("qfuse.report", 3, "a path"),
        ("qfuse.strict", 1, "True or False"),
        ("qfuse.strict", "1", "True or False"),
        ("qfuse.kernels", ["triton"], "a dict of ops to provider names, or 'dequantize=triton'"),
        ("qfuse.kernels", "triton", "a dict of ops to provider names, or 'dequantize=triton'"),
    ],
)
def test_wrong_value_of_ours(name: str, value: object, expected: str) -> None:
    with pytest.raises(InvalidOptionValue) as caught:
        on_cpu({name: value})
    assert str(caught.value).startswith(f"option {name!r}: {value!r} is not {expected}.")


def test_report_takes_a_path(tmp_path: Path) -> None:
    assert on_cpu({"qfuse.report": tmp_path / "r.json"}).report == str(tmp_path / "r.json")


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"dequantize": ("triton", "reference"), "linear": ("triton",)}
    monkeypatch.setattr(own_options, "providers", lambda: known)


@pytest.mark.usefixtures("providers")
@pytest.mark.parametrize("given", [{"dequantize": "triton"}, "dequantize=triton"], ids=repr)
def test_kernels(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFUSE_KERNELS", "linear=triton,dequantize=reference")
    resolved = on_cpu({"qfuse.kernels": given})
    assert resolved.kernels == {"linear": "triton", "dequantize": "triton"}
    assert resolved.sources["qfuse.kernels.linear"] == "environment"
    assert resolved.sources["qfuse.kernels.dequantize"] == "user"


@pytest.mark.usefixtures("providers")
def test_unknown_kernels() -> None:
    with pytest.raises(UnknownOp, match="'dequantise'; did you mean 'dequantize'"):
        on_cpu({"qfuse.kernels": {"dequantise": "triton"}})
    with pytest.raises(UnknownProvider, match="no provider 'tritn' of qfuse::dequantize; did you"):
        on_cpu({"qfuse.kernels": {"dequantize": "tritn"}})
    assert on_cpu({"qfuse.kernels": {"dequantize": "auto"}}).kernels == {"dequantize": "auto"}


def test_merging_an_adapter_needs_relaxed_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"scatter2scatter": "merged"}
    relaxed = on_cpu({"qfuse.kernels": asked, "qfuse.numerics": "relaxed"})
    assert relaxed.kernels == asked
    for numerics in ("default", "strict"):
        with pytest.raises(NeedsRelaxed, match=f"numerics='{numerics}' does not; set options=.*"):
            on_cpu({"qfuse.kernels": asked, "qfuse.numerics": numerics})
    monkeypatch.setenv("QFUSE_KERNELS", "scatter2scatter=merged")
    with pytest.raises(NeedsRelaxed, match="in environment variable QFUSE_KERNELS"):
        on_cpu()
    assert on_cpu({"qfuse.kernels": {"scatter2scatter": "auto"}}).numerics == "default"


def test_providers_are_those_of_the_kernels() -> None:
    assert "reference" in own_options.providers()["dequantize"]


# --- the environment -----------------------------------------------------------------------------


def test_environment_is_the_default_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFUSE_PRESET", "sm_90")
    monkeypatch.setenv("QFUSE_PASSES", "-extend_k")
    monkeypatch.setenv("QFUSE_NUMERICS", "relaxed")
    monkeypatch.setenv("QFUSE_REPORT", "report.json")
    monkeypatch.setenv("QFUSE_STRICT", "on")
    resolved = on_cpu()
    assert resolved.preset.name == "sm_90"
    assert "extend_k" not in resolved.passes
    assert (resolved.numerics, resolved.report) == ("relaxed", "report.json")
    assert resolved.strict
    assert {name for name, source in resolved.sources.items() if source == "environment"} == {
        "qfuse.preset",
        "qfuse.passes",
        "qfuse.passes.extend_k",
        "qfuse.numerics",
        "qfuse.report",
        "qfuse.strict",
    }
    user = on_cpu(
        {"qfuse.preset": "none", "qfuse.passes": {"extend_k": True}, "qfuse.strict": False}
    )
    assert user.preset.name == "none"
    assert user.passes == PASSES
    assert not user.strict
    assert user.sources["qfuse.passes.extend_k"] == "user"
    assert user.numerics == "relaxed"


@pytest.mark.parametrize(
    ("variable", "text", "error", "message"),
    [
        ("PRESET", "sm90", UnknownPreset, "unknown preset 'sm90' in {}; did you mean 'sm_90'"),
        ("PASSES", "-fold", UnknownPass, "unknown pass 'fold' in {}"),
        ("NUMERICS", "fast", InvalidOptionValue, "option 'qfuse.numerics' in {}: 'fast' is not"),
        ("KERNELS", "triton", InvalidOptionValue, "option 'qfuse.kernels' in {}: 'triton' is not"),
        ("STRICT", "maybe", InvalidOptionValue, "in {}: 'maybe' is not 1 or 0"),
    ],
)
def test_error_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    text: str,
    error: type[QfuseError],
    message: str,
) -> None:
    monkeypatch.setenv(f"QFUSE_{variable}", text)
    with pytest.raises(error) as caught:
        on_cpu()
    assert message.format(f"environment variable QFUSE_{variable}") in str(caught.value)


def test_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFUSE_NUMERICS", " ")
    assert on_cpu() == on_cpu({"qfuse.numerics": None})


def test_mistyped_variable_is_told(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setenv("QFUSE_PRESETS", "none")
    monkeypatch.setenv("QFUSE_SOMETHING_ELSE", "1")
    on_cpu()
    on_cpu()
    assert told == ["environment variable QFUSE_PRESETS is not read; did you mean QFUSE_PRESET?"]


# --- conflicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "given", "who"),
    [
        (None, {"triton.cudagraphs": True}, "user"),
        ("reduce-overhead", None, "mode reduce-overhead"),
    ],
)
def test_cudagraphs_with_dynamic_shapes(
    gpu: Callable[..., None],
    told: list[str],
    mode: str | None,
    given: dict[str, Any] | None,
    who: str,
) -> None:
    gpu((9, 0))
    for _ in range(3):
        resolve(mode, given, device=CUDA, dynamic=True)
    assert len(told) == 1
    assert told[0].startswith(f"triton.cudagraphs ({who}) with dynamic shapes records one graph")


def test_no_conflict_with_cudagraphs(gpu: Callable[..., None], told: list[str]) -> None:
    gpu((9, 0))
    graphs = {"triton.cudagraphs": True}
    resolve(None, graphs, device=CUDA, dynamic=False)
    resolve(None, graphs, device=CPU, dynamic=True)
    skipping = {**graphs, "triton.cudagraph_skip_dynamic_graphs": True}
    resolve(None, skipping, device=CUDA, dynamic=True)
    resolve("reduce-overhead", {"triton.cudagraphs": False}, device=CUDA, dynamic=True)
    assert told == []


def test_conflict_with_a_global_setting(gpu: Callable[..., None], told: list[str]) -> None:
    gpu((9, 0))
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        resolve(None, None, device=CUDA, dynamic=True)
    assert told[0].startswith("triton.cudagraphs (torch's own configuration) with dynamic shapes")


@pytest.mark.parametrize(
    ("mode", "given", "told_of"),
    [
        (None, {"max_autotune_gemm": True}, "max_autotune_gemm=True (user)"),
        ("max-autotune-no-cudagraphs", None, "max_autotune=True (mode max-autotune-no-cudagraphs)"),
        (None, dict.fromkeys(("max_autotune_gemm", "max_autotune"), True), "max_autotune_gemm"),
    ],
)
def test_autotuning_loses_on_sm_86(
    gpu: Callable[..., None],
    told: list[str],
    mode: str | None,
    given: dict[str, Any] | None,
    told_of: str,
) -> None:
    gpu((8, 6))
    for _ in range(2):
        resolved = resolve(mode, given, device=CUDA)
    assert len(told) == 1
    assert told[0].startswith(told_of)
    assert "loses on sm_86: +13 % step time" in told[0]
    assert any(resolved.inductor.get(name) for name in ("max_autotune_gemm", "max_autotune"))


def test_autotuning_wants_memory_on_sm_120(gpu: Callable[..., None], told: list[str]) -> None:
    given = {"max_autotune_gemm": True}
    gpu((12, 0), memory=33.7e9)  # what a card sold as 32 GB reports
    resolve(None, given, device=CUDA)
    assert told == []
    gpu((12, 0), memory=16.6e9)
    for _ in range(2):
        resolve(None, given, device=CUDA)
    assert len(told) == 1
    assert told[0].startswith(
        "max_autotune_gemm (user) may not fit in the 16.6 GB of this device: -2.57 % step time"
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 1)], ids=str)
def test_no_evidence_no_conflict(
    gpu: Callable[..., None], told: list[str], capability: tuple[int, int]
) -> None:
    gpu(capability, memory=8e9)
    resolve("max-autotune-no-cudagraphs", None, device=CUDA)
    assert told == []


def test_canonicalize_without_keep_packed(told: list[str]) -> None:
    for _ in range(2):
        on_cpu({"qfuse.passes": "-keep_packed"})
    on_cpu({"qfuse.passes": "-keep_packed,-canonicalize"})
    assert len(told) == 1
    assert "canonicalize without keep_packed saves every dequantized weight" in told[0]


# --- nothing global moves ------------------------------------------------------------------------


def everything_global() -> dict[str, Any]:
    import torch._dynamo.config
    import torch._functorch.config
    import torch.compiler.config

    modules: list[Any] = [
        torch._inductor.config,
        torch._functorch.config,
        torch._dynamo.config,
        torch.compiler.config,
    ]
    return {
        **{module.__name__: module.get_config_copy() for module in modules},
        "overridden": [
            name
            for name in torch._inductor.config._config  # type: ignore[attr-defined]
            if not torch._inductor.config._is_default(name)  # type: ignore[attr-defined]
        ],
        "environment": dict(os.environ),
    }


def test_configuration_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFUSE_PASSES", "-extend_k")
    before = everything_global()
    given: dict[str, Any] = dict.fromkeys(WELL_KNOWN, True)
    given |= {"rocm.arch": ["gfx90a"], "qfuse.mode": "max-autotune", "qfuse.preset": "sm_86"}
    on_cpu(given, dynamic=True)
    list_options()
    for wrong in ({"gone": 1}, {"shape_padding": 3}, {"qfuse.mode": "fast"}):
        with pytest.raises(QfuseError):
            on_cpu({**given, **wrong})
    assert everything_global() == before


def test_caller_keeps_its_values() -> None:
    given = {"rocm.arch": ["gfx90a"], "qfuse.passes": {"extend_k": False}}
    original = copy.deepcopy(given)
    resolved = on_cpu(given)
    resolved.inductor["rocm.arch"].append("gfx942")
    assert given == original


def test_import_has_no_effects() -> None:
    code = (
        "import torch, logging, sys\n"
        "before = set(sys.modules)\n"
        "import inductor_q.options\n"
        "new = set(sys.modules) - before\n"
        "assert not [n for n in new if n.startswith(('torch.', 'triton', 'bitsandbytes'))], new\n"
        "assert not logging.getLogger('inductor_q').handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


# --- the result ----------------------------------------------------------------------------------


def test_result_is_read_only_yet_travels() -> None:
    resolved = on_cpu({"shape_padding": False})
    with pytest.raises(TypeError):
        resolved.inductor["shape_padding"] = True  # type: ignore[index]
    for twin in (copy.deepcopy(resolved), pickle.loads(pickle.dumps(resolved))):
        assert twin == resolved
        assert twin.fingerprint() == resolved.fingerprint()


class Identified:
    def __init__(self, identity: object) -> None:
        self.identity = identity

    def __call__(self, graph: torch.fx.Graph) -> None: ...

    def uuid(self) -> object:
        return self.identity


def test_fingerprint_tells_what_changes_the_code() -> None:
    different: list[dict[str, Any]] = [
        {},
        {"shape_padding": False},
        {"shape_padding": True},
        {"cpp.threads": 1},
        {"qfuse.preset": "sm_90"},
        {"qfuse.preset": "none"},
        {"qfuse.mode": "max-autotune"},
        {"qfuse.passes": "-extend_k"},
        {"qfuse.numerics": "strict"},
        {"qfuse.strict": True},
        {"joint_custom_pre_pass": Identified(b"a")},
        {"joint_custom_pre_pass": Identified(b"b")},
        {"joint_custom_post_pass": Identified(b"a")},
    ]
    prints = [on_cpu(given).fingerprint() for given in different]
    assert len(set(prints)) == len(prints)
    assert prints == [on_cpu(given).fingerprint() for given in different]


def test_fingerprint_sees_thresholds() -> None:
    resolved = on_cpu()
    entry = replace(resolved.preset.thresholds["extend_k.min_rows"], value=7)
    thresholds = {**resolved.preset.thresholds, "extend_k.min_rows": entry}
    moved = replace(resolved, preset=replace(resolved.preset, thresholds=thresholds))
    assert moved.fingerprint() != resolved.fingerprint()


def test_fingerprint_ignores_what_does_not(tmp_path: Path) -> None:
    plain = on_cpu({"shape_padding": False, "debug": True}).fingerprint()
    given = {"debug": True, "shape_padding": False, "qfuse.report": tmp_path}
    assert on_cpu(given).fingerprint() == plain


@pytest.mark.parametrize("opaque", [lambda graph: None, Identified(None)])
def test_fingerprint_of_an_opaque_value_is_never_found_again(opaque: object) -> None:
    given = {"joint_custom_pre_pass": opaque}
    first = on_cpu(given)
    assert first.fingerprint() == first.fingerprint()
    assert first.fingerprint() != on_cpu(given).fingerprint()


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "import torch\n"
        "from inductor_q.options import resolve\n"
        "given = {'shape_padding': False, 'qfuse.mode': 'max-autotune', 'rocm.arch': ['a']}\n"
        "print(resolve(None, given, device=torch.device('cpu')).fingerprint())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env=environment(PYTHONHASHSEED=seed),
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


# --- listing -------------------------------------------------------------------------------------


def test_list_options() -> None:
    listing = list_options()
    assert list(listing)[: len(own_options.OPTIONS)] == list(own_options.OPTIONS)
    assert set(WELL_KNOWN) <= set(listing)
    assert listing["max_autotune_gemm"] == "Inductor: True or False; now False"
    assert "QFUSE_STRICT" in listing["qfuse.strict"]
    assert all(text and "\n" not in text for text in listing.values())
    known = {*own_options.OPTIONS, *inductor_config.schema()}
    assert set(listing) <= known
    assert not any(part.startswith("_") for name in listing for part in name.split("."))
