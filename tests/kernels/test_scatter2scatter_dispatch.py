"""Which kernel of scatter2scatter serves a problem on a device, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_q import kernels
from inductor_q.capture.example import example_product
from inductor_q.context import Context
from inductor_q.graph_report import Report
from inductor_q.kernels import provider as providers
from inductor_q.kernels import scatter2scatter_cuda
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.dispatch import serve
from inductor_q.kernels.expert_calls import ARGUMENTS, Scatter2Scatter
from inductor_q.kernels.scatter2scatter_dequantize import Large, preferred
from inductor_q.passes.fuse_scatter2scatter import FuseScatter2Scatter
from inductor_q.presets import NEVER
from inductor_q.resolved import Resolved
from tests.support.moe import Layer, Sizes, layer
from tests.support.resolving import on_cpu
from tests.support.tile_cases import BF16, FIT, FP16, device

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("default_options")


def served(
    case: Layer,
    arch: int,
    monkeypatch: pytest.MonkeyPatch,
    provider: str = "auto",
    large: Large | None = None,
    memory: int | None = None,
) -> tuple[str, list[str]]:
    """Which kernel a GPU of that architecture would launch for `case`, and what is told.

    `large` are the thresholds of large experts, `memory` is the budget.
    """
    context = Context(resolved(provider, large, memory), Report())
    capability = device(arch).capability
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr("inductor_q.csrc.nvrtc.library", lambda: None)  # as if it were there
    monkeypatch.setattr(scatter2scatter_cuda, "_function", lambda *_: None)
    launched: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(
        providers, "warn_passed_over", lambda *args: told.append(": ".join(args[1:]))
    )
    for kernel in kernels.PROVIDERS["scatter2scatter"]["cuda"]:
        name = kernel.name
        monkeypatch.setattr(kernel, "plan", lambda _, name=name: lambda _: launched.append(name))
    monkeypatch.setattr(Scatter2Scatter, "kind", lambda _: None)  # fake tensors have no address
    with FakeTensorMode():

        def fake(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="cuda"
                )
            return value

        given: dict[str, Any] = {n: getattr(case.call(), n) for n in ARGUMENTS}
        given["operands"] = [fake(operand) for operand in given["operands"]]
        call = Scatter2Scatter(**{name: fake(value) for name, value in given.items()})
        call.check()
        reported = reported_provider(call, context)
        assert not told  # of what only a run is to be warned of
        serve("scatter2scatter", call, preferred(call, provider, context.decoded_from()))
    assert reported == launched[0], "the report names who does not serve"
    return launched[0], told


def resolved(provider: str, large: Large | None, memory: int | None) -> Resolved:
    """What options say of it."""
    given: dict[str, Any] = {"qfuse.kernels": {"scatter2scatter": provider}}
    if large is not None:
        given["qfuse.thresholds"] = {
            "fuse_scatter2scatter.min_elements_of_large": large.elements,
            "fuse_scatter2scatter.min_rows_of_large": large.rows,
            "fuse_scatter2scatter.min_elements_of_large_transposed": large.elements_transposed,
            "fuse_scatter2scatter.min_rows_of_large_transposed": large.rows_transposed,
        }
    return on_cpu({**given, "qfuse.memory": memory} if memory else given)


def reported_provider(call: Scatter2Scatter, context: Context) -> str:
    """Who serves, as the pass says of a node with the arguments of `call`."""
    graph = fx.Graph()

    def node(value: Any) -> Any:
        if isinstance(value, list):
            return [node(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        placeholder = graph.placeholder("value")
        placeholder.meta["val"] = value
        return placeholder

    args = tuple(node(getattr(call, name)) for name in ARGUMENTS)
    graph.call_function(torch.ops.qfuse.scatter2scatter.default, args)
    (site,) = FuseScatter2Scatter().match(graph, context)
    if call.rank == 0 and call.bias is None and call.gates is None:  # as of a product found
        found = example_product(
            *(args[0], args[1], call.format, call.shape),
            dtype=call.x.dtype,
            transposed=call.transposed,
            top_k=call.top_k,
            grouped_in=call.grouped_in,
        )
        assert context.expert_kernel(found) == site.provider
    return site.provider


@pytest.mark.parametrize("sentinel", [None, -1])
@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_without_hopper_experts_are_decoded_in_the_loop_and_it_is_told(
    arch: int, sentinel: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the sentinels of expert parallelism, which other libraries refuse there."""
    name, told = served(layer(FIT, dtype=BF16, sentinel=sentinel), arch, monkeypatch)
    assert name == "triton"
    assert told == ["cuda: csrc/scatter2scatter.cu is for compute capability 9.0 (Hopper)"]


@pytest.mark.parametrize("name", ["fp8_e4m3_128x128", "fp8_e4m3_row", "mxfp8_e4m3"])
def test_bytes_of_e4m3_are_decoded_in_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for transposed in (False, True):
        form: dict[str, Any] = {"quant": name, "transposed": transposed}
        assert served(layer(FIT, dtype=BF16, **form), 90, monkeypatch)[0] == "cuda"
        for arch in (80, 89, 120):
            assert served(layer(FIT, dtype=BF16, **form), arch, monkeypatch)[0] == "triton"


def test_other_bytes_are_decoded_first_from_fewer_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has a grouped GEMM; nibbles still are decoded in the loop with so many rows."""
    few, more = (replace(FIT, experts=2, tokens=rows) for rows in (60, 100))
    for name, dtype in (("int8_absmax", BF16), ("fp8_e4m3_128x128", FP16)):
        form: dict[str, Any] = {"quant": name, "dtype": dtype}
        assert served(layer(few, **form), 90, monkeypatch)[0] == "triton"
        first = "dequantize" if dtype is BF16 else "triton"  # which torch's is not for
        assert served(layer(more, **form), 90, monkeypatch)[0] == first
    assert served(layer(more, dtype=FP16), 90, monkeypatch)[0] == "triton"


def test_the_order_goes_by_rows_where_torch_has_a_grouped_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = replace(FIT, tokens=64), replace(FIT, experts=2, tokens=1024)
    few, many = replace(few, rank=80), replace(many, rank=80)  # not what the Hopper kernel has
    packed: dict[str, Any] = {"dtype": BF16}
    for arch in (90, 100):
        assert served(layer(few, **packed), arch, monkeypatch)[0] == "triton"
        assert served(layer(many, **packed), arch, monkeypatch)[0] == "dequantize"
        assert served(layer(many, **packed), arch, monkeypatch, "triton")[0] == "triton"
        assert served(layer(few, dtype=BF16, quant=DENSE), arch, monkeypatch)[0] == "grouped_mm"
    for arch in (89, 120):  # torch's would wait for the device
        assert served(layer(many, **packed), arch, monkeypatch)[0] == "triton"
        assert served(layer(few, dtype=BF16, quant=DENSE), arch, monkeypatch)[0] == "triton"
    assert served(layer(FIT, dtype=BF16), 90, monkeypatch)[0] == "cuda"
    assert served(layer(few, dtype=FP16), 90, monkeypatch)[0] == "triton"


def test_large_experts_are_decoded_first_where_a_preset_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not smaller ones, nor with fewer rows, nor under a budget, nor where a kernel is named; and
    nothing is told where the provider refuses. Weights that are read transposed have a choice of
    their own."""
    case = layer(FIT, dtype=BF16)
    elements, rows = FIT.in_features * FIT.out_features, case.call().rows // FIT.experts
    large = Large(elements, rows, NEVER, NEVER)
    assert served(case, 90, monkeypatch, large=large) == ("dequantize", [])
    assert served(case, 90, monkeypatch, large=large._replace(elements=elements + 1))[0] == "cuda"
    assert served(case, 90, monkeypatch, large=large._replace(rows=rows + 1))[0] == "cuda"
    other = Large(NEVER, NEVER, elements, rows)
    turned = layer(FIT, dtype=BF16, transposed=True)
    assert served(turned, 90, monkeypatch, large=other) == ("dequantize", [])
    assert served(turned, 90, monkeypatch, large=large)[0] == "cuda"
    assert served(case, 90, monkeypatch, large=other)[0] == "cuda"
    assert served(case, 90, monkeypatch, large=large, memory=1 << 30)[0] == "cuda"
    assert served(case, 90, monkeypatch, "cuda", large)[0] == "cuda"
    with inductor_config.patch(cpp_wrapper=True):  # which calls the op
        assert served(case, 90, monkeypatch, large=large)[0] == "cuda"
    dense = layer(FIT, dtype=BF16, quant=DENSE, lora=False)
    assert served(dense, 90, monkeypatch, large=Large(1, 1, 1, 1))[0] == "grouped_mm"
    assert served(layer(FIT), 90, monkeypatch, large=Large(1, 1, 1, 1))[0] == "reference"


MIXTRAL, GPT_OSS = (8, 28_672, 4096), (32, 5760, 2880)


@pytest.mark.parametrize(
    ("shape", "rows", "options", "first"),
    [
        (MIXTRAL, 2047, {}, False),
        (MIXTRAL, 2048, {}, True),
        (MIXTRAL, 4095, {"transposed": True}, False),
        (MIXTRAL, 4096, {"transposed": True}, True),
        (MIXTRAL, 4096, {"transposed": True, "format": "mxfp4"}, False),
        (GPT_OSS, 2047, {"format": "mxfp4"}, False),
        (GPT_OSS, 2048, {"format": "mxfp4"}, True),
        (GPT_OSS, 1 << 20, {"transposed": True}, False),
        ((128, 3072, 4096), 1 << 20, {}, False),
    ],
)
def test_what_is_large_on_hopper(
    shape: tuple[int, ...], rows: int, options: dict[str, Any], first: bool
) -> None:
    """By the preset of sm_90; what is decoded by rows is never, where it is read transposed."""
    context = Context(on_cpu({"qfuse.preset": "sm_90"}), Report())
    order = torch.empty(rows * shape[0], dtype=torch.int64, device="meta")
    x = torch.empty(1, dtype=BF16, device="meta")
    given: dict[str, Any] = dict.fromkeys(("order", "inverse", "offsets", "tiles"), order)
    given |= {"format": "nf4_b64", "shape": shape, "x": x, "operands": [x], "top_k": 1, **options}
    call = Scatter2Scatter(**given)
    wanted = preferred(call, "auto", context.decoded_from())
    assert wanted == ("dequantize" if first else "auto")


@pytest.mark.parametrize(
    ("sizes", "options", "name"),
    [
        (FIT, {"dtype": BF16, "quant": DENSE, "lora": False}, "grouped_mm"),
        (replace(FIT, rank=96), {"dtype": BF16}, "triton"),
        (
            replace(FIT, experts=2, tokens=1024, in_features=96),
            {"dtype": BF16, "lora": False},
            "dequantize",
        ),
        (FIT, {"dtype": FP16}, "triton"),
        (FIT, {}, "reference"),
    ],
    ids=["dense", "r=96", "k=96, many rows", "fp16", "fp32"],
)
def test_the_report_names_who_serves_on_hopper(
    sizes: Sizes, options: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first that knows the format; `served` compares the two for every call here."""
    assert served(layer(sizes, **options), 90, monkeypatch)[0] == name


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
    monkeypatch.setattr(
        providers, "warn_passed_over", lambda *args: told.append(": ".join(args[1:]))
    )
    case = layer(replace(FIT, tokens=3))
    assert torch.equal(case(provider="triton"), case())
    assert told == ["triton: there is none of that name for cpu tensors"]


@pytest.mark.parametrize(("shape", "dim"), [((7, 64), None), ((7, 1, 64), 1), ((7, 64, 1), 2)])
def test_an_example_has_the_rows_of_the_product(shape: tuple[int, ...], dim: int | None) -> None:
    """Gathered experts multiply rows that have one more dimension, on either side."""
    with FakeTensorMode():
        nodes = [fx.Graph().placeholder("x"), fx.Graph().placeholder("weight")]
        for node, size in zip(nodes, (shape, (5, 48, 64)), strict=True):
            node.meta["val"] = torch.empty(size)
        call = example_product(
            *(nodes[0], nodes[1:], DENSE, (5, 48, 64)),
            dtype=torch.float32,
            transposed=False,
            top_k=1,
            grouped_in=False,
            dim=dim,
        )
        call.check()
    assert (call.rows, tuple(call.x.shape)) == (7, (7, 64))
