"""What providers of scatter2scatter say that they take beside results, against what they do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_q.kernels import PROVIDERS
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_calls import IN_FP8, Scatter2Scatter
from tests.kernels.test_scatter2scatter_fp8 import scales
from tests.support.allocated import most_beside
from tests.support.moe import GROUPED, Sizes, layer

pytest.importorskip("bitsandbytes")

BF16 = torch.bfloat16
SIZES = Sizes(experts=8, in_features=512, out_features=256, tokens=512, top_k=2, rank=16)
OP = "scatter2scatter"
FP8, *_ = PROVIDERS[IN_FP8]["cuda"]
#: Of the others on a GPU, one is for experts that are not quantized, and one is plain torch.
ON_GPU = (FP8, *PROVIDERS[OP]["cuda"])
GPU = {each.name: each for each in ON_GPU if each.name not in ("grouped_mm", "reference")}
CPU = {each.name: each for each in PROVIDERS[OP]["cpu"]}


@pytest.mark.parametrize("grouped", GROUPED, ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["", "adapter"])
@pytest.mark.parametrize("name", CPU)
def test_a_cpu_takes_what_is_said(name: str, lora: bool, grouped: tuple[bool, bool]) -> None:
    """Providers other than that of decoded experts take some more there: plain torch gathers rows,
    and sums them up by token."""
    quant = DENSE if name == "grouped_mm" else "nf4"
    with torch.no_grad():
        call = layer(SIZES, dtype=BF16, quant=quant, lora=lora, grouped=grouped).call()
        taken, said = most_beside(lambda: CPU[name].run(call)), CPU[name].workspace(call)
    if name == "dequantize":
        packed = (
            2 * call.in_features * call.out_features
        )  # by oneDNN on processors with AVX512-BF16
        assert 0.98 * taken - packed < said <= taken
    else:
        assert said <= taken < said + 5 * call.rows * call.out_features * 2


@pytest.mark.parametrize("grouped", GROUPED, ids=str)
def test_what_is_decoded_by_rows_is_in_memory_once(grouped: tuple[bool, bool]) -> None:
    """Also where it is read transposed, and has no place for the adapter."""
    with torch.no_grad():
        case = layer(SIZES, dtype=BF16, quant="mxfp4", transposed=True, grouped=grouped)
        call, kernel = case.call(), CPU["dequantize"]
        taken, said = most_beside(lambda: kernel.run(call)), kernel.workspace(call)
    packed = 2 * call.in_features * call.out_features  # as above
    assert 0.98 * taken - packed < said <= taken
    assert taken < 2 * 2 * 8 * call.in_features * call.out_features + call.gathered_bytes


def test_experts_in_fp8_take_a_byte_for_each_weight() -> None:
    """And their rows as much for each feature, and four for a scale."""
    case = layer(SIZES, dtype=BF16, lora=False, grouped=(True, True))
    small, call = case.call(row_scale=scales(case)), case.call(row_scale=scales(case))
    assert FP8.workspace(call) == 8 * 512 * 256 + call.rows * (512 + 4)
    by_token = replace(small, grouped_out=False)
    summed = call.rows * 256 * 2  # before the result, half as large, is there
    assert FP8.workspace(by_token) == FP8.workspace(call) + summed // 2


def test_a_gpu_took_what_is_said() -> None:
    """In the measurements of forward by benchmarks.bench_moe, of a first projection."""
    bench_moe = pytest.importorskip("benchmarks.bench_moe", exc_type=ImportError)
    file = Path(bench_moe.__file__).with_name("results") / "moe_fp8-h100.json"
    found = json.loads(file.read_text())
    rows = [row for row in found["rows"] if row["case"]["pass"] == "fwd" and not row["case"]["r"]]
    rows = [row for row in rows if row["peer"] == "fp8"]
    assert len(rows) == 8
    for row in rows:
        experts, n, k, top_k = bench_moe.MODELS[row["case"]["model"]]
        slots, tokens = row["case"]["T"] * top_k, row["case"]["T"]
        with FakeTensorMode():
            call = Scatter2Scatter(
                x=torch.empty(tokens, k, dtype=BF16),
                operands=[],
                format="nf4_b64_nested",
                shape=(experts, n, k),
                order=torch.empty(slots, dtype=torch.int64),
                inverse=torch.empty(slots, dtype=torch.int64),
                offsets=torch.empty(experts + 1, dtype=torch.int32),
                tiles=torch.empty(1, 4, dtype=torch.int32),
                top_k=top_k,
                grouped_out=True,
                row_scale=torch.empty(experts * n),
            )
        assert FP8.workspace(call) == pytest.approx(row["extra"]["peak_bytes"], rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("grouped", GROUPED, ids=str)
@pytest.mark.parametrize("name", GPU)
def test_a_gpu_takes_what_is_said(name: str, grouped: tuple[bool, bool], transposed: bool) -> None:
    sizes = Sizes(experts=32, in_features=2048, out_features=1024, tokens=2048, top_k=4, rank=16)
    with torch.no_grad():
        case = layer(sizes, dtype=BF16, grouped=grouped, transposed=transposed, device="cuda")
        call = case.call(**({"row_scale": scales(case)} if name == FP8.name else {}))
        kernel = GPU[name]
        if reason := kernel.missing() or kernel.refuses(call):
            pytest.skip(reason)
        kernel.run(call)  # what is made once is made
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = kernel.run(call)
        taken = torch.cuda.max_memory_allocated() - before - sum(r.nbytes for r in results)
    # The adapter's B, transposed, and its projections, are small and not counted everywhere.
    assert kernel.workspace(call) == pytest.approx(taken, rel=0.1, abs=4 << 20)
