"""Put qfuse under a program that does not know of it, for `qfuse run`.

What this changes of other libraries is taken back at the end: what torch.compile compiles goes to
qfuse, each Trainer of transformers has a `QfuseCallback`, and accelerate knows a backend of that
name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from inductor_q.late import after_import


@contextlib.contextmanager
def qfuse_everywhere() -> Iterator[None]:
    """Compile with qfuse whatever is compiled inside the block; import nothing before it does."""
    with contextlib.ExitStack() as stack:

        def after(name: str, change: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
            stack.enter_context(after_import(name, lambda: stack.enter_context(change())))

        after("torch", _forced)
        after("transformers.trainer", _with_callback)
        after("accelerate.utils.dataclasses", _named)
        yield


@contextlib.contextmanager
def _forced() -> Iterator[None]:
    import torch

    from inductor_q.backend import qfuse_backend

    with torch.compiler.set_stance(force_backend=qfuse_backend()):
        yield


@contextlib.contextmanager
def _with_callback() -> Iterator[None]:
    from transformers import trainer

    from inductor_q.integrations import QfuseCallback

    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    callbacks.append(QfuseCallback)
    try:
        yield
    finally:
        callbacks.remove(QfuseCallback)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    from inductor_q.integrations.backend_name import forget_backend, name_backend

    is_new = name_backend()
    try:
        yield
    finally:
        if is_new:
            forget_backend()
