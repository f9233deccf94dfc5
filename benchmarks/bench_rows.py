"""Time a linear layer of a few rows with a packed weight: `qfuse::linear` and what else there is.

``bitsandbytes`` is `matmul_4bit`, ``torchao`` its layer of NVFP4 or its MXFP4 dequantized, each as
it is without a compiler; ``stock`` is the same under Inductor, but the definition of the format for
MXFP4, whose scales Inductor has no dtype for on a CPU, and for k-bit weights. ``decode``
dequantizes with our kernel and multiplies; ``dense`` multiplies with a weight of 16 bits that is
not quantized; ``adapter`` is ``qfuse`` with a LoRA adapter of rank 16. The roof is the time of
reading the packed weight once.
The cache is flushed before each call, which is timed alone. ``graph_s`` is the time of a call in a
CUDA graph of many, whose weights together exceed the cache, as decoding has them: free of what
starting one kernel alone costs. With more rows than a kernel takes, ``qfuse`` and ``adapter`` are
what the backend compiles of the same layer. ``--formats`` with more than one has a table, and a
picture, of each.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import harness
from inductor_q import capture, ops, quantize, testing
from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.decode.eager import Eager
from inductor_q.formats import FORMATS
from inductor_q.formats.kbit import KBITS, kbit_format_name, normal_float
from inductor_q.kernels import linear_rows_cuda
from inductor_q.kernels.quantize_kbit_reference import reference
from inductor_q.ops.linears import linears

PEERS = ("bitsandbytes", "torchao", "decode", "dense", "stock", "qfuse", "adapter")
BNB = "nf4_b64_nested"
MXFP4, NVFP4 = "mxfp4", "nvfp4_tiles"  # as torchao makes them
KBIT = {kbit_format_name(k, "e4m4"): k for k in KBITS}
#: Output and input features.
SHAPES = {
    "cuda": ((12288, 4096), (4096, 12288), (4096, 4096), (1024, 4096)),
    "cpu": ((4096, 4096),),
}
ROWS = {
    "cuda": (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    "cpu": (1, 2, 4, 8, 16, 32),
}
QUICK = ((96, 128),)
#: Bytes of the weights of a graph: several times the cache of a GPU.
GRAPH_BYTES = 256 << 20
RANK = 16

Calls = dict[str, Callable[[Tensor], Tensor]]


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--formats", nargs="+", choices=list(MAKERS), default=[BNB])
    parser.add_argument("--rows", nargs="+", type=int)
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_rows", arguments)
    kind = suite.device.type
    for name in arguments.formats:
        for shape in QUICK if arguments.quick else SHAPES[kind]:
            weight = torch.randn(shape, device=suite.device).bfloat16() * 0.02
            packed = MAKERS[name](weight)
            for rows in arguments.rows or ((1, 3) if arguments.quick else ROWS[kind]):
                x = torch.randn(rows, shape[1], device=suite.device).bfloat16()
                _measure(suite, arguments, name, packed, weight, x)
    harness.finish(suite, arguments, extras=("error", "graph_s"))
    return suite


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed weight.

    library: whose layer multiplies with it without a compiler, if one does.
    stock: the layer that Inductor compiles, if it is not that one.
    """

    operands: list[Tensor]
    library: str = ""
    layer: nn.Module | None = None
    stock: nn.Module | None = None


class Decoded(nn.Module):
    """Multiply with what `decode` makes of a weight."""

    def __init__(self, decode: Callable[[], Tensor]) -> None:
        super().__init__()
        self.decode = decode

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.decode())


def _bnb(weight: Tensor) -> Packed:
    layer: Any = testing.quantized_linear(weight).eval()
    operands = bnb_operands(layer.weight.data, layer.weight.quant_state)[0]
    return Packed(list(operands), "bitsandbytes", layer)


def _defined(name: str, operands: list[Tensor], weight: Tensor) -> nn.Module:
    """Return a layer that decodes its weight as the format is defined, in PyTorch's operations."""
    fmt, (rows, columns) = FORMATS[name], weight.shape

    def decode() -> Tensor:
        named = dict(zip(fmt.operands, operands, strict=True))
        elements = torch.arange(rows * columns, device=weight.device)
        values = fmt.decode(Eager(named, columns, rows), elements)
        return values.reshape(rows, columns).to(weight.dtype)

    return Decoded(decode)


def _kbit(k: int, weight: Tensor) -> Packed:
    codebook = torch.tensor(normal_float(k), device=weight.device)
    operands = [*reference(weight, codebook, k, "e4m4"), codebook]
    return Packed(operands, stock=_defined(kbit_format_name(k, "e4m4"), operands, weight))


def _mxfp4(weight: Tensor) -> Packed:
    module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    held = module.MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    operands = [held.qdata.reshape(-1), held.scale.view(torch.uint8).reshape(-1)]
    layer = Decoded(lambda: held.dequantize(weight.dtype))
    return Packed(operands, "torchao", layer, _defined(MXFP4, operands, weight))


def _nvfp4(weight: Tensor) -> Packed:
    features, columns = weight.shape
    linear = nn.Linear(columns, features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    layer = quantize(linear, "nvfp4", progress=False).requires_grad_(False)
    found = capture.packed_weight(layer, "weight")
    assert found is not None and found.read is not None
    return Packed(list(found.read().operands), "torchao", layer)


MAKERS: dict[str, Callable[[Tensor], Packed]] = {
    BNB: _bnb,
    **{name: functools.partial(_kbit, k) for name, k in KBIT.items()},
    MXFP4: _mxfp4,
    NVFP4: _nvfp4,
}


#: The product with operands, and that with an adapter besides.
Layers = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def _of_few_rows(name: str, shape: Sequence[int]) -> Layers:
    """Return the layer as a graph has it where a kernel reads the packed weight."""

    def plain(x: Tensor, operands: list[Tensor]) -> Tensor:
        return ops.linear(x, operands, name, shape)

    def adapted(x: Tensor, operands: list[Tensor], a: Tensor, b: Tensor) -> Tensor:
        return linears(x, operands, name, shape[:1], [None], [a], [b], [1.0])[0]

    return plain, adapted


def _of_many_rows(name: str, shape: Sequence[int]) -> Layers:
    """Return the layer compiled, which serves all weights of its format and shape."""

    def adapted(x: Tensor, operands: list[Tensor], a: Tensor, b: Tensor) -> Tensor:
        return ops.lora_linear(x, operands, name, shape, [a], [b], [1.0])

    backend = testing.qfuse_backend()
    plain, _ = _of_few_rows(name, shape)
    compiled = (torch.compile(fn, backend=backend, dynamic=False) for fn in (plain, adapted))
    return next(compiled), next(compiled)


def _calls(name: str, packed: Packed, weight: Tensor, layers: Layers) -> Calls:
    """Return the calls of one weight by peer, but for the one that Inductor compiles."""
    operands = packed.operands
    plain, adapted = layers
    shape, dtype = weight.shape, weight.dtype
    sizes = (RANK, shape[1]), (shape[0], RANK)
    a, b = (0.02 * torch.randn(size, device=weight.device).to(dtype) for size in sizes)

    def decode(x: Tensor) -> Tensor:
        return F.linear(x, ops.dequantize(operands, name, shape, dtype))

    calls: Calls = {} if packed.layer is None else {packed.library: packed.layer}
    return calls | {
        "decode": decode,
        "dense": lambda x: F.linear(x, weight),
        "qfuse": lambda x: plain(x, operands),
        "adapter": lambda x: adapted(x, operands, a, b),
    }


def _measure(
    suite: harness.Suite, arguments: Any, name: str, packed: Packed, weight: Tensor, x: Tensor
) -> None:
    torch.compiler.reset()  # past some recompiles it would be eager
    with torch.no_grad():
        dense = ops.dequantize(packed.operands, name, weight.shape, torch.float32)
        exact = x.double() @ dense.double().t()
        are_many = x.shape[0] > linear_rows_cuda.MOST_ROWS
        layers = (_of_many_rows if are_many else _of_few_rows)(name, weight.shape)
        peers = _calls(name, packed, weight, layers)
        stock = packed.stock or packed.layer
        if stock is not None:
            peers["stock"] = torch.compile(stock, backend="inductor", dynamic=False)
        calls = {
            peer: functools.partial(peers[peer], x) for peer in arguments.backends if peer in peers
        }
        extra = {
            peer: {"error": float((call().double() - exact).norm() / exact.norm())}
            for peer, call in calls.items()
            if peer not in ("dense", "adapter")  # another weight
        }
        rounds = arguments.rounds or 3
        timings = harness.time_kernels(calls, suite.device, rounds=rounds, budget=0.02)
        if suite.device.type == "cuda":
            graphed = [peer for peer in calls if peer != "stock"]  # it has no graph of many
            found = _in_graphs(graphed, name, packed, weight, layers, x, rounds)
            for peer, seconds in found.items():
                extra.setdefault(peer, {})["graph_s"] = seconds
    nbytes = float(sum(t.nbytes for t in packed.operands))
    case = {"shape": "x".join(map(str, weight.shape)), "rows": x.shape[0]}
    if arguments.formats != [BNB]:
        case = {"format": name, **case}
    suite.add(case, timings, roof=suite.ceilings.roof(bytes=nbytes), extra=extra)


def _in_graphs(
    peers: Sequence[str],
    name: str,
    packed: Packed,
    weight: Tensor,
    layers: Layers,
    x: Tensor,
    rounds: int,
) -> dict[str, float]:
    """Return the seconds of a call in a CUDA graph of many, by peer."""
    nbytes = sum(t.nbytes for t in packed.operands)
    many, few = (range(-(-GRAPH_BYTES // size)) for size in (nbytes, weight.nbytes))
    copies = [_calls(name, copy.deepcopy(packed), weight, layers) for _ in many]
    denses = [_calls(name, packed, weight.clone(), layers) for _ in few]
    calls = {
        peer: [functools.partial(of[peer], x) for of in (denses if peer == "dense" else copies)]
        for peer in peers
    }
    graphs = {peer: harness.in_sequence(of, x.device) for peer, of in calls.items()}
    timings = harness.time_kernels(graphs, x.device, rounds=rounds, budget=0.02)
    return {peer: timing.median / len(calls[peer]) for peer, timing in timings.items()}


if __name__ == "__main__":
    main()
