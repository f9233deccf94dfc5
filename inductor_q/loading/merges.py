"""Have PEFT merge adapters into packed weights by their values, or say that it cannot.

PEFT 0.21 adds `B A` to a weight that a library's tensor packs, whatever the variant of LoRA is: a
DoRA adapter loses its magnitudes, and nothing says so. Unmerging subtracts that, and rounds once
more. A `PackedLinear` it takes for an ordinary layer, and changes codes. So two methods of its
layers ask first whether the layer below is one of ours; for every other they are PEFT's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from inductor_q.capture.values import dequantize
from inductor_q.exc import CannotMerge
from inductor_q.late import on_import

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
        elif _refuses(base) or vars(base).get(PACK) is not None:
            _merge(self, adapter_names, functools.partial(of_values, self, safe_merge))
        else:
            own(self, safe_merge, adapter_names)

    @functools.wraps(own_unmerge)
    def unmerge(self: Any) -> None:
        base = self.get_base_layer()
        if _holds_values(base):
            unmerge_values(self)
        elif self.merged and KEPT in self._caches:
            _put(base, *self._caches[KEPT])
            self._caches.clear()  # DoRA's norms are there too; all of it is for unmerging
            self.merged_adapters.clear()
        else:
            own_unmerge(self)

    return merge, unmerge


def _holds_values(base: Any) -> bool:
    """Whether a layer of ours has been decoded, for good or while adapters merge into it."""
    return PACK in vars(base) and type(base.weight) is nn.Parameter


def _refuses(base: Any) -> bool:
    """Whether a layer is one of ours that stays packed: of a class that says so."""
    return not getattr(base, "merges_adapters", True)


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
    base, merged = layer.get_base_layer(), layer.merged_adapters[:]
    if _refuses(base):
        raise CannotMerge(adapter=names[0], format=base.format)
    before = base.weight, None if base.bias is None else base.bias.data
    weight, bias = kept = layer._caches.get(KEPT, before) if merged else before
    try:
        layer.merged_adapters.clear()
        values = nn.Parameter(dequantize(weight), requires_grad=False)
        _put(base, values, None if bias is None else bias.clone())  # PEFT adds to it in place
        merge([*merged, *names])
        getattr(base, PACK)(base)
    except BaseException:
        _put(base, *before)
        layer.merged_adapters[:] = merged
        raise
    layer._cache_store(KEPT, kept)


def _put(base: Any, weight: Any, bias: Any) -> None:
    device = base.weight.device  # the layer may have moved since
    base.weight = nn.Parameter(weight.to(device), requires_grad=False)
    if bias is not None:
        base.bias.data = bias.to(device)
