"""The `qfuse::` operator namespace: one library object per process, and how an op enters it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "qfuse"


@functools.cache
def library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Define `qfuse::<schema>` with an eager implementation for every device and a fake."""
    name = schema.partition("(")[0]
    lib = library()
    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    lib.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=lib)


def define_composite(schema: str, implementation: Callable[..., Any]) -> None:
    """Define `qfuse::<schema>` by torch's own ops: tracing goes through it, gradients included."""
    lib = library()
    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl(schema.partition("(")[0], implementation, "CompositeImplicitAutograd")


def define_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Give `qfuse::<name>` its gradient formula."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=library()
    )
