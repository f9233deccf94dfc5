"""Read experts straight from a safetensors checkpoint, one projection of one layer at a time.

Checkpoints hold them fused, as transformers' modules do, or expert by expert under the names that
their models had before; either way no more than one projection is in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from inductor_q.experts.modules import expert_layers, projections
from inductor_q.experts.stack import ExpertStack
from inductor_q.kbit.checkpoint import Checkpoint, assign, owners

#: Layers' names in the model and in checkpoints, and the parts of each projection, row by row.
_RENAMED = {".mlp.": ".block_sparse_moe."}
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}


class ExpertCheckpoint:
    """Read a model's weights from a checkpoint.

    Raises:
        WrongCheckpoint: something that the model needs is missing, or has another shape.
    """

    def __init__(self, path: str | Path, model: nn.Module) -> None:
        self._file = Checkpoint(path)
        self._experts: dict[str, list[list[str]]] = {}
        shapes, problems = self._file.shapes(), []
        for layer_name, layer in expert_layers(model).items():
            for short in projections(layer):
                name = f"{layer_name}.{short}"
                shape = tuple(getattr(layer, short).shape)  # a parameter, or a stack
                found = next(self._layouts(layer_name, short, shape[0]), None)
                if found is None:
                    problems.append(f"{name} is missing, fused and expert by expert")
                    continue
                rows = [shapes[part] for part in found[0]]
                got = (shape[0], sum(r[0] for r in rows), *rows[0][1:])
                if len(found) == 1 and found[0] == [name]:
                    got = rows[0]
                if got != shape:
                    problems.append(f"{name} has shape {got}, the model's is {shape}")
                self._experts[name] = found
        for name, tensor in _others(model):
            key = self._key(name)
            if key is None:
                problems.append(f"{name} is missing")
            elif shapes[key] != tuple(tensor.shape):
                problems.append(f"{name} has shape {shapes[key]}, not {tuple(tensor.shape)}")
        if problems:
            raise self._file.wrong(problems)

    def weight(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the values of a fused parameter, in its dtype; each tensor of the file is read
        once.
        """
        found = self._experts[name]
        if found == [[name]]:
            return self._file.read(name).to(parameter.dtype)
        out = torch.empty(parameter.shape, dtype=parameter.dtype)
        for expert, parts in zip(out, found, strict=True):
            start = 0
            for part in parts:
                values = self._file.read(part)
                expert[start : start + len(values)] = values
                start += len(values)
        return out

    def load_others(self, model: nn.Module, device: torch.device | str | None) -> None:
        """Load everything that is not a stack by now, in the model's dtypes."""
        for name in self._experts:
            layer, _, short = name.rpartition(".")
            parameter = model.get_submodule(layer)._parameters.get(short)
            if parameter is not None:  # not a target
                assign(model, {name: self.weight(name, parameter).to(device or "cpu")})
        for name, tensor in _others(model):
            key = self._key(name)
            assert key is not None, f"{name=} was there"
            value = self._file.read(key).to(device or "cpu", tensor.dtype)
            assign(model, {name: value})

    def _layouts(self, layer: str, short: str, num_experts: int) -> Iterator[list[list[str]]]:
        """Yield the names of a projection's tensors, one list per expert, for each layout in the
        file.
        """
        fused = f"{layer}.{short}"
        if fused in self._file:
            yield [[fused]]
        for prefix in _names(layer):
            for parts in _PARTS[short]:
                names = [
                    [f"{prefix}.{e}.{part}.weight" for part in parts] for e in range(num_experts)
                ]
                if all(name in self._file for expert in names for name in expert):
                    yield names

    def _key(self, name: str) -> str | None:
        return next((n for n in _names(name) if n in self._file), None)


def _names(name: str) -> list[str]:
    """List the names that the checkpoint may use."""
    return [name, *(name.replace(old, new) for old, new in _RENAMED.items() if old in name)]


def _others(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List parameters and buffers of a state dict that are no expert's weights, tied ones once."""
    experts = {
        f"{layer_name}.{short}"
        for layer_name, layer in expert_layers(model).items()
        for short in projections(layer)
    }
    packed = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, ExpertStack))
    state = model.state_dict(keep_vars=True)
    return [
        (name, state[name])
        for name in owners(model)
        if name not in experts and not name.startswith(packed)
    ]
