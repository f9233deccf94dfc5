"""`qfuse doctor` as a process, and the checks of the environment it runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import config
from torch._inductor import config as inductor_config

from inductor_q.csrc import nvrtc as csrc_nvrtc
from inductor_q.diagnostics.checks import (
    ENVIRONMENT,
    Finding,
    caches,
    check_environment,
    device,
    nvrtc,
    settings,
    worst,
)
from inductor_q.diagnostics.checks.tested import PACKAGES, Package, release, table
from inductor_q.diagnostics.checks.versions import judge
from inductor_q.diagnostics.named import build
from inductor_q.exc import NotAModelFactory
from tests.support.processes import ROOT, environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def run(*args: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inductor_q", "doctor", *args],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
    )


def by_check(findings: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in findings}


# --- the command --------------------------------------------------------------------------------


def test_text_on_a_pipe_is_plain_and_fits_80_columns() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    torch_version = re.escape(metadata.version("torch"))
    assert re.search(rf"^ok +torch +{torch_version}", done.stdout, re.MULTILINE)
    assert re.fullmatch(r"\d+ ok, \d+ warn, 0 fail", lines[-1])


def test_a_broken_environment_fails_and_says_how_to_mend_it() -> None:
    done = run(
        "--json",
        CXX="/nonexistent/c++",
        TORCHINDUCTOR_CACHE_DIR="/dev/null/cache",
        TORCHDYNAMO_SUPPRESS_ERRORS="1",
        TORCH_COMPILE_DISABLE="1",
        TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
        QFUSE_PRESET="sm_91",
    )
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["status"], document["model"]) == (1, "fail", [])
    found = by_check(document["environment"])
    wrong = {name for name, finding in found.items() if finding["status"] != "ok"}
    expected = {"inductor cache", "qfuse cache", "fx graph cache", "compiler"}
    assert wrong >= expected | {"suppress_errors", "compiling", "preset"}
    assert "/dev/null/cache cannot be written" in found["inductor cache"]["found"]
    assert found["inductor cache"]["remedy"].startswith("export TORCHINDUCTOR_CACHE_DIR=")
    assert "/nonexistent/c++" in found["compiler"]["found"]
    assert "unknown preset 'sm_91'" in found["preset"]["found"]
    assert all(finding["remedy"] for finding in found.values() if finding["status"] != "ok")


FACTORIES = """
import torch, warnings
from torch import nn
from inductor_q import testing

def wrong():
    torch._dynamo.config.suppress_errors = True  # as a training script would set it
    return nn.Sequential(testing.quantized_linear(torch.randn(64, 64), compute_dtype=torch.float32))

def failing():
    raise OSError("no such checkpoint")

def not_a_model():
    return 3

def of_a_size(size):
    return nn.Linear(size, size)

number = 3
"""


def test_a_model_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "factories.py").write_text(FACTORIES)
    done = run("--json", "--model", "factories:wrong", cwd=tmp_path)
    assert done.returncode == 1, done.stderr  # suppress_errors; the dtype alone would be a warning
    document = json.loads(done.stdout)
    assert by_check(document["environment"])["suppress_errors"]["status"] == "fail"
    model = by_check(document["model"])
    assert [name for name, f in model.items() if f["status"] != "ok"] == ["compute_dtype"]


def test_a_factory_that_raises_has_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "factories.py").write_text(FACTORIES)
    done = run("--model", "factories:failing", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    first, *frames, last = done.stderr.splitlines()
    assert first.startswith("Traceback") and last == "OSError: no such checkpoint"
    assert [line for line in frames if "File " in line] == [
        f'  File "{tmp_path / "factories.py"}", line 11, in failing'
    ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("factories", "no function is named"),
        ("factories:missing", "no attribute 'missing'"),
        ("factories:number", "a int cannot be called"),
        ("factories:not_a_model", "it returned a int"),
        ("factories:of_a_size", r"it takes arguments \(missing a required argument: 'size'\)"),
        ("no_such_module_here:f", "there is no module 'no_such_module_here'"),
    ],
)
def test_a_name_that_is_no_factory(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    with pytest.raises(NotAModelFactory, match=problem):
        build(name)


def test_a_factory_whose_decorator_gives_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of hydra does."""
    (tmp_path / "decorated.py").write_text(
        "import functools\nfrom torch import nn\n"
        "def of_size_8(f):\n    return functools.wraps(f)(lambda *args: f(8))\n"
        "@of_size_8\ndef factory(size):\n    return nn.Linear(size, size)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert build("decorated:factory").in_features == 8


def test_a_module_that_lacks_another_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking.py").write_text("import no_such_module_here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        build("lacking:factory")


# --- versions -----------------------------------------------------------------------------------

TORCH, PEFT = PACKAGES[0], next(p for p in PACKAGES if p.name == "peft")


@pytest.mark.parametrize(
    ("package", "version", "status", "remedy"),
    [
        (TORCH, "2.13.0+cpu", "ok", ""),
        (TORCH, "2.13.0a0+git1234", "ok", ""),
        (TORCH, "2.14.1", "warn", "pip install 'torch==2.13.0'"),
        (TORCH, "2.10.0", "fail", "pip install 'torch>=2.11,<2.16'"),
        (TORCH, "2.16.0", "fail", "pip install 'torch>=2.11,<2.16'"),
        (TORCH, None, "fail", "pip install 'torch>=2.11,<2.16'"),
        (PEFT, None, "ok", ""),
        (PEFT, "0.18.0", "warn", "pip install 'peft==0.21.2'"),
        (PEFT, "0.17.1", "fail", "pip install 'peft>=0.18'"),
    ],
)
def test_a_version(package: Package, version: str | None, status: str, remedy: str) -> None:
    found = judge(package, version)
    assert (found.status, found.remedy) == (status, remedy)
    assert version is None or version in found.found


def test_the_matrix_is_that_of_the_project_files_and_of_the_documentation() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *chain(*project["optional-dependencies"].values())}
    pins = dict(re.findall(r"^([a-z]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for package in PACKAGES:
        assert any(package.requirement == line.partition(";")[0] for line in wanted), package.name
        assert package.name == "triton" or pins[package.name] in package.tried, package.name
        assert list(package.tried) == sorted(package.tried, key=release)
    assert table() in (ROOT / "docs/compatibility.md").read_text()


def test_every_check_is_explained() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    sections = set(re.findall(r"^### `(\w+)`", text, re.MULTILINE))
    from inductor_q.diagnostics.checks import MODEL

    names = {sys.modules[check.__module__].NAME for check in MODEL}
    assert sections == names | {"suppress_errors", "recompile_limit"}


# --- the machine --------------------------------------------------------------------------------


def test_every_environment_check_says_something_here() -> None:
    for check in ENVIRONMENT:
        found = list(check())
        assert found, check.__module__
        assert all(f.remedy for f in found if f.status != "ok")
    names = [f.check for f in check_environment()]
    assert len(names) == len(set(names)) or torch.cuda.device_count() > 1


def test_settings_of_dynamo() -> None:
    with config.patch(suppress_errors=True, recompile_limit=2):
        statuses = {f.check: f.status for f in settings.check()}
    assert statuses == {"suppress_errors": "fail", "recompile_limit": "warn"}
    assert {f.status for f in settings.check()} == {"ok"}
    with inductor_config.patch(fallback_random=True):
        [found] = [f for f in settings.check() if f.status != "ok"]
    assert (found.check, found.status) == ("fallback_random", "warn")


def test_a_folder_that_can_be_written(tmp_path: Path) -> None:
    found = caches.writable("cache", tmp_path / "new")
    assert found.status in ("ok", "warn")  # a warning where the disk is nearly full
    assert list((tmp_path / "new").iterdir()) == []


def test_the_folder_is_where_inductor_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(caches.VARIABLE, "relative")
    assert caches.folder() == Path.cwd() / "relative"
    monkeypatch.delenv(caches.VARIABLE)
    assert caches.folder() == Path(default_cache_dir())


def test_another_folder_serves_while_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(caches.VARIABLE, "/dev/null/cache")
    with caches.usable():
        assert caches.writable("", caches.folder()).status != "fail"
    assert os.environ[caches.VARIABLE] == "/dev/null/cache"


def test_nvrtc_says_its_version_or_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    [here] = nvrtc.check()
    library = csrc_nvrtc.library()
    if isinstance(library, str):
        assert library in here.found
    else:
        assert here.found.startswith(f"{library.version[0]}.{library.version[1]}, ")
        assert library.path.endswith(here.found.partition(", ")[2])
    monkeypatch.setattr(csrc_nvrtc, "_places", lambda: [os.devnull])
    csrc_nvrtc.library.cache_clear()
    found: list[Any] = []
    try:
        for is_there in (True, False):
            monkeypatch.setattr(torch.cuda, "is_available", lambda there=is_there: there)
            found += nvrtc.check()
    finally:
        csrc_nvrtc.library.cache_clear()
    assert [(f.status, f.remedy) for f in found] == [("warn", nvrtc.INSTALL), ("ok", "")]
    assert all(f"{os.devnull}: " in f.found for f in found)


def test_the_worst_counts() -> None:
    ok, warn, fail = (Finding("x", s, "") for s in ("ok", "warn", "fail"))
    assert (worst([]), worst([ok, warn]), worst([warn, fail, ok])) == ("ok", "warn", "fail")


def test_the_preset_on_a_cpu() -> None:
    found = device.preset(torch.device("cpu"))
    assert (found.status, found.found) == ("ok", "cpu: the device is a CPU, cpu")


@pytest.mark.gpu
def test_a_gpu_is_named_with_its_shared_memory_and_preset() -> None:
    from inductor_q.presets import select

    gpu, chosen = list(device.check())[:2]
    assert gpu.status == "ok"
    assert torch.cuda.get_device_name(0) in gpu.found
    preset = select(torch.device("cuda", 0))
    assert chosen.found == f"{preset.name}: {preset.reason}"
    properties: Any = torch.cuda.get_device_properties(0)
    assert f"{properties.shared_memory_per_block_optin:,} B of shared memory" in gpu.found
