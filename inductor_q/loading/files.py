"""Read a safetensors checkpoint one tensor at a time: a file, or shards with their index."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from inductor_q.exc import AlreadyQuantized, MissingExtra, UnreadCheckpoint, WrongCheckpoint

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

#: Where a configuration may say how weights are packed.
_PACKINGS = ("quantization_config", "compression_config")


class Checkpoint:
    """Hold a checkpoint: names and shapes of its tensors at once, their values when read.

    Args:
        path: a .safetensors file, an index.json of shards, or a folder with either. In a folder
            model.safetensors is taken before an index, as transformers does: what an earlier save
            left beside it is old.

    Raises:
        WrongCheckpoint: there is no such file, or it is not what it should be; or a name is in two
            files of a folder that has no index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open = safetensors().safe_open
        self._files: dict[str, Path] = {}
        self._held: tuple[Path, Any] | None = None  # opened once for all of its tensors
        with self.readable():
            for file, names in _files(self.path):
                with self._open(file, "pt") as handle:
                    held = set(handle.keys())
                if missing := sorted(set(names or held) - held):
                    raise self.wrong([f"{name}: the index names {file.name}" for name in missing])
                if twice := sorted(self._files.keys() & set(names or held)):
                    raise self.wrong(
                        f"{name} is in {self._files[name].name} and in {file.name}: give the path "
                        "of one file, or of an index"
                        for name in twice
                    )
                self._files.update(dict.fromkeys(names or held, file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """List its tensors in alphabetical order, which files do not keep."""
        return sorted(self._files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Map names to shapes, from the headers alone."""
        found = {}
        with self.readable():
            for file in dict.fromkeys(self._files.values()):
                with self._open(file, "pt") as handle:
                    for name in handle.keys():  # noqa: SIM118 - not a mapping
                        found[name] = tuple(handle.get_slice(name).get_shape())
        return {name: found[name] for name in self._files}

    def metadata(self) -> dict[str, str]:
        """Return the headers' own entries."""
        found: dict[str, str] = {}
        with self.readable():
            for file in dict.fromkeys(self._files.values()):
                with self._open(file, "pt") as handle:
                    found.update(handle.metadata() or {})
        return found

    def read(self, name: str) -> Tensor:
        """Return the tensor `name` in host memory; nothing of it is kept here."""
        if name not in self._files:
            raise self.wrong([f"{name} is not in it"])
        file = self._files[name]
        with self.readable():
            if self._held is None or self._held[0] != file:
                self._held = file, self._open(file, "pt")
            tensor: Tensor = self._held[1].get_tensor(name)
        return tensor

    def wrong(self, problems: Iterable[str]) -> WrongCheckpoint:
        return WrongCheckpoint(path=str(self.path), problems=tuple(problems))

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Raise `WrongCheckpoint` for what a missing or damaged file raises inside the block."""
        damaged = (OSError, safetensors().SafetensorError)
        try:
            yield
        except damaged as error:
            raise self.wrong([str(error)]) from error


def _files(path: Path) -> list[tuple[Path, list[str]]]:
    """List files and the names to take from each; an empty list stands for all of them."""
    if path.is_dir():
        found = next((path / name for name in (SINGLE, INDEX) if (path / name).is_file()), None)
        if found is None:
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise FileNotFoundError(f"no {INDEX} and no *.safetensors in {path}")
            return [(file, []) for file in files]
        path = found
    if path.suffix != ".json":
        return [(path, [])]
    places, by_file = _part(path, _mapping(path), "weight_map"), dict[str, list[str]]()
    if not places:
        raise _wrong(path, "it has no weight_map from names to files")
    for name, file in places.items():
        if not isinstance(file, str):
            raise _wrong(path, f"its weight_map has {file!r} for {name}, which names no file")
        by_file.setdefault(file, []).append(name)
    return [(path.parent / file, names) for file, names in by_file.items()]


def _mapping(path: Path) -> Mapping[str, Any]:
    """Return what a JSON file says.

    Raises:
        WrongCheckpoint: it cannot be read, or is no mapping.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _wrong(path, str(error)) from error
    if not isinstance(said, Mapping):
        raise _wrong(path, "it is no mapping")
    return said


def _part(path: Path, said: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a mapping inside another; an empty one where there is none.

    Raises:
        WrongCheckpoint: there is something else.
    """
    found = said.get(key) or {}
    if not isinstance(found, Mapping):
        raise _wrong(path, f"its {key} is {found!r}, which is no mapping")
    return found


def _wrong(path: Path, problem: str) -> WrongCheckpoint:
    return WrongCheckpoint(path=str(path), problems=(problem,))


def quantization(path: str | Path) -> dict[str, Any] | None:
    """Return what the config.json beside a checkpoint says of how its weights are packed, or None.

    ModelOpt's older checkpoints say it in hf_quant_config.json.

    Raises:
        WrongCheckpoint: the file cannot be read.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    for name in ("config.json", "hf_quant_config.json"):
        config = folder / name
        if not config.exists():
            continue
        said = _mapping(config)
        for of in (said, _part(config, said, "text_config")):
            for key in _PACKINGS:
                if found := _part(config, of, key):
                    return dict(found)
        if name != "config.json" and (found := _part(config, said, "quantization")):
            return {"quant_method": "modelopt", **found}
    return None


def forget_quantization(model: nn.Module) -> None:
    """Take out of a model's configuration how its checkpoint was packed, which it no longer is."""
    config = getattr(model, "config", None)
    for of in (config, getattr(config, "text_config", None)):
        for key in _PACKINGS:
            if hasattr(of, key):
                delattr(of, key)


def check_not_quantized(path: str | Path) -> None:
    """Raise where the config.json beside a checkpoint says that its weights are codes already.

    Some of them (fp8) have the shapes of what they stand for, and would be read without scales.

    Raises:
        AlreadyQuantized; WrongCheckpoint where config.json cannot be read.
    """
    found = quantization(path)
    if found is not None:
        raise AlreadyQuantized(
            what=f"the checkpoint {path}",
            found=f"its configuration says quant_method={found.get('quant_method')!r}",
            remedy=_way_out(path, str(found.get("quant_method"))),
        )


_OURS = "inductor_q.kbit.dequantize_model(model)"

#: What makes values of codes that transformers loads.
_DEQUANTIZED = {
    "bitsandbytes": "model.dequantize()",
    "fp8": "from_pretrained with FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "from_pretrained with Mxfp4Config(dequantize=True)",
    "torchao": _OURS,
}


def _way_out(path: str | Path, method: str) -> str:
    """Say what can be done with a checkpoint that is quantized by a method."""
    from inductor_q.loading.readers import ITSELF, find_in

    decoded = _DEQUANTIZED.get(method)
    if method in ITSELF:
        as_it_is = "Load it by transformers' from_pretrained, and compile that model"
    else:
        try:
            find_in(path)
        except UnreadCheckpoint as error:
            as_it_is = f"Nothing here reads its codes: {error.problem}"
        else:
            as_it_is = "inductor_q.load_checkpoint(model, path) takes its codes as they are"
            decoded = decoded or _OURS
    other = f", or quantize what {decoded} makes of it, without `checkpoint`" if decoded else ""
    return f"{as_it_is}. To quantize anew, give a checkpoint in 16 or 32 bits{other}"


def safetensors() -> Any:
    try:
        import safetensors as package
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise MissingExtra(
            package="safetensors", extra="kbit", feature="reading or writing a checkpoint"
        ) from error
    return package


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Make the parameters of modules that are built inside on the meta device, without memory.

    Buffers stay real, since some (rotary frequencies) are in no checkpoint. Memory is taken for one
    parameter at a time, before it is registered.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None  # a tied one must stay the same object
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def owners(model: nn.Module) -> dict[str, list[str]]:
    """Map first names to all names, of each parameter and each buffer that a state dict has."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = first.setdefault(id(tensor), name)
        names.setdefault(key, []).append(name)
    return names


def assign(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put `values`, by first name, in the place of parameters and buffers, tied ones together."""
    state = model.state_dict(keep_vars=True)
    for name, aliases in owners(model).items():
        if name not in values:
            continue
        old, new = state[name], values[name]
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, old.requires_grad)
        for alias in aliases:
            parent, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
