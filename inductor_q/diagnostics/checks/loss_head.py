"""Find heads whose loss keeps all of its logits, since no pass computes them in chunks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.diagnostics.checks.finding import Finding

NAME = "loss_head"
REMEDY = 'BitsAndBytesConfig(..., llm_int8_skip_modules=["lm_head"])  # where it is loaded'


def check(model: nn.Module) -> Iterator[Finding]:
    """The logits of a vocabulary of 151,936 are the largest tensor of a step."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    weight = getattr(getattr(head, "base_layer", head), "weight", None)
    config = getattr(model, "config", None)
    softcap = getattr(config, "final_logit_softcapping", None)
    if weight is not None and not weight.is_floating_point():
        what = (
            "the head is quantized: a loss keeps all of its logits, and as much for their gradient"
        )
        yield Finding(NAME, "warn", what, REMEDY)
    elif softcap:
        what = f"final_logit_softcapping={softcap}: a loss keeps all of its logits"
        yield Finding(NAME, "warn", what)
    else:
        yield Finding(NAME, "ok", "none" if weight is None else "a plain product")
