"""Have PEFT merge adapters into packed weights by their values.

PEFT 0.21 adds `B A` to a weight that a library's tensor packs, whatever the variant of LoRA is: a
DoRA adapter loses its magnitudes, and nothing says so. Unmerging subtracts that, and rounds once
more. A `PackedLinear` it takes for an ordinary layer, and would change codes. So two methods of its
layers ask first whether the layer below is one of ours; for every other they are PEFT's own.

A library's tensor is decoded, and the sum packed again in the same layer. In the place of a
`PackedLinear` an ordinary layer is put, of the sum in 16 bits, which `merge_and_unload` leaves in
the model. What was packed is kept, and unmerging puts that back.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from inductor_q.capture.values import dequantize
from inductor_q.late import on_import
from inductor_q.log import warn_once

#: What packs the values of a linear layer again, an attribute of it; None where they stay values.
PACK = "pack_again"
#: The name under which PEFT's layer keeps what was below it before the first merge.
KEPT = "inductor_q.kept"


def merge_by_values(layer: nn.Module, pack: Callable[[nn.Module], object] | None) -> None:
    """Have adapters merge into the values of a linear layer, whose weight `pack` packs again."""
    setattr(layer, PACK, pack)
    mend_merges()


@functools.cache
def mend_merges() -> None:
    """Take over PEFT's merges into layers of ours: now, or as soon as somebody imports PEFT."""
    on_import("peft.tuners.lora.model", _mend)


def _mend() -> None:
    plain: Any = vars(sys.modules["peft.tuners.lora.layer"])["Linear"]
    of_values = plain.merge, plain.unmerge
    for kind in (plain, *plain.__subclasses__()):
        if "merge" in vars(kind):
            kind.merge, kind.unmerge = _mended(kind.merge, kind.unmerge, *of_values)


def _mended(own: Any, own_unmerge: Any, of_values: Any, unmerge_values: Any) -> tuple[Any, Any]:
    """Return `merge` and `unmerge` of a class, around its own and those for ordinary weights."""

    @functools.wraps(own)
    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base = self.get_base_layer()
        if _holds_values(base):
            of_values(self, safe_merge, adapter_names)
        elif KEPT in self._caches or _is_ours(base) or vars(base).get(PACK) is not None:
            _merge(self, adapter_names, functools.partial(of_values, self, safe_merge))
        else:
            own(self, safe_merge, adapter_names)

    @functools.wraps(own_unmerge)
    def unmerge(self: Any) -> None:
        base = self.get_base_layer()
        if _holds_values(base):
            unmerge_values(self)
        elif self.merged and KEPT in self._caches:
            _put(self, *self._caches[KEPT])
            self._caches.clear()  # DoRA's norms are there too; all of it is for unmerging
            self.merged_adapters.clear()
        else:
            own_unmerge(self)

    return merge, unmerge


def _holds_values(base: Any) -> bool:
    """Whether a layer of ours has been decoded, for good or while adapters merge into it."""
    return PACK in vars(base) and type(base.weight) is nn.Parameter


def _is_ours(base: Any) -> bool:
    """Whether a layer is a `PackedLinear`, in whose place adapters have an ordinary one."""
    return hasattr(base, "decoded")


def _merge(layer: Any, asked: list[str] | None, merge: Callable[[list[str]], None]) -> None:
    """Merge adapters, and those that are merged already, into the values of what was packed first.

    So the weight is rounded once, however many there are, and PEFT's variants of LoRA see an
    ordinary layer while they merge.
    """
    from peft.tuners.tuners_utils import check_adapters_to_merge

    # It warns of those that are merged already; and some may adapt other layers only.
    names = [name for name in check_adapters_to_merge(layer, asked) if name in layer.lora_A]
    if not names:
        return
    merged, before = layer.merged_adapters[:], _state(layer.get_base_layer())
    packed, weight, bias = kept = layer._caches.get(KEPT, before) if merged else before
    try:
        layer.merged_adapters.clear()
        if _is_ours(packed):
            _put(layer, _values_of(packed))
            with _in_float32(layer):
                merge([*merged, *names])
            _round(layer.get_base_layer(), packed)
        else:
            values = dequantize(weight)
            # PEFT adds to the bias in place.
            _put(layer, packed, values, None if bias is None else bias.clone())
            merge([*merged, *names])
            getattr(packed, PACK)(packed)
    except BaseException:
        _put(layer, *before)
        layer.merged_adapters[:] = merged
        raise
    layer._cache_store(KEPT, kept)


def _state(base: Any) -> tuple[nn.Module, Any, Any]:
    """Return a layer and, where adapters change it in its place, its weight and bias."""
    if _is_ours(base):
        return base, None, None
    return base, base.weight, None if base.bias is None else base.bias.data


def _put(layer: Any, base: Any, weight: Any = None, bias: Any = None) -> None:
    """Put a layer below PEFT's, and in it a weight and a bias, where there are any."""
    device = layer.get_base_layer().weight.device  # the model may have moved since
    while hasattr(layer.base_layer, "base_layer"):  # adapters of another kind are between
        layer = layer.base_layer
    if base is not layer.base_layer:
        layer.base_layer = base.to(device)
    if weight is not None:
        base.weight = nn.Parameter(weight.to(device), requires_grad=False)
    if bias is not None:
        base.bias.data = bias.to(device)


def _values_of(packed: Any) -> nn.Linear:
    """Return an ordinary layer of a packed one's values in float32, with a bias of its own."""
    values: nn.Linear = packed.decoded(torch.float32)
    if values.bias is not None:
        values.bias = nn.Parameter(values.bias.detach().float().clone(), requires_grad=False)
    setattr(values, PACK, None)
    return values


def _round(values: Any, packed: Any) -> None:
    """Round what adapters have been merged into to the dtypes of the packed layer, and tell it."""
    delattr(values, PACK)  # until the adapters are taken out the layer is as any other
    values.weight = nn.Parameter(values.weight.detach().to(packed.dtype), requires_grad=False)
    if (bias := packed.bias) is not None:
        rounded = values.bias.detach().to(bias.dtype)
        values.bias = nn.Parameter(rounded, requires_grad=bias.requires_grad)
    before = sum(t.nbytes for t in packed.operands) / values.weight.numel()
    warn_once(
        "PEFT merges adapters into the values of packed layers, which are ordinary ones then: "
        f"{packed.dtype} takes {packed.dtype.itemsize} bytes an element, where {packed.format} "
        f"takes {before:.2f}. The packed weight is kept beside it until the adapters are unmerged "
        "or unloaded"
    )


@contextlib.contextmanager
def _in_float32(layer: nn.Module) -> Iterator[None]:
    """Hold the 16-bit matrices of adapters in float32, so that their product is not rounded."""
    short = [
        (module, name, parameter)
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dtype.itemsize < 4
    ]
    try:
        for module, name, parameter in short:
            module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)
        yield
    finally:
        for module, name, parameter in short:
            module._parameters[name] = parameter
