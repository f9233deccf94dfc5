"""Make an `Explanation` with something in every section, for the tests of the renderers.

The values are those of real runs: a small Llama in NF4 with PEFT, whose forward was given a print,
a branch on data and several lengths. `write_source` writes the script they name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from inductor_q.diagnostics.explanation import (
    Compile,
    CudagraphSkip,
    Exit,
    Explanation,
    Fallback,
    Frame,
    GraphBreak,
    Layer,
    LayerStatus,
    Phase,
    Recompile,
    SavedTensors,
    Step,
    SuppressedError,
)

SOURCE = '''\
import torch


def step(model, batch):
    """One step; stops early on a bad loss."""
    loss = model(batch)
    if loss.item() > 10:
        raise ValueError("diverged")
    return loss


def main():
    for length in (16, 24, 32):
        step(torch.nn.Identity(), torch.zeros(length))
'''

FUSED = (
    Step("canonicalize", provider="cpp", count=2),
    Step("fold_lora", provider="aten", count=4),
    Step("extend_k", provider="aten", count=1),
    Step("keep_packed", provider="aten", bytes_saved=8192, count=1),
)
REASON = "the adapter's product is float32 and the layer's bfloat16: load the adapter in bfloat16"
PADDED = "the mask depends on the input attention_mask"


def write_source(folder: Path) -> Path:
    """Write the script that the frames of `explanation` lie in."""
    script = folder / "train.py"
    script.write_text(SOURCE)
    return script


def layer(module: str, status: LayerStatus = "fused", reason: str = "") -> Layer:
    steps = FUSED if status == "fused" else (Step("extend_k", rejected=reason),) if reason else ()
    return Layer(
        module=module,
        kind="Linear4bit + lora.Linear4bit",
        format="nf4_b64_nested",
        status=status,
        reason=reason,
        shape=(64, 64),
        source="train.py:6",
        steps=steps,
    )


def llama(layers: int, *, broken: dict[str, str] | None = None) -> tuple[Layer, ...]:
    """Return the projections of a Llama: all fused, but those that `broken` maps to reasons."""
    found = []
    for index in range(layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"):
            module = f"base_model.model.model.layers.{index}.{name}"
            reason = (broken or {}).get(f"{index}.{name}", "")
            found.append(layer(module, "canonical" if reason else "fused", reason))
    return tuple(found)


def attention(layers: int, *, padded: tuple[int, ...] = ()) -> tuple[Layer, ...]:
    """Return the attention of a Llama: without its mask, but in the layers `padded`."""

    def one(index: int) -> Layer:
        reason = PADDED if index in padded else ""
        provider = "" if reason else "sdpa, grouped keys"
        return Layer(
            module=f"base_model.model.model.layers.{index}.self_attn",
            kind="attention",
            format="",
            status="canonical" if reason else "fused",
            reason=reason,
            steps=(Step("causal_attention", provider, reason, by_choice=bool(reason)),),
        )

    return tuple(map(one, range(layers)))


def explanation(script: str = "train.py") -> Explanation:
    """Return an explanation with everything at once."""
    item = Frame(script, 7, "step", "    if loss.item() > 10:")
    call = Frame(script, 6, "step", "    loss = model(batch)")
    peft = Frame("/venv/lib/python3.11/site-packages/peft/tuners/lora/layer.py", 2412, "forward")
    return Explanation(
        target=script,
        argv=("--steps", "3"),
        exit=Exit(status=1, exception="ValueError: diverged"),
        created=1_763_720_000.0,
        seconds=12.5,
        environment={"torch": "2.13.0+cpu", "peft": "0.21.2", "device": "cpu"},
        options={
            "qfuse.preset": {"value": "", "source": "default"},
            "qfuse.numerics": {"value": "strict", "source": "user"},
        },
        compiles=(
            Compile("0/0", "forward", call, "qfuse", ops=412, seconds=4.25),
            Compile("0/1", "forward", call, "qfuse", ops=415, seconds=4.75, cached=True),
        ),
        breaks=(
            GraphBreak(
                reason="Unsupported Tensor.item() call with capture_scalar_outputs=False",
                count=3,
                gb_id="GB0124",
                explanation="Dynamo does not support tracing Tensor.item() with this setting.",
                hints=("Set torch._dynamo.config.capture_scalar_outputs = True.",),
                fix="Compare on the device with torch._assert_async, or look at the loss later.",
                library="your code",
                user=item,
                origin=item,
                compile_ids=("0/0", "0/1"),
            ),
            GraphBreak(
                reason="Skip calling `torch.compiler.disable()`d function",
                fix="Update PEFT, or do not use target_parameters under compile.",
                library="peft 0.21.2",
                user=call,
                origin=peft,
            ),
        ),
        recompiles=(
            Recompile(
                function="step",
                where=Frame(script, 4, "step", "def step(model, batch):"),
                guard="tensor 'batch' size mismatch at index 0",
                before="16",
                after="24",
                fix="Pad to few lengths, or torch._dynamo.mark_dynamic(batch, 0).",
                count=8,
                hit_limit=True,
            ),
        ),
        fallbacks=(Fallback("step", call, "recompile limit of 8 reached"),),
        suppressed=(SuppressedError("step", call, "BackendCompilerFailed: no C++ compiler"),),
        cudagraph_skips=(CudagraphSkip("mutated inputs", 2),),
        phases=(Phase("backend_compile", 8.5, 2), Phase("dynamo", 10.0, 2)),
        saved=(
            SavedTensors("aten.mm", 4, 3 << 20),
            SavedTensors("aten.silu", 2, 1 << 20),
        ),
        layers=llama(4, broken={"2.mlp.down_proj": REASON}),
        attention=attention(4, padded=(3,)),
        memory=("memory planned 1.10 GB of 2.00 GB",),
        warnings=("torch.compile was called twice on one module",),
    )


def clean() -> Explanation:
    """Return a run with nothing to mend."""
    return replace(
        explanation(),
        exit=Exit(),
        breaks=(),
        recompiles=(),
        fallbacks=(),
        suppressed=(),
        cudagraph_skips=(),
        layers=llama(4),
        attention=attention(4),
        memory=(),
        warnings=(),
    )
