"""Which kernel of scatter2scatter serves a problem on a device, and what is told of it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_q import kernels
from inductor_q.kernels import provider as providers
from inductor_q.kernels import scatter2scatter_cuda
from inductor_q.kernels.calls import DENSE
from tests.support.moe import Layer, layer
from tests.support.tile_cases import BF16, FIT, FP16, device

pytest.importorskip("triton")


def served(
    case: Layer, arch: int, monkeypatch: pytest.MonkeyPatch, provider: str = "auto"
) -> tuple[str, list[str]]:
    """Which kernel a GPU of that architecture would launch for `case`, and what is told."""
    capability = device(arch).capability
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr("inductor_q.csrc.nvrtc.library", lambda: None)  # as if it were there
    monkeypatch.setattr(scatter2scatter_cuda, "_function", lambda *_: None)
    launched: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(providers, "warn_once", lambda *args: told.append(": ".join(args[1:])))
    for kernel in kernels.PROVIDERS["scatter2scatter"]["cuda"]:
        name = kernel.name
        monkeypatch.setattr(kernel, "run", lambda _, name=name: launched.append(name))
    with FakeTensorMode():

        def fake(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="cuda"
                )
            return value

        arguments = [
            case.x,
            case.operands,
            case.format,
            case.shape,
            case.transposed,
            *case.routing,
            *(case.grouped_in, case.grouped_out, case.lora_a, case.lora_b, case.scaling),
            *(case.bias, case.gates, provider),
        ]
        importlib.import_module("inductor_q.ops.scatter2scatter")._scatter2scatter(
            *([fake(v) for v in a] if isinstance(a, list) else fake(a) for a in arguments)
        )
    return launched[0], told


@pytest.mark.parametrize("sentinel", [None, -1])
@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_without_hopper_experts_are_decoded_in_the_loop_and_it_is_told(
    arch: int, sentinel: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the sentinels of expert parallelism, which other libraries refuse there."""
    name, told = served(layer(FIT, dtype=BF16, sentinel=sentinel), arch, monkeypatch)
    assert name == "triton"
    assert told == ["cuda: csrc/scatter2scatter.cu is for compute capability 9.0 (Hopper)"]


def test_the_order_goes_by_rows_where_torch_has_a_grouped_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = replace(FIT, tokens=64), replace(FIT, experts=2, tokens=1024)
    packed: dict[str, Any] = {"dtype": BF16, "blocksize": 128}  # not what the Hopper kernel has
    for arch in (90, 100):
        assert served(layer(few, **packed), arch, monkeypatch)[0] == "triton"
        assert served(layer(many, **packed), arch, monkeypatch)[0] == "dequantize"
        assert served(layer(many, **packed), arch, monkeypatch, "triton")[0] == "triton"
        assert served(layer(few, dtype=BF16, quant=DENSE), arch, monkeypatch)[0] == "grouped_mm"
    for arch in (89, 120):  # torch's would wait for the device
        assert served(layer(many, **packed), arch, monkeypatch)[0] == "triton"
        assert served(layer(few, dtype=BF16, quant=DENSE), arch, monkeypatch)[0] == "triton"
    assert served(layer(few, dtype=BF16), 90, monkeypatch)[0] == "cuda"
    assert served(layer(few, dtype=FP16), 90, monkeypatch)[0] == "triton"


def test_what_it_refuses_is_served_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = layer(replace(FIT, rank=136), dtype=BF16)
    name, told = served(wide, 120, monkeypatch)
    assert name == "dequantize" and told[1] == "triton: rank 136 is over 128"
    name, told = served(layer(FIT, dtype=BF16), 75, monkeypatch)
    assert name == "reference" and "7.5 does not multiply torch.bfloat16" in told[1]
    assert served(layer(FIT, dtype=FP16), 75, monkeypatch)[0] == "triton"
    assert served(layer(FIT), 120, monkeypatch)[0] == "reference"


def test_a_cpu_has_no_triton_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(providers, "warn_once", lambda *args: told.append(": ".join(args[1:])))
    case = layer(replace(FIT, tokens=3))
    assert torch.equal(case(provider="triton"), case())
    assert told == ["triton: there is none of that name for cpu tensors"]
