"""Time each format as its library ships it: one weight's decode, a LoRA linear, a training step.

Layers are what users have: `inductor_q.quantize` makes torchao's and bitsandbytes', PEFT adapts
them (r = 16, bf16). Where a library has no product with the values (torchao's MXTensor;
transformers' FP8Linear quantizes its input), stock multiplies with what the library decodes, and
with GPTQ's formula. All peers hold the same tensors. Of ``int4_g128`` qfuse alone trains;
``intx4_g128`` is torchao's int4 with a byte for each code, through which stock's gradients pass.
``bf16``, where ``--formats`` names it, is not quantized: for products in eight bits. A format that
this machine cannot make is left out, and the reason printed.

- dequantize: ``eager`` and ``inductor`` run the library's function, ``qfuse`` is our op, checked
  bitwise; ``copy`` moves as many bytes as they must.
- linear: forward and backward over 4096 rows, on a CPU over 16, 128 and 512; ``error`` is against
  float64 on the decoded weight.
- step: that of bench_step (8 layers of Qwen3-8B's shapes on a GPU, on a CPU two layers 1024 wide;
  as many tokens as rows), compiled once and untimed; ``fused`` is how many layers the report has
  as fused, ``loss_deviation`` the largest of some steps from eager's.

On a GPU each note says whether qfuse / stock is at most 0.85 and the peak no higher than stock's.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

import inductor_q
from benchmarks import bench_step, harness
from inductor_q import capture, ops, testing
from inductor_q.capture.library import Stored
from inductor_q.loading.linear import PackedLinear

BF16 = torch.bfloat16
PARTS = ("dequantize", "linear", "step")
PEERS = ("copy", *harness.PEERS)
RANK = 16
GOAL = 0.85
SHAPES = {"cuda": [(12_288, 4096), (16_384, 16_384)], "cpu": [(2048, 2048)]}
QUICK = {"cuda": [(12_288, 4096)], "cpu": [(128, 256)]}
QUICK_ROWS = {"cuda": [4096], "cpu": [128]}
ROWS = {"cuda": [4096], "cpu": [16, 128, 512]}  # of the linear layer, and tokens of a step
#: A tile of 128 x 128 has to fit into every projection of a CPU's model.
SMALL = {**bench_step.SMALL, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 256}
SMALL |= {"intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 256}
WIDER = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "head_dim": 128}


class Decoded(nn.Linear):
    """A linear layer that multiplies with what its library decodes of its packed weight."""

    def __init__(self, like: nn.Linear, weight: Tensor, decode: Callable[[Any], Tensor]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.decode = nn.Parameter(weight, requires_grad=False), decode
        self.bias: Any = like.bias

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.decode(self), self.bias)


@dataclass(frozen=True)
class Format:
    """A format as its library makes it.

    make: returns the layer of a linear layer in bfloat16.
    decode: returns the values of such a layer as its library does; None where that has no function.
    ours: returns a layer of the same tensors that qfuse reads, where it is not the same layer.
    untrained: says why stock torch cannot train on it.
    only_gpu: says why a CPU cannot make it.
    dense: whether there is nothing to decode.
    """

    library: str
    make: Callable[[nn.Linear], Any]
    decode: Callable[[Any], Tensor] | None
    ours: Callable[[Any], nn.Module] | None = None
    untrained: str = ""
    only_gpu: str = ""
    dense: bool = False

    def missing(self, device: torch.device) -> str:
        """Say why there are no such layers here; "" where there are."""
        if find_spec(self.library) is None:
            return f"{self.library} is not installed"
        return self.only_gpu if device.type == "cpu" else ""

    def stored(self, layer: Any) -> Stored:
        found = (self.ours(layer), "qweight") if self.ours else (layer, "weight")
        packed = capture.packed_weight(*found)
        assert packed is not None and packed.read is not None, found
        return packed.read()


def _dense(linear: nn.Linear) -> nn.Linear:
    return linear


def _quantized(name: str, linear: nn.Linear) -> nn.Module:
    return inductor_q.quantize(linear, name, progress=False)


def _intx4(linear: nn.Linear) -> nn.Module:
    from torchao import quantization as ao

    config = ao.IntxWeightOnlyConfig(vars(torch)["int4"], ao.PerGroup(128))
    return inductor_q.quantize(linear, config, progress=False)


def _mxfp4(linear: nn.Linear) -> Decoded:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    numbers: Any = vars(torch)["float4_e2m1fn_x2"]
    return Decoded(linear, MXTensor.to_mx(linear.weight.detach(), numbers, 32), _subclass)


def _subclass(layer: Any) -> Tensor:
    values: Tensor = layer.weight.dequantize()
    return values


def _fp8_tiles(linear: nn.Linear) -> Decoded:
    """Quantize as DeepSeek-V3 does: the largest number of a tile becomes float8's largest."""
    n, k = linear.weight.shape
    tiles = linear.weight.detach().float().view(n // 128, 128, k // 128, 128)
    scale = tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    codes = (tiles / scale[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn)
    layer = Decoded(linear, codes, _of_tiles)
    layer.register_buffer("weight_scale_inv", scale)
    return layer


def _of_tiles(layer: Any) -> Tensor:
    """Decode as transformers' Fp8Dequantize; a test compares them."""
    n, k = layer.weight.shape
    tiles = layer.weight.float().view(n // 128, 128, k // 128, 128)
    values: Tensor = (tiles * layer.weight_scale_inv[:, None, :, None]).to(BF16).view(n, k)
    return values


def _loaded(layer: Any) -> PackedLinear:
    """Return the layer that `load_checkpoint` makes of the same tensors."""
    sizes, weight = (layer.out_features, layer.in_features), layer.weight
    if weight.dtype is torch.float8_e4m3fn:
        operands = {"qweight": weight.data, "scale": layer.weight_scale_inv}
        return PackedLinear(operands, "fp8_e4m3_128x128", sizes, layer.bias)
    if weight.dtype is torch.uint8:
        operands = {"qweight": weight.data, "scale": layer.scale, "zero_point": layer.zero_point}
        return PackedLinear(operands, "int4_g128", sizes, layer.bias)
    operands = {"qweight": weight.qdata, "scale": weight.scale.view(torch.uint8)}
    return PackedLinear(operands, "mxfp4", sizes, layer.bias)


def _gptq(linear: nn.Linear) -> Decoded:
    """Quantize 128 neighbours to 16 evenly spaced values, between the least and the largest."""
    groups = linear.weight.detach().float().view(-1, 128)
    low, high = groups.aminmax(dim=1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    codes = (groups / scale + zero).round().clamp(0, 15).byte().view(linear.weight.shape)
    layer = Decoded(linear, codes[:, ::2] | codes[:, 1::2] << 4, _of_groups)
    layer.register_buffer("scale", scale)
    layer.register_buffer("zero_point", zero.byte())
    return layer


def _of_groups(layer: Any) -> Tensor:
    codes = torch.stack([layer.weight & 15, layer.weight >> 4], -1).view(-1, 128)
    values: Tensor = ((codes.float() - layer.zero_point.float()) * layer.scale).to(BF16)
    return values.view(layer.out_features, layer.in_features)


def _bnb(layer: Any) -> Tensor:
    dequantize: Any = testing.bitsandbytes().functional.dequantize_4bit
    values: Tensor = dequantize(layer.weight.data, layer.weight.quant_state)
    return values


def _llm_int8(layer: Any) -> Tensor:
    int8_dequantize: Any = testing.bitsandbytes().functional.int8_vectorwise_dequant
    held = layer.weight if layer.weight.SCB is not None else layer.state  # from the first call on
    values: Tensor = int8_dequantize(held.CB, held.SCB).to(BF16)
    return values


FORMATS = {
    "int4_g128": Format(
        "torchao",
        functools.partial(_quantized, "int4_g128"),
        None,
        untrained="torchao's product with tile-packed int4 has no gradient, and nothing decodes it",
        only_gpu="torchao packs it on a GPU",
    ),
    "intx4_g128": Format("torchao", _intx4, _subclass),
    "fp8_row": Format("torchao", functools.partial(_quantized, "fp8_row"), _subclass),
    "fp8_128x128": Format("transformers", _fp8_tiles, _of_tiles, _loaded),
    "mxfp4": Format("torchao", _mxfp4, _subclass, _loaded),
    "nvfp4": Format("torchao", functools.partial(_quantized, "nvfp4"), _subclass),
    "llm_int8": Format("bitsandbytes", functools.partial(_quantized, "llm_int8"), _llm_int8),
    "nf4": Format("bitsandbytes", functools.partial(_quantized, "nf4"), _bnb),
    "int8_row": Format("torchao", functools.partial(_quantized, "int8"), _subclass),
    "int8_g64": Format("torchao", functools.partial(_quantized, "int8_g64"), _subclass),
    "fp8_e5m2": Format("torchao", functools.partial(_quantized, "fp8_e5m2_tensor"), _subclass),
    "gptq_g128": Format("torch", _gptq, _of_groups, _loaded),
    "bf16": Format("torch", _dense, None, dense=True),
}


PACKED = [name for name, fmt in FORMATS.items() if not fmt.dense]


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=PACKED)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", nargs="+", type=int, metavar="M", help="and tokens of a step")
    parser.add_argument("--layers", type=int, help="default: 8 on a GPU, 2 on CPU")
    parser.add_argument("--loss-steps", type=int, default=5)
    parser.set_defaults(vocab_size=32_000, batch=2)
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_formats", arguments)
    suite.settings |= {"rank": RANK, "adapter_dtype": "bf16", "loss_steps": arguments.loss_steps}
    arguments.rows = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)[suite.device.type]
    formats = {}
    for name in arguments.formats:
        if reason := FORMATS[name].missing(suite.device):
            suite.notes.append(f"without {name}: {reason}")
            harness.console.print(f"[yellow]{suite.notes[-1]}")
        else:
            formats[name] = FORMATS[name]
    run = {"dequantize": _dequantize, "linear": _linear, "step": _step}
    for part in arguments.parts:
        for name, fmt in formats.items():
            if fmt.dense and part == "dequantize":
                continue
            for m in arguments.rows[: 1 if part == "dequantize" else None]:
                torch.compiler.reset()
                gc.collect()
                run[part](suite, arguments, name, fmt, m)
                harness.keep(suite, arguments)
    shown = ("error", "peak_bytes", "fused", "breaks", "loss_deviation")
    harness.finish(suite, arguments, extras=shown)
    return suite


def _random_linear(n: int, k: int, device: torch.device) -> nn.Linear:
    linear = nn.Linear(k, n, bias=False, device=device, dtype=BF16).requires_grad_(False)
    linear.weight.normal_(std=k**-0.5)
    return linear


def _peers(arguments: argparse.Namespace, fmt: Format) -> list[str]:
    """Return the compiled peers, and eager, that can train."""
    peers = [peer for peer in harness.available(arguments.backends) if peer != "copy"]
    return [peer for peer in peers if not fmt.untrained or peer.startswith("qfuse")]


def _compiles(suite: harness.Suite, name: str, peer: str, call: Callable[[], object]) -> bool:
    """Whether the first call ends well; where it is stock's compiler that fails, note the error."""
    try:
        call()
    except (InductorError, TorchDynamoException) as error:
        if peer.startswith("qfuse"):
            raise
        suite.notes.append(f"without {peer} of {name}: {str(error).strip().splitlines()[0]}")
        harness.console.print(f"[yellow]{suite.notes[-1]}")
        return False
    return True


def _note(suite: harness.Suite, case: dict[str, Any], fmt: Format) -> None:
    """Say how qfuse stands to stock in a case, or why stock is not there."""
    ratio = suite.ratio(case, "qfuse", "inductor")
    name = f"{case['part']} {case['format']}"
    if fmt.untrained:
        suite.notes.append(f"{name}: qfuse alone, as {fmt.untrained}")
    if ratio is None:
        return
    note = f"{name}: qfuse / inductor {ratio:.3f}"
    if suite.device.type == "cuda":
        note += f" (goal {GOAL}: {'met' if ratio <= GOAL else 'missed'})"
        rows = [suite.find(case, peer) for peer in ("qfuse", "inductor")]
        ours, stock = (row.extra["peak_bytes"] for row in rows if row is not None)
        note += f", peak {ours / stock:.3f}"
    suite.notes.append(note)


# --- one weight -----------------------------------------------------------------------------------


def _dequantize(
    suite: harness.Suite, arguments: argparse.Namespace, name: str, fmt: Format, _: int
) -> None:
    device = suite.device
    for n, k in (QUICK if arguments.quick else SHAPES)[device.type]:
        layer = fmt.make(_random_linear(n, k, device))
        operands, format, shape = fmt.stored(layer)
        moved = sum(t.nbytes for t in operands) + 2 * n * k
        source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        expected = fmt.decode(layer) if fmt.decode else None
        calls: dict[str, Callable[[], Any]] = {}
        for peer in harness.available(arguments.backends):
            if peer == "copy":
                calls[peer] = functools.partial(target.copy_, source)
                continue
            if peer.startswith("qfuse"):
                calls[peer] = functools.partial(ops.dequantize, operands, format, shape, BF16)
            elif fmt.decode is None:
                continue
            else:
                calls[peer] = functools.partial(harness.compile_as(peer, fmt.decode), layer)
            if not _compiles(suite, name, peer, calls[peer]):
                del calls[peer]
            elif expected is not None and not torch.equal(calls[peer](), expected):
                sys.exit(f"{peer} decodes {name} to other values than {fmt.library}: not timed")
        with torch.no_grad():
            timings = harness.time_kernels(calls, device, rounds=arguments.rounds or 5)
        case = {"part": "dequantize", "format": name, "size": f"{n}x{k}"}
        extra = {peer: {"gbps": moved / t.median / 1e9} for peer, t in timings.items()}
        suite.add(case, timings, roof=suite.ceilings.roof(bytes=moved), extra=extra)


# --- one linear layer -----------------------------------------------------------------------------


def _adapted(model: nn.Module, name: str, targets: Sequence[str]) -> nn.Module:
    """Give the layers of these names PEFT's adapters in bfloat16."""
    import peft

    model.is_loaded_in_8bit = name == "llm_int8"  # type: ignore[assignment]
    lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(targets))
    peft.inject_adapter_in_model(lora, model)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.data = parameter.data.to(BF16)
    return model.train()


def _twin(model: nn.Module, fmt: Format) -> nn.Module:
    """Return the model that qfuse is given: of the same tensors, with layers that it reads."""
    if fmt.ours is None:
        return model
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(each): each for each in shared})
    for parent in list(twin.modules()):
        for key, child in list(parent.named_children()):
            if isinstance(child, Decoded):
                setattr(parent, key, fmt.ours(child))
    return twin


def _linear(
    suite: harness.Suite, arguments: argparse.Namespace, name: str, fmt: Format, m: int
) -> None:
    device = suite.device
    n, k = (QUICK if arguments.quick else SHAPES)[device.type][0]
    layer = fmt.make(_random_linear(n, k, device))
    stored = None if fmt.dense else fmt.stored(layer)
    size = layer.weight.nbytes if stored is None else sum(t.nbytes for t in stored.operands)
    values = layer.weight.detach() if stored is None else ops.dequantize(*stored, BF16)
    model = _adapted(nn.Sequential(OrderedDict(proj=layer)), name, ["proj"])
    x = torch.randn(m, k, device=device, dtype=BF16, requires_grad=True)
    grad = torch.randn(m, n, device=device, dtype=BF16)
    inputs = [x, *testing.adapter_parameters(model)]
    for adapter in inputs[1:]:  # B is zero so far, and the gradient of A with it
        adapter.data.normal_(std=adapter.shape[1] ** -0.5)

    def run(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = call(x)
        return (y.detach(), *torch.autograd.grad(y, inputs, grad))

    a, b = (p.detach().double() for p in inputs[1:])
    rows, dy = x.detach().double(), grad.double()
    weight = values.double() + 2 * b @ a
    exact = (rows @ weight.t(), dy @ weight, 2 * (dy @ b).t() @ rows, 2 * dy.t() @ (rows @ a.t()))
    calls: dict[str, Callable[[], object]] = {}
    extra: dict[str, dict[str, Any]] = {}
    twin = _twin(model, fmt)
    with torch.no_grad():
        model(x)  # LLM.int8 moves its codes in its first call, and would be compiled once more
    for peer in _peers(arguments, fmt):
        held = twin if peer.startswith("qfuse") else model
        call = functools.partial(run, harness.compile_as(peer, held))
        if not _compiles(suite, name, peer, call):
            continue
        calls[peer], got = call, call()
        errors = [testing.relative_error(one, y) for one, y in zip(got, exact, strict=True)]
        extra[peer] = {"error": max(errors), "errors": errors}
    del weight, exact, values
    for peer, each in calls.items():  # after all that compiling leaves behind
        extra[peer]["peak_bytes"] = harness.peak_bytes(each, device)
    timings = harness.time_kernels(calls, device, rounds=arguments.rounds or 5)
    product = 2 * m * n * k + 2 * m * RANK * (n + k)
    roof = suite.ceilings.roof(
        flops=2.0 * product + 2 * m * RANK * (n + k), bytes=2 * size + 2 * m * (2 * n + 3 * k)
    )
    case = {"part": "linear", "format": name, "size": f"{n}x{k}x{m}"}
    suite.add(case, timings, roof=roof, extra=extra)
    _note(suite, case, fmt)


# --- one training step ----------------------------------------------------------------------------


def _model(config: Any, name: str, fmt: Format, device: torch.device, seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    with torch.device(device):
        from_config: Any = transformers.AutoModelForCausalLM.from_config
        model = from_config(config, dtype=BF16, attn_implementation="sdpa").requires_grad_(False)
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if key in testing.PROJECTIONS:
                setattr(parent, key, fmt.make(child))
    return _adapted(model, name, testing.PROJECTIONS)


def _forward_backward(step: bench_step.Step, ids: Tensor) -> None:
    bench_step._backward(step(ids))


def _step(
    suite: harness.Suite, arguments: argparse.Namespace, name: str, fmt: Format, m: int
) -> None:
    device, on_gpu = suite.device, suite.device.type == "cuda"
    layers = arguments.layers or (8 if on_gpu else 1 if arguments.quick else 2)
    length = m // arguments.batch
    if on_gpu:
        config = testing.qwen3_8b_config(layers, vocab_size=arguments.vocab_size)
    else:
        sizes = {**SMALL, **({} if arguments.quick else WIDER), "num_hidden_layers": layers}
        config = testing.tiny_qwen3_config(**sizes)
    model = _model(config, name, fmt, device, arguments.seed)
    twin, start = _twin(model, fmt), testing.adapter_state(model)
    data = list(bench_step._batches(config, arguments, length, device))
    with torch.no_grad():  # before anything is compiled, as in _linear; int4 has no other of eager
        expected = [float(bench_step.loss_of(model)(data[0]))]
    extra: dict[str, dict[str, Any]] = {}
    losses: dict[str, list[float]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for peer in _peers(arguments, fmt):
        held = twin if peer.startswith("qfuse") else model
        step = bench_step.loss_of(harness.compile_as(peer, held))
        with testing.CompileTrace() as trace:
            first = functools.partial(_forward_backward, step, data[0])
            if not _compiles(suite, name, peer, first):
                continue
        extra[peer] = {} if peer == "eager" else {"breaks": len(trace.breaks)}
        if peer.startswith("qfuse"):
            judged = [v for r in inductor_q.backend.reports() for v in r.verdicts().values()]
            extra[peer]["fused"] = f"{sum(v.is_accepted for v in judged)} of {len(judged)}"
        testing.load_adapter_state(model, start)
        optimizer = bench_step.adamw(model)
        losses[peer] = [float(bench_step.full_step(optimizer, step, ids)()) for ids in data]
        steps[peer] = bench_step.full_step(optimizer, step, data[0])
    for peer, values in losses.items():
        pairs = zip(values, losses.get("eager", expected), strict=False)
        deviation = max(abs(one - other) / abs(other) for one, other in pairs)
        extra[peer] |= {"losses": values, "loss_deviation": deviation}
    for peer, call in steps.items():  # after all that compiling leaves behind
        extra[peer]["peak_bytes"] = harness.peak_bytes(call, device)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    timings = harness.time_steps(steps, device, rounds=rounds, per_round=5 if on_gpu else 2)
    flops, moved = bench_step._work(config, arguments.batch * length, length)
    case = {
        "part": "step",
        "format": name,
        "size": f"{layers} layers, {arguments.batch} x {length}",
    }
    suite.add(case, timings, roof=suite.ceilings.roof(flops=flops, bytes=moved), extra=extra)
    _note(suite, case, fmt)


if __name__ == "__main__":
    main()
