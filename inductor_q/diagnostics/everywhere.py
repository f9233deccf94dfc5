"""Put qfuse under a program that does not know of it, for `qfuse run`.

This is the one place where anything of another library is changed, and all of it is taken back at
the end: what torch.compile compiles goes to qfuse, each Trainer of transformers has a
`QfuseCallback`, and accelerate knows a backend of that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from inductor_q.late import after_import

_NAME = "QFUSE"


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
    """Add a member to accelerate's enumeration of backends, which refuses every other name."""
    from accelerate.utils.dataclasses import DynamoBackend

    if _NAME in DynamoBackend._value2member_map_:
        yield
        return
    member: Any = str.__new__(DynamoBackend, _NAME)
    member._name_ = member._value_ = _NAME
    DynamoBackend._value2member_map_[_NAME] = member
    try:
        yield
    finally:
        del DynamoBackend._value2member_map_[_NAME]
