"""qfuse.* keys, as options and as variables of the environment: what is taken, what refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from inductor_q import own_options
from inductor_q.exc import (
    InvalidOptionValue,
    QfuseError,
    UnknownOp,
    UnknownPass,
    UnknownPreset,
    UnknownProvider,
)
from tests.support.resolving import on_cpu

pytestmark = pytest.mark.usefixtures("default_options")

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
        ("qfuse.compute", "fp16", "one of 'bf16', 'fp8', 'int8'"),
        ("qfuse.compute", True, "one of 'bf16', 'fp8', 'int8'"),
        (
            "qfuse.compute.exclude",
            [3],
            "a list of patterns of module paths, or a text as '*.down_proj,layers.0.*'",
        ),
        ("qfuse.preset", 90, "the name of a preset"),
        ("qfuse.report", 3, "a path"),
        ("qfuse.strict", 1, "True or False"),
        ("qfuse.strict", "1", "True or False"),
        ("qfuse.kernels", ["triton"], "a dict of ops to provider names, or 'dequantize=triton'"),
        ("qfuse.memory", "1e400", "an amount of memory such as"),
        ("qfuse.memory", "9e999GB", "an amount of memory such as"),
        ("qfuse.passes", "", "a dict of pass names to True or False"),
        ("qfuse.thresholds", "extend_k.min_rows=\u00b2", "a dict of threshold names to integers"),
        ("qfuse.kernels", "triton", "a dict of ops to provider names, or 'dequantize=triton'"),
    ],
)
def test_wrong_value_of_ours(name: str, value: object, expected: str) -> None:
    with pytest.raises(InvalidOptionValue) as caught:
        on_cpu({name: value})
    assert str(caught.value).startswith(f"option {name!r}: {value!r} is not {expected}")


@pytest.mark.parametrize("given", ["*.up, layers.0.*,", ["*.up", "layers.0.*"]], ids=repr)
def test_exclusions(given: object) -> None:
    options = {"qfuse.compute": "fp8", "qfuse.compute.exclude": given}
    assert on_cpu(options).exclude == ("*.up", "layers.0.*")
    assert on_cpu(options).fingerprint() != on_cpu({"qfuse.compute": "fp8"}).fingerprint()


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
