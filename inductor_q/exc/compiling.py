"""What a compile cannot do as it was asked, or has to tell."""

from __future__ import annotations

from collections.abc import Collection

from inductor_q.exc.base import QfuseError, Sourced, first_few


class InvalidOptionValue(Sourced, ValueError, TypeError):
    name: str
    value: object
    expected: str
    message = (
        "option {name!r}{where}: {value!r} is not {expected}. Drop the option to keep the default"
    )


class ModeConflict(QfuseError, ValueError):
    argument: str
    option: str
    message = (
        "torch.compile(mode={argument!r}) and options={{'qfuse.mode': {option!r}}} differ; "
        "give one of them (only 'qfuse.mode' goes together with other options)"
    )


class UnreadablePreset(QfuseError, ValueError):
    """A tuned preset is damaged, or of another place."""

    path: str
    problem: str
    message = "{path}: {problem}. Remove it, or write it again with qfuse tune"


class MissingExtra(QfuseError, ImportError):
    package: str
    extra: str
    feature: str
    message = "{feature} needs {package}, which is not installed: pip install 'inductor-q[{extra}]'"


class NotAModule(QfuseError, TypeError):
    """What is to be compiled in place is no module."""

    call: str
    found: str
    message = (
        "{call} takes a torch.nn.Module and compiles it in place, and got a {found}. "
        'Compile a function by torch.compile(function, backend="qfuse")'
    )


class NotFused(QfuseError, RuntimeError):
    """No pass took some quantized sites, given as (site, reason), under `qfuse.strict`."""

    sites: Collection[tuple[str, str]]
    message = (
        "{count} not fused:\n{listing}\n"
        "Mend what the reasons name, or set options={{'qfuse.strict': False}} to run them unfused"
    )

    @property
    def count(self) -> str:
        return f"{len(self.sites)} quantized site{'s' if len(self.sites) != 1 else ''}"

    @property
    def listing(self) -> str:
        return "\n".join(f"  {site}: {reason}" for site, reason in self.sites)


class PackedForInference(QfuseError, RuntimeError):
    """A graph that trains reads weights that are packed for a kernel without a backward."""

    layers: Collection[str]
    message = (
        "bitsandbytes has packed {found!j} for inference on this CPU, so what comes before would "
        "get no gradient. Call inductor_q.integrations.keep_unpacked(model), which unpacks the "
        "weights; best before the first evaluation"
    )

    @property
    def found(self) -> list[str]:
        return first_few(self.layers, most=3)


class UnreadableLogits(QfuseError, RuntimeError):
    """The logits of a chunked loss can be computed from their head while that is what it was, but
    are no part of what was computed before."""

    problem: str
    message = (
        "{problem}. The loss of this model is computed in chunks, and its logits when they are "
        "read: read them before optimizer.step(), or compile the model with "
        "options={{'qfuse.loss': 'whole'}}, which keeps them"
    )


class OneBackward(QfuseError, NotImplementedError):
    """The gradients of a loss in chunks are computed with it, and nothing is kept to differentiate
    them by."""

    message = (
        "a loss in chunks has no gradient of its gradient, which create_graph=True asks for. "
        "Compile the model with options={{'qfuse.loss': 'whole'}}, which keeps the logits"
    )
