"""Adapters and experts that do not go together, or with what is asked."""

from __future__ import annotations

from inductor_q.exc.base import QfuseError


class NoExperts(QfuseError, ValueError):
    """The model has no expert layers that can be quantized or adapted."""

    model: str
    message = (
        "{model} has no experts behind transformers' experts interface, which is what is known: "
        "transformers >= 5 and a model such as Qwen3-MoE, Mixtral, OLMoE or gpt-oss (not Llama 4). "
        "Where its checkpoint is packed (gpt-oss in MXFP4), inductor_q.load_checkpoint loads it"
    )


class UnreadExperts(QfuseError, ValueError):
    """Experts that a library has packed do not hold their codes as a checkpoint has them."""

    what: str
    found: str
    message = (
        "cannot take over {what} as it is packed: expected blocks and scales as they lie on disk, "
        "found {found}. Make the model anew under inductor_q.kbit.meta_parameters() and load its "
        "checkpoint with inductor_q.load_checkpoint, which keeps it packed; or load it in 16 bits, "
        "by from_pretrained with Mxfp4Config(dequantize=True) or "
        "FineGrainedFP8Config(dequantize=True)"
    )


class CannotShard(QfuseError, ValueError):
    """The experts of a layer cannot be shared among the ranks; `problem` says what to change."""

    what: str
    problem: str
    message = "cannot shard the experts of {what}: {problem}"


class AlreadyAdapted(QfuseError, ValueError):
    """A new adapter would replace one whose parameters an optimizer may hold."""

    what: str
    message = (
        "{what} has an adapter already, which a new one would discard. Train the parameters lora_A "
        "and lora_B that it has, give other targets, or make the model anew; load_adapter replaces "
        "adapters by saved ones"
    )


class AdaptedByPeft(QfuseError, ValueError):
    """A call would replace a parameter below one of PEFT's layers, which then finds none."""

    what: str
    asked: str
    message = (
        "{asked} would replace {what}, which has an adapter of PEFT's (target_parameters, or "
        'target_modules="all-linear"). Call it before get_peft_model(), with a LoraConfig that '
        "names other modules; or keep PEFT's adapters and call experts.use_qfuse(model) instead"
    )


class CorruptAdapter(QfuseError, ValueError):
    """A saved adapter does not fit the model, or there is nothing to save."""

    path: str
    problem: str
    message = "{path}: {problem}"


class StillMerged(QfuseError, ValueError):
    """A call would leave merged adapters in the weights of experts for good."""

    what: str
    asked: str
    message = (
        "{asked} expects the adapter of {what} beside its weight, but it is merged, and would stay "
        "in there for good. Call unmerge_adapter() of PEFT's model first"
    )


class CannotMerge(QfuseError, ValueError):
    """An adapter cannot be added to the weight below it; `remedy` says how to have the sum."""

    what: str
    problem: str
    remedy: str
    message = "cannot merge an adapter into {what}: {problem}. {remedy}"
