"""Know what a graph was compiled for: parameters, and the model that `inductor_q.compile` has."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

_model: ContextVar[weakref.ref[nn.Module] | None] = ContextVar("model", default=None)

#: What torch had counted when a model was compiled first.
began: WeakKeyDictionary[nn.Module, Counter[str]] = WeakKeyDictionary()


@contextlib.contextmanager
def compiling(model: nn.Module) -> Iterator[None]:
    """Have graphs that are compiled inside be for `model`."""
    token = _model.set(weakref.ref(model))
    try:
        yield
    finally:
        _model.reset(token)


@dataclass(frozen=True)
class CompiledFor:
    """Hold what one graph was compiled for, and keep nothing of it alive."""

    parameters: tuple[weakref.ref[nn.Parameter], ...]
    model: weakref.ref[nn.Module] | None  # None where torch.compile was called by somebody else

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> CompiledFor:
        """Describe a graph with these inputs that is compiled now."""
        parameters = tuple(weakref.ref(x) for x in inputs if isinstance(x, nn.Parameter))
        return cls(parameters, _model.get())

    def whose(
        self, model: nn.Module, own: Set[int], every: Set[int]
    ) -> Literal["own", "other", "gone"]:
        """Say whether the graph counts for `model`, is for another one, or was for one that
        `inductor_q.compile` compiled and that is gone.

        Where somebody else compiled it, and its parameters are in no live module, it counts for
        every model: FSDP gathers such ones for a while.

        Args:
            own: the ids of the parameters of `model`.
            every: those of the parameters of every live module.
        """
        alive = {id(p) for p in (reference() for reference in self.parameters) if p is not None}
        if alive & own:  # also where another of PEFT's wrappers was around them
            return "own"
        if self.model is None:
            return "other" if alive & every else "own"
        compiled = self.model()
        if compiled is None:
            return "gone"
        return "own" if is_part(compiled, model) or is_part(model, compiled) else "other"


def is_compiled(model: nn.Module) -> bool:
    """Whether somebody has compiled `model`, a part of it, or what it is a part of."""
    parts = list(model.modules())
    if any(isinstance(part, OptimizedModule) or part._compiled_call_impl for part in parts):
        return True
    return counted_before(model) is not None


def is_part(part: nn.Module, model: nn.Module) -> bool:
    return any(module is part for module in model.modules())


def counted_before(model: nn.Module) -> Counter[str] | None:
    """Return what torch had counted when `model`, or what it is a part of, was compiled first; None
    where `inductor_q.compile` has compiled neither."""
    for compiled, counted in began.items():
        if is_part(compiled, model) or is_part(model, compiled):
            return counted
    return None
