"""How libraries lay packed weights out in checkpoints: one file for each, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inductor_q.exc import UnreadCheckpoint
from inductor_q.loading.files import quantization
from inductor_q.loading.found import Find, finds_nothing
from inductor_q.loading.readers import awq, compressed_tensors, fp8, gptq, hqq, modelopt, mxfp4

#: Makes a `Find` of a checkpoint's quantization_config, or says why such are not read.
READERS: Mapping[str, Callable[[Mapping[str, Any]], Find | str]] = {
    "awq": awq.reader,
    "compressed-tensors": compressed_tensors.reader,
    "fp8": fp8.reader,
    "gptq": gptq.reader,
    "hqq": hqq.reader,
    "modelopt": modelopt.reader,
    "mxfp4": mxfp4.reader,
}

#: Methods whose layers are read as transformers makes them.
ITSELF = ("bitsandbytes", "torchao")


def find_in(path: str | Path) -> Find:
    """Return what finds the packed weights of a checkpoint; nothing where it holds values.

    Raises:
        UnreadCheckpoint: it is quantized by a method, or in a way, that has no reader.
        WrongCheckpoint: its config.json cannot be read.
    """
    said = quantization(path)
    if said is None:
        return finds_nothing
    method = str(said.get("quant_method"))
    if method in ITSELF:
        problem = f"transformers' from_pretrained loads {method} packed, and nothing else is needed"
        raise UnreadCheckpoint(path=str(path), problem=problem)
    if method not in READERS:
        problem = f"quant_method {method!r} has no reader; those that have are {', '.join(READERS)}"
        raise UnreadCheckpoint(path=str(path), problem=problem)
    try:
        found = READERS[method](said)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"its quantization_config is not as {method}'s are: {error!r} in {said}"
        raise UnreadCheckpoint(path=str(path), problem=problem) from error
    if isinstance(found, str):
        raise UnreadCheckpoint(path=str(path), problem=found)
    return found
