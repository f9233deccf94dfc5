"""Check LoRA on parameters instead of modules (PEFT's `target_parameters`, for fused experts)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import compiled_alone, instances, several, tidy
from inductor_q.integrations.methods import has_own_forward

NAME = "target_parameters"
NAMES = "LoraConfig(target_parameters=[...])  # the ends of names in model.named_parameters()"
OURS = "inductor_q.experts.add_lora(model, r=16, alpha=32)"
PREPARED = (
    "from inductor_q.integrations import prepare_parameters; prepare_parameters(model)"
    "  # QfuseCallback and inductor_q.compile do"
)
PACKED = f"inductor_q.experts.quantize(model); {OURS}  # instead of target_parameters"


def check(model: nn.Module) -> Iterator[Finding]:
    """Look for two faults: adapters requested and missing, or there and breaking each graph they
    meet.
    """
    asked = _asked(model)
    if not asked:
        yield Finding(NAME, "ok", "not used")
        return
    wrappers = list(instances(model, "peft.tuners.lora.layer", "ParamWrapper"))
    quantized = _quantized_parameters(model)
    # A parametrized parameter is no longer among named_parameters(), where PEFT looks for the name.
    missing = sorted(
        name for name in asked if not any(_matches(name, *where) for where in _adapted(wrappers))
    )
    hidden = [n for n in missing if any(path.endswith(f".{n}") for path in quantized)]
    if missing:
        why = ": 4-bit parameters of bitsandbytes hide from PEFT" if hidden else ""
        found = f"no LoRA parameters were made for {', '.join(missing)}{why}"
        yield Finding(NAME, "fail", found, PACKED if hidden else NAMES)
    over = [tidy(path) for path, w in wrappers if _is_quantized(w)]
    if over:
        found = f"LoRA over {several(over, '4-bit expert parameter')}: gradients are lost"
        yield Finding(NAME, "fail", found, PACKED)
    elif traced := [w for w in _compiled(model, wrappers) if has_own_forward(w[1])]:
        paths = [f"{path}.{w.parameter_name}" for path, w in traced]
        found = (
            f"LoRA on {several(paths, 'parameter')}: PEFT registers and removes a parametrization "
            "in each forward, which breaks the graph in every layer"
        )
        yield Finding(NAME, "warn", found, PREPARED)
    elif not missing:
        inside = bool(_compiled(model, wrappers))
        yield Finding(NAME, "ok", "traceable" if inside else "outside of what is compiled")


def _asked(model: nn.Module) -> set[str]:
    """Return the names in `target_parameters` of the model's adapters."""
    names: set[str] = set()
    for submodule in model.modules():
        configs = getattr(submodule, "peft_config", None)
        for config in configs.values() if isinstance(configs, dict) else ():
            names.update(getattr(config, "target_parameters", None) or ())
    return names


def _adapted(wrappers: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, str]]:
    for path, wrapper in wrappers:
        yield path, str(wrapper.parameter_name)


def _matches(name: str, path: str, parameter: str) -> bool:
    full = f"{path}.{parameter}"
    return full == name or full.endswith(f".{name}")


def _quantized_parameters(model: nn.Module) -> list[str]:
    """List what `bitsandbytes.nn.parametrize.replace_parameter_4bit` took over, by path."""
    found = instances(model, "bitsandbytes.nn.parametrize", "Bnb4bitParametrization")
    # experts.parametrizations.gate_up_proj.0 stands for experts.gate_up_proj
    return [path.rpartition(".")[0].replace(".parametrizations.", ".") for path, _ in found]


def _compiled(model: nn.Module, wrappers: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the wrappers inside compiled submodules, or all of them if none is compiled."""
    regions = [path for path, _ in compiled_alone(model)]
    if not regions:
        return wrappers
    return [w for w in wrappers if any(f"{w[0]}.".startswith(f"{r}.") for r in regions)]


def _is_quantized(wrapper: nn.Module) -> bool:
    base = wrapper
    while isinstance(inner := getattr(base, "base_layer", None), nn.Module):
        base = inner
    return any(_quantized_parameters(base))
