"""Time one projection of a mixture of experts: packed experts, a LoRA adapter each, top-k routing.

Rows are gathered, multiplied with their experts and left grouped: forward, and forward with the
gradients of x, A and B; ``--passes`` times one gradient by itself, too. ``bitsandbytes``
dequantizes all experts and multiplies with torch's grouped GEMM (what transformers' "grouped_mm"
experts do, and saves them for backward); ``qfuse`` is our op as it chooses, ``dequantize`` the
op with the provider of that name, and ``grouped_mm`` the op on the same experts held
in bf16; ``compiled``, the op in a graph of qfuse, which knows the preset's thresholds, ``triton``,
on a GPU, and ``fp8``, the op with its products in FP8, are timed where ``--backends`` names them.
``error`` is against float64, relative to that of bitsandbytes; ``overhead`` of an adapter
is over rank 0, where ``--ranks`` has it. Experts are in NF4; ``--format`` asks for another, and the
library that dequantizes it, ``torchao`` or ``transformers``, stands in for ``bitsandbytes``.

``--cases few`` has the tokens of decoding, forward alone: each expert that has rows is read
once, and the roof counts no other. ``graph_s`` is the time of a call in a CUDA graph of many on the
same experts, whose tokens go to other ones each, as a decoding step has them: free of what starting
kernels alone costs.

``--ep N`` is one device of N: it has every Nth part of the experts and sees all tokens. Choices of
other devices' experts are sentinels for our op, which skips them; ``masked`` is the op, and
``bitsandbytes`` the same as above, with those ids clamped to the last expert and their gates zero,
as transformers' "batched_mm" experts have it: every row is computed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config

from benchmarks import harness
from inductor_q import lowerings, ops
from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.kernels import rounding
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.dispatch import preferring
from inductor_q.ops.routing import Routing, route

# name: (experts, out features, in features, top-k); gate and up in one projection.
MODELS = {
    "Qwen3-30B-A3B": (128, 1536, 2048, 8),
    "Qwen3.5-35B-A3B": (256, 1024, 2048, 8),
    "OLMoE": (64, 2048, 2048, 8),
    "Mixtral": (8, 28_672, 4096, 2),
    "E128 2880": (128, 5760, 2880, 4),
    "gpt-oss-20b": (32, 5760, 2880, 4),
    "Qwen3-235B-A22B": (128, 3072, 4096, 8),
    "DeepSeek-V2": (160, 3072, 5120, 6),
    "tiny": (4, 128, 64, 2),
}
FEW = (1, 4, 16)
#: Models and numbers of tokens, by `--cases` and device.
CASES = {
    "many": {
        "cuda": [
            *(("Qwen3-30B-A3B", tokens) for tokens in (4096, 1024, 512, 64)),
            *((name, 4096) for name in ("Qwen3.5-35B-A3B", "OLMoE", "Mixtral", "E128 2880")),
        ],
        "cpu": [("tiny", 64), ("tiny", 512)],
    },
    "few": {
        "cuda": [*itertools.product(("Qwen3-30B-A3B", "gpt-oss-20b"), FEW)],
        "cpu": [("tiny", tokens) for tokens in FEW],
    },
}
QUICK = {
    "many": {"cuda": [("Qwen3-30B-A3B", 512)], "cpu": [("tiny", 16)]},
    "few": {"cuda": [("Qwen3-30B-A3B", 1)], "cpu": [("tiny", 2)]},
}
GRAPH_CALLS = 32  # whose experts together exceed the cache of a GPU
TOKENS = 2048  # for a model that is in no list
PEERS = ("bitsandbytes", "dequantize", "grouped_mm", "qfuse")
PARALLEL_PEERS = ("bitsandbytes", "masked", "qfuse")
LIBRARIES = ("bitsandbytes", "torchao", "transformers")
KNOWN = tuple(dict.fromkeys((*PEERS, *PARALLEL_PEERS, *LIBRARIES, "triton", "compiled", "fp8")))
PASSES = ("fwd", "fwd+bwd", "dX", "dA/dB")
TILE = 128  # rows and columns of a tile of FP8
CUT = f"transformers decodes fp8_128x128 in whole tiles of {TILE} x {TILE}"
RANK = 16
SCALING = 2.0


class Packed(NamedTuple):
    """A stack of experts as its library packs it, and that library's own dequantization."""

    operands: list[Tensor]
    format: str
    decode: Callable[[], Tensor]


@dataclass(frozen=True)
class Layer:
    """Hold the inputs of one case; weights are seeded, and a library quantizes them."""

    name: str
    x: Tensor
    a: Tensor | None  # None: rank 0
    b: Tensor | None
    packed: Packed
    shape: tuple[int, int, int]
    routing: Routing
    gates: Tensor | None  # with expert parallelism
    grad: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.a, self.b) if t is not None]


def _nf4(weight: Tensor) -> Packed:
    import bitsandbytes.functional as F

    qweight, state = F.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    operands, name, _ = bnb_operands(qweight, state)
    return Packed(operands, name, functools.partial(F.dequantize_4bit, qweight, state))


def _mxfp4(weight: Tensor) -> Packed:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    held: Any = MXTensor.to_mx(weight, vars(torch)["float4_e2m1fn_x2"], 32)
    return Packed([held.qdata, held.scale.view(torch.uint8)], "mxfp4", held.dequantize)


def _nvfp4(weight: Tensor) -> Packed:
    """Pack as experts are loaded: the scale of scales is repeated for each row."""
    from torchao.prototype.mx_formats import nvfp4_tensor

    library: Any = nvfp4_tensor
    whole = library.per_tensor_amax_to_scale(weight.abs().max().float())
    held = library.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=whole)
    operands = [held.qdata, held.scale.view(torch.uint8), whole.repeat(len(weight))]
    return Packed(operands, "nvfp4_rows", held.dequantize)


def _fp8_tiles(weight: Tensor) -> Packed:
    """Quantize as DeepSeek-V3 does, which no library here does without a kernel of a hub's: the
    largest number of a tile becomes float8's largest."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    n, k = weight.shape
    tiles = weight.float().view(n // TILE, TILE, -1, min(k, TILE))
    scale = tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    codes = (tiles / scale[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn)
    decode: Any = Fp8Dequantize(None)._dequantize_one
    return Packed(
        [codes, scale], "fp8_e4m3_128x128", functools.partial(decode, codes, scale, torch.bfloat16)
    )


#: What packs the experts, and the library whose dequantization is a peer.
FORMATS: dict[str, tuple[Callable[[Tensor], Packed], str]] = {
    "nf4": (_nf4, "bitsandbytes"),
    "mxfp4": (_mxfp4, "torchao"),
    "nvfp4": (_nvfp4, "torchao"),
    "fp8_128x128": (_fp8_tiles, "transformers"),
}


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.set_defaults(backends=None)
    known = ", ".join(MODELS)
    parser.add_argument(
        "--models",
        nargs="+",
        help=f"of {known}; or Hugging Face ids or folders, of which the config is read",
    )
    parser.add_argument("--tokens", nargs="+", type=int, help=f"(default: by case, or {TOKENS})")
    parser.add_argument("--ranks", nargs="+", type=int, default=[RANK], help="0: no adapter")
    parser.add_argument("--cases", choices=CASES, default="many")
    parser.add_argument("--passes", nargs="+", choices=PASSES)
    parser.add_argument("--ep", nargs="+", type=int, default=[1], help="devices that share experts")
    parser.add_argument("--format", choices=FORMATS, default="nf4")
    arguments = parser.parse_args(argv)
    if arguments.passes is None:
        arguments.passes = list(PASSES[: 1 if arguments.cases == "few" else 2])
    library = FORMATS[arguments.format][1]
    if arguments.backends is None:
        _, *others = PEERS if arguments.ep == [1] else PARALLEL_PEERS
        arguments.backends = [library, *others]
    if unknown := set(arguments.backends) - set(KNOWN):
        parser.error(f"no peer {', '.join(sorted(unknown))}; known: {', '.join(KNOWN)}")
    if strange := set(LIBRARIES) & set(arguments.backends) - {library}:
        parser.error(f"{', '.join(strange)}: --format {arguments.format} is {library}'s")
    for model in arguments.models or ():
        if not _fits(model, arguments.format):
            parser.error(f"{model}'s experts are {sizes(model)[1:3]}, and {CUT}: leave it out")
    if arguments.cases == "few" and arguments.ep != [1]:
        parser.error("--cases few is of one device")
    name = "bench_moe" if arguments.format == "nf4" else f"bench_moe_{arguments.format}"
    suite = harness.start(name, arguments)
    if suite.device.type == "cpu" and "triton" in arguments.backends:
        parser.error("triton runs on a GPU")
    shown = "nf4, nested" if arguments.format == "nf4" else arguments.format
    suite.settings |= {"format": shown, "dtype": "bf16"}
    for (name, tokens), rank, devices in itertools.product(
        list(_cases(arguments, suite.device.type)), sorted(arguments.ranks), arguments.ep
    ):
        layers = _layers(name, tokens, rank, devices, suite.device, arguments.format)
        _run_case(suite, arguments, layers, devices)
    extras = (f"error_to_{library}", "overhead", "peak_bytes", "graph_s")
    harness.finish(suite, arguments, extras=extras)
    return suite


def _cases(arguments: argparse.Namespace, device: str) -> Iterator[tuple[str, int]]:
    """List models and numbers of tokens: as requested, and otherwise those listed that fit."""
    listed = (QUICK if arguments.quick else CASES)[arguments.cases][device]
    fitting = [name for name, _ in listed if _fits(name, arguments.format)]
    for name in arguments.models or dict.fromkeys(fitting):
        known = [tokens for model, tokens in listed if model == name]
        for tokens in arguments.tokens or known or [TOKENS]:
            yield name, tokens


def sizes(name: str) -> tuple[int, int, int, int]:
    """Return experts, out and in features, top-k of one of MODELS, or of what a config says."""
    if name in MODELS:
        return MODELS[name]
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(name).get_text_config()
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return experts, 2 * inner, config.hidden_size, config.num_experts_per_tok


def _fits(name: str, format: str) -> bool:
    """Whether transformers decodes such a model's experts: it divides columns by tiles, evenly."""
    if format != "fp8_128x128":
        return True
    _, n, k, _ = sizes(name)
    return n % TILE == 0 and k % min(k, TILE) == 0


def _layers(
    name: str, tokens: int, rank: int, devices: int, device: torch.device, format: str = "nf4"
) -> tuple[Layer, Layer]:
    """Make one device's layer, whose choices elsewhere are sentinels, and the same with masks."""
    everywhere, n, k, top_k = sizes(name)
    experts = everywhere // devices
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).mul_(scale).bfloat16()

    weight = random(experts * n, k, scale=k**-0.5)
    packed = FORMATS[format][0](weight)
    logits = torch.randn(tokens, everywhere, device=device, generator=generator)
    values, ids = logits.topk(top_k)
    here = ids < experts
    gates = None if devices == 1 else values.softmax(-1)
    layer = Layer(
        name=Path(name).name,
        x=random(tokens, k).requires_grad_(),
        a=random(experts, rank, k, scale=k**-0.5).requires_grad_() if rank else None,
        b=random(experts, n, rank, scale=0.02).requires_grad_() if rank else None,
        packed=packed,
        shape=(experts, n, k),
        routing=route(torch.where(here, ids, -1), experts),
        gates=gates,
        grad=random(tokens * top_k, n),
    )
    clamped = route(ids.clamp(max=experts - 1), experts)
    return layer, replace(layer, routing=clamped, gates=None if gates is None else gates * here)


def _grouped_mm(layer: Layer) -> Tensor:
    weight = layer.packed.decode().view(layer.shape)
    routing, offs = layer.routing, layer.routing.offsets[1:]
    x = layer.x[routing.order // routing.top_k]
    y = torch._grouped_mm(x, weight.transpose(1, 2), offs=offs)
    if layer.a is not None and layer.b is not None:
        rank = torch._grouped_mm(x, layer.a.transpose(1, 2), offs=offs)
        y = y + torch._grouped_mm(rank * SCALING, layer.b.transpose(1, 2), offs=offs)
    if layer.gates is not None:
        y = y * layer.gates.reshape(-1, 1)[routing.order].to(y.dtype)
    return y


def _op(
    layer: Layer, provider: str, dense: Tensor | None = None, row_scale: Tensor | None = None
) -> Tensor:
    with preferring("scatter2scatter", provider):
        return _product(layer, dense, row_scale)


def _product(layer: Layer, dense: Tensor | None = None, row_scale: Tensor | None = None) -> Tensor:
    operands, name, _ = layer.packed
    if dense is not None:
        operands, name = [dense], DENSE
    return ops.scatter2scatter(
        layer.x,
        operands,
        name,
        layer.shape,
        layer.routing,
        grouped_out=True,
        lora_a=layer.a,
        lora_b=layer.b,
        scaling=SCALING,
        gates=layer.gates,
        row_scale=row_scale,
    )


def _compiled(layer: Layer) -> Callable[[], Tensor]:
    product = harness.compile_as("qfuse", lambda: _product(layer))

    def run() -> Tensor:
        # A graph for each way, and for each set of experts in a graph of many.
        with dynamo_config.patch(recompile_limit=4 * GRAPH_CALLS, fail_on_recompile_limit_hit=True):
            result: Tensor = product()
        return result

    return run


def _fp8(layer: Layer) -> Tensor:
    """Compute in FP8, scales of the weights' rows included, which a graph fuses into one kernel."""
    operands, name, _ = layer.packed
    experts, n, k = layer.shape
    with dynamo_config.patch(recompile_limit=64):  # a graph for each case
        scale = _row_scales()(operands, name, (experts * n, k))
    return _op(layer, "auto", row_scale=scale)


@functools.cache
def _row_scales() -> Callable[..., Tensor]:
    lowerings.register()

    def scales(operands: Sequence[Tensor], format: str, shape: Sequence[int]) -> Tensor:
        amax = torch.ops.qfuse.row_amax(operands, format, shape)
        return rounding.to_scale(amax, torch.float8_e4m3fn)

    return torch.compile(scales, dynamic=False)


def _values(layer: Layer, dtype: torch.dtype) -> Tensor:
    operands, name, _ = layer.packed
    return ops.dequantize(operands, name, layer.shape, dtype)


def _exact(layer: Layer) -> Tensor:
    """Compute in float64 from the weight's fp32 values, an expert at a time; one row per slot."""
    weight, routing = _values(layer, torch.float32), layer.routing
    rows = layer.x.detach()[routing.order // routing.top_k]
    y = torch.zeros_like(layer.grad, dtype=torch.float64)
    for e, (start, end) in enumerate(pairwise(routing.offsets.tolist())):
        x = rows[start:end].double()
        y[start:end] = x @ weight[e].double().t()
        if layer.a is not None and layer.b is not None:
            a, b = layer.a[e].detach().double(), layer.b[e].detach().double()
            y[start:end] += SCALING * (x @ a.t()) @ b.t()
    if layer.gates is not None:
        y *= layer.gates.reshape(-1, 1)[routing.order]
    return y[routing.inverse]


def _run_case(
    suite: harness.Suite,
    arguments: argparse.Namespace,
    layers: tuple[Layer, Layer],
    devices: int,
) -> None:
    torch.compiler.reset()  # each case has a graph of its own
    layer, masked = layers
    rank = 0 if layer.a is None else layer.a.shape[1]
    dense = _values(layer, torch.bfloat16) if "grouped_mm" in arguments.backends else None
    library = FORMATS[arguments.format][1]
    forwards = _forwards(arguments, layers, dense)
    exact = _exact(layer)
    errors = {}
    for peer in arguments.backends:
        inverse = (masked if peer in (library, "masked") else layer).routing.inverse
        got = forwards[peer]().detach()[inverse]
        errors[peer] = float((got - exact).norm() / exact.norm())
    del exact
    case = {"model": layer.name, "T": layer.x.shape[0], "r": rank, "ep": devices}
    for kind in arguments.passes:
        if kind == "dA/dB" and not rank:
            continue
        candidates = {peer: _pass(kind, forwards[peer], layer) for peer in arguments.backends}
        extra: dict[str, dict[str, Any]] = {}
        for peer, call in candidates.items():
            results = sum(t.nbytes for t in call())
            before = harness.held_bytes(suite.device) or 0
            peak = harness.peak_bytes(call, suite.device)
            extra[peer] = {"error": errors[peer]}
            if library in errors:
                extra[peer][f"error_to_{library}"] = errors[peer] / errors[library]
            if peak is not None:  # beyond inputs and what is returned
                extra[peer]["peak_bytes"] = peak - before - results
        rounds = arguments.rounds or 5
        timings = harness.time_kernels(candidates, suite.device, rounds=rounds)
        if arguments.cases == "few" and kind == "fwd" and suite.device.type == "cuda":
            for peer, spent in _in_graphs(arguments, layers, dense, rounds).items():
                extra[peer]["graph_s"] = spent
        for peer, timing in timings.items():
            base = suite.find({**case, "r": 0, "pass": kind}, peer)
            if rank and base is not None:
                extra[peer]["overhead"] = timing.median / base.timing.median - 1
        roof = _roof(suite, layer, ways=2 if kind == "fwd+bwd" else 1)
        suite.add({**case, "pass": kind}, timings, roof=roof, extra=extra)


def _forwards(
    arguments: argparse.Namespace, layers: tuple[Layer, Layer], dense: Tensor | None
) -> dict[str, Callable[[], Tensor]]:
    """Return each peer's forward; `dense` are the experts in bf16."""
    layer, masked = layers
    forwards: dict[str, Callable[[], Tensor]] = {
        FORMATS[arguments.format][1]: functools.partial(_grouped_mm, masked),
        "masked": functools.partial(_op, masked, "auto"),
        "grouped_mm": functools.partial(_op, layer, "grouped_mm", dense),
        "qfuse": functools.partial(_op, layer, "auto"),
        "compiled": _compiled(layer),
        "fp8": functools.partial(_fp8, layer),
    }
    for provider in arguments.backends:  # the others are our op's
        forwards.setdefault(provider, functools.partial(_op, layer, provider))
    return forwards


def _in_graphs(
    arguments: argparse.Namespace, layers: tuple[Layer, Layer], dense: Tensor | None, rounds: int
) -> dict[str, float]:
    """Return the seconds of a forward in a CUDA graph of many, by peer."""
    several = [_forwards(arguments, _rerouted(layers, seed), dense) for seed in range(GRAPH_CALLS)]
    device = layers[0].x.device
    with torch.no_grad():
        graphs = {
            peer: harness.in_sequence([forwards[peer] for forwards in several], device)
            for peer in arguments.backends
        }
        timings = harness.time_kernels(graphs, device, rounds=rounds)
    return {peer: timing.median / GRAPH_CALLS for peer, timing in timings.items()}


def _rerouted(layers: tuple[Layer, Layer], seed: int) -> tuple[Layer, Layer]:
    """Send as many tokens to other experts, of all of which this device has the weights."""
    layer, masked = layers
    assert layer.gates is None, "one device of several has sentinels"
    tokens, experts, top_k = layer.x.shape[0], layer.shape[0], layer.routing.top_k
    generator = torch.Generator(layer.x.device).manual_seed(seed)
    logits = torch.randn(tokens, experts, device=layer.x.device, generator=generator)
    routing = route(logits.topk(top_k).indices, experts)
    return replace(layer, routing=routing), replace(masked, routing=routing)


def _pass(kind: str, forward: Callable[[], Tensor], layer: Layer) -> Callable[[], list[Tensor]]:
    """Make the call that is timed; `kind` is one of PASSES."""

    def without_gradients() -> list[Tensor]:
        with torch.no_grad():
            return [forward()]

    def with_gradients() -> list[Tensor]:
        y = forward()
        return [y.detach(), *torch.autograd.grad(y, layer.leaves, layer.grad)]

    if kind == "fwd":
        return without_gradients
    if kind == "fwd+bwd":
        return with_gradients
    # One gradient alone, of a graph that has no other.
    wanted = layer.leaves[:1] if kind == "dX" else layer.leaves[1:]
    for leaf in layer.leaves:
        leaf.requires_grad_(any(leaf is one for one in wanted))
    y = forward()
    for leaf in layer.leaves:
        leaf.requires_grad_()
    return lambda: list(torch.autograd.grad(y, wanted, layer.grad, retain_graph=True))


def _roof(suite: harness.Suite, layer: Layer, *, ways: int) -> float:
    """Count the products, or rows and the packed weights of experts that have any, read and written
    once per direction."""
    experts, n, k = layer.shape
    rows = int(layer.routing.offsets[-1])
    active = int(layer.routing.offsets.diff().count_nonzero())
    packed = sum(t.nbytes for t in layer.packed.operands) * active / experts
    return suite.ceilings.roof(
        flops=ways * 2.0 * rows * n * k,
        bytes=ways * (packed + layer.x.nbytes + layer.grad.nbytes),
    )


if __name__ == "__main__":
    main()
