"""List the peers of a benchmark by name, and which of them can run here."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.suite import console
from inductor_q import testing

PEERS = ("eager", "inductor", "qfuse")


def compile_as(peer: str, fn: Callable[..., Any], *, dynamic: bool | None = False) -> Any:
    """Return ``fn`` as ``peer`` runs it.

    Peers are ``eager``; ``inductor`` and ``max-autotune`` (stock); ``qfuse``; and for ablations
    ``qfuse[key=value;key=value]`` or ``inductor[...]``, where the pairs are the backend's options;
    ``guard_filter_fn`` names a function of torch.compiler.
    """
    if peer == "eager":
        return fn
    if peer == "inductor" or peer.startswith("inductor["):
        options = peer_options(peer)
        return torch.compile(fn, backend="inductor", options=options, dynamic=dynamic)
    if peer == "max-autotune":
        return torch.compile(fn, mode="max-autotune-no-cudagraphs", dynamic=dynamic)
    if peer == "qfuse" or peer.startswith("qfuse["):
        options = peer_options(peer)
        return torch.compile(fn, backend=testing.qfuse_backend(), options=options, dynamic=dynamic)
    known = "eager, inductor, inductor[...], max-autotune, qfuse, qfuse[...]"
    raise ValueError(f"no peer {peer!r}; known: {known}")


def peer_options(peer: str) -> dict[str, Any] | None:
    """Return the backend's options in a peer's brackets; None where it has none."""
    pairs = peer.partition("[")[2].removesuffix("]")
    if not pairs:
        return None
    options: dict[str, Any] = {}
    for pair in pairs.split(";"):
        key, _, value = pair.partition("=")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value  # a bare word
    if "guard_filter_fn" in options:
        options["guard_filter_fn"] = getattr(torch.compiler, options["guard_filter_fn"])
    return options


def available(peers: Sequence[str]) -> list[str]:
    """Return the peers that can run here; print which cannot."""
    usable = []
    for peer in peers:
        if peer.startswith("qfuse"):
            try:
                testing.qfuse_backend()
            except ImportError as error:
                console.print(f"[yellow]without {peer}: {error}")
                continue
        usable.append(peer)
    return usable
