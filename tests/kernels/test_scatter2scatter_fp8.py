"""scatter2scatter in FP8: emulated and interpreted here, compiled for a GPU, and run on one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q import exc, ops
from inductor_q.kernels import scatter2scatter_fp8, scatter2scatter_reference
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.dispatch import served_by
from inductor_q.kernels.expert_calls import IN_FP8
from inductor_q.kernels.rounding import to_scale
from tests.support.compile_triton import compiled
from tests.support.moe import GROUPED, Layer, Sizes, layer, results
from tests.support.processes import interpreted

pytest.importorskip("bitsandbytes")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KERNEL = scatter2scatter_fp8.KERNEL
FIT = Sizes(experts=4, in_features=128, out_features=64, tokens=40, top_k=2, rank=4)
FULL: dict[str, Any] = {"dtype": BF16, "bias": True, "gates": True, "sentinel": -1}


def scales(case: Layer) -> Tensor:
    experts, rows, columns = case.shape
    amax = torch.ops.qfuse.row_amax(case.operands, case.format, [experts * rows, columns])
    return to_scale(amax, E4M3)


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# --- without a GPU --------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("grouped", GROUPED, ids=str)
def test_products_are_in_fp8_and_gradients_of_adapters_are_not(
    grouped: tuple[bool, bool], transposed: bool
) -> None:
    form = {**FULL, "bias": False}
    case = layer(replace(FIT, rank=1), grouped=grouped, transposed=transposed, **form)
    assert case.lora_b is not None
    with torch.no_grad():
        case.lora_b.mul_(0.01)  # so that what is in FP8 is nearly all of the result
    exact = results(case, case())
    found = results(case, case(row_scale=scales(case)))
    assert 1e-2 < off(found["y"], exact["y"]) < 0.04
    assert 1e-2 < off(found["x"], exact["x"]) < 0.04
    assert torch.equal(found["lora_b"], exact["lora_b"])


def test_the_emulation_is_the_formula() -> None:
    """One expert, one row of each scale: the sum of rounded numbers, times both scales."""
    case = layer(Sizes(1, 64, 32, 6, 1, 2), dtype=BF16, lora=False)
    scale = scales(case)
    weight = ops.dequantize(case.operands, case.format, case.shape, torch.float32)[0]
    codes = (weight / scale[:, None]).to(E4M3).double()
    of_rows = case.x.detach().float().abs().amax(1, keepdim=True) / 448
    rows = (case.x.detach().float() / of_rows).to(E4M3).double()
    expected = rows @ codes.t() * of_rows.double() * scale.double()
    assert off(case(row_scale=scale), expected) < 4e-3  # bfloat16's rounding


def test_in_the_interpreter() -> None:
    """Real kernels, on CPU tensors."""
    assert interpreted("interpret_expert_fp8")[0] == 8


@pytest.mark.parametrize("top_k", [0, 8])
@pytest.mark.parametrize("factor", [False, True])
def test_compiles(factor: bool, top_k: int) -> None:
    pytest.importorskip("triton")
    from inductor_q.kernels import expert_fp8_triton

    pointers = {"x": "*bf16", "order": "*i64", "tiles": "*i32", "codes": "*fp8e4nv"}
    pointers |= {"factor": "*fp32", "scales": "*fp32"}
    sizes = {"PARTS": 64, "ROWS": 4, "WIDTH": 2048, "TOP_K": top_k, "FACTOR": factor}
    numbers = {"LEAST": 2.0**-100, "LARGEST": 448.0}
    compiled(expert_fp8_triton.cast, {**sizes, **numbers}, pointers, arch=90, num_warps=8)
    pointers = {"y": "*bf16", "scaled": "*bf16", "b": "*fp32", "tiles": "*i32"}
    sizes = {"PARTS": 4, "ROWS": 64, "RANK": 16, "WIDTH": 128}
    compiled(expert_fp8_triton.add_product, sizes, pointers, arch=90)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("no multiples of 16", {"sizes": replace(FIT, out_features=72)}),
        ("rank 80 is over 64", {"sizes": replace(FIT, rank=80)}),
        ("float16, not bfloat16", {"dtype": torch.float16}),
        ("dense", {"quant": DENSE}),
        ("capability 9.0", {}),
    ],
)
def test_it_says_what_it_does_not_take(reason: str, changes: dict[str, Any]) -> None:
    case = layer(**{"sizes": FIT, "dtype": BF16, **changes})
    rows = case.shape[0] * case.shape[1]
    assert reason in KERNEL.refuses(case.call(row_scale=torch.ones(rows)))


def test_the_op_has_other_providers_in_fp8() -> None:
    case = layer(FIT, dtype=BF16)
    assert case.call().op == "scatter2scatter"
    call = case.call(row_scale=scales(case))
    assert call.op == IN_FP8
    assert served_by(call.op, call) == "reference"
    assert call.kind() != case.call().kind()


@pytest.mark.parametrize(
    ("error", "scale"),
    [
        (exc.WrongShape, torch.ones(7)),
        (exc.WrongDtype, torch.ones(256, dtype=BF16)),
        (exc.WrongDevice, torch.ones(256, device="meta")),
    ],
)
def test_scales_that_do_not_fit(error: type[Exception], scale: Tensor) -> None:
    case = layer(FIT, dtype=BF16)
    with pytest.raises(error):
        case(row_scale=scale)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["nf4", "mxfp4", "nvfp4_rows"])
@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("grouped", GROUPED, ids=str)
def test_gpu_is_the_emulation(grouped: tuple[bool, bool], transposed: bool, quant: str) -> None:
    sizes = replace(FIT, in_features=320, tokens=300, rank=16)
    form: dict[str, Any] = {"grouped": grouped, "transposed": transposed, "quant": quant}
    case = layer(sizes, device="cuda", **form, **FULL)
    call = case.call(row_scale=scales(case))
    assert not KERNEL.refuses(call)
    found, expected = KERNEL.run(call), scatter2scatter_reference.KERNEL.run(call)
    assert off(found[0], expected[0]) < 0.01
    assert off(found[1], expected[1]) < 0.01
    again = KERNEL.run(call)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.gpu
def test_gpu_gradients() -> None:
    case = layer(replace(FIT, tokens=300), grouped=(False, True), device="cuda", **FULL)
    exact, found = results(case, case()), results(case, case(row_scale=scales(case)))
    for name, value in exact.items():
        assert off(found[name], value) < 0.05, name
