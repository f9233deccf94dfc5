"""What every test shares: `gpu` says why it did not run, hypothesis allows for compile times, and
`device` is where a test of both groups runs, `graph_or_code` what it runs there, `told` what the
library said to its log."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# An example may compile; the same examples every time, so that a red run can be repeated.
settings.register_profile("inductor_q", deadline=None, derandomize=True)
settings.load_profile("inductor_q")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """For a test that holds on any device: a CPU in the default group, a GPU with `-m gpu`."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def choose_again() -> None:
    """No provider is remembered from a test that changed what providers answer."""
    from inductor_q.kernels.dispatch import forget

    forget()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that another test compiled is there, and nothing of this one stays."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def count_again() -> None:
    """A break of an earlier test is not counted, whichever backend compiled around it."""
    from inductor_q.backend import count_anew

    count_anew()


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["graph", "code"])
def graph_or_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a test of what passes make of a graph: the default group runs that graph op by op, the
    slow group Inductor's code for it."""
    from tests.support.compiling import no_codegen

    with contextlib.nullcontext() if request.param else no_codegen():
        yield


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts one of its own there
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def default_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option of ours in the environment, and nothing told yet."""
    from inductor_q.log import warn_once

    for name in list(os.environ):
        if name.startswith("QFUSE_"):
            monkeypatch.delenv(name)
    warn_once.cache_clear()


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the logger "inductor_q" said."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("inductor_q").addHandler(handler)
    yield messages
    logging.getLogger("inductor_q").removeHandler(handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    explained = "skip tests that would start after this time, in seconds since the epoch"
    parser.addoption("--until", type=float, default=float("inf"), metavar="TIME", help=explained)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("--until"):
        pytest.skip("no time is left (--until)")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the workers of `pytest -n` out of each other's way.

    Two threads, so that Inductor writes parallel kernels on a machine of any size, and a thread
    that waits leaves its core to the other workers. Each worker compiles its C++ itself: a pool of
    processes per worker, and per process that a test starts, would only compete with the workers.
    A preset that `qfuse tune` wrote for whoever runs the tests is not in force.
    """
    os.environ["XDG_CONFIG_HOME"] = str(config.rootpath / ".pytest_cache" / "config")
    if not getattr(config.option, "numprocesses", None):
        return
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if gold := shutil.which("ld.gold"):
        _link_with(gold, config)


def _link_with(linker: str, config: pytest.Config) -> None:
    """Have g++ call this linker, if the two fit: GNU ld takes a third of a small kernel's time."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))  # Inductor's choice
    cache = getattr(config, "cache", None)  # there is none under -p no:cacheprovider
    if not cache or not compiler or "COMPILER_PATH" in os.environ:
        return
    link = cache.mkdir("linker") / "ld"
    link.unlink(missing_ok=True)
    link.symlink_to(linker)
    trial = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(link.parent / "trial.so")]
    environment = {**os.environ, "COMPILER_PATH": str(link.parent)}
    if subprocess.run(trial, input=b"", env=environment, capture_output=True).returncode == 0:
        os.environ["COMPILER_PATH"] = str(link.parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, asked for with `-m gpu`, where there is no device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
