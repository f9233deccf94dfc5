"""Adapters of experts in PEFT's format: what `LoraConfig(target_parameters=...)` saves and loads.

PEFT keeps one adapter of a fused parameter as two matrices: A [E r, K] with an expert's rows
together, B [N, r E] with an expert's columns E apart. It wraps the module once per parameter, so
the first one's adapter lies below as many `base_layer`s as there are parameters after it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from inductor_q.exc import CorruptAdapter
from inductor_q.experts.forward import is_sharded
from inductor_q.experts.model import attach, stacks, use_qfuse
from inductor_q.experts.modules import (
    PROJECTIONS,
    as_stack,
    check_not_merged,
    check_not_wrapped,
    expert_layers,
    path_of,
    projections,
    sizes,
    take_over,
)
from inductor_q.experts.stack import ExpertStack, ranks_of
from inductor_q.loading.merged_values import KEPT

PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the experts' adapters under PEFT's names and in its shapes, those of all ranks."""
    adapted = _adapted(model)
    found = {}
    for name, key in _keys([*adapted]).items():
        stack = adapted[name]
        assert stack.lora_A is not None and stack.lora_B is not None
        ranks = ranks_of(model.get_submodule(name.rpartition(".")[0]))
        a, b = (_of_all_ranks(part.detach(), ranks) for part in (stack.lora_A, stack.lora_B))
        found[f"{key}.lora_A.weight"] = a.flatten(0, 1).contiguous()
        found[f"{key}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()
    return found


def save_adapter(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters of `model` as PEFT does, and the active one of a PEFT model around it.

    After `shard` all ranks call it, and the first one writes.

    Raises:
        CorruptAdapter: its experts have none.
    """
    from peft import LoraConfig, PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file

    adapted = _adapted(model)
    if not adapted:
        raise CorruptAdapter(path=str(folder), problem="the model's experts have no adapters")
    if isinstance(model, PeftModel):
        active = model.active_adapter
        config: dict[str, Any] = model.peft_config[active].to_dict()
        state = get_peft_model_state_dict(model, adapter_name=active)
    else:
        r = _rank(next(iter(adapted.values())))
        config = LoraConfig(r=r, lora_alpha=r, target_modules=[]).to_dict()
        state = {}
    config["inference_mode"] = True
    config["target_parameters"] = sorted({_short(name) for name in adapted})
    ranks = {name: _rank(stack) for name, stack in adapted.items()}
    alphas = {}
    for name, stack in adapted.items():
        alpha = stack.scaling * (math.sqrt(ranks[name]) if config["use_rslora"] else ranks[name])
        alphas[name] = int(alpha) if alpha == int(alpha) else alpha
    config["rank_pattern"] = _patterns(ranks, config["rank_pattern"], config["r"])
    config["alpha_pattern"] = _patterns(alphas, config["alpha_pattern"], config["lora_alpha"])
    state = {**state, **adapter_state_dict(model)}
    if is_sharded(model) and dist.get_rank():
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous().cpu() for name, value in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config, indent=2, default=_plain)  # unsorted: of patterns the first counts
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def load_adapter(
    model: nn.Module, folder: str | Path, *, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Give the experts of `model` the adapters that PEFT, or `save_adapter`, has written.

    The active adapter of a PEFT model around it takes what there is for other layers.

    Args:
        dtype: the dtype of the experts' adapters.

    Returns:
        The experts' new parameters.

    Raises:
        CorruptAdapter: tensors are missing, are left over or have other shapes. The experts are
            as they were then.
        StillMerged: PEFT's `merge_adapter` has merged adapters of experts. Nothing is changed then.
        AdaptedByPeft: PEFT has adapters over experts (`target_parameters`). Nothing is changed
            then.
        NoExperts, UnreadExperts.
    """
    from peft import PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    check_not_merged(model, "load_adapter")
    check_not_wrapped(model, "load_adapter")
    folder = Path(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    state = load_file(folder / WEIGHTS)
    take_over(model)
    targets = config.get("target_parameters") or []
    paths = [
        path_of(layer_name, name)
        for layer_name, layer in expert_layers(model).items()
        for name in projections(layer)
    ]
    names = [path for path in paths if any(_matches(path, target) for target in targets)]
    taken = []
    for name, key in _keys(names).items():
        layer_name, _, short = name.rpartition(".")
        layer: Any = model.get_submodule(layer_name)
        ranks = ranks_of(layer)
        a, b = (_take(state, f"{key}.lora_{side}.weight", folder) for side in "AB")
        e, n, k = sizes(layer, short)
        e *= ranks
        r = a.shape[0] // e
        expected = (e * r, k), (n, e * r)
        if (tuple(a.shape), tuple(b.shape)) != expected:
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise CorruptAdapter(path=str(folder), problem=f"{key} has {shapes}, not {expected}")
        alpha = _pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
        scaling = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
        a, b = a.unflatten(0, (e, r)), b.unflatten(1, (r, e)).permute(2, 0, 1)
        if ranks > 1:
            a, b = (part.chunk(ranks)[dist.get_rank()] for part in (a, b))
        a, b = (part.to(dtype).contiguous() for part in (a, b))
        taken.append(partial(_attach, layer, short, a, b, scaling))
    if isinstance(model, PeftModel):
        result: Any = set_peft_model_state_dict(model, state, adapter_name=model.active_adapter)
        left = result.unexpected_keys
    else:
        left = [*state]
    if left:
        problem = f"no place for {left[0]} (of {len(left)}); wrap the model with PEFT first"
        raise CorruptAdapter(path=str(folder), problem=problem)
    added = [parameter for put in taken for parameter in put()]
    use_qfuse(model)
    return added


def _adapted(model: nn.Module) -> dict[str, ExpertStack]:
    """Return the stacks with adapters by name, in whose place there may be merged values."""
    found = {name: stack for name, stack in stacks(model) if stack.lora_A is not None}
    for path, layer in model.named_modules():
        kept = vars(layer).get(KEPT, {})
        found |= {path_of(path, name): stack for name, (stack, _) in kept.items()}
    return found


def _attach(layer: Any, name: str, a: Tensor, b: Tensor, scaling: float) -> list[nn.Parameter]:
    return attach(as_stack(layer, name), a, b, scaling)


def _of_all_ranks(part: Tensor, ranks: int) -> Tensor:
    """Return the parts of all ranks, one behind the other."""
    if ranks == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def _keys(names: list[str]) -> dict[str, str]:
    """Map names of projections to the start of PEFT's names of their adapters."""
    found = {}
    for name in names:
        layer, _, short = name.rpartition(".")
        above = sum(
            path_of(layer, other) in names for other in PROJECTIONS[PROJECTIONS.index(short) + 1 :]
        )
        path = f"{PREFIX}{layer.removeprefix(PREFIX)}".removesuffix(".")
        found[name] = path + ".base_layer" * above
    return found


def _short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _pattern(patterns: Mapping[str, float] | None, name: str, default: float) -> float:
    """Return the value of the PEFT pattern that fits whole components of `name` from the right."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _patterns(
    values: Mapping[str, float], known: Mapping[str, float], default: float
) -> dict[str, float]:
    """Return PEFT's patterns that give each projection its value, before those that are known.

    A pattern is a projection's short name where all layers have the same value of it, and its whole
    name where they differ.
    """
    own = {}
    for name, value in values.items():
        same = {other for key, other in values.items() if _short(key) == _short(name)} == {value}
        if _pattern(known, name, default) != value:
            own[_short(name) if same else name.removeprefix(PREFIX)] = value
    return {**own, **known, **own}  # first, and not overwritten by a known one of that name


def _take(state: dict[str, Tensor], key: str, folder: Path) -> Tensor:
    if key not in state:
        raise CorruptAdapter(path=str(folder), problem=f"{key} is missing")
    return state.pop(key)


def _rank(stack: ExpertStack) -> int:
    assert stack.lora_A is not None
    return stack.lora_A.shape[1]


def _plain(value: Any) -> Any:
    """Convert what PEFT's configurations hold and JSON does not know: sets, enums."""
    return (
        sorted(value)
        if isinstance(value, (set, frozenset))
        else getattr(value, "value", str(value))
    )
