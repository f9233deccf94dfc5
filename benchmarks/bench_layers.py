"""Time a training step whose decoder layers are compiled one by one, beside the whole model's.

Layers are compiled so under FSDP, and for a shorter first step
(``inductor_q.compile(model, regions="layers")``). Each peer has a QLoRA model of Qwen3's
architecture of its own, with equal weights. ``model`` is qfuse over the whole model, ``layers``
qfuse by layers, ``inductor`` stock Inductor over each layer, the rest in eager mode, and ``eager``
is nothing compiled.

A step is forward, loss and backward, by the recipes of ``benchmarks/recipes.py``; ``packed`` is one
row of 8192 tokens on a GPU, the others are 2 x 2048. A GPU gets the shapes of Qwen3-8B with all of
its vocabulary. ``peak`` is of the step alone: what was allocated before it is left out.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import inductor_q
from benchmarks import bench_step, harness
from benchmarks.recipes import RECIPES
from inductor_q import testing

PEERS = ("inductor", "model", "layers")
NARROW = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
SHOWN = ("peak_bytes", "compile_s", "graphs", "breaks")


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    recipes = ("trainer", "trl", "packed")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=recipes)
    parser.add_argument("--layers", type=int, help="default: 8 on a GPU, 2 on a CPU")
    parser.add_argument("--vocab-size", type=int, default=151_936, help="on a GPU")
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_layers", arguments)
    on_gpu = suite.device.type == "cuda"
    layers = arguments.layers or (8 if on_gpu else 2)
    suite.settings |= {"layers": layers, "recipes": list(arguments.recipes)}
    if on_gpu:
        suite.settings |= {"vocab_size": arguments.vocab_size}
        config = testing.qwen3_8b_config(layers, vocab_size=arguments.vocab_size)
    else:
        config = testing.tiny_qwen3_config(**{**NARROW, "num_hidden_layers": layers})
    for recipe in arguments.recipes:
        _compare(suite, arguments, config, recipe)
        harness.keep(suite, arguments)
    harness.finish(suite, arguments, extras=SHOWN)
    return suite


def _compare(suite: harness.Suite, arguments: argparse.Namespace, config: Any, recipe: str) -> None:
    device = suite.device
    rows, length = (2, 2048) if device.type == "cuda" else (2, 32)
    if recipe == "packed":
        rows, length = 1, 2 * rows * length
    generator = torch.Generator().manual_seed(arguments.seed)
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator).to(device)
    steps: dict[str, Callable[[], Tensor]] = {}
    extra: dict[str, dict[str, Any]] = {}
    for peer in arguments.backends:
        torch._dynamo.reset()
        counters.clear()
        step = _step(config, RECIPES[recipe], peer, ids, arguments.seed)
        before = harness.held_bytes(device)
        extra[peer] = {"compile_s": harness.first_call(step, device), "loss": float(step())}
        extra[peer]["graphs"] = counters["stats"]["unique_graphs"]
        extra[peer]["breaks"] = sum(counters["graph_break"].values())
        peak = harness.peak_bytes(step, device)
        if before is not None and peak is not None:
            extra[peer]["peak_bytes"] = peak - before
        steps[peer] = step
    per_round = 3 if device.type == "cuda" else 1
    rounds = arguments.rounds or (2 if arguments.quick else 7)
    timings = harness.time_steps(steps, device, rounds=rounds, per_round=per_round)
    suite.add({"recipe": recipe, "tokens": f"{rows} x {length}"}, timings, extra=extra)
    steps.clear()
    gc.collect()


def _step(config: Any, recipe: Any, peer: str, ids: Tensor, seed: int) -> Callable[[], Tensor]:
    """Return a step of a model of its own, compiled as `peer` has it."""
    model = testing.qlora_model(
        config,
        adapter_dtype=recipe.adapter_dtype,
        dropout=recipe.dropout,
        prepare=recipe.prepared,
        randomize_adapters=True,
        device=ids.device,
        seed=seed,
    )
    bench_step.checkpoint(model, recipe)
    if peer == "model":
        inductor_q.compile(model, regions="model")
    elif peer == "layers":
        inductor_q.compile(model, regions="layers")
    elif peer == "inductor":
        for layer in model.get_base_model().model.layers:
            layer._compiled_call_impl = harness.compile_as(peer, layer._call_impl)
    elif peer != "eager":
        raise ValueError(f"no peer {peer!r}; known: eager, {', '.join(PEERS)}")
    forward = bench_step.loss_of(model, recipe)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> Tensor:
        loss = forward(ids)
        loss.backward()
        for parameter in trained:  # as an optimizer, which looks at no module
            parameter.grad = None
        return loss.detach()

    return step


if __name__ == "__main__":
    main()
