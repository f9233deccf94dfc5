"""Time what each part of a trainer's step costs: a mask, padding, dropout, checkpoints.

The step is that of bench_memory: forward, loss and backward without an optimizer, of 4 layers of
Qwen3-8B's shapes on a GPU, 2 x 2048 tokens, NF4 with double quantization, LoRA r = 16 in float32
on the seven projections under bf16 autocast; of a small model on a CPU, where no peak is measured.
``plain`` has autocast alone, and each other variant adds what its name says; ``padding + dropout``
is ``bench_step --recipe trainer``. ``mask of ones`` runs the graph of ``padding`` on other values.

Models with dropout, without it and with checkpoints share all their tensors, so that each variant
holds as much between steps as any other, and all of both peers take turns in the same rounds. A row
has the measured peak, what of it does not live between steps (``transient_bytes``), and time and
peak over those of the same peer's ``plain``. Nothing is tuned or timed while compiling.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import bench_step, harness
from benchmarks.recipes import TRAINER, Recipe

PLAIN = Recipe(autocast=True)
VARIANTS = {
    "plain": PLAIN,
    "mask of ones": dataclasses.replace(PLAIN, mask="ones"),
    "padding": dataclasses.replace(PLAIN, mask="padded"),
    "dropout": dataclasses.replace(PLAIN, dropout=TRAINER.dropout),
    "padding + dropout": TRAINER,
    "padding + dropout, checkpointed": dataclasses.replace(TRAINER, checkpointed=True),
}
#: Of qfuse on a GPU: a variant, the one it is compared with, and how many times that one's time and
#: peak it may take.
GOALS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("mask of ones", "plain", {"time": 1.03}),
    ("padding + dropout", "padding", {"time": 1.03, "peak": 1.02}),
)


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=("inductor", "qfuse"))
    parser.add_argument("--layers", type=int, help="default: 4, or 1 with --quick")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="on a GPU")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, help="default: 2048 on a GPU, 64 on CPU")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        metavar="NAME",
        help="default: %(default)s",
    )
    parser.set_defaults(rank=16, adapter_dtype="fp32", loss_steps=1)
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_parts", arguments)
    device, on_gpu = suite.device, suite.device.type == "cuda"
    layers = arguments.layers or (1 if arguments.quick else 4)
    length = arguments.seq_len or (2048 if on_gpu else 64)
    config = bench_step._config(arguments, on_gpu=on_gpu, layers=layers)
    suite.settings |= {"layers": layers, "vocab_size": config.vocab_size, "rank": arguments.rank}
    suite.settings |= {"batch": arguments.batch, "seq_len": length}

    model = bench_step._model(arguments, config, device, TRAINER)
    [ids] = bench_step._batches(config, arguments, length, device)
    variants = {name: recipe for name, recipe in VARIANTS.items() if name in arguments.variants}
    models = {
        (recipe.dropout, recipe.checkpointed): sharing(model, recipe)
        for recipe in variants.values()
    }
    steps: dict[tuple[str, str], Callable[[], object]] = {}
    extra: dict[str, dict[str, dict[str, Any]]] = {variant: {} for variant in variants}
    torch.compiler.reset()  # what was compiled before would say which sizes may vary
    # Each peer, model and kind of mask adds a graph to the same frame.
    with torch._dynamo.config.patch(recompile_limit=64):
        for peer in harness.available(arguments.backends):
            calls = {key: harness.compile_as(peer, each) for key, each in models.items()}
            for variant, recipe in variants.items():
                harness.console.print(f"compiling {peer}: {variant}", markup=False)
                call = calls[recipe.dropout, recipe.checkpointed]
                steps[peer, variant] = _step(model, call, recipe, ids)
                steps[peer, variant]()
        for (peer, variant), step in steps.items():  # after all that compiling leaves behind
            peak, held = harness.peak_bytes(step, device), harness.held_bytes(device)
            transient = None if peak is None or held is None else peak - held
            extra[variant][peer] = {"peak_bytes": peak, "transient_bytes": transient}
        timings = harness.time_steps(
            {f"{peer}: {variant}": step for (peer, variant), step in steps.items()},
            device,
            rounds=arguments.rounds or (1 if arguments.quick else 7),
            per_round=5 if on_gpu else 2,
        )

    flops, moved = bench_step._work(config, arguments.batch * length, length)
    roof = suite.ceilings.roof(flops=flops, bytes=moved)
    case = {"model": "qwen3", "layers": layers, "tokens": f"{arguments.batch} x {length}"}
    peers = list(dict.fromkeys(peer for peer, _ in steps))
    for variant, found in extra.items():
        taken = {peer: timings[f"{peer}: {variant}"] for peer in peers}
        suite.add({**case, "variant": variant}, taken, roof=roof, extra=found)
    for row in suite.rows:
        ratios = _over(suite, row.peer, row.case["variant"], "plain")
        row.extra |= {f"{what}_over_plain": ratio for what, ratio in ratios.items()}
    for variant, to, limits in GOALS:
        for peer in peers:
            ratios = _over(suite, peer, variant, to)
            for what in filter(limits.get, ratios):
                suite.notes.append(
                    f"{peer}: {what} of '{variant}' over that of '{to}': {ratios[what]:.3f}"
                    f" (goal for qfuse on a GPU: at most {limits[what]})"
                )
    extras = ("peak_bytes", "transient_bytes", "time_over_plain", "peak_over_plain")
    harness.finish(suite, arguments, extras=extras)
    return suite


def sharing(model: nn.Module, recipe: Recipe) -> Any:
    """Return a model of the same tensors, with the dropout and the checkpoints of a recipe."""
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    shared += [each.quant_state for each in shared if hasattr(each, "quant_state")]
    twin = copy.deepcopy(model, {id(each): each for each in shared})
    if not recipe.dropout:  # what PEFT has in its place then
        for parent in list(twin.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Dropout):
                    setattr(parent, name, nn.Identity())
    bench_step.checkpoint(twin, recipe)
    return twin


def _step(
    model: nn.Module, call: Callable[..., Any], recipe: Recipe, ids: torch.Tensor
) -> Callable[[], object]:
    inputs = recipe.inputs(ids)  # made once: to make a mask is no part of a step

    def run() -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=recipe.autocast):
            loss: torch.Tensor = call(**inputs).loss
        loss.backward()
        model.zero_grad(set_to_none=True)  # the gradients of all, as they share parameters
        return loss.detach()

    return run


def _over(suite: harness.Suite, peer: str, variant: str, to: str) -> dict[str, float]:
    """Divide time and, on a GPU, peak of a peer's variant by those of another, if both ran."""
    rows = {row.case["variant"]: row for row in suite.rows if row.peer == peer}
    one, other = rows.get(variant), rows.get(to)
    if one is None or other is None:
        return {}
    ratios = {"time": suite.seconds(one) / suite.seconds(other)}
    if one.extra["peak_bytes"] is not None:
        ratios["peak"] = one.extra["peak_bytes"] / other.extra["peak_bytes"]
    return ratios


if __name__ == "__main__":
    main()
