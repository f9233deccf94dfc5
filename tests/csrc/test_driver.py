"""The CUDA driver: devices, grids of three dimensions, shared memory that is asked for."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from inductor_q.csrc import driver
from tests.support.fake_driver import FakeDriver

KIB = 1024
SOURCE = """
__global__ void where(int* out, long long last) {
  extern __shared__ int shared[];
  const int i = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  shared[last] = i;
  out[i] = shared[last] + 1;
}
"""


def test_a_launch_on_its_device_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeDriver(monkeypatch, device=0)
    launch = driver.Launch(ctypes.c_void_p(1), 1, grid=1, threads=32, pointers=2, numbers=(7, -1))
    launch(2**63 + 5, 6)
    assert cuda.launched == [(5 - 2**63, 6, 7, -1)]
    assert cuda.current == [1] and cuda.device == 0
    cuda.stream = 2**40
    cuda.codes = [201, 0]  # a thread without a context gets one, and launches then
    launch(8, 9)
    assert cuda.launched[1:] == [(8, 9, 7, -1)] * 2
    assert cuda.streams == [None, 2**40, 2**40]
    cuda.codes = [700]
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx: CUDA error 700"):
        launch(8, 9)


def test_a_launch_that_may_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and the attribute lie where the driver looks for them; older devices have neither."""
    for major, words in ((8, 0), (9, 1)):
        cuda = FakeDriver(monkeypatch, device=0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        launch = driver.Launch(
            ctypes.c_void_p(1),
            0,
            grid=(5, 6, 7),
            threads=32,
            pointers=1,
            numbers=(9,),
            shared=64,
            early=True,
        )
        launch(8)
        assert cuda.launched == [(8, 9)]
        assert len(cuda.configured) == words
        for config in cuda.configured:
            assert config[:7] == (5, 6, 7, 32, 1, 1, 64)
            assert config[7:] == (6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def test_threads_share_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launches what it was given, on its stream: backward runs in a thread of its own."""
    cuda = FakeDriver(monkeypatch, device=0)
    launch = driver.Launch(ctypes.c_void_p(1), 0, grid=1, threads=32, pointers=1, numbers=())
    inside, record = threading.Event(), cuda.cuLaunchKernelEx

    def slow(*given: Any) -> int:
        inside.set()
        time.sleep(0.1)  # in which the other thread would overwrite what is not launched yet
        return record(*given)

    launch._call = slow
    other = threading.Thread(target=launch, args=(1,))
    other.start()
    assert inside.wait(timeout=60)
    cuda.stream = 7
    launch(2)
    other.join()
    assert cuda.launched == [(1,), (2,)]
    assert cuda.streams == [None, 7]


@pytest.mark.gpu
def test_gpu_grid_and_shared_memory(tmp_path: Path) -> None:
    source = tmp_path / "where.cu"
    source.write_text(SOURCE)
    index = torch.cuda.current_device()
    handle = driver.function(str(source), "where", index)
    assert not isinstance(handle, str), handle
    properties: Any = torch.cuda.get_device_properties(index)  # its annotations are partial
    most = properties.shared_memory_per_block_optin

    def launch(shared: int) -> driver.Launch:
        last = shared // 4 - 1
        return driver.Launch(
            handle, index, grid=(2, 3, 4), threads=1, pointers=1, numbers=(last,), shared=shared
        )

    first, second = launch(most), launch(4 * KIB)  # the second leaves the first its memory
    for each in (first, second):
        out = torch.zeros(24, dtype=torch.int32, device="cuda")
        each(out.data_ptr())
        assert out.tolist() == list(range(1, 25))
    with pytest.raises(RuntimeError, match="cuFuncSetAttribute: CUDA_ERROR"):
        launch(most + KIB)


@pytest.mark.gpu
def test_gpu_code_for_an_architecture(tmp_path: Path) -> None:
    """Code for another architecture is refused with a reason, not run."""
    source = tmp_path / "where.cu"
    source.write_text(SOURCE)
    major, minor = torch.cuda.get_device_capability()
    index = torch.cuda.current_device()
    assert not isinstance(driver.function(str(source), "where", index, f"sm_{major}{minor}"), str)
    other = "sm_75" if (major, minor) != (7, 5) else "sm_90"
    reason = driver.function(str(source), "where", index, other)
    assert isinstance(reason, str)
    assert f"for {other} was not loaded into device {index}: cuModuleLoadData" in reason
