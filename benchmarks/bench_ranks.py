"""Time a QLoRA step on several ranks, under DDP and FSDP2: ``torchrun --nproc-per-node 2 -m
benchmarks.bench_ranks``.

A GPU gets 8 layers of Qwen3-8B from its configuration and 1 x 2048 tokens a rank, a CPU a toy over
gloo. FSDP2 shards each decoder layer, then the model; the packed weights are stored in bfloat16.
``fsdp2-parts`` shards the embeddings, and the last norm with the head, by themselves too, as
torchtitan does: layers then compute while the head is gathered. ``fsdp2-ahead`` also asks for each
layer's weights before the layer in front of it is called. ``fsdp2-kept`` keeps gathered weights
from forward to backward. ``fsdp2-packed`` shards of a layer the packed weights alone: its adapters
and norms are whole on each rank, and one all-reduce behind backward averages their gradients.
``fsdp2-packed-kept`` is both, and ``fsdp2-packed-kept-parts`` that and ``fsdp2-parts``.
What is compiled is each layer, or under DDP with ``--regions model`` all of the model: by
``inductor_q.compile`` for ``qfuse``, by torch.compile otherwise. A step is forward and backward.
``--recipe`` takes a step that people run instead of the bare one (``benchmarks/recipes.py``).
Peers come one after the other, so that a peak is of one model alone, and then once more in the
reverse order, since the host's speed drifts within a process: a step's time is the median over both
runs. ``inductor`` is stock Inductor behind our capture of bitsandbytes' gathered weights, without
which it breaks at each linear layer under FSDP2.

``--wraps experts`` takes layers of Qwen3-30B-A3B with LoRA on attention and experts, of which each
rank keeps its share (``experts.shard``), beside DDP for all else; ``experts-ddp`` is the same model
with all experts on each rank. In ``experts-chosen`` a token goes only to ranks that have its
experts, as it does where ranks are more than choices, so that the host waits for the device.
Every peer has qfuse's experts there, eager and stock Inductor too.

``exposed`` is the time per step in which a rank's GPU runs NCCL's kernels and no others, ``nccl``
that of all of them. ``host`` is the time until the host has issued a step, ``calls`` are what it
asks of CUDA for that, and ``calls_s`` the time inside of them. ``recorded`` are the CUDA graphs of
all steps, and ``late`` those of timed ones: none, where addresses stay. ``--traces`` keeps what
torch's profiler saw of rank 0, a file a peer. ``link_gbps`` is the
rate at which a rank receives in a large all-gather, ``built_bytes`` what a rank has
allocated before the first step; what was allocated before the model is left out of both peaks.

``--large`` takes some steps of a model in the shape of Llama-3-70B (80 layers, gradient
checkpointing, AdamW), which is packed layer by layer, so that no rank ever holds all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import inductor_q
from benchmarks import bench_step, harness
from benchmarks.bench_moe_model import QWEN3_30B_A3B, moe_model
from benchmarks.peers import peer_options
from benchmarks.recipes import RECIPES
from inductor_q import testing
from inductor_q.experts import shard
from inductor_q.ops import exchange

LARGE = {
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
}

TIMES = ("first_s", "host_s", "nccl_s", "exposed_s", "calls_s")
SHOWN = (
    *TIMES,
    "calls",
    "recorded",
    "late",
    "peak_bytes",
    "breaks",
    "graphs",
    "fused",
    "loss",
)

#: How the weights of a model are sharded.
SHARDED = (
    "fsdp2",
    "fsdp2-parts",
    "fsdp2-ahead",
    "fsdp2-kept",
    "fsdp2-packed",
    "fsdp2-packed-kept",
    "fsdp2-packed-kept-parts",
)

#: Steps that torch's profiler sees, and bytes of the all-gather that tells the link's rate.
PROFILED = 3
LINK_BYTES = 2**28

#: What a model on meta gets: weights of adapters and of embeddings are small, norms are one.
SCALE = 0.02


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__)
    wraps = ("ddp", *SHARDED, "experts", "experts-chosen", "experts-ddp")
    parser.add_argument("--wraps", nargs="+", choices=wraps, default=["ddp", "fsdp2"])
    parser.add_argument("--regions", choices=("layers", "model"), default="layers")
    parser.add_argument("--recipe", choices=RECIPES, default="benchmark")
    parser.add_argument("--layers", type=int, help="default: 8 on a GPU, 2 on CPU; --large: 80, 2")
    parser.add_argument("--vocab", type=int, help="default: that of the model")
    parser.add_argument("--seq-len", type=int, help="default: 2048 on a GPU, 32 on CPU")
    parser.add_argument("--steps", type=int, help="timed steps a peer; default: 12, and 5 if large")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--traces", type=Path, help="folder for the profiler's traces of rank 0")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda":
        arguments.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(arguments.device)
    dist.init_process_group("gloo" if arguments.device == "cpu" else "nccl")
    try:
        harness.console.quiet = dist.get_rank() > 0
        warnings.filterwarnings("ignore", category=FutureWarning)
        suite = harness.start("bench_ranks", arguments)
        suite.settings |= {"ranks": dist.get_world_size(), "regions": arguments.regions}
        suite.settings["recipe"] = arguments.recipe
        if suite.device.type == "cuda":
            suite.settings["link_gbps"] = _link_gbps(suite.device)
        # Stock Inductor's graph of experts that are shared out stays whole by the second, as ours.
        with dynamo_config.patch(recompile_limit=64, capture_dynamic_output_shape_ops=True):
            if arguments.large:
                _large(suite, arguments)
            else:
                for wrap in arguments.wraps:
                    with _chosen() if wrap == "experts-chosen" else contextlib.nullcontext():
                        _compare(suite, arguments, wrap)
                    if dist.get_rank() == 0:
                        harness.keep(suite, arguments)
        if dist.get_rank() == 0:
            harness.finish(suite, arguments, extras=SHOWN)
    finally:
        harness.console.quiet = False
        dist.destroy_process_group()
    return suite


def _compare(suite: harness.Suite, arguments: argparse.Namespace, wrap: str) -> None:
    on_gpu = suite.device.type == "cuda"
    layers = arguments.layers or (8 if on_gpu else 2)
    sizes = {"vocab_size": arguments.vocab} if arguments.vocab else {}
    if is_moe := wrap.startswith("experts"):
        # a toy's experts of whole blocks of nested scales
        toy = {"hidden_size": 128, "moe_intermediate_size": 128}
        sizes = {**(QWEN3_30B_A3B if on_gpu else toy), **sizes}
        make = testing.tiny_qwen3_moe_config
    else:
        make = testing.qwen3_8b_config if on_gpu else testing.tiny_qwen3_config
    config = make(num_hidden_layers=layers, **sizes)
    recipe = RECIPES[arguments.recipe]
    ids = _ids(config.vocab_size, arguments.seq_len or (2048 if on_gpu else 32), suite.device)
    samples: dict[str, list[float]] = {}
    extra: dict[str, dict[str, Any]] = {}
    peers = harness.available(arguments.backends)
    for peer in [*peers, *reversed(peers)]:
        before = _allocated(suite.device)
        if is_moe:
            model = moe_model(config, suite.device, recipe, packed=True, adapts_experts=True)
        else:
            model = testing.qlora_model(
                config,
                quant_storage=torch.bfloat16,
                adapter_dtype=recipe.adapter_dtype,
                dropout=recipe.dropout,
                prepare=recipe.prepared,
                randomize_adapters=True,
                device=suite.device,
                seed=arguments.seed,
            )
            bench_step.checkpoint(model, recipe)
        if wrap in ("experts", "experts-chosen"):
            shard(model)
        call = _parallel(model, wrap, peer, arguments.regions, suite.device)
        small = _small(model) if "packed" in wrap else []

        forward = bench_step.loss_of(call, recipe)
        trained = [p for p in model.parameters() if p.requires_grad]

        def step(forward: Any = forward, small: Any = small, trained: Any = trained) -> Any:
            loss: torch.Tensor = forward(ids)
            loss.backward()
            _average([p.grad for p in small if p.grad is not None])
            for parameter in trained:  # as an optimizer, which looks at no module
                parameter.grad = None
            return loss

        trace = _trace_file(arguments.traces, wrap, peer)
        steps = arguments.steps or 12
        found, told = _time(step, model, steps, suite.device, before, trace)
        samples[peer] = samples.get(peer, []) + found
        extra[peer] = _together(extra[peer], told) if peer in extra else told
        del step, call, forward, model, small, trained
        _forget()
    timings = {peer: harness.Timing.of(found) for peer, found in samples.items()}
    suite.add({"wrap": wrap, "layers": layers, "tokens": ids.numel()}, timings, extra=extra)


def _chosen() -> AbstractContextManager[Any]:
    """Send tokens only to ranks that have their experts, however few the ranks are."""
    return mock.patch.object(exchange, "is_gathered", lambda top_k, ranks: False)


def _together(first: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Return what the first run of a peer told, with the mean of both runs' times of a step."""
    steps = {name for name in TIMES if name != "first_s" and name in first}
    return {**first, **{name: (first[name] + again[name]) / 2 for name in steps}}


def _parallel(
    model: Any, wrap: str, peer: str, regions: str, device: torch.device
) -> Callable[..., Any]:
    """Return what calls `model` on this rank, as `peer` runs it."""
    is_sharded = wrap.startswith("fsdp2")
    whole = not is_sharded and regions == "model"
    call: Any = model
    if is_sharded:
        _shard(model, wrap)
    else:
        devices = [device.index] if device.type == "cuda" else None
        call = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    if whole and not peer.startswith(("eager", "qfuse")):
        call = harness.compile_as(peer, call)
    else:
        _compile(model, peer, "model" if whole else "layers")
    return lambda **batch: call(**batch)


def _compile(model: Any, peer: str, regions: Literal["layers", "model"]) -> None:
    """Compile a model in place, as somebody does who uses the peer by hand."""
    if peer.startswith("qfuse"):
        inductor_q.compile(model, regions=regions, options=peer_options(peer))
    elif peer != "eager":
        for part in _layers(model):
            part._compiled_call_impl = harness.compile_as(peer, part._call_impl)


def _shard(model: Any, wrap: str) -> None:
    """Shard each layer and then the model, as `wrap` says."""
    mesh = dist.device_mesh.init_device_mesh(_device_type(model), (dist.get_world_size(),))
    left_out = set(_small(model)) if "packed" in wrap else None
    for layer in _layers(model):
        kept = "kept" in wrap
        fully_shard(layer, mesh=mesh, reshard_after_forward=not kept, ignored_params=left_out)
    if wrap.endswith(("parts", "ahead")):
        _shard_ends(model.get_base_model(), mesh)
    fully_shard(model, mesh=mesh, ignored_params=left_out)
    if wrap == "fsdp2-ahead":
        for layer, following in itertools.pairwise(_layers(model)):
            layer.set_modules_to_forward_prefetch([following])


def _shard_ends(base: Any, mesh: dist.device_mesh.DeviceMesh) -> None:
    """Shard the embeddings, and the last norm with the head, which backward needs at once."""
    fully_shard(base.model.embed_tokens, mesh=mesh)
    fully_shard([base.model.norm, base.lm_head], mesh=mesh, reshard_after_forward=False)


def _small(model: Any) -> list[nn.Parameter]:
    """Return what each rank keeps whole of the layers, where only packed weights are sharded."""
    packed = testing.bitsandbytes().nn.Params4bit
    return [p for part in _layers(model) for p in part.parameters() if not isinstance(p, packed)]


def _average(gradients: list[torch.Tensor]) -> None:
    """Give all ranks the mean of their gradients, by one all-reduce."""
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(
            gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
        )


def _device_type(model: nn.Module) -> str:
    return next(p.device.type for p in model.parameters() if p.device.type != "meta")


def _layers(model: Any) -> list[Any]:
    found: list[Any] = list(model.get_base_model().model.layers)
    return found


def _ids(vocab: int, length: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, vocab, (1, length), generator=generator).to(device)


def _forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- measuring --------------------------------------------------------------------------


def _time(
    step: Callable[[], torch.Tensor],
    model: nn.Module,
    steps: int,
    device: torch.device,
    before: int,
    trace: Path | None = None,
) -> tuple[list[float], dict[str, Any]]:
    """Return the seconds of steps, each from a barrier to the end of this rank's work, and more.

    `before` are the bytes that the device had allocated when there was no model; `trace` is the
    file for what the profiler sees.
    """
    counters.clear()
    extra: dict[str, Any] = {"built_bytes": _allocated(device) - before}
    recorded = 0

    def count(compiled: CallbackArgs) -> None:
        nonlocal recorded
        recorded += compiled.callback_trigger is CallbackTrigger.CUDAGRAPH_RECORDING

    callback_handler.register_start_callback(count)
    start = time.perf_counter()
    step()
    harness.synchronize(device)
    extra["first_s"] = time.perf_counter() - start
    for _ in range(2):
        step()
    recorded_early = recorded
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    samples, issued = [], []
    for _ in range(steps):
        dist.barrier()
        harness.synchronize(device)
        start = time.perf_counter()
        loss = step()
        issued.append(time.perf_counter() - start)
        harness.synchronize(device)
        samples.append(time.perf_counter() - start)
    callback_handler.remove_start_callback(count)
    if recorded:
        extra |= {"recorded": recorded, "late": recorded - recorded_early}
    extra["host_s"] = statistics.median(issued)
    if device.type == "cuda":
        extra["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        extra |= _profiled(step, device, trace)
    extra |= {
        "breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "loss": loss.item(),
    }
    told = inductor_q.report(model)
    if told.graphs:
        extra["fused"] = f"{told.fused} of {len(told.layers)}"
    return samples, extra


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _link_gbps(device: torch.device) -> float:
    """Return the GB/s that a rank receives from the others in an all-gather."""
    ranks = dist.get_world_size()
    own = torch.ones(LINK_BYTES // ranks, dtype=torch.uint8, device=device)
    every = torch.empty(ranks * own.numel(), dtype=torch.uint8, device=device)
    samples = []
    for _ in range(8):
        dist.barrier()
        harness.synchronize(device)
        start = time.perf_counter()
        dist.all_gather_into_tensor(every, own)
        harness.synchronize(device)
        samples.append(time.perf_counter() - start)
    return 1e-9 * (every.numel() - own.numel()) / statistics.median(samples)


def _trace_file(folder: Path | None, wrap: str, peer: str) -> Path | None:
    if folder is None or dist.get_rank() > 0:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "_" for letter in peer)
    return folder / f"{wrap}-{name}.json.gz"


def _profiled(
    step: Callable[[], object], device: torch.device, trace: Path | None
) -> dict[str, float]:
    """Return the seconds of a step in which NCCL's kernels run, and those in which no others do;
    how often it calls CUDA, and for how long. torch's profiler, which tells, makes calls longer."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        harness.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(path))
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [("nccl" in e["name"].lower(), e["ts"], e["ts"] + e["dur"]) for e in kernels]
    nccl = exposed(span for span in spans if span[0])
    calls = [e["dur"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    seconds = {"exposed_s": exposed(spans), "nccl_s": nccl, "calls_s": sum(calls)}
    return {
        "calls": len(calls) / PROFILED,
        **{name: value * 1e-6 / PROFILED for name, value in seconds.items()},
    }


def exposed(spans: Iterable[tuple[bool, float, float]]) -> float:
    """Return for how long a span of communication is open, and no other."""
    changes = sorted(
        (when, is_communication, change)
        for is_communication, begin, end in spans
        for when, change in ((begin, 1), (end, -1))
    )
    total, before, open_now = 0.0, 0.0, {True: 0, False: 0}
    for when, is_communication, change in changes:
        if open_now[True] and not open_now[False]:
            total += when - before
        open_now[is_communication] += change
        before = when
    return total


# --- 80 layers --------------------------------------------------------------------------


def _large(suite: harness.Suite, arguments: argparse.Namespace) -> None:
    on_gpu = suite.device.type == "cuda"
    layers = arguments.layers or (80 if on_gpu else 2)
    config = testing.tiny_llama_config(**(LARGE if on_gpu else {}), num_hidden_layers=layers)
    ids = _ids(config.vocab_size, arguments.seq_len or (2048 if on_gpu else 32), suite.device)
    for peer in harness.available(arguments.backends):
        start, before = time.perf_counter(), _allocated(suite.device)
        model = large_model(config, suite.device, arguments.seed)
        _compile(model, peer, "layers")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        built = {"build_s": time.perf_counter() - start}

        def step(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if on_gpu:
            built["build_peak_bytes"] = torch.cuda.max_memory_allocated(suite.device)
        samples, extra = _time(step, model, arguments.steps or 5, suite.device, before)
        suite.add(
            {"wrap": "fsdp2", "layers": layers, "tokens": ids.numel()},
            {peer: harness.Timing.of(samples)},
            extra={peer: {**built, **extra}},
        )
        del step, model, optimizer, trained
        _forget()


def large_model(config: Any, device: torch.device, seed: int) -> Any:
    """Make a QLoRA model whose layers are filled, packed and sharded one after the other."""
    import peft
    import transformers

    with torch.device("meta"):
        from_config: Any = transformers.AutoModelForCausalLM.from_config
        base = from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    base.requires_grad_(False)
    for layer in base.model.layers:
        _put_unpacked(layer)
    base.is_loaded_in_4bit = True
    lora = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules=list(testing.PROJECTIONS), task_type="CAUSAL_LM"
    )
    model: Any = peft.get_peft_model(base, lora, low_cpu_mem_usage=True)
    torch.manual_seed(seed)  # all ranks fill the same weights, and keep their shard
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in base.model.layers:
        _fill(layer, device)
        fully_shard(layer, mesh=mesh)
    with device:
        base.model.rotary_emb = type(base.model.rotary_emb)(config=config)
    _fill(model, device)
    _shard_ends(base, mesh)
    fully_shard(model, mesh=mesh)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _put_unpacked(layer: nn.Module) -> None:
    """Put 4-bit layers without weights into the place of linear ones."""
    bnb = testing.bitsandbytes()
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                linear = bnb.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    quant_storage=torch.bfloat16,
                    device="meta",
                )
                linear.support_avx512bf16_for_cpu = False
                setattr(parent, name, linear)


def _fill(part: nn.Module, device: torch.device) -> None:
    """Give random values to the parameters that are still on meta, and pack what is to be."""
    bnb = testing.bitsandbytes()
    for module in part.modules():
        for name, held in list(module.named_parameters(recurse=False)):
            if held.device.type != "meta":
                continue
            shape, is_packed = held.shape, isinstance(held, bnb.nn.Params4bit)
            scale = shape[-1] ** -0.5 if is_packed else SCALE
            value = torch.randn(shape, device=device, dtype=torch.bfloat16) * scale
            if len(shape) == 1:
                value = torch.ones_like(value)
            put: Any = nn.Parameter(value, requires_grad=held.requires_grad)
            if is_packed:
                put = bnb.nn.Params4bit(
                    value,
                    requires_grad=False,
                    quant_type="nf4",
                    quant_storage=torch.bfloat16,
                    module=module,
                ).to(device)
            module._parameters[name] = put


if __name__ == "__main__":
    main()
