"""Where the tensors of a model lie in a checkpoint: what every call that reads one goes by.

Experts lie fused, as transformers' modules hold them, or expert by expert under the names that
their models had before. No more than one tensor of the model is read at a time. Some may be packed,
as a `Find` of `loading.readers` says; their codes are taken as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inductor_q.capture import holds_experts
from inductor_q.capture.packed import holds_codes
from inductor_q.formats import FORMATS
from inductor_q.kernels.checks import check_operands
from inductor_q.loading.files import Checkpoint, assign, owners
from inductor_q.loading.found import Find, Found, Shapes, finds_nothing
from inductor_q.loading.layers import replace_layers
from inductor_q.loading.unused import check_unused

#: Layers' names in the model and in checkpoints, and the parts of each projection, row by row.
_RENAMED = {".mlp.": ".block_sparse_moe."}
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}

#: The fused parameters of a layer of experts, in the order in which a layer registers them.
PROJECTIONS = tuple(_PARTS)


class Packed(NamedTuple):
    """The operands of a packed weight; `columns` has the weight's column of each stored one."""

    operands: dict[str, Tensor]
    format: str
    shape: tuple[int, ...]
    columns: Tensor | None


@dataclass(frozen=True)
class _Place:
    """Names in the file, or packed weights: one where it `is_whole`, or by expert and part."""

    parts: Sequence[Sequence[str | Found]]
    is_whole: bool = False

    @property
    def packed(self) -> bool:
        return isinstance(self.parts[0][0], Found)

    @property
    def found(self) -> list[list[Found]]:
        return [[part for part in parts if isinstance(part, Found)] for parts in self.parts]


class FromCheckpoint:
    """Read a checkpoint one tensor of the model at a time; layers change when all are read.

    Args:
        find: finds what is packed; by default everything holds values.

    Raises:
        WrongCheckpoint: it lacks tensors of the model, has them in other shapes, or packed where
            the model has neither a linear layer nor experts, or a bias that no module takes. Of
            other tensors that nothing takes, a warning tells.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        device: torch.device | str,
        find: Find = finds_nothing,
    ) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._device = device
        self._layers: dict[str, nn.Module] = {}
        self._changes: dict[str, Callable[[], object]] = {}
        search = _Search(model, checkpoint, find)
        self._places = search.places()
        check_unused(model, checkpoint, search.taken, search.packed, search.passed)

    @property
    def packed(self) -> list[str]:
        """The names of the model's tensors that the checkpoint holds packed."""
        return [name for name, place in self._places.items() if place.packed]

    def check(self, names: Iterable[str], absmax: str | None) -> None:
        pass  # nothing is put before everything was read

    def weight(self, name: str) -> Tensor:
        return self.values(f"{name}.weight" if name else "weight")

    def values(self, name: str, like: Tensor | None = None) -> Tensor:
        """Return the values of the model's tensor `name`, in the dtype of `like` or the file's."""
        place = self._places.get(name) or self._places[f"{name}.weight"]  # a dense stack's
        assert not place.packed, f"{name=} is packed"
        if place.is_whole:
            values = self._value(str(place.parts[0][0]), like)
            return values if like is None else values.to(like.dtype)
        assert like is not None, f"{name=} is a stack"
        out = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        for expert, parts in zip(out, place.parts, strict=True):
            start = 0
            for part in parts:
                values = self._value(str(part), like)
                expert[start : start + len(values)] = values
                start += len(values)
        return out

    def pack(self, name: str) -> Packed:
        """Return the packed weight that stands for the model's tensor `name`."""
        place = self._places[name]
        if place.is_whole:
            ((found,),) = place.found
            operands_and_columns = found.read(self._read)
            columns = operands_and_columns.pop("columns", None)
            packed = Packed(operands_and_columns, found.format, found.shape, columns)
        else:
            packed = self._stack(name, place)
        fmt = FORMATS[packed.format]
        operands = [packed.operands[operand] for operand in fmt.operands]
        check_operands(operands, fmt, packed.shape, torch.float32)
        return packed

    def put(self, name: str, layer: nn.Module) -> None:
        """Have `layer` take the place of the one called `name`, whose weight is not read again."""
        self._layers[name] = layer

    def change(self, name: str, how: Callable[[], object]) -> None:
        """Have `how` called at the end; it puts something in the place of the tensor `name`."""
        self._changes[name] = how

    def finish(self) -> nn.Module:
        """Read what is left in the model's dtypes, put everything in its place, return the model.

        Adapters and what else is in no checkpoint stay.
        """
        done = {f"{name}.weight" if name else "weight" for name in self._layers} | {*self._changes}
        state = self._model.state_dict(keep_vars=True)
        names = [name for name in self._places if name not in done and name in state]
        rest = {name: self.values(name, state[name]) for name in names}
        model = replace_layers(self._model, self._layers)
        for change in self._changes.values():
            change()
        assign(model, rest)
        return model.to(self._device)  # buffers that are in no checkpoint

    def _value(self, name: str, like: Tensor | None) -> Tensor:
        """Read a tensor of values. Codes may have the shape of what they stand for."""
        values = self._read(name)
        is_value = like is None or like.is_floating_point()
        if is_value and holds_codes(values) and (like is None or like.dtype != values.dtype):
            problem = (
                f"{name} is {values.dtype} in it, which are codes: no scale for them is where the "
                "quantization_config of the config.json beside it has one"
            )
            raise self._checkpoint.wrong([problem])
        return values

    def _read(self, name: str) -> Tensor:
        return self._checkpoint.read(name).to(self._device)

    def _stack(self, stack: str, place: _Place) -> Packed:
        """Put the packed weights of experts, and of their parts, behind each other."""
        format = place.found[0][0].format
        shape = _stacked([[part.shape for part in parts] for parts in place.found])
        numels, out = _numels(format, shape), dict[str, Tensor]()
        filled = dict.fromkeys(numels, 0)
        for part in itertools.chain.from_iterable(place.found):
            for name, values in part.read(self._read).items():
                if name == "columns":
                    problem = "has its columns in another order for each expert (act-order)"
                    raise self._checkpoint.wrong([f"{stack} {problem}"])
                if name not in out:
                    out[name] = values.new_empty(numels[name])
                out[name][filled[name] : filled[name] + values.numel()] = values
                filled[name] += values.numel()
        return Packed(out, format, shape, None)


def _stacked(shapes: Sequence[Sequence[tuple[int, ...]]]) -> tuple[int, ...]:
    """Return [E, rows, columns] of parts [rows, columns], by expert."""
    return len(shapes), sum(rows for rows, _ in shapes[0]), shapes[0][0][1]


def _numels(format: str, shape: Sequence[int]) -> dict[str, int]:
    return {operand.name: operand.numel for operand in FORMATS[format].requirements(shape)}


class _Unread(str):
    """The reason why a packed weight is not read."""


class _Search:
    """Looks every tensor of a model up in the headers of a checkpoint.

    taken: the names that were found, and others of the same tensors; `packed` are those of packed
        weights.
    passed: layers of experts that keep some of what they have, since it is packed already.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, find: Find) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._shapes: Shapes = checkpoint.shapes()
        self._find = find
        self.taken: set[str] = set()
        self.packed: set[str] = set()
        self.passed: set[str] = set()
        self._experts = _projections(model)
        self._linears = {
            f"{name}.weight" if name else "weight"
            for name, module in model.named_modules()
            if type(module) is nn.Linear
        }

    def places(self) -> dict[str, _Place]:
        """Map first names of the model's tensors to their places.

        Raises:
            WrongCheckpoint: for all tensors that are missing or do not fit.
        """
        state = self._model.state_dict(keep_vars=True)
        places, problems = {}, []
        for name, aliases in owners(self._model).items():
            above, _, leaf = name.rpartition(".")
            if above in self._experts and leaf != "weight":
                self.passed.add(above.rpartition(".")[0])
                continue  # an adapter of experts, or an operand of what is packed already
            found = self._place(name, aliases, state[name])
            if isinstance(found, str):
                problems.append(found)
            else:
                places[name] = found
        problems += [
            f"the buffer {name} is on the meta device and in no checkpoint: make the model under "
            "inductor_q.kbit.meta_parameters()"
            for name, buffer in self._model.named_buffers()
            if buffer.is_meta and name not in state
        ]
        if problems:
            raise self._checkpoint.wrong(problems)
        return places

    def _place(self, name: str, aliases: Sequence[str], tensor: Tensor) -> _Place | str:
        """Return where a tensor lies, or why it cannot be read."""
        stack = name if name in self._experts else name.removesuffix(".weight")
        is_stack = stack in self._experts
        swapped = is_stack and self._experts[stack].is_transposed
        columns = tensor.shape[-2 if swapped else -1] if tensor.ndim else 1
        self.taken.update(_names(aliases))
        for held in _names([stack] if is_stack else aliases):
            part = self._part(held, columns)
            if isinstance(part, _Unread):
                return part
            if part is not None:
                return self._checked(aliases, _Place([[part]], is_whole=True), tensor)
        if f"{stack}.qweight" in self._shapes:
            return (
                f"{name} is not in it, but codes ({stack}.qweight) that its config.json does not "
                "explain. A model of load_checkpoint is saved by inductor_q.kbit.save; for "
                "save_pretrained call inductor_q.kbit.dequantize_model first"
            )
        if not is_stack:
            return f"{name} is not in it"
        for parts in self._by_expert(stack, tensor.shape[0], columns):
            unread = [part for part in parts[0] if isinstance(part, _Unread)]
            return unread[0] if unread else self._checked(aliases, _Place(parts), tensor)
        return f"{name} is not in it, neither fused nor expert by expert"

    def _by_expert(self, name: str, num_experts: int, columns: int) -> Iterator[Any]:
        """Yield a projection's parts, one list per expert, for each layout in the file."""
        layer, _, short = name.rpartition(".")
        for prefix in _names([layer]):
            for parts in _PARTS[short]:
                found = [
                    [self._part(f"{prefix}.{e}.{part}.weight", columns) for part in parts]
                    for e in range(num_experts)
                ]
                if all(part is not None for expert in found for part in expert):
                    yield found

    def _part(self, name: str, columns: int) -> str | Found | None:
        """Return the name of a tensor in the file, or a packed weight of so many columns, which its
        headers may not say; None where it is neither."""
        found = self._find(self._shapes, name)
        if isinstance(found, str):
            return _Unread(found)
        if found is not None and len((found := found.in_rows(columns)).shape) == 1:
            return _Unread(f"{name} has {found.shape[0]} elements in it, no rows of {columns}")
        if found is not None:
            self.packed.add(name)
        elif name not in self._shapes:
            return None
        self.taken.add(name)
        return found or name

    def _checked(self, names: Sequence[str], place: _Place, tensor: Tensor) -> _Place | str:
        """Return the place of a tensor, by all of its names, or what does not fit."""
        name = names[0]
        shapes = [
            [part.shape if isinstance(part, Found) else self._shapes[part] for part in parts]
            for parts in place.parts
        ]
        shape, here = shapes[0][0] if place.is_whole else _stacked(shapes), tuple(tensor.shape)
        layer = self._experts.get(name) or self._experts.get(name.removesuffix(".weight"))
        if place.packed and layer is None and name not in self._linears:
            return f"{name} is packed in it, and belongs to no linear layer or experts"
        modules = {self._model.get_submodule(n.rpartition(".")[0]): n for n in names}
        if place.packed and len(modules) > 1:
            tied = ", ".join(modules.values())
            return f"{name} is packed in it, tied here ({tied}): give each module a weight first"
        swapped = place.packed and layer is not None and layer.is_transposed
        if shape != ((here[0], here[2], here[1]) if swapped else here):
            return f"{name} is {shape} in it, {here} here"
        problem = "" if place.is_whole or not place.packed else _unstacked(place.found, shape)
        return f"{name} {problem}" if problem else place


def _unstacked(found: Sequence[Sequence[Found]], shape: tuple[int, ...]) -> str:
    """Return what stands against putting packed weights behind each other; empty if nothing."""
    parts = [*itertools.chain.from_iterable(found)]
    formats = sorted({part.format for part in parts})
    if len(formats) > 1:
        return f"is packed as {', '.join(formats)}"
    numels = [_numels(part.format, part.shape) for part in parts]
    for operand, numel in _numels(formats[0], shape).items():
        if numel != sum(part[operand] for part in numels):
            return f"is {formats[0]}, whose {operand} runs on from expert to expert"
    return ""


def _projections(model: nn.Module) -> dict[str, Any]:
    """Map the names of experts' projections to the layers that they belong to."""
    return {
        f"{name}.{short}" if name else short: layer
        for name, layer in model.named_modules()
        if holds_experts(layer)
        for short in PROJECTIONS
        if short in layer._parameters or short in layer._modules
    }


def _names(names: Iterable[str]) -> list[str]:
    """List the names that a checkpoint may use."""
    given = [*names]
    return given + [n.replace(old, new) for n in given for old, new in _RENAMED.items() if old in n]
