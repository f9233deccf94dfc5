"""Layers of few rows on a CPU, by the C++ kernel, in a model with adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_q import testing
from inductor_q.kernels import linear_rows_cpp
from tests.support.compiling import Compiled, compile_step, no_codegen

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

KERNEL = linear_rows_cpp.KERNEL
pytestmark = pytest.mark.skipif(bool(KERNEL.missing()), reason=KERNEL.missing() or "it is there")


def model(dtype: torch.dtype, adapter: torch.dtype) -> Any:
    return testing.qlora_model(
        testing.tiny_qwen3_config(num_hidden_layers=1),
        compute_dtype=dtype,
        adapter_dtype=adapter,
        randomize_adapters=True,
    ).eval()


def compiled(module: Any, ids: Tensor, **options: Any) -> Compiled:
    def logits(ids: Tensor) -> Tensor:
        out: Tensor = module(input_ids=ids, use_cache=False).logits
        return out

    with torch.no_grad():
        return compile_step(logits, ids, module=module, context=no_codegen(), options=options)


@pytest.mark.parametrize("rows", [1, 6, 16])
@pytest.mark.parametrize(
    ("dtype", "adapter"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_a_decoder_layer_has_four_calls(
    dtype: torch.dtype, adapter: torch.dtype, rows: int
) -> None:
    """q, k and v; o; gate and up, multiplied; down: each with its adapter, near to float64."""
    module = model(dtype, adapter)
    ids = torch.randint(0, 256, (1, rows), generator=torch.Generator().manual_seed(1))
    result = compiled(module, ids)
    assert result.ops["qfuse.linears"] == 4 and not result.ops["qfuse.dequantize"]
    assert result.applied["fuse_rows"] == 4
    sites = [s for s in result.report.sites if s.pass_name == "fuse_rows" and not s.rejected]
    assert {s.provider for s in sites} == {KERNEL.name}
    exact = testing.reference_model(module)(input_ids=ids).logits
    with torch.no_grad():
        theirs = testing.relative_error(module(input_ids=ids).logits, exact)
    assert testing.relative_error(result.output, exact) <= 1.25 * theirs + 3e-7


def test_more_rows_than_the_threshold_are_decoded() -> None:
    module = model(torch.bfloat16, torch.bfloat16)
    ids = torch.arange(6)[None]
    result = compiled(module, ids, **{"qfuse.thresholds": {"linear_rows.max_rows": 5}})
    assert not result.ops["qfuse.linears"] and result.ops["qfuse.dequantize"] == 7
