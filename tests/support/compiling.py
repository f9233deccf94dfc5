"""Compile a module with qfuse and keep the outcome: values, gradients, graphs, report."""

from __future__ import annotations

import contextlib
import copy
import functools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import inductor_q
from inductor_q.backend import qfuse
from inductor_q.graph_report import Report

#: Small enough to compile in a second, so every plan must pay from the first row on; and out of no
#: graph cache, so that the passes run (compiled C++ kernels are taken again).
SMALL: dict[str, Any] = {"qfuse.thresholds": {"extend_k.min_rows": 1}, "fx_graph_cache": False}


class Recorder(CustomGraphPass):
    """Act as a custom pass of the user's that changes nothing and keeps a copy of each graph."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []
        self._id = str(uuid.uuid4())

    def __call__(self, graph: fx.Graph) -> None:
        seen = fx.Graph()
        copied: Any = seen.graph_copy(graph, {}, return_output_node=True)
        value, output = copied
        seen.output(value).meta = copy.copy(output.meta)
        self.graphs.append(seen)

    def uuid(self) -> str:
        return self._id

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return self


class Between(nn.Module):
    """Put a layer between two activations, as in a model.

    Both of its inputs then come from a kernel that can write anywhere.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(x)))


@contextlib.contextmanager
def no_codegen() -> Iterator[None]:
    """Let Inductor stop behind the passes and the partitioning: its last graphs run op by op.

    Writing and compiling code takes most of the time of a whole model's compile. This is for tests
    of what the passes make of a model; lowerings and kernels are tested on layers.
    """

    def run(gm: fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        return make_boxed_func(gm.forward)

    stopped = functools.partial(compile_fx.compile_fx, inner_compile=run)
    with (
        mock.patch.object(compile_fx, "compile_fx", stopped),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


#: What these passes find depends on the device, so their own tests alone look at it.
OF_THE_DEVICE = frozenset({"cast_together", "widen_products"})
ON_ANY_CPU = {"qfuse.passes": "-widen_products"}


@dataclass
class Compiled:
    """Hold one compile and one step of it."""

    output: Tensor
    gradients: dict[str, Tensor]
    report: Report
    joint: list[fx.Graph] = field(default_factory=list)
    partitioned: list[fx.Graph] = field(default_factory=list)

    @property
    def applied(self) -> dict[str, int]:
        """Return the number of sites by pass, passes without a site left out."""
        found = self.report.applied().items()
        return {name: count for name, count in found if count and name not in OF_THE_DEVICE}

    @property
    def reasons(self) -> dict[str, dict[str, int]]:
        found = self.report.rejections().items()
        return {name: dict(counts) for name, counts in found if name not in OF_THE_DEVICE}

    @property
    def ops(self) -> Counter[str]:
        """Count the ops of the joint graph after the passes."""
        return sum(map(count_ops, self.joint), Counter())


def op_name(node: fx.Node) -> str:
    """Name an op as `mm`, `qfuse.dequantize` or `bitsandbytes.gemm_4bit`: aten is left out."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    namespace, name = node.target.namespace, node.target._opname
    return name if namespace in ("aten", "prims") else f"{namespace}.{name}"


def gradients(inputs: Mapping[str, Tensor], module: nn.Module | None = None) -> dict[str, Tensor]:
    """Return gradients by name, and clear them for the next run."""
    tensors = dict(inputs)
    if module is not None:
        tensors |= dict(module.named_parameters())
    found = {}
    for name, tensor in tensors.items():
        if tensor.grad is not None:
            found[name] = tensor.grad.clone()
            tensor.grad = None
    return found


def step(
    fn: Callable[..., Tensor], *inputs: Tensor, module: nn.Module | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a forward and, where anything trains, a backward from a fixed cotangent."""
    output = fn(*inputs)
    if output.requires_grad:
        generator = torch.Generator().manual_seed(7)
        output.backward(torch.randn(output.shape, generator=generator).to(output))
    return output.detach(), gradients({f"x{i}": x for i, x in enumerate(inputs)}, module)


def skip_unless_regions_chain(module: nn.Module, x: Tensor) -> None:
    """Skip on torch 2.11, which does not trace nested compile regions in a row."""
    torch._dynamo.reset()
    try:
        torch.compile(module, backend="eager")(x)
    except InternalTorchDynamoError as error:
        assert "example_value" in str(error)
        pytest.skip("this torch (2.11) does not trace a region called on its own output")


def compile_step(
    fn: Callable[..., Tensor],
    *inputs: Tensor,
    module: nn.Module | None = None,
    options: Mapping[str, Any] | None = None,
    context: contextlib.AbstractContextManager[Any] | None = None,
    **compile_options: Any,
) -> Compiled:
    """Compile `fn` from nothing with `options` over SMALL, and run one step."""
    torch._dynamo.reset()
    joint, partitioned = Recorder(), Recorder()
    patch = inductor_config.patch(
        joint_custom_pre_pass=joint, post_grad_custom_pre_pass=partitioned
    )
    compiled = torch.compile(
        fn, backend=qfuse, options={**SMALL, **(options or {})}, **compile_options
    )
    module = module if module is not None else fn if isinstance(fn, nn.Module) else None
    with patch, context or contextlib.nullcontext():
        output, grads = step(compiled, *inputs, module=module)
    report = inductor_q.last_report()
    assert report is not None
    return Compiled(output, grads, report, joint.graphs, partitioned.graphs)


def partition(
    run: Callable[[Any], None], model: nn.Module, options: Mapping[str, Any] | None = None
) -> list[fx.Graph]:
    """Run `run` on `model` compiled without code generation; return forward's and backward's graph
    as the partitioner left them."""
    graphs: list[fx.Graph] = []
    whole = compile_fx.compile_fx

    def compile_inner(gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def compile_without_code(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        if "config_patches" in kwargs:  # else it is a call of its own
            kwargs["inner_compile"] = compile_inner
        return whole(gm, example_inputs, **kwargs)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=qfuse, options={**SMALL, **(options or {})})
    with (
        pytest.MonkeyPatch.context() as patch,
        functorch_config.patch(enable_autograd_cache=False),
    ):
        patch.setattr(compile_fx, "compile_fx", compile_without_code)
        run(compiled)
    return graphs


def count_ops(graph: fx.Graph) -> Counter[str]:
    return Counter(name for node in graph.nodes if (name := op_name(node)))
