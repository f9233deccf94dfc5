"""torchao: tensor subclasses, recognized for reports. None of its layouts is one of our formats."""

from __future__ import annotations

from torch import nn

from inductor_q.capture.library import Library, Packed


def _packed(module: nn.Module, name: str) -> Packed | None:
    tensor = module._parameters.get(name)
    kind = type(tensor)
    # Parameter goes first: Dynamo traces this in layers of experts and does not know its module.
    if tensor is None or kind is nn.Parameter or kind.__module__.partition(".")[0] != "torchao":
        return None
    reason = f"it is torchao's {kind.__name__}, which none of our formats describes"
    return Packed(kind.__name__, tuple(tensor.shape), reason=reason)


TORCHAO = Library(name="torchao", packed=_packed)
