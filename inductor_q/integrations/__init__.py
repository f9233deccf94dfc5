"""What makes other libraries' ways of training fit into one graph: called by name, never unasked.

What is here changes the model or the trainer that it is given and nothing else: no class, and no
configuration, but for what the model would write there itself. There are two exceptions: the name
of a backend, which accelerate is told as soon as both are imported, and that masks of transformers
note what they are made of once a model is compiled by layers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inductor_q.integrations.backend_name import name_backend
from inductor_q.integrations.checkpointing import prepare_checkpointing
from inductor_q.integrations.cpu_packing import keep_unpacked
from inductor_q.integrations.dora import prepare_dora
from inductor_q.integrations.parameters import prepare_parameters
from inductor_q.late import on_import

if TYPE_CHECKING:
    from inductor_q.integrations.decoding import compile_decoding as compile_decoding
    from inductor_q.integrations.fp8 import prepare_fp8 as prepare_fp8
    from inductor_q.integrations.regions import local_device_map as local_device_map
    from inductor_q.integrations.trainer import QfuseCallback as QfuseCallback
    from inductor_q.integrations.trainer import compile_trainer as compile_trainer

__all__ = [
    "QfuseCallback",
    "compile_decoding",
    "compile_trainer",
    "keep_unpacked",
    "local_device_map",
    "prepare_checkpointing",
    "prepare_dora",
    "prepare_fp8",
    "prepare_parameters",
]


#: Modules that import transformers, or the compiler, which needs a cache folder.
_LATER = {
    "QfuseCallback": "trainer",
    "compile_decoding": "decoding",
    "compile_trainer": "trainer",
    "local_device_map": "regions",
    "prepare_fp8": "fp8",
}

on_import("accelerate.utils.dataclasses", name_backend)


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"inductor_q.integrations.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
