"""Time one QLoRA training step: forward, loss, backward, AdamW on the adapters.

A GPU gets the shapes of Qwen3-8B, 8 layers, NF4 with double quantization, LoRA r = 16 on the seven
projections with bf16 adapters, 2 x 2048 tokens, sdpa. The vocabulary is 32,000: with Qwen3's own
(``--vocab-size 151936``) the frozen head adds 13 ms at 790 TFLOP/s to every peer's step, a share
that only a shortened model has. A CPU gets a small model of the same architecture.

``--model qwen3-0.6b`` has that model's shapes: with 2 x 512 tokens the host is the limit.
``--recipe`` takes a step that people run instead of the bare one (``benchmarks/recipes.py``).
``--axolotl PATH`` and ``--unsloth PATH`` add their kernels for LoRA as peers, from a checkout of
their repositories (``benchmarks/foreign.py``).

All peers train the same module, so they hold the same static memory. The phases:

1. cold compile time of each compiled peer: empty caches, the order of peers rotating, the best of
   the rounds, after one throw-away compile of another size has loaded the compiler itself;
2. 20 steps from the same adapters on the same batches: losses against eager's;
3. step time, interleaved; peak memory (GPU) and bytes saved for backward;
4. graph breaks, graphs and recompilations over three sequence lengths, on fewer layers. Without
   this phase the breaks are those that torch's counter has of the step that is timed.

``mfu`` is the useful operations of a step, without what checkpointing repeats, over its time and
the rate of a large product on this device. ``tokens_per_second`` counts padding.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks import foreign, harness
from benchmarks.recipes import BENCHMARK, RECIPES, Recipe
from inductor_q import testing
from inductor_q.integrations import prepare_checkpointing

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 4,
}
TINY = {**SMALL, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 8}

#: What `--model` takes for a GPU.
MODELS = {"qwen3": testing.qwen3_8b_config, "qwen3-0.6b": testing.qwen3_0_6b_config}

# The usual one of QLoRA; a larger one makes a random model's training chaotic, so that no two runs
# agree and nothing can be read from their difference.
LEARNING_RATE = 2e-4

Step = Callable[[torch.Tensor], torch.Tensor]


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3", help="its shapes, on a GPU")
    parser.add_argument("--layers", type=int, help="default: 8 on a GPU, 4 on CPU")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="on a GPU")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, help="default: 2048 on a GPU, 256 on CPU")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapter-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--loss-steps", type=int, default=20)
    parser.add_argument("--compile-rounds", type=int, default=None, help="0: do not time it")
    parser.add_argument("--graph-layers", type=int, default=2, help="0: do not count graphs")
    parser.add_argument("--recipe", choices=RECIPES, default="benchmark")
    for project in foreign.PROJECTS:
        parser.add_argument(f"--{project}", type=Path, help="a checkout of its repository")
    arguments = parser.parse_args(argv)
    recipe = RECIPES[arguments.recipe]
    if recipe.prepared and any(getattr(arguments, project) for project in foreign.PROJECTS):
        parser.error(f"--recipe {arguments.recipe}: other projects' kernels take 16 bits, not 32")
    if recipe.autocast:
        arguments.adapter_dtype = recipe.adapters
    name = "bench_step" if recipe == BENCHMARK else f"bench_step_{arguments.recipe}"
    suite = harness.start(name, arguments)
    device = suite.device
    on_gpu = device.type == "cuda"
    layers = arguments.layers or (2 if arguments.quick else 8 if on_gpu else 4)
    length = arguments.seq_len or (2048 if on_gpu else 32 if arguments.quick else 256)
    if arguments.quick:
        arguments.loss_steps = min(arguments.loss_steps, 5)
        arguments.graph_layers = min(arguments.graph_layers, 1)
    if arguments.model != "qwen3" and not on_gpu:
        parser.error(f"--model {arguments.model}: a CPU gets a small model of its own")
    config = _config(arguments, on_gpu=on_gpu, layers=layers)
    suite.settings |= {
        "layers": layers,
        "vocab_size": config.vocab_size,
        "batch": arguments.batch,
        "seq_len": length,
        "rank": arguments.rank,
        "adapter_dtype": arguments.adapter_dtype,
        "loss_steps": arguments.loss_steps,
        "recipe": {"name": arguments.recipe, **dataclasses.asdict(recipe)},
    }
    peers = harness.available(arguments.backends)
    extra: dict[str, dict[str, Any]] = {peer: {} for peer in peers}

    given = {project: getattr(arguments, project) for project in foreign.PROJECTS}
    # What cannot be imported ends the run before minutes go into compiling.
    kernels = {project: foreign.load(project, path) for project, path in given.items() if path}
    if arguments.graph_layers:
        _count_graphs(suite, arguments, peers, extra, length)
    torch.compiler.reset()
    gc.collect()
    before = time.perf_counter()
    model = _model(arguments, config, device, recipe)
    suite.settings["build_s"] = round(time.perf_counter() - before, 2)
    start = testing.adapter_state(model)
    data = list(_batches(config, arguments, length, device))

    others = _foreign(suite, arguments, kernels, model, data[0], extra)
    steps = _compile(suite, arguments, peers, model, data[0], extra) | others
    peers = list(steps)
    losses: dict[str, list[float]] = {}
    for peer, step in steps.items():
        testing.load_adapter_state(model, start)
        losses[peer] = [float(loss) for loss in _train(model, step, data, recipe.accumulated)]
        extra[peer]["losses"] = losses[peer]
    _compare_losses(suite, losses, extra)

    optimizers = {peer: adamw(model) for peer in peers}
    candidates: dict[str, Callable[[], object]] = {}
    for peer, step in steps.items():
        candidates[peer] = full_step(optimizers[peer], step, data[0], recipe.accumulated)
        extra[peer]["peak_bytes"] = harness.peak_bytes(candidates[peer], device)
        extra[peer]["static_bytes"] = harness.held_bytes(device)
        optimizers[peer].state.clear()  # or the next peer's peak would have it too
        model.zero_grad()
        saved = testing.count_saved_bytes(functools.partial(step, data[0]), model)
        extra[peer]["saved_bytes"] = saved.total
        torch.compiler.cudagraph_mark_step_begin()  # or its graph would wait for its backward
    timings = harness.time_steps(
        candidates,
        device,
        rounds=arguments.rounds or (2 if arguments.quick else 7),
        per_round=5 if on_gpu else 2,
    )
    tokens = arguments.batch * length * recipe.accumulated
    sizes = f"{arguments.batch} x {length}"
    if recipe.accumulated > 1:
        sizes += f" x {recipe.accumulated}"
    case = {"model": arguments.model, "layers": layers, "tokens": sizes}
    flops, moved = _work(config, tokens, length, recipe.accumulated)
    for peer, timing in timings.items():
        taken = getattr(timing, suite.statistic)
        extra[peer]["tokens_per_second"] = tokens / taken
        extra[peer]["mfu"] = flops / taken / (suite.ceilings.matmul_tflops * 1e12)
    suite.add(case, timings, roof=suite.ceilings.roof(flops=flops, bytes=moved), extra=extra)
    summarize(suite, peers, extra)
    rates, kept = ("tokens_per_second", "mfu"), ("peak_bytes", "saved_bytes")
    shown = (*rates, *kept, "loss_deviation", "compile_s", "breaks", "graphs")
    harness.finish(suite, arguments, extras=shown)
    return suite


# --- the model and its step -----------------------------------------------------------


def _config(arguments: argparse.Namespace, *, on_gpu: bool, layers: int) -> Any:
    if on_gpu:
        make = MODELS[getattr(arguments, "model", "qwen3")]  # other benchmarks have no choice
        return make(layers, vocab_size=arguments.vocab_size)
    return testing.tiny_qwen3_config(
        **{**(TINY if arguments.quick else SMALL), "num_hidden_layers": layers}
    )


def _model(
    arguments: argparse.Namespace,
    config: Any,
    device: torch.device,
    recipe: Recipe = BENCHMARK,
) -> Any:
    model = testing.qlora_model(
        config,
        r=arguments.rank,
        adapter_dtype=torch.bfloat16 if arguments.adapter_dtype == "bf16" else None,
        dropout=recipe.dropout,
        prepare=recipe.prepared,
        device=device,
        seed=arguments.seed,
    )
    checkpoint(model, recipe)
    return model


def checkpoint(model: Any, recipe: Recipe) -> None:
    """Enable gradient checkpointing where a recipe has it, in one graph for every peer."""
    if recipe.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        prepare_checkpointing(model)


def _batches(
    config: Any, arguments: argparse.Namespace, length: int, device: torch.device
) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(arguments.seed)
    for _ in range(max(1, arguments.loss_steps)):
        # Few distinct tokens, so that there is something to learn and the loss moves.
        ids = torch.randint(0, min(64, config.vocab_size), (length,), generator=generator)
        rows = [ids.roll(shift) for shift in range(arguments.batch)]
        yield torch.stack(rows).to(device)


def loss_of(call: Callable[..., Any], recipe: Recipe = BENCHMARK) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=recipe.autocast):
            loss: torch.Tensor = call(**recipe.inputs(ids)).loss
        return loss

    return step


def _backward(loss: Any) -> None:
    loss.backward()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = testing.adapter_parameters(model)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=parameters[0].is_cuda or None)


def full_step(
    optimizer: torch.optim.Optimizer, step: Step, ids: torch.Tensor, accumulated: int = 1
) -> Callable[[], torch.Tensor]:
    """Return a step of the optimizer over this batch, or over several that are made of it."""
    batches = [ids.roll(shift, dims=1) for shift in range(accumulated)]

    def run() -> torch.Tensor:
        losses = []
        for batch in batches:
            loss = step(batch)
            _backward(loss if accumulated == 1 else loss / accumulated)
            # A CUDA graph writes the next step's loss into the same memory.
            losses.append(
                loss.detach().clone() if accumulated == 1 else loss.detach() / accumulated
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses[0] if accumulated == 1 else torch.stack(losses).sum()

    return run


def _train(
    model: torch.nn.Module, step: Step, data: Sequence[torch.Tensor], accumulated: int
) -> list[torch.Tensor]:
    optimizer = adamw(model)
    return [full_step(optimizer, step, ids, accumulated)() for ids in data]


# --- the phases -----------------------------------------------------------------------


def _compile(
    suite: harness.Suite,
    arguments: argparse.Namespace,
    peers: Sequence[str],
    model: Any,
    ids: torch.Tensor,
    extra: dict[str, dict[str, Any]],
) -> dict[str, Step]:
    """Compile each peer's step; forward and backward count towards the compile time."""

    def forward_backward(step: Step) -> Callable[[], object]:
        def run() -> None:
            _backward(step(ids))
            model.zero_grad(set_to_none=True)

        return run

    recipe = RECIPES[arguments.recipe]
    compiled = [peer for peer in peers if peer != "eager"]
    steps: dict[str, Step] = {}
    rounds = arguments.compile_rounds
    if rounds is None:
        rounds = 1 if arguments.quick else 2
    if rounds:
        forward_backward(loss_of(model, recipe))()
        warm_compiler(arguments, compiled, suite.device)
    times: dict[str, list[float]] = {peer: [] for peer in compiled}
    for order in harness.rotations(compiled, max(1, rounds)) if compiled else ():
        torch.compiler.reset()
        for peer in order:
            # Only a compile that is timed has to start from nothing.
            with testing.fresh_cache() if rounds else contextlib.nullcontext():
                steps[peer] = loss_of(harness.compile_as(peer, model), recipe)
                before = sum(counters["graph_break"].values())
                times[peer].append(harness.first_call(forward_backward(steps[peer]), suite.device))
                breaks = sum(counters["graph_break"].values()) - before
                extra[peer].setdefault("breaks", breaks)
    if rounds:
        for peer, values in times.items():
            extra[peer]["compile_s"] = min(values)
            extra[peer]["compile_all_s"] = values
    return {peer: steps[peer] if peer in steps else loss_of(model, recipe) for peer in peers}


def _foreign(
    suite: harness.Suite,
    arguments: argparse.Namespace,
    kernels: Mapping[str, foreign.Kernels],
    model: Any,
    ids: torch.Tensor,
    extra: dict[str, dict[str, Any]],
) -> dict[str, Step]:
    """Return the steps of the other projects whose sources were given, each of which is checked."""
    recipe = RECIPES[arguments.recipe]
    steps: dict[str, Step] = {}
    for project, theirs in kernels.items():
        other = foreign.adopt(model, theirs)
        step = loss_of(other, recipe)
        found = foreign.compare(step, loss_of(model, recipe), ids, (model, other))
        suite.settings[project] = {"sources": theirs.digest, **found}
        if recipe.dropout and not theirs.has_dropout:
            suite.notes.append(f"{project}: its kernels have no dropout, the other peers do")
        if not foreign.agrees(found):
            far = ", ".join(f"{name} {value:.2g}" for name, value in found.items())
            suite.notes.append(f"{project} is not timed, as it is not what eager computes: {far}")
            continue
        steps[project], extra[project] = step, {"breaks": 0}
    return steps


def warm_compiler(
    arguments: argparse.Namespace, peers: Sequence[str], device: torch.device
) -> None:
    config = testing.tiny_qwen3_config(**{**TINY, "num_hidden_layers": 1})
    model = _model(arguments, config, device)
    ids = torch.randint(0, config.vocab_size, (2, 16), device=device)
    for peer in peers:
        if "autotune" in peer:
            continue
        call = harness.compile_as(peer, model)
        call(input_ids=ids, labels=ids).loss.backward()


def _compare_losses(
    suite: harness.Suite, losses: dict[str, list[float]], extra: dict[str, dict[str, Any]]
) -> None:
    if "eager" not in losses:
        return
    for peer, values in losses.items():
        pairs = zip(values, losses["eager"], strict=True)
        deviation = max(abs(one - other) / abs(other) for one, other in pairs)
        extra[peer]["loss_deviation"] = deviation
    first, last = losses["eager"][0], losses["eager"][-1]
    suite.notes.append(f"eager loss over {len(losses['eager'])} steps: {first:.4f} -> {last:.4f}")


def _count_graphs(
    suite: harness.Suite,
    arguments: argparse.Namespace,
    peers: Sequence[str],
    extra: dict[str, dict[str, Any]],
    length: int,
) -> None:
    on_gpu = suite.device.type == "cuda"
    lengths = [length, length * 3 // 4, length // 2]
    config = _config(arguments, on_gpu=on_gpu, layers=arguments.graph_layers)
    recipe = RECIPES[arguments.recipe]
    model = _model(arguments, config, suite.device, recipe)
    for peer in peers:
        if peer == "eager" or "autotune" in peer:
            continue
        torch.compiler.reset()
        with testing.CompileTrace() as trace:
            call = harness.compile_as(peer, model, dynamic=None)
            for tokens in lengths:
                ids = torch.randint(0, 64, (arguments.batch, tokens), device=suite.device)
                _backward(loss_of(call, recipe)(ids))
        model.zero_grad(set_to_none=True)
        extra[peer] |= {"breaks": len(trace.breaks), "graphs": trace.graphs}
        reasons = {harness.portable(reason)[:400] for reason in trace.breaks}
        extra[peer]["break_reasons"] = sorted(reasons)
    suite.settings["graph_lengths"] = lengths


def _work(config: Any, tokens: int, length: int, passes: int = 1) -> tuple[float, float]:
    """Count operations and fewest bytes of the step; frozen weights need no gradient of their own.

    This is a lower bound: activations are counted once in and once out of each projection, and
    weights twice in each of the `passes` over the model.
    """
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    projections = [(heads, hidden), (keys, hidden), (keys, hidden), (hidden, heads)]
    projections += [(inner, hidden), (inner, hidden), (hidden, inner)]
    per_layer = float(sum(n * k for n, k in projections))
    ends = sum(n + k for n, k in projections)
    # Forward and input gradient; causal attention does half of the products, 2 forward, 5 backward.
    attention = 7 * tokens * length * heads
    head = config.vocab_size * hidden
    layers = config.num_hidden_layers
    flops = layers * (4 * tokens * per_layer + attention) + 4 * tokens * head
    weights = 2 * passes * (layers * per_layer * (0.5 + 1 / 64) + 2 * head)
    return flops, weights + layers * 4 * tokens * ends


def summarize(suite: harness.Suite, peers: Sequence[str], extra: dict[str, dict[str, Any]]) -> None:
    """Note how far qfuse is from stock Inductor in the last case."""
    if "inductor" not in peers or "qfuse" not in peers:
        return
    case = suite.cases()[-1]
    ratio = suite.ratio(case, "qfuse", "inductor")
    suite.notes.append(f"qfuse / inductor: step time {ratio:.3f}")
    for key, label in (
        ("compile_s", "compile time"),
        ("peak_bytes", "peak memory"),
        ("saved_bytes", "bytes saved for backward"),
    ):
        one, other = extra["qfuse"].get(key), extra["inductor"].get(key)
        if one and other:
            suite.notes[-1] += f", {label} {one / other:.3f}"


if __name__ == "__main__":
    main()
