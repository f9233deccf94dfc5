"""NVRTC: every source compiles for every architecture, and what is compiled is kept safely."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from inductor_q.csrc import nvrtc
from inductor_q.csrc.nvrtc import Cubin
from inductor_q.kernels import scatter2scatter_cuda
from inductor_q.kernels.linear_rows_sources import TOKENS
from inductor_q.kernels.requantize_cuda import DEFAULT as TILE
from inductor_q.log import warn_once

ROOT = Path(__file__).parents[2]
#: What issue and README promise; NVRTC of CUDA 13 begins at sm_75.
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
SCALES, TYPES = ("E4M4", "Float16"), ("Float32", "BFloat16", "Float16")
BITS = (2, 3, 4, 5)


class Source(NamedTuple):
    """What a provider can ask for: the architectures, and the kernels of each."""

    archs: tuple[str, ...]
    kernels: list[str]


SOURCES = {
    "kbit.cu": Source(
        ARCHS,
        [
            f"{verb}<{k}, {scale}, {dtype}, {layout}>"
            for verb, layouts in (
                ("dequantize", ("kFlat", "kRows", "kElements")),
                ("quantize", ("true", "false")),
            )
            for k, scale, dtype, layout in itertools.product(BITS, SCALES, TYPES, layouts)
        ],
    ),
    "linear_rows.cu": Source(
        tuple(arch for arch in ARCHS if arch != "sm_75"),
        [
            f"linear<{dtype}, {scale}, {together}, {gated}, {height}>"
            for dtype in ("BFloat16", "Float16")
            for together, height in ((1, 1), (1, 2), (2, 1))
            for scale in ("Plain", "Nested")
            for gated in ("false", "true")
        ]
        + [
            f"project<{dtype}, {wide}, {rows}>"
            for dtype in ("BFloat16", "Float16")
            for wide in ("false", "true")
            for rows in (1, TOKENS)
        ],
    ),
    "linear_rows_kbit.cu": Source(
        tuple(arch for arch in ARCHS if arch != "sm_75"),
        [
            f"linear<{dtype}, {k}, {scale}, {together}, {gated}, {height}>"
            for k in BITS
            for dtype in ("BFloat16", "Float16")
            for together, height in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1))
            for scale in SCALES
            for gated in ("false", "true")
        ],
    ),
    "requantize.cu": Source(
        ARCHS,
        [
            kernel
            for types in itertools.product(("Plain", "Nested"), ("E4M3", "Int8"))
            for kernel in (
                f"requantize<{', '.join(types)}>",
                f"requantize_transposed<{', '.join(types)}, {TILE.rows}, {TILE.columns}>",
            )
        ],
    ),
    "scatter2scatter.cu": Source(
        ("sm_90a",),
        [
            scatter2scatter_cuda.kernel_name(transposed, config, scales, codes)
            for configs, forms in (
                (
                    scatter2scatter_cuda.CONFIGS,
                    (("kHighFirst", 1), ("kLowFirst", 2), ("kLowFirst", 4)),
                ),
                (scatter2scatter_cuda.BYTE_CONFIGS, (("kE4M3", 1), ("kE4M3", 2))),
            )
            for transposed in (False, True)
            for config in configs
            for codes, scales in forms
        ],
    ),
}
CASES = [(source, arch) for source, of in SOURCES.items() for arch in of.archs]

if isinstance(nvrtc.library(), str):
    pytest.skip(str(nvrtc.library()), allow_module_level=True)


def compiled(source: str, kernel: str, arch: str) -> Cubin:
    found = nvrtc.compile(source, kernel, arch)
    assert isinstance(found, Cubin), found
    assert found.image[:4] == b"\x7fELF"
    assert found.name.encode() in found.image
    return found


# --- what is shipped ----------------------------------------------------------------------------


def test_every_source_is_listed() -> None:
    assert {path.name for path in (ROOT / "csrc").glob("*.cu")} == set(SOURCES)


@pytest.mark.parametrize(("source", "arch"), CASES)
def test_compiles_for(source: str, arch: str) -> None:
    """A sixteenth of the kernels, another one for each architecture: all of K, scale and dtype."""
    archs, kernels = SOURCES[source]
    for kernel in kernels[archs.index(arch) :: 16]:
        compiled(source, kernel, arch)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "arch"), CASES)
def test_compiles_every_kernel_for(source: str, arch: str) -> None:
    for kernel in SOURCES[source].kernels:
        compiled(source, kernel, arch)


@pytest.fixture
def wgmma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source with an instruction that sm_90 lacks and sm_90a has."""
    fence = '__global__ void fence() { asm volatile("wgmma.fence.sync.aligned;"); }'
    (tmp_path / "wgmma.cu").write_text(fence)
    monkeypatch.setattr(nvrtc, "__file__", str(tmp_path / "nvrtc.py"))


@pytest.mark.usefixtures("wgmma")
def test_instructions_of_one_architecture() -> None:
    assert isinstance(nvrtc.compile("wgmma.cu", "fence", "sm_90"), str)
    compiled("wgmma.cu", "fence", "sm_90a")


def test_architectures() -> None:
    assert nvrtc.arch_of((9, 0)) == "sm_90"
    assert nvrtc.arch_of((8, 6)) == "sm_86"
    assert nvrtc.arch_of((12, 9)) == "sm_121"  # a device younger than the compiler
    assert nvrtc.arch_of((6, 0)) == "sm_60"
    kernel = SOURCES["kbit.cu"].kernels[0]
    reason = nvrtc.compile("kbit.cu", kernel, "sm_60")
    assert isinstance(reason, str)
    assert reason.startswith(f"csrc/kbit.cu was not compiled for sm_60 ({kernel}): ")
    assert "--gpu-architecture" in reason


# --- the cache ----------------------------------------------------------------------------------

ADD = '#include "one.cuh"\ntemplate <int N> __global__ void add(int* x) { *x += N * kOne; }\n'
ONE = "constexpr int kOne = 1;\n"
Compile = Callable[..., Cubin | str]


@pytest.fixture
def compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compile:
    """`nvrtc.compile` without its memory, on sources and with a cache folder of our own."""
    (tmp_path / "csrc").mkdir()
    monkeypatch.setattr(nvrtc, "__file__", str(tmp_path / "csrc" / "nvrtc.py"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    def write_and_compile(
        text: str = ADD, header: str = ONE, kernel: str = "add<3>", arch: str = "sm_90"
    ) -> Cubin | str:
        (tmp_path / "csrc" / "add.cu").write_text(text)
        (tmp_path / "csrc" / "one.cuh").write_text(header)
        return nvrtc._load_or_compile("add.cu", kernel, arch)

    return write_and_compile


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "qfuse").iterdir())


def refuse(*args: object) -> Cubin:
    raise AssertionError("compiled again")


def test_cached_by_content(
    compile: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile()
    assert isinstance(first, Cubin), first
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc.Nvrtc, "compile", refuse)
        assert compile() == first
    assert len(cached(tmp_path)) == 1
    changes: list[dict[str, str]] = [
        {"text": ADD.replace("+=", "-=")},
        {"header": ONE.replace("1", "2")},
        {"kernel": "add<4>"},
        {"arch": "sm_80"},
    ]
    for count, change in enumerate(changes, start=2):
        other = compile(**change)
        assert isinstance(other, Cubin), other
        assert other != first
        assert len(cached(tmp_path)) == count
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--maxrregcount=32"))
    assert isinstance(compile(), Cubin)
    assert len(cached(tmp_path)) == len(changes) + 2


def test_failure_says_source_architecture_and_log(compile: Compile, tmp_path: Path) -> None:
    reason = compile(ADD.replace("*x", "*y"))
    assert isinstance(reason, str)
    assert reason.startswith("csrc/add.cu was not compiled for sm_90 (add<3>): ")
    assert 'add.cu(2): error: identifier "y" is undefined' in reason
    assert not (tmp_path / "cache" / "qfuse").exists()


@pytest.mark.parametrize("kept", [0, 10, 64, 66, 1000, -1])
def test_a_partial_file_is_not_taken(compile: Compile, tmp_path: Path, kept: int) -> None:
    first = compile()
    [path] = cached(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    assert nvrtc._read(path.name) is None
    assert compile() == first
    assert path.read_bytes() == whole


_KILLED = """
import os
from inductor_q.csrc import nvrtc
nvrtc.__file__ = os.path.join(os.environ["SOURCES"], "nvrtc.py")
os.replace = lambda *paths: os.kill(os.getpid(), 9)
nvrtc.compile("add.cu", "add<3>", "sm_90")
"""


def test_a_process_killed_while_it_writes(compile: Compile, tmp_path: Path) -> None:
    compile(kernel="add<1>")
    environment = {**os.environ, "SOURCES": str(tmp_path / "csrc"), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", _KILLED], env=environment, timeout=300)
    assert run.returncode == -9
    [left] = [path for path in cached(tmp_path) if not path.name.startswith("add-")]
    assert left.stat().st_size > 0
    assert isinstance(compile(), Cubin)
    assert len(cached(tmp_path)) == 3  # what was there, what was left, what is new


_RACES = """
import os, sys, time
from pathlib import Path
from inductor_q.csrc import nvrtc
nvrtc.__file__ = os.path.join(os.environ["SOURCES"], "nvrtc.py")
nvrtc.library()
here = Path(os.environ["SOURCES"])
(here / f"ready-{sys.argv[1]}").touch()
deadline = time.monotonic() + 300
while len(list(here.glob("ready-*"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.001)
found = nvrtc.compile("add.cu", "add<3>", "sm_90")
sys.exit(0 if isinstance(found, nvrtc.Cubin) else found)
"""


def test_two_processes_at_once(compile: Compile, tmp_path: Path) -> None:
    compile(kernel="add<1>")
    environment = {**os.environ, "SOURCES": str(tmp_path / "csrc"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _RACES]
    runs = [subprocess.Popen([*command, str(n)], env=environment) for n in range(2)]
    assert [run.wait(400) for run in runs] == [0, 0]
    assert len(cached(tmp_path)) == 2
    assert isinstance(compile(), Cubin)


def test_threads_wait_for_one_compilation(
    compile: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile(kernel="add<1>")
    monkeypatch.setattr(nvrtc, "_compiled", {})
    calls: list[Any] = []
    once = nvrtc.Nvrtc.compile

    def count(*args: Any) -> Cubin:
        calls.append(args)
        return once(*args)

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", count)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: nvrtc.compile("add.cu", "add<3>", "sm_90"), range(4)))
    assert len(calls) == 1
    assert all(cubin is found[0] for cubin in found)


def test_where_the_cache_cannot_be_written(
    compile: Compile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Compiled in memory, and said once: a read-only home, a full disk."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "inductor_q"):
        assert isinstance(compile(), Cubin)
        assert isinstance(compile(kernel="add<4>"), Cubin)
    [message] = caplog.messages
    assert message == "nothing is kept for the next process: Not a directory"


# --- where NVRTC lies ---------------------------------------------------------------------------


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(nvrtc, "_places", lambda: iter([str(broken)]))
    reason = nvrtc.library.__wrapped__()
    assert isinstance(reason, str)
    assert reason.startswith(
        f"NVRTC was not found (torch for CUDA brings it, as does nvidia-cuda-nvrtc): {broken}: "
    )


def test_torchs_own_cuda_version_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    for version in (12, 13):
        (tmp_path / f"cu{version}" / "lib").mkdir(parents=True)
        (tmp_path / f"cu{version}" / "lib" / f"libnvrtc.so.{version}").touch()

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    for full in ("12.8", "13.0"):
        monkeypatch.setattr(torch.version, "cuda", full)
        assert next(nvrtc._places()).endswith(f"libnvrtc.so.{full[:2]}")
