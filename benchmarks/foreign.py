"""Run the kernels that axolotl and unsloth have for LoRA on a model of ours, from their sources.

The sources are a checkout that the caller names; nothing is downloaded or installed. Of each
project only the files of its kernels are imported, with stand-ins for the few names around them, so
that what a whole import changes (it patches transformers, PEFT and bitsandbytes) stays as it is.
Taken are the projections of attention, the MLP and, of unsloth, the norms. Attention, rotary
embeddings and the loss are transformers', and the model runs in eager mode.

``adopt`` makes a second tree of modules over the same parameters, so the model itself and its
compiled peers never see a kernel of others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from inductor_q import testing

#: The largest relative deviations from eager with which a peer is timed. Of a random model the loss
#: says little; the gradients of all adapters, as one vector, do.
TOLERANCES = {"loss_deviation": 1e-2, "gradient_deviation": 0.1}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Functions that stand for parts of a decoder layer. Each takes the module and its input."""

    qkv: Callable[..., Any]  # of attention; gives three projections
    output: Callable[..., Any]  # of attention: its last projection
    mlp: Callable[..., Any]
    norm: Callable[..., Any] | None
    has_dropout: bool
    digest: str  # of the sources


# --- their sources --------------------------------------------------------------------


def load(project: str, path: Path) -> Kernels:
    """Import the kernels of a project from the checkout of its repository at `path`."""
    folder = path / _FOLDERS[project]
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(
            f"no sources of {project} in {folder}: --{project} takes the root of its repository"
        )
    if project in sys.modules:
        raise ImportError(f"{project} is imported already, and its own import changes the peers")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    _package(project, folder.parent)
    _package(f"{project}.kernels", folder)
    return PROJECTS[project](digest)


def _axolotl(digest: str) -> Kernels:
    _module("axolotl.utils")
    _module("axolotl.utils.logging", get_logger=lambda name, *_, **__: logging.getLogger(name))
    lora = importlib.import_module("axolotl.kernels.lora")
    return Kernels(
        qkv=lora.apply_lora_qkv,
        output=lora.apply_lora_o,
        mlp=lora.apply_lora_mlp_swiglu,
        norm=None,
        has_dropout=True,
        digest=digest,
    )


def _unsloth(digest: str) -> Kernels:
    _module("unsloth_zoo")
    _module("unsloth_zoo.utils", Version=lambda text: Version(str(text)))
    _module(
        "unsloth.device_type",
        is_hip=lambda: False,
        get_device_type=lambda: "cuda",
        DEVICE_TYPE="cuda",
        DEVICE_TYPE_TORCH="cuda",
        DEVICE_COUNT=torch.cuda.device_count(),
        ALLOW_PREQUANTIZED_MODELS=True,
    )
    _module("unsloth.bnb_availability", native_kernels_ready=lambda *_, **__: True)
    _module("unsloth.kernels.fp8", weight_dequant=None, fp8_linear=None)  # for weights in FP8
    lora = importlib.import_module("unsloth.kernels.fast_lora")
    norm = importlib.import_module("unsloth.kernels.rms_layernorm")
    return Kernels(
        qkv=lora.apply_lora_qkv,
        output=lora.apply_lora_o,
        mlp=lora.apply_lora_mlp_swiglu,
        norm=norm.fast_rms_layernorm,
        has_dropout=False,
        digest=digest,
    )


PROJECTS = {"axolotl": _axolotl, "unsloth": _unsloth}
_FOLDERS = {"axolotl": Path("src", "axolotl", "kernels"), "unsloth": Path("unsloth", "kernels")}


def _package(name: str, folder: Path) -> None:
    """Stand for a package, so that its files are found and its own import does not run."""
    _module(name).__path__ = [str(folder)]


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    return module


# --- on our model ---------------------------------------------------------------------


def adopt(model: Any, kernels: Kernels) -> Any:
    """Return a model with the same parameters whose decoder layers run by `kernels`."""
    other = _twin(model, {})
    decoder = other.get_base_model().model
    for layer in decoder.layers:
        _replace_projections(layer.self_attn, kernels)
        _replace(layer.mlp, kernels.mlp)
        if kernels.norm is not None:
            attention = layer.self_attn
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                _replace(norm, kernels.norm)
            for name in ("q_norm", "k_norm"):
                if hasattr(attention, name):
                    _replace(getattr(attention, name), kernels.norm)
    if kernels.norm is not None:
        _replace(decoder.norm, kernels.norm)
    return other


def compare(
    step: Callable[[torch.Tensor], torch.Tensor],
    eager: Callable[[torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
    models: Sequence[nn.Module],
) -> dict[str, float]:
    """Say how far loss and gradients of a peer are from eager's; `models` are both of them.

    Dropout drops nothing meanwhile, and adapters are random: B is 0 in a new one.
    """
    start = testing.adapter_state(models[0])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in testing.adapter_parameters(models[0]):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.5 * noise * parameter.shape[1] ** -0.5)
    found = []
    with _no_dropout(models):
        for run in (eager, step):
            loss = run(ids)
            loss.backward()
            gradients = [p.grad for p in testing.adapter_parameters(models[0])]
            flat = [g.float().flatten() for g in gradients if g is not None]
            found.append((float(loss.detach()), torch.cat(flat)))
            models[0].zero_grad(set_to_none=True)
    testing.load_adapter_state(models[0], start)
    (expected, exact), (given, gradient) = found
    same = gradient.shape == exact.shape
    return {
        "loss_deviation": abs(given - expected) / abs(expected),
        "gradient_deviation": testing.relative_error(gradient, exact.double()) if same else 1.0,
    }


def agrees(found: Mapping[str, float]) -> bool:
    return all(found[name] <= most for name, most in TOLERANCES.items())  # NaN is not


@contextlib.contextmanager
def _no_dropout(models: Iterable[nn.Module]) -> Iterator[None]:
    layers = [m for model in models for m in model.modules() if isinstance(m, nn.Dropout)]
    rates = [layer.p for layer in layers]
    for layer in layers:
        layer.p = 0.0
    try:
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.p = rate


def _twin(module: nn.Module, made: dict[nn.Module, nn.Module]) -> Any:
    """Copy the tree of modules, and nothing that they hold."""
    if module not in made:
        made[module] = copied = type(module).__new__(type(module))
        vars(copied).update(vars(module))
        children = {name: child and _twin(child, made) for name, child in module._modules.items()}
        vars(copied)["_modules"] = children
    return made[module]


def _replace(module: Any, function: Callable[..., Any]) -> None:
    module.forward = functools.partial(function, module)


def _replace_projections(attention: Any, kernels: Kernels) -> None:
    """Have the first of three projections compute all, and the others give what it computed."""
    waiting: list[torch.Tensor] = []

    def query(hidden: torch.Tensor) -> Any:
        first, *waiting[:] = kernels.qkv(attention, hidden)
        return first

    def next_one(_: torch.Tensor) -> torch.Tensor:
        return waiting.pop(0)

    attention.q_proj.forward = query
    attention.k_proj.forward = attention.v_proj.forward = next_one
    attention.o_proj.forward = functools.partial(kernels.output, attention)
