"""Say what `qfuse tune` tries: the preset that ships, and one change to it at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from inductor_q import inductor_config
from inductor_q.kernels import CHOSEN, names_on
from inductor_q.presets import THRESHOLDS, Preset
from inductor_q.tuning.runs import Run


@dataclass(frozen=True)
class Condition:
    """Name what differs from the preset that ships: thresholds, providers, options."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)


BASE, STOCK, EAGER = Condition("base"), Condition("stock"), Condition("eager")
REFERENCES = (BASE, STOCK, EAGER)  # measured and shown; no preset comes of them
TOGETHER = "together"


@dataclass(frozen=True)
class Knob:
    """An option of Inductor to switch on, on the devices where it does something; `needs` are
    switched on with it."""

    option: str
    devices: tuple[str, ...] = ("cuda",)
    needs: tuple[str, ...] = ()


#: Coordinate descent and alignment are of Triton's kernels, CUDA graphs of a GPU, and a wrapper in
#: C++ is for hosts that launch kernels too slowly.
KNOBS = (
    Knob("triton.cudagraphs", needs=("triton.cudagraph_skip_dynamic_graphs",)),
    Knob("cpp_wrapper"),
    Knob("max_autotune_gemm", devices=("cuda", "cpu")),
    Knob("max_autotune_pointwise"),
    Knob("coordinate_descent_tuning"),
    Knob("coordinate_descent_check_all_directions", needs=("coordinate_descent_tuning",)),
    Knob("assume_aligned_inputs"),
    Knob("decompose_mem_bound_mm"),
    Knob("shape_padding"),
    Knob("epilogue_fusion", devices=("cuda", "cpu")),
    Knob("comprehensive_padding", devices=("cuda", "cpu")),
)

#: Thresholds of passes that rewrite a training step: the pass, and the size that they compare.
SIZES = {
    "extend_k.min_rows": ("extend_k", "rows"),
    "fuse_dropout.min_rows": ("fuse_dropout", "rows"),
    "causal_attention.min_positions": ("causal_attention", "positions"),
    "chunk_loss.min_logits": ("chunk_loss", "logits"),
    "keep_checkpointed.min_positions": ("keep_checkpointed", "positions"),
}
KERNELS = "kernels."  # a change of the provider of an op is named by it
#: Where no size is known: from the first row on, and never.
ALWAYS, NEVER = 1, 1 << 40


def singles(
    device: str, preset: Preset, base: Run, *, compute: Iterable[str] = ()
) -> tuple[list[Condition], dict[str, str]]:
    """Return the conditions with one change, and why other changes are not tried.

    Args:
        device: the type of the device.
        preset: the one that ships.
        base: a run of it, which knows what its passes have met.
        compute: values of `qfuse.compute` that were asked for.
    """
    tried: list[Condition] = []
    left: dict[str, str] = {}
    for knob in KNOBS:
        if reason := _idle(knob, device, preset):
            left[knob.option] = reason
        else:
            tried.append(Condition(knob.option, dict.fromkeys((*knob.needs, knob.option), True)))
    for name in SIZES:
        change = _turned(name, preset, base)
        if isinstance(change, str):
            left[name] = change
        else:
            tried.append(Condition(name, {name: change}))
    tried += _other_providers(device, base)
    if base.applied("recompute_products") and "recompute_products.max_kept" in THRESHOLDS:
        name = "recompute_products.max_kept"
        tried.append(Condition(name, {name: THRESHOLDS[name].value}))
    tried += [Condition(f"qfuse.compute={name}", {"qfuse.compute": name}) for name in compute]
    return tried, left


def together(winners: Iterable[Condition]) -> Condition:
    """Return the condition that has every change of the winners."""
    changes: dict[str, Any] = {}
    for condition in winners:
        changes |= condition.changes
    return Condition(TOGETHER, changes)


def may_last(condition: Condition) -> bool:
    """Return whether a preset may make the changes: how exact products are is the user's to say."""
    return not any(name.startswith("qfuse.") for name in condition.changes)


def _other_providers(device: str, base: Run) -> Iterator[Condition]:
    """Yield each provider that could serve an op here, and served none of its calls."""
    for op in CHOSEN.keys() & base.providers.keys():
        for name in (*CHOSEN[op], *names_on(op, device)):
            if name not in base.providers[op]:
                yield Condition(f"{KERNELS}{op}={name}", {f"{KERNELS}{op}": name})


def _idle(knob: Knob, device: str, preset: Preset) -> str:
    """Say why an option would change nothing, or ""."""
    if knob.option not in inductor_config.schema():
        return "this torch has no such option"
    if device not in knob.devices:
        return f"is not tried on a device of type {device}"
    if inductor_config.current(knob.option) is True:
        return "is on by default"
    if (entry := preset.losses.get(knob.option)) is not None and entry.value is True:
        return f"loses on {preset.name}: {entry.evidence}"
    return ""


def _turned(name: str, preset: Preset, base: Run) -> int | str:
    """Return the value at which the pass does the opposite here, or why there is none.

    It moves the threshold no further than to the size that is measured.
    """
    pass_name, size = SIZES[name]
    applied, chosen = base.sites.get(pass_name, (0, 0))
    now = int(preset.thresholds[name].value)
    at = base.sizes.get(size)
    reached = now <= at if at else bool(applied)
    if reached and applied:
        return at + 1 if at else NEVER
    if not reached and chosen:
        return at * 3 // 4 if at else ALWAYS  # a pass may count a position less
    return f"{pass_name} finds nothing to do in this step"
