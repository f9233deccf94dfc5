"""Time a short fine-tuning run: 300 steps of QLoRA under stock Inductor and under qfuse.

``broken`` is stock Inductor with the adapted linears outside of the graph, as when dequantization
cannot be traced. It stands for axolotl's main branch before its pull request 3677 of June 2026
(with bitsandbytes 0.49.1), against which that request's gain was measured. There
``axolotl/kernels/quantize.py`` calls bitsandbytes' C functions through ctypes; Dynamo cannot trace
that, and inside of an autograd.Function it cannot break either, so it leaves its graph where
``axolotl/kernels/lora.py`` calls one: LoRA_MLP, LoRA_QKV, LoRA_O. Here an MLP of adapted linears
runs in eager as a whole and every other adapted linear by itself, with the same PEFT and
bitsandbytes as the other peers. What differs from there: q, k and v are three breaks, not one; what
is left out stays in eager, where Dynamo tried again inside of axolotl's functions and broke at each
dequantization; and PEFT's adapters are more and smaller kernels than those functions.

A GPU gets the shapes of Qwen3.5-0.8B's text model (24 layers, 18 of them gated delta nets, 248,320
tokens of vocabulary), NF4 with double quantization on every linear but the head, LoRA (r = 16) on
the projections of attention and MLP, AdamW, 2 x 512 tokens of a text as bytes. A CPU gets a toy.

All peers train the same module from the same adapters on the same batches, in one order and then in
the other. A round's time is that of all its steps; compiling and recording CUDA graphs are over
before it. ``compile_s`` is the first step, with empty caches.

What is compiled, for every peer alike (``--compile``):

- ``blocks``: each decoder layer by itself, and the loss. Layers of a kind share a graph, so there
  are three to compile. Embedding, last norm and head run in eager.
- ``whole``: the model in one graph. Dynamo unrolls the scan of the delta net over its chunks of 64
  tokens: 512 tokens make 390 nodes per layer in Dynamo's graph and 1,570 after autograd (attention:
  230 and 690), 28,000 in all, where the blocks have 2,300. That takes minutes per peer to compile.

Without flash-linear-attention a delta net solves a triangular system, or, in an export, by 63 steps
written out. torch 2.11 reports every trace as an export. Here it reports none, because a layer
would otherwise have 4,130 nodes in place of 1,570, and run them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters

from benchmarks import bench_step, harness
from inductor_q import testing

TEXT = harness.ROOT / "examples" / "data" / "harbour.txt"
MODELING = "transformers.models.qwen3_5.modeling_qwen3_5"

#: Stock Inductor, adapted linears outside of the graph.
BROKEN = "broken"

Enter = Callable[[], Any]


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=("inductor", "qfuse", BROKEN))
    parser.add_argument("--steps", type=int, help="default: 300 on a GPU, 10 on CPU")
    parser.add_argument("--layers", type=int, help="default: 24 on a GPU, 4 on CPU")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, help="default: 512 on a GPU, 64 on CPU")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapter-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--compile", choices=("blocks", "whole"), default="blocks")
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_recipe", arguments)
    on_gpu = suite.device.type == "cuda"
    steps = arguments.steps or (300 if on_gpu else 3 if arguments.quick else 10)
    length = arguments.seq_len or (512 if on_gpu else 64)
    layers = arguments.layers or (24 if on_gpu else 2 if arguments.quick else 4)
    config = _config(layers, on_gpu=on_gpu)
    suite.settings |= {
        "steps": steps,
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "batch": arguments.batch,
        "seq_len": length,
        "rank": arguments.rank,
        "adapter_dtype": arguments.adapter_dtype,
        "compile": arguments.compile,
    }
    peers = harness.available(arguments.backends)
    model = _model(arguments, config, suite.device)
    data = list(
        testing.batches(
            TEXT.read_text(encoding="utf-8"),
            testing.ByteTokenizer(),
            batch_size=arguments.batch,
            seq_len=length,
            steps=steps,
            seed=arguments.seed,
            device=suite.device,
        )
    )
    whole = arguments.compile == "whole"
    extra: dict[str, dict[str, Any]] = {peer: {} for peer in peers}
    put = _exits(model)
    entry = functools.partial(_entry, model=model, put=put, whole=whole)
    with _tracing(peers):
        suite.settings |= _count(entry, data[0])
        if BROKEN in peers:
            suite.settings[BROKEN] = _count(functools.partial(entry, outside=True), data[0])
            calls = sum(isinstance(module, Outside) for module in model.modules())
            suite.settings[BROKEN] |= {"calls_outside_of_the_graph": calls}  # a forward
        if not arguments.quick:
            compiled = list(dict.fromkeys(_backend(peer) for peer in peers if peer != "eager"))
            bench_step.warm_compiler(arguments, compiled, suite.device)
        torch.compiler.reset()
        entries = {
            peer: entry(
                functools.partial(harness.compile_as, _backend(peer)), outside=peer == BROKEN
            )
            for peer in peers
        }
        _compile(suite, model, entries, data[0], extra)
        runs = _rounds(suite, model, entries, data, rounds=arguments.rounds or 2)
    timings = _compare(suite, runs, extra)
    case = {"model": "qwen3_5", "layers": layers, "tokens": f"{arguments.batch} x {length}"}
    suite.add(case, timings, roof=_roof(suite, model, config, data[0]), extra=extra)
    shown = ("compile_s", "peak_bytes", "final_loss", "loss_deviation", "breaks", "graphs")
    harness.finish(suite, arguments, extras=shown)
    return suite


# --- the model ------------------------------------------------------------------------


def _config(layers: int, *, on_gpu: bool) -> Any:
    if on_gpu:
        return testing.qwen3_5_0_8b_config(layers)
    return testing.tiny_qwen3_5_config(
        num_hidden_layers=layers, layer_types=testing.qwen3_5_layer_types(layers)
    )


def _model(arguments: argparse.Namespace, config: Any, device: torch.device) -> Any:
    model = testing.qlora_model(
        config,
        r=arguments.rank,
        adapter_dtype=torch.bfloat16 if arguments.adapter_dtype == "bf16" else None,
        device=device,
        seed=arguments.seed,
    )
    if arguments.compile == "blocks":
        # PEFT's prepare_model_for_kbit_training does so too. The first layer is then like the
        # others: with an input that needs no gradient it would have a graph of its own.
        model.enable_input_require_grads()
    return model


# --- what is compiled -----------------------------------------------------------------


@contextlib.contextmanager
def _tracing(peers: Sequence[str]) -> Iterator[None]:
    """Set up Dynamo and the model in the way under which all peers are compiled."""
    # The code of a layer is compiled for every kind of layer and every peer. What passes the limit
    # would run in eager from then on; here it is an error.
    limits = dynamo_config.patch(
        recompile_limit=8 + 4 * len(peers), fail_on_recompile_limit_hit=True
    )
    # transformers without the name has no second way of solving either.
    solving = mock.patch.object(
        importlib.import_module(MODELING), "is_torchdynamo_exporting", _no, create=True
    )
    with limits, solving:
        yield


def _no() -> bool:
    return False


def _backend(peer: str) -> str:
    # An option at its default makes the backends differ. Of equal ones Dynamo would run the code of
    # one for the other: its guards up to a break do not say which linears come after it.
    return "inductor[triton.cudagraphs=False]" if peer == BROKEN else peer


class Outside(torch.nn.Module):
    """Keep a module from being traced by Dynamo: its call is a graph break."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def _eager(self, x: torch.Tensor) -> Any:
        return self.inner(x)

    forward = torch.compiler.disable(_eager, reason="an adapted linear outside of the graph")


def _exits(model: Any) -> Callable[[bool], None]:
    """Make a function that puts what is adapted outside of every graph (True), or back (False).

    It moves the outermost modules whose parameters all belong to adapted linears. They are wrapped
    in place of a forward that is disabled, so that all layers share the code of one class.
    """
    lora = importlib.import_module("peft").tuners.lora.LoraLayer
    layers = model.get_base_model().model.layers
    linears = [module for module in layers.modules() if isinstance(module, lora)]
    held = {parameter for linear in linears for parameter in linear.parameters()}
    found: list[tuple[torch.nn.Module, str, torch.nn.Module, Outside]] = []

    def visit(parent: torch.nn.Module) -> None:
        for name, module in list(parent.named_children()):
            own = set(module.parameters())
            if own and own <= held:
                found.append((parent, name, module, Outside(module)))
            else:
                visit(module)

    visit(layers)

    def put(outside: bool) -> None:
        for parent, name, inside, wrapped in found:
            setattr(parent, name, wrapped if outside else inside)

    return put


def _entry(
    compile: Callable[..., Any],
    *,
    model: Any,
    put: Callable[[bool], None],
    whole: bool,
    outside: bool = False,
) -> Enter:
    """Make a function that gives the model as ``compile`` made it.

    The layers are left as they are until another peer enters.
    """
    base = model.get_base_model()
    layers = base.model.layers
    plain = [types.MethodType(type(layer).forward, layer) for layer in layers]
    if whole:
        call, forwards, loss = compile(model), plain, _plain_loss(base)
    else:
        call, forwards = model, [compile(forward) for forward in plain]
        loss = compile(_plain_loss(base))

    def enter() -> Any:
        put(outside)
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward
        base.loss_function = loss
        return call

    return enter


def _plain_loss(base: Any) -> Any:
    return importlib.import_module("transformers.loss.loss_utils").LOSS_MAPPING[base.loss_type]


def _count(entry: Callable[..., Enter], ids: torch.Tensor) -> dict[str, Any]:
    """Count graphs, nodes and breaks of what Dynamo captures, in which no backend has a part."""
    nodes: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    compile = functools.partial(torch.compile, backend=count, dynamic=False)
    with testing.CompileTrace() as trace:
        entry(compile)()(input_ids=ids, labels=ids)
    return {
        "nodes": nodes,
        "breaks": len(trace.breaks),
        "break_reasons": sorted({harness.portable(reason)[:400] for reason in trace.breaks}),
    }


def _compile(
    suite: harness.Suite,
    model: Any,
    entries: dict[str, Enter],
    ids: torch.Tensor,
    extra: dict[str, dict[str, Any]],
) -> None:
    for peer, enter in entries.items():
        before = counters["stats"]["unique_graphs"]
        with testing.fresh_cache():
            step = bench_step.full_step(bench_step.adamw(model), bench_step.loss_of(enter()), ids)
            first = harness.first_call(step, suite.device)
        harness.console.print(f"{peer}: first step {harness.duration(first)}", markup=False)
        extra[peer] |= {"first_step_s" if peer == "eager" else "compile_s": first}
        counted = suite.settings[BROKEN] if peer == BROKEN else suite.settings
        extra[peer] |= {
            "graphs": counters["stats"]["unique_graphs"] - before,
            "breaks": 0 if peer == "eager" else counted["breaks"],
        }


# --- the runs -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Record what one peer did in one round."""

    losses: list[float]
    seconds: float  # per step
    peak: int | None


def _rounds(
    suite: harness.Suite,
    model: Any,
    entries: dict[str, Enter],
    data: Sequence[torch.Tensor],
    *,
    rounds: int,
) -> dict[str, list[_Run]]:
    start = testing.adapter_state(model)
    runs: dict[str, list[_Run]] = {peer: [] for peer in entries}
    for index in range(rounds):
        order = list(entries)[:: -1 if index % 2 else 1]
        for peer in order:
            call = entries[peer]()
            # CUDA graphs take a step that warms up and one that records. The other steps warm up
            # what a neighbour left cold.
            _train(model, call, start, data[:5])
            runs[peer].append(_train(model, call, start, data))
            rate = 1 / runs[peer][-1].seconds
            harness.console.print(f"round {index + 1}, {peer}: {rate:.2f} steps/s", markup=False)
        rates = [f"{peer} {1 / runs[peer][-1].seconds:.2f}" for peer in order]
        suite.notes.append(f"round {index + 1}, steps/s: {', then '.join(rates)}")
    return runs


def _train(
    model: Any, call: Any, start: Sequence[torch.Tensor], data: Sequence[torch.Tensor]
) -> _Run:
    device = data[0].device
    testing.load_adapter_state(model, start)
    optimizer, step = bench_step.adamw(model), bench_step.loss_of(call)
    runs = [bench_step.full_step(optimizer, step, ids) for ids in data]
    losses = torch.empty(len(runs), device=device)  # a copy: a CUDA graph writes to its own again
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    harness.synchronize(device)
    begin = time.perf_counter()
    for index, run in enumerate(runs):
        torch.compiler.cudagraph_mark_step_begin()
        losses[index] = run()
    harness.synchronize(device)
    seconds = (time.perf_counter() - begin) / len(runs)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return _Run(losses.tolist(), seconds, peak)


def _compare(
    suite: harness.Suite, runs: dict[str, list[_Run]], extra: dict[str, dict[str, Any]]
) -> dict[str, harness.Timing]:
    """Compare losses and rates with stock Inductor's, or, without it, the first peer's."""
    stock = next((peer for peer in runs if peer.startswith("inductor")), next(iter(runs)))
    for peer, own in runs.items():
        rates = [1 / run.seconds for run in own]
        ratios = [other.seconds / run.seconds for run, other in zip(own, runs[stock], strict=True)]
        losses = own[0].losses
        extra[peer] |= {
            "steps_per_s": rates,
            "speedup": ratios,
            "peak_bytes": own[0].peak,
            "first_loss": losses[0],
            "final_loss": losses[-1],
            "losses": losses[:: max(1, len(losses) // 30)],
            "loss_deviation": _deviation(losses, runs[stock][0].losses),
            "round_deviation": max(_deviation(losses, run.losses) for run in own),
        }
        for other in dict.fromkeys((stock, BROKEN)):
            if other in runs and peer not in (stock, other):
                suite.notes.append(_ratios(peer, own, other, runs[other]))
    return {peer: harness.Timing.of([run.seconds for run in own]) for peer, own in runs.items()}


def _ratios(peer: str, own: Sequence[_Run], other: str, its: Sequence[_Run]) -> str:
    ratios = [slow.seconds / fast.seconds for fast, slow in zip(own, its, strict=True)]
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    return f"{peer} / {other}: steps/s {sum(ratios) / len(ratios):.3f} (by round: {each})"


def _deviation(losses: Sequence[float], to: Sequence[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(losses, to, strict=True))


def _roof(suite: harness.Suite, model: Any, config: Any, ids: torch.Tensor) -> float:
    """Count products of forward and input gradient; packed weights and head are read twice.

    The delta rule is left out, so this is a lower bound.
    """
    quantized = testing.bitsandbytes().nn.Linear4bit
    linears = [m for m in model.modules() if isinstance(m, quantized)]
    held = sum(linear.in_features * linear.out_features for linear in linears)
    head = config.vocab_size * config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    causal = config.layer_types.count("full_attention") * 7 * ids.shape[1] * heads
    return suite.ceilings.roof(
        flops=ids.numel() * (4 * (held + head) + causal),
        bytes=2 * held * (0.5 + 1 / 64) + 2 * 2 * head,
    )


if __name__ == "__main__":
    main()
