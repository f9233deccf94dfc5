"""Products of few rows with a weight that the graph decodes become layers that read it packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inductor_q import ops
from tests.support.compiling import Compiled, compile_step, no_codegen
from tests.support.few_rows import serve_rows
from tests.support.quantized import random_weight


@pytest.fixture(autouse=True)
def a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_rows(monkeypatch)


class Decoding(nn.Module):
    """Two layers of one input, whose weights are decoded in the graph, as those of torchao are."""

    def __init__(self, name: str, *, bias: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.format, self.reads = name, reads
        for i in range(2):
            for j, operand in enumerate(random_weight(name, (48, 64), seed=i)):
                self.register_buffer(f"operand{i}_{j}", operand)
        self.bias = nn.Parameter(torch.ones(48).bfloat16()) if bias else None

    def weight(self, i: int) -> Tensor:
        found = [buffer for name, buffer in self.named_buffers() if name.startswith(f"operand{i}")]
        return ops.dequantize(found, self.format, (48, 64), torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight(0), self.weight(1)
        y: Tensor = F.linear(x, first, self.bias) * F.linear(x, second).tanh()
        return y + first.sum() if self.reads else y


def compiled(module: nn.Module, x: Tensor, numerics: str = "default") -> Compiled:
    module.requires_grad_(False)
    with torch.no_grad():
        result = compile_step(module, x, options={"qfuse.numerics": numerics}, context=no_codegen())
        torch.testing.assert_close(result.output, module(x), rtol=3e-2, atol=3e-2)
    return result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("int4_g32", "kbit3_e4m4", "mxfp4", "fp8_e4m3_row", "nf4_b64", "nvfp4_rows"),
        *("nvfp4_tiles", "int4_tiles_g32", "fp8_e4m3_128x128", "hqq4_g64_bf16"),
    ],
)
def test_layers_of_any_format_share_a_launch(name: str, bias: bool) -> None:
    result = compiled(Decoding(name, bias=bias), torch.randn(2, 3, 64).bfloat16())
    assert result.applied["read_packed"] == 2 and result.applied["fuse_rows"] == 1
    assert result.ops["qfuse.linears"] == 1
    assert not result.ops["qfuse.dequantize"] and not result.ops["mm"]


def test_a_weight_that_anything_else_reads_is_decoded() -> None:
    result = compiled(Decoding("int4_g32", reads=True), torch.randn(3, 64).bfloat16())
    assert result.applied["read_packed"] == 1
    assert result.ops["qfuse.dequantize"] == result.ops["mm"] == result.ops["qfuse.linear"] == 1


def test_many_rows_and_strict_numerics_decode() -> None:
    module = Decoding("int4_g32")
    for x, numerics in (
        (torch.randn(40, 64).bfloat16(), "default"),
        (torch.randn(3, 64).bfloat16(), "strict"),
    ):
        result = compiled(module, x, numerics)
        assert "read_packed" not in result.applied and result.ops["qfuse.dequantize"] == 2


def test_training_decodes() -> None:
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    result = compile_step(Decoding("int4_g32").requires_grad_(False), x, context=no_codegen())
    assert "read_packed" not in result.applied and result.gradients["x0"] is not None
