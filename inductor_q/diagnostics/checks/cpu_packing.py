"""Find 4-bit layers on a CPU with AVX512-BF16: bitsandbytes repacks them in the first inference
call.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inductor_q.capture.bnb_state import is_packed_for_cpu
from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.checks.modules import instances, is_training, several

NAME = "cpu_packing"
CALL = "from inductor_q.integrations import keep_unpacked; keep_unpacked(model)"
REMEDY = f"{CALL}  # before the first inference call"
REPAIR = f"{CALL}  # unpacks them; scales stay rounded to bfloat16"


def check(model: nn.Module) -> Iterator[Finding]:
    """Find layers that are packed, or would be: passes and gradients cannot reach a packed weight.

    bitsandbytes packs it for its inference kernel. The kernel has no backward, and a packed layer
    keeps to it in training mode: after an evaluation what lies before the layer gets no gradient
    through it, and torch only warns.
    """
    found = instances(model, "bitsandbytes.nn", "Linear4bit")
    layers = [(path, layer) for path, layer in found if layer.weight.device.type == "cpu"]
    packed = [path for path, layer in layers if is_packed_for_cpu(layer.weight.quant_state)]
    to_come = [
        path for path, layer in layers if getattr(layer, "support_avx512bf16_for_cpu", False)
    ]
    if not layers:
        yield Finding(NAME, "ok", "no 4-bit layer of bitsandbytes on a CPU")
    elif packed and is_training(model):
        what = f"{several(packed, '4-bit layer')} packed for inference: no gradient goes through"
        yield Finding(NAME, "fail", what, REPAIR)
    elif packed:
        what = f"{several(packed, '4-bit layer')} packed for inference: left to bitsandbytes"
        yield Finding(NAME, "warn", what, REPAIR)
    elif to_come:
        what = (
            f"the first inference call will pack {several(to_come, '4-bit layer')}: "
            "after that no gradient goes through, and nothing is fused"
        )
        yield Finding(NAME, "warn", what, REMEDY)
    else:
        yield Finding(NAME, "ok", "the 4-bit layers stay as they are")
