"""The cache of a call, by each name that transformers has given it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_q.integrations.caches import cache_of, caches_of, is_new

transformers: Any = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["cache", "past_key_values", "layer_past"])
def test_every_name(name: str) -> None:
    """The first since transformers 5.24, the others before."""
    cache = transformers.DynamicCache()
    assert cache_of({"input_ids": None, name: cache}) is cache
    assert caches_of({name: cache, "use_cache": True}) == {name: cache}
    assert cache_of({name: None}) is None


def test_a_cache_that_has_no_length() -> None:
    """As that of continuous batching, which layers are given too."""
    kind = transformers.generation.continuous_batching.cache.PagedAttentionCache
    cache = kind.__new__(kind)
    assert not hasattr(cache, "get_seq_length")
    assert cache_of({"cache": cache}) is cache and not is_new(cache)


def test_a_cache_of_something_else() -> None:
    """Only transformers' is taken for one; layers of other libraries may use the word."""
    assert caches_of({"cache": {"keys": 1}, "past_key_values": None}) == {}
    legacy = ((torch.ones(1), torch.ones(1)),)
    assert cache_of({"past_key_values": legacy}) is legacy


def test_what_a_cache_holds() -> None:
    cache = transformers.DynamicCache()
    encoder_decoder = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
    assert is_new(cache) and is_new(encoder_decoder)
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert not is_new(cache) and not is_new(encoder_decoder)
    assert not is_new(((torch.ones(1), torch.ones(1)),))
