"""Have PEFT merge adapters into packed weights by their values.

PEFT 0.21 adds `B A` to a weight that a library's tensor packs, whatever the variant of LoRA is: a
DoRA adapter loses its magnitudes, and nothing says so. Unmerging subtracts that, and rounds once
more. A `PackedLinear` it takes for an ordinary layer, and would change codes. So two methods of its
layers ask first whether the layer below is one of ours; for every other they are PEFT's own.

Adapters of experts are no layers of PEFT's, but a part of whichever adapter the model has. So they
merge and come out again with the model, of whichever of PEFT's tuners: a parameter of values stands
in the place of each stack. PEFT's `disable_adapter()` disables them with the others, and where it
freezes the model below an adapter that it adds, they train on as PEFT's own do.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inductor_q.kernels.calls import DENSE
from inductor_q.late import on_import
from inductor_q.loading.merged_experts import (
    are_disabled,
    check_experts,
    disable_experts,
    forget_experts,
    merge_experts,
    stacks_of,
    unmerge_experts,
)
from inductor_q.loading.merged_layers import (
    PACK,
    is_packed,
    mended,
    prepared_layers,
    refusing,
)
from inductor_q.loading.merged_values import KEPT, dtype_of_inputs
from inductor_q.log import warn_once
from inductor_q.modules import modules_of


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


def widen(model: nn.Module) -> None:
    """Have packed layers decode to float32 where the embedding is float32.

    PEFT's `prepare_model_for_kbit_training` casts embeddings and norms without a call of the
    layers, and their inputs are float32 then.
    """
    if dtype_of_inputs(model) is torch.float32:
        layer: Any
        for layer in model.modules():
            if is_packed(layer):
                layer.dtype = torch.float32


def _mend() -> None:
    whole: Any = vars(sys.modules["peft.tuners.tuners_utils"])["BaseTuner"]
    for name, around in _AROUND.items():
        setattr(whole, name, around(getattr(whole, name)))
    layers = vars(sys.modules["peft.tuners.lora.layer"])
    plain: Any = layers["Linear"]
    of_values = plain.merge, plain.unmerge
    for kind in (plain, *plain.__subclasses__()):
        if "merge" in vars(kind):
            kind.merge, kind.unmerge = mended(kind.merge, kind.unmerge, *of_values)
    of_parameters: Any = layers.get("ParamWrapper")
    if of_parameters is not None:
        of_parameters.merge = refusing(of_parameters.merge)


def _injecting(own: Any) -> Any:
    """Return `inject_adapter` of PEFT's model, which freezes no adapter of experts.

    PEFT freezes whatever is not its own in the model that it wraps, or gives another adapter.
    """

    @functools.wraps(own)
    def inject_adapter(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        adapters = [part for stack in stacks_of(model) for part in (stack.lora_A, stack.lora_B)]
        trained = [part for part in adapters if part is not None and part.requires_grad]
        own(self, model, *args, **kwargs)
        asked = _asked(own, self, (model, *args), kwargs)
        config = self.peft_config.get(asked["adapter_name"])
        loaded = getattr(config, "inference_mode", False)  # then PEFT's own adapter is frozen, too
        if not loaded or any(part.requires_grad for part in model.parameters()):
            for part in trained:
                part.requires_grad_(True)

    return inject_adapter


def _merging(own: Any) -> Any:
    """Return `merge_adapter` of PEFT's model, which merges experts as well."""

    @functools.wraps(own)
    def merge_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
        widen(self.model)
        asked = _asked(own, self, args, kwargs)
        merged = []
        with prepared_layers(self.model, asked.get("adapter_names")):
            # While adapters are disabled, PEFT's layers merge and come out in their next forward.
            if asked.get("adapter_names") != [] and not are_disabled(self.model):
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
        merges = asked.get("adapter_names") != []
        with prepared_layers(self.model, asked.get("adapter_names")):
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
    disable_experts(model, False)  # no more than PEFT's layers, whose adapters it has taken away
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
        disable_experts(self.model, True)

    return disable_adapter_layers


def _enabling(own: Any) -> Any:
    @functools.wraps(own)
    def enable_adapter_layers(self: Any) -> None:
        own(self)
        disable_experts(self.model, False)

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
            stack.lora_A is not None for stack in stacks_of(self.model)
        ):
            warn_once(
                "PEFT's set_adapter leaves the adapters of experts on, which have no name: only "
                "disable_adapter() is without them. TRL's trainers call that for their reference "
                "where they get a peft_config (and inductor_q.experts.add_lora the trainer.model), "
                'or after trainer.model.delete_adapter("ref")'
            )

    return set_adapter


_AROUND = {
    "inject_adapter": _injecting,
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
