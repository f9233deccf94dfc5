"""Put qfuse under a program that does not know of it, for `qfuse run`; `qfuse explain --backend`
chooses who compiles in the same way.

What this changes of other libraries is taken back at the end: what torch.compile compiles goes to
qfuse, each Trainer of transformers has a `QfuseCallback` beside those that the program gives it,
and accelerate knows a backend of that name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from inductor_q.late import after_import


@contextlib.contextmanager
def qfuse_everywhere() -> Iterator[None]:
    """Compile with qfuse whatever is compiled inside the block; import nothing before it does."""
    with contextlib.ExitStack() as stack:

        def after(name: str, change: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
            stack.enter_context(after_import(name, lambda: stack.enter_context(change())))

        after("torch", all_to_qfuse)
        after("transformers.trainer", _with_callback)
        after("accelerate.utils.dataclasses", _named)
        yield


def all_to_qfuse() -> contextlib.AbstractContextManager[None]:
    """Compile with qfuse all that torch.compile compiles, with what is meant for Inductor too."""
    from inductor_q.backend import qfuse, qfuse_backend

    return every_compile(qfuse_backend(), alike=(None, "inductor", "qfuse", qfuse))


@contextlib.contextmanager
def every_compile(chosen: Any, *, alike: Collection[Any]) -> Iterator[None]:
    """Let `torch.compile` name the backend `chosen`, whatever it was given. Mode and options stay
    where they were for one that is `alike`. (A stance of torch.compiler would drop those too.)"""
    import torch

    compile = torch.compile

    @functools.wraps(compile)
    def to_chosen(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") not in alike:
            kwargs.update(mode=None, options=None)
        return compile(*args, **{**kwargs, "backend": chosen})

    torch.compile = to_chosen
    try:
        yield
    finally:
        torch.compile = compile


@contextlib.contextmanager
def _with_callback() -> Iterator[None]:
    from transformers import trainer

    from inductor_q.integrations.trainer import DefaultCallback

    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    callbacks.append(DefaultCallback)
    try:
        yield
    finally:
        callbacks.remove(DefaultCallback)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    from inductor_q.integrations.backend_name import forget_backend, name_backend

    is_new = name_backend()
    try:
        yield
    finally:
        if is_new:
            forget_backend()
