"""Merge adapters into the values of a packed linear layer, below a layer of PEFT's.

A library's tensor is decoded, and the sum packed again in the same layer. In the place of a
`PackedLinear` an ordinary layer is put, of the sum in the layer's dtype, which `merge_and_unload`
leaves in the model. What was packed is kept, and unmerging puts that back. Both layers have one
parameter as their bias, so that an optimizer keeps it, and what it learns while merged stays. A
layer of FP8 codes that stays its library's own object (`inductor_q.integrations.prepare_fp8`) is
treated alike: PEFT adds to codes, which torch refuses.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.capture import packed_weight
from inductor_q.capture.library import Packed
from inductor_q.capture.packed import holds_codes
from inductor_q.capture.values import dequantize
from inductor_q.exc import CannotMerge
from inductor_q.loading.layers import linear_of
from inductor_q.loading.merged_values import KEPT, dtype_of_values, exactly, tell_of_values

#: What packs the values of a linear layer again, an attribute of it; None where they stay values.
PACK = "pack_again"


class _Below(NamedTuple):
    """What is below PEFT's layer: a layer and, where adapters change it in its place, its weight.

    The bias is the one before a merge, and `merged_bias` the one after.
    """

    base: Any
    weight: Any
    bias: Tensor | None
    merged_bias: Tensor | None = None


def refusing(own: Any) -> Any:
    """Return `merge` of PEFT's layer over a parameter, which takes no codes for values."""

    @functools.wraps(own)
    def merge(self: Any, *args: Any, **kwargs: Any) -> None:
        _check_parameter(self)
        own(self, *args, **kwargs)

    return merge


@contextlib.contextmanager
def prepared_layers(model: nn.Module, asked: list[str] | None) -> Iterator[None]:
    """Raise where a layer's own `merge` would, before adapters are merged into any other.

    A library's own layer of codes, which knows no dtype of values, has the model's while adapters
    are merged into it, and none where that fails.
    """
    kinds = vars(sys.modules["peft.tuners.lora.layer"])
    of_values: Any = kinds["Linear"]
    of_parameters: Any = kinds.get("ParamWrapper", ())
    codes: list[tuple[Any, Any]] = []
    layer: Any
    for layer in model.modules():
        if not isinstance(layer, (of_values, of_parameters)):
            continue
        names = layer.active_adapters if asked is None else asked
        if not any(name in layer.lora_A for name in names):
            continue
        base = layer.get_base_layer()
        if isinstance(layer, of_parameters):
            _check_parameter(layer)
        elif _read_in_place(base) is not None:
            _check_linear(base)
            codes.append((layer, base))
    for _, base in codes:
        base.dtype = dtype_of_values(model)
    try:
        yield
    except BaseException:
        for layer, base in codes:
            if layer.get_base_layer() is base:  # no values are in its place
                vars(base).pop("dtype", None)
        raise


def _check_parameter(layer: Any) -> None:
    """Raise where PEFT's layer over a parameter has codes below."""
    parameter = layer.get_param()
    if holds_codes(parameter):
        raise CannotMerge(
            what=f"{layer.parameter_name} of {type(layer.get_base_layer()).__name__}",
            problem=f"expected a parameter of values, found codes in {parameter.dtype}",
            remedy=(
                "Save PEFT's adapter, and load it by inductor_q.experts.load_adapter into a "
                "model with PEFT's adapters of other layers alone, without target_parameters"
            ),
        )


def mended(own: Any, own_unmerge: Any, of_values: Any, unmerge_values: Any) -> tuple[Any, Any]:
    """Return `merge` and `unmerge` of a class, around its own and those for ordinary weights."""

    @functools.wraps(own)
    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base = self.get_base_layer()
        if _holds_values(base):
            of_values(self, safe_merge, adapter_names)
        elif KEPT in self._caches or _is_ours(base) or vars(base).get(PACK) is not None:
            _check_linear(base)
            _merge(self, adapter_names, functools.partial(of_values, self, safe_merge))
        else:
            own(self, safe_merge, adapter_names)

    @functools.wraps(own_unmerge)
    def unmerge(self: Any) -> None:
        base = self.get_base_layer()
        if _holds_values(base):
            unmerge_values(self)
        elif self.merged and KEPT in self._caches:
            _put_back(self, self._caches[KEPT])
            self._caches.clear()  # DoRA's norms are there too; all of it is for unmerging
            self.merged_adapters.clear()
        else:
            own_unmerge(self)

    return merge, unmerge


def _holds_values(base: Any) -> bool:
    """Whether a layer of ours has been decoded, for good or while adapters merge into it."""
    return PACK in vars(base) and type(base.weight) is nn.Parameter


def _is_ours(base: Any) -> bool:
    """Whether adapters have an ordinary layer in the place of this one: a `PackedLinear`, or a
    library's own layer of codes."""
    return is_packed(base) or _read_in_place(base) is not None


def is_packed(base: Any) -> bool:
    """Whether this is a `PackedLinear`, whose module imports this one."""
    return hasattr(base, "decoded")


def _read_in_place(layer: Any) -> Packed | None:
    """Describe the codes of a layer that its library multiplies with codes; None for any other."""
    if not isinstance(layer, nn.Linear):
        return None
    held = packed_weight(layer, "weight")
    return held if held is not None and held.quantizes_input else None


def _check_linear(base: Any) -> None:
    """Raise where the codes of a library's own layer are in none of our formats."""
    held = _read_in_place(base)
    if held is not None and held.read is None:
        raise CannotMerge(
            what=f"a {type(base).__name__}",
            problem=f"expected codes in a format that is known here, but {held.reason}",
            remedy="Merge in 16 bits, which FineGrainedFP8Config(dequantize=True) loads",
        )


def _dtype_of(base: Any) -> torch.dtype:
    """Return the dtype of the values that a layer of ours stands for."""
    dtype: torch.dtype = getattr(base, "dtype", torch.bfloat16)
    return dtype


def _decoded(packed: Any) -> tuple[nn.Linear, str]:
    """Return an ordinary layer of the values in float32, and the name of their format."""
    held = _read_in_place(packed)
    if held is None:
        linear: nn.Linear = packed.decoded(torch.float32)
        return linear, packed.format
    assert held.read is not None, held
    operands, format, shape = held.read()
    values = ops.dequantize(operands, format, shape, torch.float32)
    return linear_of(values, None).train(packed.training), format


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
    first = before
    if merged and KEPT in layer._caches:
        kept = layer._caches[KEPT]
        first = kept._replace(bias=_unmerged_bias(kept, before.bias))
    try:
        layer.merged_adapters.clear()
        with exactly(layer):
            merge_all = functools.partial(merge, [*merged, *names])
            if _is_ours(first.base):
                _merge_decoded(layer, first, merge_all)
            else:
                bias = None if first.bias is None else first.bias.clone()  # PEFT adds in place
                _put(layer, _Below(first.base, dequantize(first.weight), bias))
                merge_all()
                getattr(first.base, PACK)(first.base)
            after = _state(layer.get_base_layer()).bias
            first = first._replace(merged_bias=None if after is None else after.clone())
    except BaseException:
        _put(layer, before)
        layer.merged_adapters[:] = merged
        raise
    layer._cache_store(KEPT, first)


def _merge_decoded(layer: Any, first: _Below, merge: Callable[[], None]) -> None:
    """Put an ordinary layer in the place of a packed one, and merge into that in float32."""
    base, packed = layer.get_base_layer(), first.base
    dtype = _dtype_of(base) if _is_ours(base) else base.weight.dtype  # of the last cast
    values, format = _decoded(packed)
    setattr(values, PACK, None)
    if first.bias is not None:
        values.bias = nn.Parameter(first.bias.to(torch.float32, copy=True), False)
    _put(layer, _Below(values, None, None))
    with _in_float32(layer):
        merge()
    delattr(values, PACK)  # until the adapters are taken out the layer is as any other
    values.weight = nn.Parameter(values.weight.detach().to(dtype), requires_grad=False)
    if first.bias is not None:
        base.bias.data = values.bias.detach().to(dtype)
        values.bias = base.bias
    tell_of_values(dtype, format, kept=True)


def _state(base: Any) -> _Below:
    """Return what is below PEFT's layer."""
    bias = None if base.bias is None else base.bias.data
    return _Below(base, None if _is_ours(base) else base.weight, bias)


def _put_back(layer: Any, kept: _Below) -> None:
    """Put back what was packed, with what has happened to the layer in its place since."""
    base, packed = layer.get_base_layer(), kept.base
    with exactly(layer):
        bias = _unmerged_bias(kept, _state(base).bias)
        if packed is not base:
            packed.train(base.training)
            packed.bias = base.bias
            if not is_packed(packed):
                vars(packed).pop("dtype", None)  # which the library's own layer does not have
            elif not _is_ours(base):
                packed.dtype = base.weight.dtype
        _put(layer, kept._replace(bias=bias))


def _put(layer: Any, below: _Below) -> None:
    """Put a layer below PEFT's, and in it a weight and a bias, where there are any."""
    base, weight, bias, _ = below
    device = layer.get_base_layer().weight.device  # the model may have moved since
    while hasattr(layer.base_layer, "base_layer"):  # adapters of another kind are between
        layer = layer.base_layer
    if base is not layer.base_layer:
        layer.base_layer = base.to(device)
    if weight is not None:
        base.weight = nn.Parameter(weight.to(device), requires_grad=False)
    if bias is not None:
        base.bias.data = bias.to(device)


def _unmerged_bias(kept: _Below, now: Tensor | None) -> Tensor | None:
    """Return the bias before the merge, with what training has changed in it since."""
    if now is None or kept.bias is None or kept.merged_bias is None:
        return kept.bias
    dtype = kept.bias.dtype if now.dtype is kept.merged_bias.dtype else now.dtype
    before, then = kept.bias.to(now.device), kept.merged_bias.to(now.device, now.dtype)
    if torch.equal(now, then):
        return before.to(dtype)
    return (before.double() + (now.double() - then.double())).to(dtype)


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
