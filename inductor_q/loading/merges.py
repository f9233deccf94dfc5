"""Have PEFT merge adapters into packed weights by their values.

PEFT 0.21 adds `B A` to a weight that a library's tensor packs, whatever the variant of LoRA is: a
DoRA adapter loses its magnitudes, and nothing says so. Unmerging subtracts that, and rounds once
more. A `PackedLinear` it takes for an ordinary layer, and would change codes. So two methods of its
layers ask first whether the layer below is one of ours; for every other they are PEFT's own.

A library's tensor is decoded, and the sum packed again in the same layer. In the place of a
`PackedLinear` an ordinary layer is put, of the sum in the layer's dtype, which `merge_and_unload`
leaves in the model. What was packed is kept, and unmerging puts that back. Both layers have one
parameter as their bias, so that an optimizer keeps it, and what it learns while merged stays. A
layer of FP8 codes that stays its library's own object (`inductor_q.integrations.prepare_fp8`) is
treated alike: PEFT adds to codes, which torch refuses.

Adapters of experts are no layers of PEFT's, but a part of whichever adapter the model has. So they
merge and come out again with the model, of whichever of PEFT's tuners: a parameter of values stands
in the place of each stack. And PEFT's `disable_adapter()` disables them with the others.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inductor_q import ops
from inductor_q.capture import packed_weight
from inductor_q.capture.library import Packed
from inductor_q.capture.packed import holds_codes
from inductor_q.capture.values import dequantize
from inductor_q.exc import CannotMerge
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_calls import Stack
from inductor_q.late import on_import
from inductor_q.loading.layers import linear_of
from inductor_q.log import warn_once
from inductor_q.modules import modules_of

#: What packs the values of a linear layer again, an attribute of it; None where they stay values.
PACK = "pack_again"
#: The name under which PEFT's layer keeps what was below it before the first merge, and a layer of
#: experts its stacks: by name, with the dtype of the values in the place of each.
KEPT = "inductor_q.kept"


class _Below(NamedTuple):
    """What is below PEFT's layer: a layer and, where adapters change it in its place, its weight.

    The bias is the one before a merge, and `merged_bias` the one after.
    """

    base: Any
    weight: Any
    bias: Tensor | None
    merged_bias: Tensor | None = None


def merge_by_values(layer: nn.Module, pack: Callable[[nn.Module], object] | None) -> None:
    """Have adapters merge into the values of a linear layer, whose weight `pack` packs again."""
    setattr(layer, PACK, pack)
    mend_merges()


@functools.cache
def mend_merges() -> None:
    """Take over PEFT's merges into layers of ours: now, or as soon as somebody imports PEFT."""
    on_import("peft.tuners.lora.model", _mend)


def forget_packed(model: nn.Module) -> None:
    """Drop what was packed before merges: adapters come out of ordinary layers as PEFT has it."""
    layer: Any
    for layer in model.modules():
        stacks = vars(layer).get(KEPT, {})
        for name, (stack, dtype) in stacks.items():
            stacks[name] = stack if stack.format == DENSE else stack._dense(dtype), dtype
        caches = vars(layer).get("_caches")
        if isinstance(caches, dict) and caches.pop(KEPT, None):
            merge_by_values(layer.get_base_layer(), None)


def dtype_of_inputs(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of a model's embedding, which that of the inputs of its layers follows."""
    find: Any = getattr(model, "get_input_embeddings", None)
    try:
        weight: Any = getattr(find(), "weight", None) if find else None
    except NotImplementedError:  # transformers raises it for a model without an embedding
        return None
    dtype: torch.dtype | None = getattr(weight, "dtype", None)
    return dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else None


def dtype_of_values(model: nn.Module) -> torch.dtype:
    """Return the dtype for values of layers that do not know their own: that of the embedding, or
    what the configuration says, or bfloat16."""
    said = str(getattr(getattr(model, "config", None), "dtype", None)).removeprefix("torch.")
    # A configuration may have a text, and no cast of the model changes it.
    of_config: torch.dtype = getattr(torch, said, torch.bfloat16)
    return dtype_of_inputs(model) or of_config


def widen(model: nn.Module) -> None:
    """Have packed layers decode to float32 where the embedding is float32.

    PEFT's `prepare_model_for_kbit_training` casts embeddings and norms without a call of the
    layers, and their inputs are float32 then.
    """
    if dtype_of_inputs(model) is torch.float32:
        layer: Any
        for layer in model.modules():
            if _is_packed(layer):
                layer.dtype = torch.float32


def merge_experts(model: nn.Module, *, keep: bool, safe: bool = False) -> list[tuple[Any, str]]:
    """Merge the adapters of all experts, and put parameters of the values where their stacks were.

    Args:
        keep: whether the layers keep their stacks, for `unmerge_experts`. Where they do not, none
            that an earlier merge has kept comes back either.
        safe: whether nothing changes where a sum is not finite, as PEFT's `safe_merge` has it. Each
            is computed twice then.

    Returns:
        What has been merged: layers, and names of projections.

    Raises:
        CannotMerge: the experts are sharded, by `shard` or FSDP2. Nothing is changed then.
    """
    merged: list[tuple[Any, str]] = []
    try:
        for layer, name, stack, dtype in check_experts(model, safe=safe):
            with _exactly(stack):
                stack._put_values(layer, name, stack.merged(dtype))
            if keep:
                vars(layer).setdefault(KEPT, {})[name] = stack, dtype
                merged.append((layer, name))
            if stack.format != DENSE:
                _tell(dtype, stack.format, kept=keep)
    except BaseException:
        unmerge_experts(merged)
        raise
    if not keep:
        forget_experts(model)
    return merged


def check_experts(model: nn.Module, *, safe: bool) -> list[tuple[Any, str, Any, torch.dtype]]:
    """Return the layer, name, stack and dtype of the sums of all adapted experts, if their adapters
    can be merged."""
    of_model = dtype_of_values(model)
    found: dict[str, tuple[Any, str, Any, torch.dtype]] = {}
    for path, layer in model.named_modules():
        for name, child in layer.named_children():
            stack: Any = child  # an `ExpertStack`, if one: its package imports this one
            if isinstance(child, Stack) and stack.lora_A is not None:
                where = f"{path}.{name}" if path else name
                stack._check_merge(layer, where)
                dtype = stack.operands[0].dtype if stack.format == DENSE else of_model
                found[where] = layer, name, stack, dtype
    for where, (_, _, stack, dtype) in found.items() if safe else ():
        with _exactly(stack):
            # In the dtype of the sum, whose range a sum in float32 may leave.
            if not stack.merged(dtype).isfinite().all():
                raise ValueError(f"NaNs detected in the merged weights: {where}, in {dtype}")
    return [*found.values()]


def unmerge_experts(merged: Sequence[tuple[Any, str]]) -> None:
    """Put back the stacks that layers keep, with what has happened to the values since."""
    for layer, name in merged:
        kept = forget_expert(layer, name)
        assert kept is not None, name
        stack, dtype = kept
        weight = layer._parameters.pop(name)
        stack.to(weight.device)
        if weight.dtype is not dtype:  # a cast of the model, which adapters follow
            stack.to(weight.dtype)
        setattr(layer, name, stack.train(layer.training))


def forget_experts(model: nn.Module) -> None:
    """Leave in the weights of experts what is merged there."""
    for layer in model.modules():
        vars(layer).pop(KEPT, None)


def forget_expert(layer: nn.Module, name: str) -> tuple[Any, torch.dtype] | None:
    """Take what a layer keeps of a merged projection from it, and return it; None for nothing."""
    kept: dict[str, tuple[Any, torch.dtype]] = vars(layer).get(KEPT, {})
    taken = kept.pop(name, None)
    if taken is not None and not kept:
        del vars(layer)[KEPT]
    return taken


def _mend() -> None:
    whole: Any = vars(sys.modules["peft.tuners.tuners_utils"])["BaseTuner"]
    for name, around in _AROUND.items():
        setattr(whole, name, around(getattr(whole, name)))
    layers = vars(sys.modules["peft.tuners.lora.layer"])
    plain: Any = layers["Linear"]
    of_values = plain.merge, plain.unmerge
    for kind in (plain, *plain.__subclasses__()):
        if "merge" in vars(kind):
            kind.merge, kind.unmerge = _mended(kind.merge, kind.unmerge, *of_values)
    of_parameters: Any = layers.get("ParamWrapper")
    if of_parameters is not None:
        of_parameters.merge = _refusing(of_parameters.merge)


def _merging(own: Any) -> Any:
    """Return `merge_adapter` of PEFT's model, which merges experts as well."""

    @functools.wraps(own)
    def merge_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
        widen(self.model)
        asked = _asked(own, self, args, kwargs)
        merged = []
        _prepare_layers(self.model, asked.get("adapter_names"))
        # While adapters are disabled, PEFT's layers merge and come out in their next forward.
        if asked.get("adapter_names") != [] and not _are_disabled(self.model):
            safe = asked.get("safe_merge", False)
            merged = merge_experts(self.model, keep=True, safe=safe)
        try:
            own(self, *args, **kwargs)
        except BaseException:
            unmerge_experts(merged)
            raise

    return merge_adapter


def _unmerging(own: Any) -> Any:
    @functools.wraps(own)
    def unmerge_adapter(self: Any) -> None:
        own(self)
        layers = [*self.model.modules()]
        unmerge_experts([(layer, name) for layer in layers for name in vars(layer).get(KEPT, {})])

    return unmerge_adapter


def _unloading(own: Any) -> Any:
    """Return `merge_and_unload` of PEFT's model, after which no expert has an adapter, but for
    `adapter_names=[]`: nothing is merged then that is not, and experts keep theirs."""

    @functools.wraps(own)
    def merge_and_unload(self: Any, *args: Any, **kwargs: Any) -> Any:
        widen(self.model)
        asked = _asked(own, self, args, kwargs)
        _prepare_layers(self.model, asked.get("adapter_names"))
        merges = asked.get("adapter_names") != []
        if merges:
            check_experts(self.model, safe=asked.get("safe_merge", False))
        unloaded = own(self, *args, **kwargs)
        if merges:
            merge_experts(unloaded, keep=False)
        return _left_alone(unloaded)

    return merge_and_unload


def _leaving(own: Any) -> Any:
    """Return `unload` of PEFT's model. What is merged stays so, and experts keep what is not."""

    @functools.wraps(own)
    def unload(self: Any) -> Any:
        return _left_alone(own(self))

    return unload


def _left_alone(model: nn.Module) -> nn.Module:
    """Leave experts as they are computed now: PEFT's methods, which change that, are gone."""
    forget_experts(model)
    _disable_experts(model, False)  # no more than PEFT's layers, whose adapters it has taken away
    return model


def _disabling(own: Any) -> Any:
    """Return `disable_adapter_layers` of PEFT's model, which disables experts' adapters as well.

    Where experts are merged, everything comes out first: PEFT's own layers would in their next
    forward, and an expert has nothing that forward could do it with.
    """

    @functools.wraps(own)
    def disable_adapter_layers(self: Any) -> None:
        own(self)
        if any(vars(layer).get(KEPT) for layer in modules_of(self.model)):
            self.unmerge_adapter()
        _disable_experts(self.model, True)

    return disable_adapter_layers


def _enabling(own: Any) -> Any:
    @functools.wraps(own)
    def enable_adapter_layers(self: Any) -> None:
        own(self)
        _disable_experts(self.model, False)

    return enable_adapter_layers


def _activating(own: Any) -> Any:
    """Return `set_adapter` of PEFT's model, which says so where experts keep their adapters on.

    TRL's trainers make a second adapter "ref" of a model that PEFT has wrapped before, and switch
    to it for their reference: the experts' adapters, which train, are in that too.
    """

    @functools.wraps(own)
    def set_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.active_adapters
        own(self, *args, **kwargs)
        if {*before} != {*self.active_adapters} and any(
            stack.lora_A is not None for stack in _stacks(self.model)
        ):
            warn_once(
                "PEFT's set_adapter leaves the adapters of experts on, which have no name: only "
                "disable_adapter() is without them. TRL's trainers call that for their reference "
                "where they get a peft_config (and inductor_q.experts.add_lora the trainer.model), "
                'or after trainer.model.delete_adapter("ref")'
            )

    return set_adapter


def _are_disabled(model: nn.Module) -> bool:
    return any(stack.disabled for stack in _stacks(model))


def _disable_experts(model: nn.Module, disabled: bool) -> None:
    for stack in _stacks(model):
        stack.disabled = disabled


def _stacks(model: nn.Module) -> list[Any]:
    """Return the model's `ExpertStack`s, whose package imports this one."""
    return [module for module in modules_of(model) if isinstance(module, Stack)]


_AROUND = {
    "merge_adapter": _merging,
    "unmerge_adapter": _unmerging,
    "merge_and_unload": _unloading,
    "unload": _leaving,
    "set_adapter": _activating,
    "disable_adapter_layers": _disabling,
    "enable_adapter_layers": _enabling,
}


def _asked(own: Any, model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return inspect.signature(own).bind(model, *args, **kwargs).arguments


def _refusing(own: Any) -> Any:
    """Return `merge` of PEFT's layer over a parameter, which takes no codes for values."""

    @functools.wraps(own)
    def merge(self: Any, *args: Any, **kwargs: Any) -> None:
        _check_parameter(self)
        own(self, *args, **kwargs)

    return merge


def _prepare_layers(model: nn.Module, asked: list[str] | None) -> None:
    """Raise where a layer's own `merge` would, before adapters are merged into any other.

    A library's own layer of codes, which knows no dtype of values, gets the model's then.
    """
    kinds = vars(sys.modules["peft.tuners.lora.layer"])
    of_values: Any = kinds["Linear"]
    of_parameters: Any = kinds.get("ParamWrapper", ())
    codes: list[Any] = []
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
            codes.append(base)
    for base in codes:
        base.dtype = dtype_of_values(model)


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


def _mended(own: Any, own_unmerge: Any, of_values: Any, unmerge_values: Any) -> tuple[Any, Any]:
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
    return _is_packed(base) or _read_in_place(base) is not None


def _is_packed(base: Any) -> bool:
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
        with _exactly(layer):
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
    _tell(dtype, format, kept=True)


def _tell(dtype: torch.dtype, format: str, *, kept: bool) -> None:
    beside = ". What was packed is kept beside them until the adapters are unmerged or unloaded"
    warn_once(
        "merging adapters makes values of packed weights: "
        f"{dtype} takes {dtype.itemsize} bytes an element, more than {format} did"
        f"{beside if kept else ''}"
    )


def _state(base: Any) -> _Below:
    """Return what is below PEFT's layer."""
    bias = None if base.bias is None else base.bias.data
    return _Below(base, None if _is_ours(base) else base.weight, bias)


def _put_back(layer: Any, kept: _Below) -> None:
    """Put back what was packed, with what has happened to the layer in its place since."""
    base, packed = layer.get_base_layer(), kept.base
    with _exactly(layer):
        bias = _unmerged_bias(kept, _state(base).bias)
        if packed is not base:
            packed.train(base.training)
            packed.bias = base.bias
            if not _is_packed(packed):
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
def _exactly(layer: nn.Module) -> Iterator[None]:
    """Have what is made here train later, and no product be rounded to autocast's dtype."""
    device_type = next(layer.parameters()).device.type
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


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
