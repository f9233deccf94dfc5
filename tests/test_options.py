"""Resolved options: nothing global moves, the fingerprint tells what matters, all are listed."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_q
from inductor_q import inductor_config, own_options
from inductor_q.exc import (
    ModeConflict,
    QfuseError,
    UnknownOption,
    UnknownPreset,
    UnknownProvider,
)
from inductor_q.options import list_options
from inductor_q.testing import qfuse_backend
from tests.support.processes import environment
from tests.support.resolving import WELL_KNOWN, on_cpu

pytestmark = pytest.mark.usefixtures("default_options")


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
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=environment(PYTHONHASHSEED=seed),
    ).stdout
    given = {"shape_padding": False, "qfuse.mode": "max-autotune", "rocm.arch": ["a"]}
    assert printed.strip() == on_cpu(given).fingerprint()


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


# --- checked before a compile -------------------------------------------------------------------


def test_options_are_checked_before_a_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile itself reads no option until a graph is compiled."""
    torch.compile(torch.nn.Linear(2, 2), backend=qfuse_backend(), options={"qfuse.pases": "none"})
    with pytest.raises(UnknownOption, match=r"'qfuse.pases'; did you mean 'qfuse.passes'"):
        inductor_q.check_options({"qfuse.pases": []})
    with pytest.raises(ModeConflict):
        inductor_q.check_options({"qfuse.mode": "default"}, "max-autotune")
    with pytest.raises(UnknownProvider):
        inductor_q.check_options({"qfuse.kernels": {"dequantize": "cudnn"}}, device="cpu")
    inductor_q.check_options({"qfuse.passes": {"extend_k": False}, "max_autotune": True})
    monkeypatch.setenv("QFUSE_PRESET", "sm90")
    with pytest.raises(UnknownPreset, match="environment variable QFUSE_PRESET"):
        inductor_q.check_options()
