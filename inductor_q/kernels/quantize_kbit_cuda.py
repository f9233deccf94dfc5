"""Quantize to bit planes on a GPU with the CUDA kernel of csrc/kbit.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inductor_q.csrc import driver, nvrtc
from inductor_q.formats.kbit import BLOCK, KBIT_SCALES
from inductor_q.kernels.calls import QuantizeKbit
from inductor_q.kernels.dequantize_cuda import RUN, SOURCE, TYPES, VECTOR_BYTES, scale_type
from inductor_q.kernels.provider import Provider
from inductor_q.kernels.quantize_kbit_reference import allocate


@dataclass(frozen=True)
class Config:
    """How many threads a program has; each encodes one block's worth of elements."""

    threads: int = 256


DEFAULT = Config()


class Cuda(Provider[QuantizeKbit]):
    name = "cuda"

    def missing(self) -> str:
        return nvrtc.missing()

    def refuses(self, call: QuantizeKbit) -> str:
        x, codebook = call.x, call.codebook
        if x.device.type != "cuda":
            return f"the CUDA kernel runs on a GPU, not on {x.device}"
        if codebook.device != x.device:
            return f"the codebook lies on {codebook.device}, not on {x.device}"
        launch = _launch(x, call.k, call.absmax, DEFAULT)
        return launch if isinstance(launch, str) else ""

    def run(self, call: QuantizeKbit, config: Config = DEFAULT) -> tuple[Tensor, Tensor]:
        x, codebook = call.x.contiguous(), call.codebook.contiguous()
        qweight, scales = allocate(x, call.k, call.absmax)
        if x.numel():
            launch = _launch(x, call.k, call.absmax, config)
            assert not isinstance(launch, str), launch
            launch(x.data_ptr(), codebook.data_ptr(), qweight.data_ptr(), scales.data_ptr())
        return qweight, scales


_LAUNCHES: dict[tuple[Any, ...], driver.Launch | str] = {}


def _launch(x: Tensor, k: int, absmax: str, config: Config) -> driver.Launch | str:
    """Return a launch for tensors like `x`, prepared once, or why there is none."""
    aligned = x.data_ptr() % VECTOR_BYTES == 0 or not x.is_contiguous()  # a copy is
    key = (k, absmax, x.dtype, x.numel(), x.device.index, aligned, config)
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _LAUNCHES[key] = _prepare(x, k, absmax, aligned, config)
    return launch


def _prepare(x: Tensor, k: int, absmax: str, aligned: bool, config: Config) -> driver.Launch | str:
    assert x.device.index is not None, f"{x.device=}"
    vector = "true" if aligned and x.numel() % RUN == 0 else "false"
    kernel = f"quantize<{k}, {scale_type(KBIT_SCALES[absmax])}, {TYPES[x.dtype]}, {vector}>"
    handle = driver.function(SOURCE, kernel, x.device.index)
    if isinstance(handle, str):
        return handle
    blocks = -(-x.numel() // BLOCK)
    return driver.Launch(
        handle,
        x.device.index,
        grid=max(1, -(-blocks // config.threads)),
        threads=config.threads,
        pointers=4,
        numbers=(x.numel(),),
    )


KERNEL = Cuda()
