"""Read what the running torch's `torch._inductor.config` accepts: keys, their types, their aliases.

Nothing is written. `coerce` checks the declared type of a key more strictly than torch does (which
accepts True for a number and skips every generic type) and more kindly (4 for 4.0, a list for a
tuple), because options often come from JSON, YAML or a command line.
"""

from __future__ import annotations

import collections.abc
import functools
import numbers
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MISMATCH: Final = object()

#: The option for CUDA graphs, each of which overwrites what the one before it has returned.
GRAPHS = "triton.cudagraphs"

#: Whether torch cuts a graph around what no CUDA graph can hold. Where a cut is between parts that
#: are concatenated, those in front of it are lost (torch 2.11 and 2.13, docs/upstream.md).
PARTITION = "graph_partition"
REUSE = "allow_buffer_reuse"

_PREFIX = "torch._inductor.config."


@dataclass(frozen=True, kw_only=True)
class Key:
    declared: Any  # a type, or what typing makes of one; NoneType when torch does not say
    alias: str = ""  # the key of the same config that it is another spelling of
    deprecated: str = ""  # why not to use it


@functools.cache
def schema() -> Mapping[str, Key]:
    """Return every key that can be patched, nested ones dotted ("triton.cudagraphs")."""
    from torch._inductor import config

    keys = {}
    for name, entry in config._config.items():  # type: ignore[attr-defined]
        alias = entry.alias or ""
        keys[name] = Key(
            declared=config.get_type(name),  # type: ignore[attr-defined]
            alias=alias.removeprefix(_PREFIX) if alias.startswith(_PREFIX) else "",
            # torch has deprecation of keys from 2.12 on
            deprecated=(getattr(entry, "deprecation_message", None) or "it will be removed")
            if getattr(entry, "deprecated", False)
            else "",
        )
    keys.pop("TYPE_CHECKING", None)  # an import of the module, not a setting
    return keys


def current(name: str) -> Any:
    """Return the value that holds when nobody patches the key."""
    from torch._inductor import config

    return functools.reduce(getattr, name.split("."), config)


def wants_graphs(options: Mapping[str, Any]) -> bool:
    """Return whether CUDA graphs are on under these options of a compile."""
    return bool(options.get(GRAPHS, current(GRAPHS)))


def for_cpp_wrapper() -> dict[str, Any]:
    """Return the keys that backward under the C++ wrapper needs on a GPU, where torch does not set
    them itself.

    torch 2.11 sets them around forward, and around backward, which is compiled later, only where
    `cpp_wrapper` is no option of a compile (docs/upstream.md). 2.13 does it in `compile_fx_inner`.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    if "get_cpp_wrapper_config" in compile_fx_inner.__code__.co_names:
        return {}
    given = current("triton.autotune_at_compile_time")
    autotune = True if given is None else given  # as torch does for forward
    return {"triton.store_cubin": True, "triton.autotune_at_compile_time": autotune}


def modes(dynamic: bool) -> Mapping[str, Mapping[str, Any]]:
    """Return the modes of `torch.compile` and the keys that each sets."""
    import torch._inductor

    return torch._inductor.list_mode_options(dynamic=dynamic)


def coerce(value: Any, declared: Any) -> Any:
    """Return `value` as the declared type has it, or MISMATCH. Other kinds of types accept
    everything.
    """
    if declared is types.NoneType:
        return value if value is None else MISMATCH
    if declared is bool:
        return value if isinstance(value, bool) else MISMATCH
    if declared in (int, float):
        return _number(value, declared)
    origin = typing.get_origin(declared) or declared
    arguments = typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        options = (coerce(value, argument) for argument in arguments)
        return next((option for option in options if option is not MISMATCH), MISMATCH)
    if origin is typing.Literal:
        same = any(type(value) is type(x) and value == x for x in arguments)
        return value if same else MISMATCH
    if origin is list:
        if not isinstance(value, (list, tuple)):
            return MISMATCH
        items = [coerce(item, arguments[0]) for item in value] if arguments else list(value)
        return MISMATCH if any(item is MISMATCH for item in items) else items
    if origin in (tuple, set):  # torch's element types of tuples are not reliable
        return origin(value) if isinstance(value, (list, tuple, set)) else MISMATCH
    if origin is dict:
        return dict(value) if isinstance(value, Mapping) else MISMATCH
    if origin is collections.abc.Callable:
        return value if callable(value) else MISMATCH
    if isinstance(origin, type):
        return value if isinstance(value, origin) else MISMATCH
    return value


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return MISMATCH
    if isinstance(value, numbers.Integral):
        return kind(operator.index(value))
    as_float = float(value)
    if kind is float:
        return as_float
    return int(as_float) if as_float.is_integer() else MISMATCH


def describe(declared: Any) -> str:
    """Say in words what the declared type accepts, for messages."""
    simple = {
        bool: "True or False",
        int: "a whole number",
        float: "a number",
        str: "a string",
        list: "a list",
        tuple: "a tuple",
        set: "a set",
        dict: "a mapping",
        types.NoneType: "None",
        collections.abc.Callable: "a callable",
    }
    origin = typing.get_origin(declared) or declared
    arguments = typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(argument) for argument in arguments))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is list and arguments and arguments[0] in simple:
        return f"a list, each {simple[arguments[0]]}"
    return simple.get(origin) or f"a {getattr(origin, '__name__', origin)}"
