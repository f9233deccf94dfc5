"""The CUDA driver: grids of three dimensions, shared memory that a kernel has to ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inductor_q.csrc import driver

KIB = 1024
SOURCE = """
__global__ void where(int* out, long long last) {
  extern __shared__ int shared[];
  const int i = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  shared[last] = i;
  out[i] = shared[last] + 1;
}
"""


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
