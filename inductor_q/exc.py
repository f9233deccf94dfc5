"""Errors: one class per mistake a user can make, with the value, what was expected, the way out.

A class is a message template and the fields it speaks of. The fields are keyword-only, stay on the
error as attributes, and survive pickling (a data loader's worker, a spawned rank). A broken
invariant of ours is an assertion, not a class here; a site that does not match is a reason in the
report.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from typing_extensions import dataclass_transform


class _Template(string.Formatter):
    """Format with `str.format` over the attributes of an error; `!j` joins items by commas."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(args[0], str(key))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "j":
            return ", ".join(map(str, value))
        return super().convert_field(value, conversion)


@dataclass_transform(kw_only_default=True, eq_default=False)
class QfuseError(Exception):
    """The base of every error that a user of qfuse can cause.

    Subclasses also derive from the builtin that a caller would catch without knowing us: ValueError
    for a value, TypeError for a dtype, KeyError for a name that is in no registry.
    """

    message: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(kw_only=True, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        self.args = (str(self),)

    def __str__(self) -> str:  # first in the MRO, so KeyError does not quote the message
        return _Template().vformat(self.message, (self,), {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})  # type: ignore[arg-type]


def _rebuild(cls: type[QfuseError], values: Mapping[str, Any]) -> QfuseError:
    return cls(**values)


def _first(items: Collection[str], most: int = 12) -> list[str]:
    """Return the items, or as many as one reads and the number of the others."""
    known = list(items)
    return known if len(known) <= most else [*known[:most], f"and {len(known) - most} more"]


# --- names --------------------------------------------------------------------------------------


class _Sourced(QfuseError):
    """`source` says where a value was read, when not in the call ("environment variable X")."""

    source: str = ""

    @property
    def where(self) -> str:
        return f" in {self.source}" if self.source else ""


class _UnknownName(_Sourced, ValueError, KeyError):
    name: str
    known: Collection[str]

    @property
    def hint(self) -> str:
        near = difflib.get_close_matches(self.name, list(self.known), n=3, cutoff=0.6)
        return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


class UnknownOption(_UnknownName):
    message = "unknown option {name!r}{where}{hint} List all: inductor_q.list_options()"


class NoOption(_UnknownName):
    message = "no option's name contains {name!r}{hint} List all: qfuse options --all"


class UnknownCommand(_UnknownName):
    message = "unknown command {name!r}{hint} Known: {known!j}"


class UnknownMode(_UnknownName):
    message = "unknown mode {name!r}{where}{hint} Known: {known!j}"


class UnknownRegions(_UnknownName):
    message = "unknown regions {name!r}{hint} Known: {known!j}"


class NotAModule(QfuseError, TypeError):
    """What is to be compiled in place is no module."""

    call: str
    found: str
    message = (
        "{call} takes a torch.nn.Module and compiles it in place, and got a {found}. "
        'Compile a function by torch.compile(function, backend="qfuse")'
    )


class NotATrainer(QfuseError, TypeError):
    """What is to be given a callback takes none."""

    found: str
    message = (
        "compile_trainer takes a Trainer of transformers, or one that is made of it as TRL's are, "
        "and got a {found}. In a loop of your own call inductor_q.compile(model)"
    )


class UnknownPreset(_UnknownName):
    message = "unknown preset {name!r}{where}{hint} Known: auto, none, {known!j}"


class UnreadablePreset(QfuseError, ValueError):
    """A tuned preset is damaged, or of another place."""

    path: str
    problem: str
    message = "{path}: {problem}. Remove it, or write it again with qfuse tune"


class UnknownPass(_UnknownName):
    message = "unknown pass {name!r}{where}{hint} Known, in order: {known!j}"


class UnknownProvider(_UnknownName):
    """`op` has no provider of that name."""

    op: str
    message = "no provider {name!r} of qfuse::{op}{where}{hint} Known: auto, {known!j}"


class UnknownBackend(_UnknownName):
    message = "unknown backend {name!r}{hint} Known: {known!j}"


class UnknownOp(_UnknownName):
    message = "unknown op {name!r}{where}{hint} Known: {known!j}"


class UnknownFormat(_UnknownName):
    message = "no quantization format {name!r}{hint} Known: {known!j}"


class NoQuantizer(QfuseError, ValueError):
    """The format can only be read: weights in it come from elsewhere."""

    name: str
    what: str
    known: Collection[str]
    message = (
        "{name} is a format to read; nothing here quantizes {what} to it. Quantize to {some!j}"
    )

    @property
    def some(self) -> Collection[str]:
        return _first(self.known)


class UnknownAbsmax(_UnknownName):
    message = "no absmax of k-bit blocks is called {name!r}{hint} Known: {known!j}"


class UnknownLayer(_UnknownName):
    message = "no linear layer matches {name!r}{where}{hint} Known: {some!j}"

    @property
    def some(self) -> Collection[str]:
        return _first(self.known)


class NotNames(QfuseError, TypeError):
    """One text stands where several names are expected; its letters would be taken for them."""

    argument: str
    value: str
    message = "{argument} is the text {value!r}, expected several names: {argument}=[{value!r}]"


class UnknownProjection(_UnknownName):
    message = "unknown projection of experts {name!r}{where}{hint} Known: {known!j}"


class CorruptAdapter(QfuseError, ValueError):
    """A saved adapter does not fit the model, or there is nothing to save."""

    path: str
    problem: str
    message = "{path}: {problem}"


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


class StillMerged(QfuseError, ValueError):
    """A call would leave merged adapters in the weights of experts for good."""

    what: str
    asked: str
    message = (
        "{asked} expects the adapter of {what} beside its weight, but it is merged, and would stay "
        "in there for good. Call unmerge_adapter() of PEFT's model first"
    )


class NoExperts(QfuseError, ValueError):
    """The model has no expert layers that can be quantized or adapted."""

    model: str
    message = (
        "{model} has no experts behind transformers' experts interface, which is what is known: "
        "transformers >= 5 and a model such as Qwen3-MoE, Mixtral, OLMoE or gpt-oss (not Llama 4). "
        "Where its checkpoint is packed (gpt-oss in MXFP4), inductor_q.load_checkpoint loads it"
    )


class UnreadWeight(QfuseError, ValueError):
    """None of our formats is the one in which a library holds a weight."""

    kind: str
    reason: str
    message = (
        "cannot decode {kind}: {reason}. Ask its library for the values, or quantize the "
        "original weight by inductor_q.quantize, whose formats are all read"
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


class CannotMerge(QfuseError, ValueError):
    """An adapter cannot be added to the weight below it; `remedy` says how to have the sum."""

    what: str
    problem: str
    remedy: str
    message = "cannot merge an adapter into {what}: {problem}. {remedy}"


class CannotShard(QfuseError, ValueError):
    """The experts of a layer cannot be shared among the ranks; `problem` says what to change."""

    what: str
    problem: str
    message = "cannot shard the experts of {what}: {problem}"


class NothingToQuantize(QfuseError, ValueError):
    """A quantizer would have changed nothing in the model; `found` says what is there."""

    model: str
    found: str
    message = "nothing to quantize in {model}: {found}"


class NotAModel(QfuseError, TypeError):
    """What is to be quantized is neither a module nor says which one to make."""

    found: str
    message = (
        "cannot quantize a {found}: expected a torch.nn.Module, or transformers' configuration of "
        "a causal language model beside checkpoint=..."
    )


class WrongScheme(QfuseError, ValueError):
    """What is asked of `inductor_q.quantize` is no format, or none that can be written."""

    asked: object
    problem: str
    message = "cannot quantize to {asked!r}: {problem}"


class AlreadyQuantized(QfuseError, ValueError):
    """The weights are codes already and cannot be quantized as if they were values."""

    what: str
    found: str
    remedy: str
    message = "{what} is quantized already: {found}. {remedy}"


# --- options ------------------------------------------------------------------------------------


class InvalidOptionValue(_Sourced, ValueError, TypeError):
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
        return _first(self.layers, most=3)


# --- reports of a run ---------------------------------------------------------------------------


class UnusableCaches(QfuseError, ValueError):
    """A file of `qfuse cache` cannot be written or read."""

    path: str
    problem: str
    message = "caches in {path}: {problem}"


class UnknownTarget(QfuseError, ValueError):
    """The target to run cannot be found, or cannot be run."""

    target: str
    problem: str
    message = (
        "cannot run {target!r}: {problem}. Give a script, -m module, package.module:callable or a "
        "pytest node (tests/test_x.py::test_y)"
    )


class InvalidInputs(QfuseError, TypeError):
    """A factory of inputs returned neither arguments nor arguments and keywords."""

    factory: str
    got: str
    message = (
        "{factory} returned a {got}. Return a tuple of arguments, or a pair of a tuple and a dict "
        "of keywords"
    )


class UnwritableOutput(QfuseError, OSError):
    """A file or folder to report to cannot be written, found out before the target runs."""

    option: str
    path: str
    problem: str
    message = "{option} {path} cannot be written: {problem}. Nothing was run"


class ClosedOutput(QfuseError, OSError):
    """The process was started without a standard output, as by `>&-`."""

    message = "standard output is closed. Send it somewhere, such as > /dev/null"


class NotAReport(QfuseError, ValueError):
    """The file was not written by `qfuse explain --json`."""

    path: str
    problem: str
    message = "{path} is not a report: {problem}. Write one with: qfuse explain --json FILE TARGET"


class UnknownReportVersion(QfuseError, ValueError):
    path: str
    version: object
    known: int
    message = (
        "{path} has schema_version {version}, this qfuse reads {known}. "
        "Write it again with this version: qfuse explain --json FILE TARGET"
    )


# --- tensors ------------------------------------------------------------------------------------


class CorruptQuantState(QfuseError, ValueError):
    """A quantization state does not fit its packed tensor."""

    what: str
    expected: object
    got: object
    remedy: str
    message = "corrupt quantization state: {what} should be {expected}, is {got}. {remedy}"


class UnsupportedBlocksize(QfuseError, ValueError):
    blocksize: int
    supported: Collection[int]
    message = "blocksize {blocksize} is not supported. Quantize again with one of {supported!j}"


class UnsupportedBits(QfuseError, ValueError):
    k: object
    supported: Collection[int]
    message = "k={k!r} bits are not supported. Quantize with one of {supported!j}"


class WrongCodebook(QfuseError, ValueError):
    k: int
    problem: str
    message = (
        "codebook of k={k}: {problem}. It takes {size} finite float32 values in ascending order "
        "(duplicates are allowed)"
    )

    @property
    def size(self) -> int:
        return int(2**self.k)


class NotFinite(QfuseError, ValueError):
    """The tensor has NaN or infinity, which would spoil its whole block."""

    what: str
    message = "{what} contains NaN or infinity. Repair it, or leave it out with skip=[...]"


class NoValues(QfuseError, ValueError):
    """The tensor is on the meta device, which has shapes and no numbers."""

    what: str
    message = (
        "{what} is on the meta device, so it has no values to quantize. Give checkpoint=..., from "
        "which weights are read one at a time, or load the model before, such as by "
        "inductor_q.load_checkpoint"
    )


class ScaleOutOfRange(QfuseError, ValueError):
    """The tensor is too large or too small for the number format of its scales."""

    what: str
    value: float
    absmax: str
    low: float
    high: float
    message = (
        "{what} reaches {value:.3g}, outside of the {low:.3g} to {high:.3g} that absmax={absmax!r} "
        "scales hold in full precision. Use another absmax, or scale the tensor"
    )


class _WrongTensor(QfuseError):
    what: str
    expected: object
    got: object


class WrongDevice(_WrongTensor, ValueError):
    message = "{what} is on {got}, expected {expected}. Move it with .to(...)"


class WrongDtype(_WrongTensor, TypeError):
    message = "{what} is {got}, expected {expected}. Cast it with .to(...)"


class WrongShape(_WrongTensor, ValueError):
    message = (
        "{what} has shape {got}, expected {expected}. Check which weight the operands belong to"
    )


class WrongBudget(QfuseError, ValueError):
    """No assignment of K reaches the requested number of bits per element."""

    bits: float
    low: float
    high: float
    message = "a budget of {bits:g} bits an element is not between {low:g} and {high:g}"


class WrongCheckpoint(QfuseError, ValueError):
    """A file of tensors does not fit the model, or cannot be read; nothing was changed."""

    path: str
    problems: Collection[str]
    message = "{path} does not fit the model, which was left as it was:\n{listing}"

    @property
    def listing(self) -> str:
        return "\n".join(f"  {line}" for line in _first(self.problems))


class UnreadCheckpoint(QfuseError, ValueError):
    """The weights of a checkpoint are packed in a way that nothing here reads as it is."""

    path: str
    problem: str
    message = "{path} is not loaded as it is: {problem}"


class CannotSave(QfuseError, ValueError):
    """What would be written is not enough to load the model again."""

    what: str
    problem: str
    remedy: str
    message = "{what} cannot be saved in this way: {problem}. {remedy}"


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


# --- the machine --------------------------------------------------------------------------------


class MissingExtra(QfuseError, ImportError):
    package: str
    extra: str
    feature: str
    message = "{feature} needs {package}, which is not installed: pip install 'inductor-q[{extra}]'"


# --- the command line ---------------------------------------------------------------------------


class NotAModelFactory(QfuseError, ValueError):
    name: str
    problem: str
    message = (
        "{name!r} is no model factory: {problem}. "
        "Give package.module:function, a function without arguments that returns the model"
    )


class BaseFailed(QfuseError, RuntimeError):
    """`qfuse tune` has nothing to hold other conditions against."""

    problem: str
    message = "the preset that ships gives no measurement: {problem}. Run the model by itself first"


class UnusableRuns(QfuseError, OSError):
    """The file in which `qfuse tune` remembers its runs cannot be read or written."""

    path: str
    problem: str
    message = (
        "the runs of qfuse tune in {path}: {problem}. Move away what is in the way, or set "
        "XDG_CONFIG_HOME to a folder that can be written to"
    )


class NoRegion(QfuseError, ValueError):
    message = (
        "{model} names no layers that could be compiled by themselves (_no_split_modules); "
        'compile it with regions="model".'
    )
    model: str


class NormOfOneRank(QfuseError, ValueError):
    """A trainer would clip gradients by another factor on each rank."""

    value: float
    message = (
        "max_grad_norm={value} clips each rank by the norm of its own experts, so that what the "
        "ranks have in common drifts apart. Set max_grad_norm=0.0, or train in a loop of your own "
        "with inductor_q.experts.clip_grad_norm_"
    )


class ReplicatedModel(QfuseError, ValueError):
    """A trainer would run copies of the model in threads (nn.DataParallel), which call what was
    compiled for the original."""

    gpus: int
    message = (
        "{gpus} GPUs are visible to one process, so the trainer would wrap the model in "
        "nn.DataParallel, whose replicas cannot be compiled. Start a process for each GPU: "
        "torchrun --nproc-per-node {gpus} train.py; or set CUDA_VISIBLE_DEVICES=0"
    )


class NoProfileSteps(QfuseError, ValueError):
    message = "profile_steps is {given!r}: name the steps to record, from 1 on, such as (4, 5)"
    given: Any


class OptionsWithoutCompile(QfuseError, ValueError):
    message = (
        "QfuseCallback has {given!j} and enabled=False, so nothing would use them; "
        'drop them, or set enabled=True or enabled="auto".'
    )
    given: Sequence[str]
