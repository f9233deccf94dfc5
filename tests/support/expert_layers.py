"""Expert layers of transformers' as a graph has them, a step of one, and what became of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from inductor_q.experts.modules import expert_layers
from inductor_q.kernels.expert_calls import unchecked
from tests.support.compiling import Compiled, compile_step, step
from tests.support.moe_models import EXPERTS, HIDDEN, model

PASS = "fuse_scatter2scatter"
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}


class Experts(nn.Module):
    """The expert layer of a tiny model, with its choices, and an input that wants a gradient."""

    def __init__(
        self,
        family: str,
        implementation: str,
        dtype: torch.dtype,
        packed: bool = True,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        net = model(family).to(device, dtype)
        self.experts: Any = expert_layers(net)["model.layers.0.mlp.experts"]
        self.experts.requires_grad_(False)
        if packed:
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(self.experts, name)
            # What the hooks cache of a layer alone would leave the graph as outputs.
            self.experts._forward_hooks.clear()
            self.experts._forward_pre_hooks.clear()
        self.experts.config._experts_implementation = implementation

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        result: Tensor = self.experts(x, ids, gates)
        return result


def inputs(dtype: torch.dtype, n: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, HIDDEN, generator=generator).to(dtype).requires_grad_()
    gates = torch.rand(n, 2, generator=generator).to(dtype).requires_grad_()
    return x, torch.rand(n, EXPERTS, generator=generator).argsort(-1)[:, :2], gates


def skip_unless_torch_compiles(layer: Experts, args: tuple[Tensor, ...]) -> None:
    """transformers 5.17 multiplies groups in float32 on a CPU in a loop over their sizes."""
    try:
        torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)(*args)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, GuardOnDataDependentSymNode):
            pytest.skip("no backend compiles this transformers' grouped_mm here: it reads sizes")
        raise
    finally:
        torch.compiler.reset()


def compiled(
    layer: Experts, dtype: torch.dtype, args: tuple[Tensor, ...] = (), **kwargs: Any
) -> Compiled:
    """One step, held to the layer in eager mode: in float32, or in 16 bits and in float64."""
    args = args or inputs(dtype)
    skip_unless_torch_compiles(layer, args)
    expected = step(layer, *args)
    result = compile_step(layer, *args, fullgraph=True, **kwargs)
    if dtype is torch.float32:
        torch.testing.assert_close(result.output, expected[0], **CLOSE)
        assert_all_close(result.gradients, expected[1])
    else:
        check_errors(result, expected, in_float64(layer, args))
    return result


def assert_all_close(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], **CLOSE)


Step = tuple[Tensor, dict[str, Tensor]]  # an output, and gradients by name


def in_float64(layer: nn.Module, args: tuple[Tensor, ...]) -> Step:
    """A step of the layer in eager mode in float64."""
    exact: Any = copy.deepcopy(layer)
    for name in list(exact.experts._modules.get("parametrizations") or ()):
        unpack(exact.experts, name)
    exact.experts.config._experts_implementation = "eager"
    doubles = [a.detach().double().requires_grad_() if a.requires_grad else a for a in args]
    return step(exact.double(), *doubles)


def unpack(module: Any, name: str) -> None:
    """Replace a parameter that bitsandbytes has packed by its values, decoded in float32."""
    module.parametrizations[name][0].quant_state.dtype = torch.float32
    weight = getattr(module, name).detach()
    torch.nn.utils.parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    setattr(module, name, nn.Parameter(weight, requires_grad=False))


def check_errors(result: Compiled, eager: Step, exact: Step) -> None:
    """Both round to 16 bits, in other places: no further from float64 than eager, and a quarter."""
    names = ["output", *eager[1]]
    ours, theirs, true = (
        [output, *gradients.values()]
        for output, gradients in ((result.output, result.gradients), eager, exact)
    )
    assert result.gradients.keys() == eager[1].keys() == exact[1].keys()
    for name, mine, other, value in zip(names, ours, theirs, true, strict=True):
        assert (mine - value).norm() <= 1.25 * (other - value).norm(), name


def products(result: Compiled) -> list[tuple[Any, ...]]:
    """(top_k, grouped_in, grouped_out) of each scatter2scatter."""
    nodes = [n for graph in result.joint for n in graph.nodes]
    op = torch.ops.qfuse.scatter2scatter.default
    calls = [unchecked(n.args) for n in nodes if n.target is op]
    return [(call.top_k, call.grouped_in, call.grouped_out) for call in calls]


#: Tokens in, sorted rows between the projections, tokens out; and back.
TO_ROWS, TO_TOKENS = (2, False, True), (2, True, False)
BY_TOKEN = [TO_ROWS, TO_TOKENS, TO_ROWS, TO_TOKENS]
