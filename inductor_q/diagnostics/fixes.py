"""Say what to change: one table from the cause of a graph break to the way out, in one sentence.

The first entry that matches wins, so the particular (a library's known trouble) stands before the
general (a torch message). An entry matches on the frames of the break, as `path: function`, and on
torch's title and explanation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_q.diagnostics.explanation import Frame


@dataclass(frozen=True)
class Fix:
    """Hold one way out; `frame` is looked for in "path: function" of each frame, `said` in torch's
    words.
    """

    remedy: str
    frame: str = ""
    said: str = ""

    def matches(self, said: str, frames: Sequence[str]) -> bool:
        return (not self.said or re.search(self.said, said, re.IGNORECASE) is not None) and (
            not self.frame or any(re.search(self.frame, frame) for frame in frames)
        )


FIXES: tuple[Fix, ...] = (
    # --- libraries, as of peft 0.21, bitsandbytes 0.50, transformers 5.23 ---
    Fix(
        "PEFT's target_parameters registers and removes a parametrization in every forward, which "
        "cannot be compiled: give a Trainer inductor_q.integrations.QfuseCallback() as a callback "
        "instead of compiling the model, or call prepare_parameters(model) of the same package "
        "before training, and after add_adapter",
        frame=r"peft/tuners/lora/layer\.py: (_activate_lora|_remove_parametrizations)",
    ),
    Fix(
        "PEFT's DoRA decodes the packed weight with Python code in every forward: give a Trainer "
        "inductor_q.integrations.QfuseCallback() as a callback instead of compiling the model, or "
        "call prepare_dora(model) of the same package once, before training",
        frame=r"peft/tuners/lora/dora\.py",
    ),
    Fix(
        "the hook of enable_input_require_grads() cannot be compiled, and only reentrant "
        "checkpointing needs it: give a Trainer inductor_q.integrations.QfuseCallback() as a "
        "callback instead of compiling the model, or call prepare_checkpointing(model) of the same "
        "package once, before training",
        frame=r"(transformers|peft)/.*: make_inputs_require_grad",
    ),
    Fix(
        "the hooks around experts packed by replace_parameter_4bit fill a cache, which cannot be "
        "compiled in a checkpointed layer: give a Trainer inductor_q.integrations.QfuseCallback() "
        "as a callback instead of compiling the model, or call prepare_checkpointing(model) of the "
        "same package once, before training",
        frame=r": \w+_experts_forward$|nn/(utils/)?parametrize\.py",
        said=r"unsafe side effect",
    ),
    Fix(
        "TRL computes the loss in a function that cannot be compiled: give the trainer "
        "callbacks=[inductor_q.integrations.QfuseCallback()] instead of compiling the model; it "
        "compiles the decoder inside",
        frame=r"trl/kernels/chunked_logprob\.py|trl/.*: _fused_forward",
    ),
    Fix(
        "the eager experts loop over the experts that were hit: call "
        "model.set_experts_implementation('grouped_mm')",
        frame=r"transformers/.*/modeling_\w+\.py: forward|transformers/integrations/moe\.py",
        said=r"nonzero|data.dependent|dynamic shape",
    ),
    Fix(
        "LLM.int8's outlier columns have a shape that depends on data: set "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True, or llm_int8_threshold=0.0",
        frame=r"bitsandbytes/",
        said=r"int8_vectorwise_quant|int8_mixed_scaled_mm|dynamic shape|data.dependent",
    ),
    Fix(
        "bitsandbytes rewrites the packed weight's .data, or that of a bias in another dtype than "
        "the layer computes in, in the first call: run one eager forward (or move the model to its "
        "device) before compiling",
        frame=r"bitsandbytes/nn/modules\.py",
        said=r"\.data\b|set_data|mutat",
    ),
    Fix(
        "torch gave this function up because one that it calls broke, and it cannot resume in a "
        "comprehension: mend the other breaks first",
        frame=r": <(dict|list|set)comp>$",
        said=r"^Missing tp_iternext",
    ),
    # --- torch's own words ---
    Fix(
        "remove the call of torch._dynamo.graph_break()",
        said=r"torch\._dynamo\.graph_break",
    ),
    Fix(
        "keep the value a tensor, or set torch._dynamo.config.capture_scalar_outputs = True, which "
        "keeps .item() in the graph",
        said=r"Tensor\.item|\.item\(\)|capture_scalar_outputs",
    ),
    Fix(
        "choose with torch.where, or torch.cond where only one side may run: a Python `if` on a "
        "tensor's value cannot be in a graph",
        said=r"data.dependent (branching|jump|control|assertion)|Data-dependent branching",
    ),
    Fix(
        "the operator's output shape depends on data: mask instead of selecting, or set "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
        said=r"dynamic shape operator|capture_dynamic_output_shape_ops|nonzero",
    ),
    Fix(
        "the function is marked with torch.compiler.disable: drop the mark, or call it outside of "
        "the compiled region",
        said=r"torch\.compiler\.disable",
    ),
    Fix(
        "print and log outside of the compiled function, or add the function to "
        "torch._dynamo.config.reorderable_logging_functions",
        said=r"\bprint\b|logging|logger|warnings\.warn",
    ),
    Fix(
        "torch cannot look into a C extension: make it an operator (torch.library.custom_op), or "
        "call it outside of the compiled region",
        said=r"builtin|C/C\+\+ (function|extension)|pybind",
    ),
    Fix(
        "the optimizer or the gradients are touched inside the compiled function: compile the "
        "forward and the loss, and step outside",
        said=r"backward\(\)|\.grad\b.*attribute",
    ),
)


def fix_for(title: str, explanation: str, hints: Sequence[str], frames: Sequence[Frame]) -> str:
    """Say what to change about a break: our fix for a known cause, else torch's first hint."""
    said = f"{title}\n{explanation}"
    places = [f"{frame.file}: {frame.function}" for frame in frames]
    for fix in FIXES:
        if fix.matches(said, places):
            return fix.remedy
    useful = [h for h in hints if "report an issue" not in h.lower()]
    return useful[0] if useful else ""
