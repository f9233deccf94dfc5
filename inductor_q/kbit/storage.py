"""Save and load a model of packed layers: one safetensors file, all or nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from inductor_q.capture import is_written
from inductor_q.capture.packed import packed_tensors
from inductor_q.exc import CannotSave, CorruptQuantState, QfuseError, UnknownFormat
from inductor_q.files import replacing
from inductor_q.formats import get_format
from inductor_q.formats.kbit import KBIT_FORMATS
from inductor_q.kbit.linear import PACKED, KBitLinear, check_packed
from inductor_q.kernels.checks import check_operands
from inductor_q.kernels.expert_calls import Stack
from inductor_q.loading.files import Checkpoint, assign, owners, safetensors
from inductor_q.loading.layers import replace_layers
from inductor_q.loading.linear import PackedLinear

KEY = "inductor_q.kbit"
VERSION = 1


def save(model: nn.Module, path: str | Path) -> None:
    """Write the state of `model` with the formats of its packed layers, replacing `path` at once.

    A plain safetensors file: the names are those of `model.state_dict()`, tied tensors are there
    under one of theirs, and the header says which layers are packed and how, stacks of experts and
    their adapters' scaling included. An error or a killed process leaves what was at `path` before.

    Raises:
        CannotSave: a layer is packed by a library that keeps its state in objects of its own.
    """
    path = Path(path)
    _check_ours(model)
    state = model.state_dict()
    tensors = {name: state[name].detach().contiguous().cpu() for name in owners(model)}
    layers = {
        name: {
            "format": layer.format,
            "shape": [layer.out_features, layer.in_features],
            "dtype": str(layer.dtype).removeprefix("torch."),
        }
        for name, layer in model.named_modules()
        if isinstance(layer, KBitLinear)
    }
    said = {"version": VERSION, "layers": layers, "packed": _packed(model)}
    metadata = {"format": "pt", KEY: json.dumps(said)}
    with replacing(path, fsync=True) as scratch:
        safetensors().torch.save_file(tensors, scratch, metadata)


def load(model: nn.Module, path: str | Path, device: torch.device | str = "cpu") -> nn.Module:
    """Give `model` the state that `save` wrote, bit for bit.

    Each `nn.Linear` (of no subclass) that is packed in the file is replaced, whatever its format;
    layers and experts that are packed already must have the file's format, and adapters of experts
    take the file's scaling. The model may be on the meta device (see `meta_parameters`). Everything
    is read and checked before anything is changed.

    Returns:
        The model, changed in place; a packed layer where it is itself a linear layer.

    Raises:
        WrongCheckpoint: the file is damaged or was not written by `save`; it lacks tensors of the
            model, has others, or has them in other shapes.
        CorruptQuantState: a layer is packed with another K, kind of scale or shape, or experts in
            another format.
    """
    checkpoint = Checkpoint(path)
    header = _header(checkpoint)
    layers = _packed_layers(model, checkpoint, header["layers"])
    entries = header.get("packed", {})
    others = _other_layers(model, checkpoint, entries)
    scalings = _check_packed(
        model, checkpoint, {name: e for name, e in entries.items() if name not in others}
    )
    tensors = {name: checkpoint.read(name) for name in checkpoint.shapes()}
    for name, layer in layers.items():
        own = {b: tensors.get(_join(name, b)) for b in PACKED}
        if missing := [_join(name, b) for b, tensor in own.items() if tensor is None]:
            raise checkpoint.wrong(f"{tensor} is not in it" for tensor in missing)
        check_packed(layer, own, name or "the layer")
    expected = _expected(model, {**layers, **others})
    problems = [f"{name} is not in it" for name in expected if name not in tensors]
    problems += [f"{name} is not in the model" for name in tensors if name not in expected]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} in it, {tuple(tensor.shape)} here"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        raise checkpoint.wrong(problems)
    for stack, scaling in scalings:
        stack.scaling = scaling
    model = replace_layers(model, {**layers, **others})
    assign(model, {name: tensor.to(device) for name, tensor in tensors.items()})
    return model.to(device)  # buffers that are in no file


def _join(layer: str, leaf: str) -> str:
    return f"{layer}.{leaf}" if layer else leaf


def _check_ours(model: nn.Module) -> None:
    """Raise where a weight is codes in an object of a library, whose state is no tensor here."""
    for layer_name, layer in model.named_modules():
        for name, tensor in packed_tensors(layer):
            if type(tensor) in (Tensor, nn.Parameter) and not isinstance(
                layer, ParametrizationList
            ):
                continue
            if not isinstance(layer, (PackedLinear, Stack)):
                written = "save_pretrained, torch.save" if is_written(tensor) else "torch.save"
                raise CannotSave(
                    what=_join(layer_name, name),
                    problem=f"{type(layer).__name__} keeps more than tensors",
                    remedy=f"Save the model as its library does: {written}",
                )


def _packed(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe layers and stacks of experts into which tensors are loaded as they are."""
    found: dict[str, dict[str, Any]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Stack):
            stack: Any = layer  # an `ExpertStack`: its package imports this one
            shape = [stack.num_experts, stack.out_features, stack.in_features]
            found[name] = {"format": stack.format, "shape": shape, "scaling": stack.scaling}
        elif isinstance(layer, PackedLinear) and not isinstance(layer, KBitLinear):
            shape = [layer.out_features, layer.in_features]
            found[name] = {"format": layer.format, "shape": shape}
    return found


def _check_packed(
    model: nn.Module, checkpoint: Checkpoint, entries: dict[str, dict[str, Any]]
) -> list[tuple[Any, float]]:
    """Raise unless what is packed here is packed so in the file; return scalings of its stacks."""
    here = _packed(model)
    for name, entry in entries.items():
        if name not in here:
            problem = f"{name} is packed as {entry['format']} in it: pack the model so first"
            raise checkpoint.wrong([problem])
    scalings = []
    for name, own in here.items():
        if name not in entries:
            raise checkpoint.wrong([f"it does not say how {name} is packed; save the model again"])
        for key in ("format", "shape"):
            if own[key] != entries[name][key]:
                raise CorruptQuantState(
                    what=f"{key} of {name}",
                    expected=own[key],
                    got=entries[name][key],
                    remedy="Pack the model as the one that was saved.",
                )
        if "scaling" in own:
            scalings.append((model.get_submodule(name), entries[name]["scaling"]))
    return scalings


def _header(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `save` wrote of the model's layers."""
    header = checkpoint.metadata().get(KEY)
    if header is None:
        raise checkpoint.wrong(["inductor_q.kbit.save did not write it: its header says nothing"])
    found: dict[str, Any] = json.loads(header)
    if found["version"] != VERSION:
        raise checkpoint.wrong([f"its version is {found['version']}, this one reads {VERSION}"])
    return found


def _packed_layers(
    model: nn.Module, checkpoint: Checkpoint, entries: dict[str, dict[str, Any]]
) -> dict[str, KBitLinear]:
    """Make an empty layer for each that the file holds packed."""
    modules = dict(model.named_modules())
    layers = {}
    for name, entry in entries.items():
        old = modules.get(name)
        out_features, in_features = entry["shape"]
        if not isinstance(old, nn.Linear):
            raise checkpoint.wrong([f"{name} is no linear layer here, but {type(old).__name__}"])
        if (old.out_features, old.in_features) != (out_features, in_features):
            here = (old.out_features, old.in_features)
            raise checkpoint.wrong([f"{name} is {(out_features, in_features)} in it, {here} here"])
        known = [fmt.name for fmt in KBIT_FORMATS]
        if entry["format"] not in known:
            raise UnknownFormat(name=entry["format"], known=known)
        if isinstance(old, KBitLinear) and old.format != entry["format"]:
            raise CorruptQuantState(
                what=f"format of {name}",
                expected=old.format,
                got=entry["format"],
                remedy="Quantize the model with the k and absmax of the file, or load into the "
                "model as it was before it was quantized.",
            )
        layers[name] = KBitLinear.empty(
            in_features,
            out_features,
            entry["format"],
            bias=old.bias is not None,
            dtype=getattr(torch, entry["dtype"]),
        )
        if old.bias is not None:
            layers[name].bias = old.bias
    return layers


def _other_layers(
    model: nn.Module, checkpoint: Checkpoint, entries: Mapping[str, Mapping[str, Any]]
) -> dict[str, PackedLinear]:
    """Make a layer for each `nn.Linear` that the file holds packed in other formats than k bits."""
    modules, held = dict(model.named_modules()), checkpoint.shapes()
    layers = {}
    for name, entry in entries.items():
        old = modules.get(name)
        if type(old) is not nn.Linear or "scaling" in entry:
            continue
        if "shape" not in entry:
            raise checkpoint.wrong([f"it does not say the shape of {name}; save the model again"])
        rows, columns = entry["shape"]
        if (old.out_features, old.in_features) != (rows, columns):
            here = (old.out_features, old.in_features)
            raise checkpoint.wrong([f"{name} is {(rows, columns)} in it, {here} here"])
        fmt = get_format(entry["format"])
        if missing := [leaf for leaf in fmt.operands if _join(name, leaf) not in held]:
            raise checkpoint.wrong(f"{_join(name, leaf)} is not in it" for leaf in missing)
        operands = {leaf: checkpoint.read(_join(name, leaf)) for leaf in fmt.operands}
        try:
            check_operands([*operands.values()], fmt, (rows, columns), torch.float32)
        except QfuseError as error:
            raise checkpoint.wrong([f"{name}: {error}"]) from error
        sorted_by = _join(name, "columns")
        layers[name] = PackedLinear(
            operands,
            fmt.name,
            (rows, columns),
            old.bias,
            dtype=old.weight.dtype,
            columns=checkpoint.read(sorted_by) if sorted_by in held else None,
        )
    return layers


def _expected(model: nn.Module, layers: Mapping[str, PackedLinear]) -> dict[str, Tensor]:
    """Return what the file has to hold, once `layers` are in the model: first names of tied
    tensors.
    """
    state = model.state_dict(keep_vars=True)
    names = {name: state[name] for name in owners(model)}
    for layer, new in layers.items():
        names.pop(_join(layer, "weight"), None)
        own = new.state_dict(keep_vars=True)
        names |= {_join(layer, leaf): own[leaf] for leaf in own if leaf != "bias"}
    return names
