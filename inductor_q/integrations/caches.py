"""Find the cache of keys and values that a call of transformers' models gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Since transformers 5.24 models and layers say "cache". Before, models with attention said
#: "past_key_values", and so did layers but for those of GPT-NeoX, Falcon and others.
_NAMES = ("cache", "past_key_values", "layer_past")


def caches_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the caches that a call gives by name."""
    given = {name: kwargs[name] for name in _NAMES if kwargs.get(name) is not None}
    if not type(given.get("cache")).__module__.startswith("transformers."):
        given.pop("cache", None)  # a word that other libraries' layers may mean something else by
    return given


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache that a call of a model gives by name, or None."""
    return next(iter(caches_of(kwargs).values()), None)


def is_new(cache: Any) -> bool:
    """Whether a cache of transformers has no keys and values yet."""
    # An encoder-decoder's has one for each of its decoder's attentions.
    parts = [getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross")]
    if None not in parts:
        return all(map(is_new, parts))
    layers = getattr(cache, "layers", None)
    return layers is not None and not any(map(_holds_something, layers))


def _holds_something(layer: Any) -> bool:
    """Whether a layer of a cache has keys and values, or the states of linear attention."""
    states: Any = getattr(layer, "is_conv_states_initialized", {})
    return bool(getattr(layer, "is_initialized", not states)) or any(states.values())
