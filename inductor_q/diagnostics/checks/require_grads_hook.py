"""Find the hook by which transformers makes embeddings require gradients, for checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import tidy

NAME = "require_grads_hook"
REMEDY = "from inductor_q.integrations import prepare_checkpointing; prepare_checkpointing(model)"


def check(model: nn.Module) -> Iterator[Finding]:
    """`requires_grad_()` cannot be traced: the hook breaks the graph, then each checkpointed layer.

    Only reentrant checkpointing needs the hook: without it, it would compute no gradients.
    """
    # Not at the top: it loads the backend, and that Inductor, which fails without its cache.
    from inductor_q.integrations.checkpointing import input_hooks

    for path, _, _ in input_hooks(model):
        layers = any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules())
        found = f"make_inputs_require_grads on {tidy(path)}" + (
            ", with gradient checkpointing: the graph breaks there and in each layer"
            if layers
            else ""
        )
        yield Finding(NAME, "warn", found, REMEDY)
        return
    yield Finding(NAME, "ok", "not there")
