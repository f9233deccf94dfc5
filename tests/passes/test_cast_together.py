"""cast_together: casts of adapters, and of their gradients, that share launches."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.passes.cast_together import TOGETHER, CastTogether
from inductor_q.passes.graph import tensor
from inductor_q.passes.runner import Pass, Site, listeners
from tests.support.compiling import SMALL, Compiled, compile_step, skip_unless_regions_chain, step
from tests.support.triton_code import launches, triton_code

pytest.importorskip("bitsandbytes")
pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAME, K = "cast_together", 64
OFF: Any = {"qfuse.passes": f"-{NAME}"}


class Adapted(nn.Module):
    """A quantized layer under adapters in the dtype of its parameters, as PEFT computes them."""

    def __init__(self, seed: int, dtype: torch.dtype, adapters: int, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int) -> nn.Parameter:
            drawn = torch.randn(rows, columns, generator=generator) / columns**0.5
            return nn.Parameter(drawn.to(device, dtype))

        weight = torch.randn(K, K, generator=generator) / K**0.5
        self.base = testing.quantized_linear(weight.to(device, BF16))
        self.a = nn.ParameterList(draw(8, K) for _ in range(adapters))
        self.b = nn.ParameterList(draw(K, 8) for _ in range(adapters))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        for a, b in zip(self.a, self.b, strict=True):
            # The factor is no power of two: with it a cast that is left out would show.
            y = y + (nn.functional.linear(nn.functional.linear(x, a), b) * 1.3).to(y.dtype)
        return y


class Net(nn.Module):
    """Two blocks of two layers that share an input, and one that reads both."""

    def __init__(
        self,
        dtype: torch.dtype = FP32,
        *,
        adapters: int = 1,
        checkpointed: bool = True,
        autocast: torch.dtype = BF16,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        layers = [Adapted(seed, dtype, adapters, device) for seed in range(6)]
        self.blocks = nn.ModuleList(nn.ModuleList(layers[i : i + 3]) for i in (0, 3))
        self.checkpointed, self.autocast, self.device = checkpointed, autocast, device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, self.autocast):
            for block in self.blocks:
                if self.checkpointed:
                    x = checkpoint(self._block, block, x, use_reentrant=False)
                else:
                    x = self._block(block, x)
            return x

    def _block(self, block: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return x + torch.tanh(block[2](torch.tanh(block[0](h)) * block[1](h)))


def x_MK(rows: int = 96, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, rows // 2, K, generator=generator).to(device, BF16).requires_grad_()


def counted(net: nn.Module, options: Any = None, **more: Any) -> tuple[Compiled, list[list[str]]]:
    """Compile a step to Triton; return it, and the launches of forward and of backward."""
    with triton_code() as codes:
        found = compile_step(net, x_MK(), options=options, **more)
    return found, [launches(code) for code in codes]


def equal(found: Compiled, right: Compiled) -> None:
    assert torch.equal(found.output, right.output)
    assert found.gradients.keys() == right.gradients.keys()
    for name, gradient in found.gradients.items():
        assert gradient.dtype == right.gradients[name].dtype
        assert gradient.stride() == right.gradients[name].stride()
        assert torch.equal(gradient, right.gradients[name]), name


@pytest.mark.parametrize("autocast", [BF16, FP16], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_fewer_launches(checkpointed: bool, autocast: torch.dtype) -> None:
    net = Net(checkpointed=checkpointed, autocast=autocast)
    right, before = counted(net, OFF)
    found, after = counted(net)
    equal(found, right)
    assert not right.report.applied().get(NAME) and not found.report.rejections().get(NAME)
    # Forward has one launch for parameters, backward one for gradients and, where it computes a
    # segment again, one for parameters; else it reads what forward made.
    assert [names.count("triton_for_fused") for names in after] == [1, 1 + checkpointed]
    fewer = [len(b) - len(a) for b, a in zip(before, after, strict=True)]
    assert fewer[0] >= 3 and fewer[1] >= 9


def test_several_adapters() -> None:
    net = Net(adapters=2)
    right, before = counted(net, OFF)
    found, after = counted(net)
    equal(found, right)
    assert all(len(a) < len(b) for a, b in zip(after, before, strict=True))


def test_any_length() -> None:
    net = Net()
    options = {**SMALL, **OFF}
    with triton_code() as codes, testing.CompileTrace() as trace:
        for options in (SMALL, {**SMALL, **OFF}):
            torch.compiler.reset()
            compiled = torch.compile(net, backend=qfuse, options=options, dynamic=True)
            results = [step(compiled, x_MK(rows), module=net) for rows in (64, 80, 8)]
            if options is SMALL:
                found = results
    assert trace.graphs == 2 and len(codes) == 4
    for (output, gradients), (wanted, right) in zip(found, results, strict=True):
        assert torch.equal(output, wanted)
        assert all(torch.equal(gradients[name], right[name]) for name in right)


class Regions(Net):
    @torch.compiler.nested_compile_region
    def _block(self, block: Any, x: Tensor) -> Tensor:
        return super()._block(block, x)


def test_nested_regions() -> None:
    net = Regions(checkpointed=False)
    skip_unless_regions_chain(net, x_MK())
    right, before = counted(net, OFF)
    found, after = counted(net)
    equal(found, right)
    assert found.report.applied()[NAME] and len(after[1]) < len(before[1])


def test_adapters_in_16_bits_are_left() -> None:
    found, codes = counted(Net(BF16))
    assert not found.report.applied().get(NAME) and not found.report.rejections().get(NAME)
    assert not any("triton_for_fused" in names for names in codes)


def test_a_launch_makes_so_many_bytes() -> None:
    net = Net()
    few: Any = {"qfuse.thresholds": {**SMALL["qfuse.thresholds"], f"{NAME}.bytes": 4 * 8 * K * 2}}
    right, _ = counted(net, OFF)
    found, codes = counted(net, few)
    equal(found, right)
    assert codes[1].count("triton_for_fused") > 2
    none: Any = {"qfuse.thresholds": {**SMALL["qfuse.thresholds"], f"{NAME}.bytes": 100}}
    found, codes = counted(net, none)
    assert (
        f"1024 bytes, more than {NAME}.bytes=100 of the preset" in found.report.rejections()[NAME]
    )
    assert not found.report.applied().get(NAME) and not any(
        "triton_for_fused" in names for names in codes
    )


def test_code_without_such_kernels() -> None:
    found = compile_step(Net(), x_MK())
    assert {*found.report.rejections()[NAME]} == {
        "this device's code has no kernels of several tensors"
    }
    equal(found, compile_step(Net(), x_MK(), options=OFF))


def sites(run: Any, *args: Tensor) -> tuple[fx.GraphModule, list[Site]]:
    traced = make_fx(run, tracing_mode="fake")(*args)
    context: Any = type("Context", (), {"threshold": lambda self, name: 1 << 20})()
    with inductor_config.patch(cpu_backend="triton"):
        return traced, list(CastTogether().match(traced.graph, context))


def cast(x: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    result: Tensor = torch.ops.prims.convert_element_type(x, dtype)
    return result


def test_what_a_wide_weight_reads_is_left() -> None:
    """It rounds once where the product's operand is rounded twice, as before."""

    def run(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        one, two = cast(a), cast(b)
        return x @ one, x @ two, torch.cat([one * 1.3, two])

    x, a, b = torch.randn(4, 6).to(BF16), torch.randn(6, 3), torch.randn(6, 3)
    traced, found = sites(run, x, a, b)
    assert [(s.node.target, s.rejected) for s in found] == [(s.node.target, "") for s in found[:2]]
    with V.set_fake_mode(tensor(found[0].node).fake_mode):  # type: ignore[attr-defined]
        for site in found:
            CastTogether().apply(traced.graph, site, None)  # type: ignore[arg-type]
    traced.graph.lint()
    traced.recompile()
    (made,) = traced.graph.find_nodes(op="call_function", target=TOGETHER)
    (scaled,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert scaled.args[0].op == "call_function" and made not in scaled.args[0].all_input_nodes
    for got, right in zip(traced(x, a, b), run(x, a, b), strict=True):
        assert torch.equal(got, right)


def test_what_the_graph_writes_to_is_left() -> None:
    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        one = x @ cast(a)
        a.copy_(a * 2)
        return one + x @ cast(a) + x @ cast(b)

    x, a, b = torch.randn(4, 6).to(BF16), torch.randn(6, 3), torch.randn(6, 3)
    _, found = sites(run, x, a, b)
    assert [site.rejected for site in found] == ["no other cast is near"]


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_on_a_gpu(checkpointed: bool) -> None:
    """The values are what they were, bit for bit, also where a factor is no power of two."""
    net, x = Net(device="cuda", checkpointed=checkpointed), x_MK(device="cuda")
    made: list[int] = []

    def look(step: Pass, graph: fx.Graph, when: str) -> None:
        if step.name == NAME and when == "after":
            made.append(len(graph.find_nodes(op="call_function", target=TOGETHER)))

    right = compile_step(net, x, options=OFF)
    with contextlib.ExitStack() as stack:
        listeners.append(look)
        stack.callback(listeners.remove, look)
        found = compile_step(net, x)
    assert made == [1, 2 if checkpointed else 1]
    equal(found, right)
