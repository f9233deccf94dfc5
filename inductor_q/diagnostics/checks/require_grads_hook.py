"""Find the hook by which transformers makes embeddings require gradients, for checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import tidy

NAME = "require_grads_hook"
# Local functions of transformers, and of PEFT for models that are not transformers'.
HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
DISABLE = "model.disable_input_require_grads()"
# Each enabling adds a hook (PEFT's preparation, get_peft_model, a Trainer) and only the last one's
# handle is kept.
CLEAR = "model.get_input_embeddings()._forward_hooks.clear()"
NOT_REENTRANT = (
    "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
)


def check(model: nn.Module) -> Iterator[Finding]:
    """`requires_grad_()` cannot be traced: the hook breaks the graph, then each checkpointed layer.

    Only reentrant checkpointing needs the hook: without it, it would compute no gradients.
    """
    hooked = [
        tidy(path)
        for path, submodule in model.named_modules()
        for hook in submodule._forward_hooks.values()
        if getattr(hook, "__name__", "") in HOOKS
    ]
    if not hooked:
        yield Finding(NAME, "ok", "not there")
        return
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    found = f"{HOOKS[0]} on {hooked[0]}" + (
        ", with gradient checkpointing: the graph breaks there and in each layer" if layers else ""
    )
    remove = DISABLE if len(hooked) == 1 else CLEAR
    # Switching it on again brings the hook again, and loses the handle of one that is still there.
    reentrant = any(map(_is_reentrant, layers))
    remedy = f"{remove}; {NOT_REENTRANT}; {remove}" if reentrant else remove
    yield Finding(NAME, "warn", found, remedy)


def _is_reentrant(layer: nn.Module) -> bool:
    keywords = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
    return bool(keywords.get("use_reentrant", True))
