"""The data of one observed run, behind `qfuse explain`, its JSON, its HTML and its budgets.

They are plain frozen records, filled by the observer and read by the renderers. A field is added
here first; `docs/explain.schema.json` is generated from these classes and a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

SCHEMA_VERSION = 1


#: The possible outcomes for a quantized layer, the best first.
LayerStatus = Literal["fused", "left", "canonical", "rejected", "unseen"]
STATUSES: tuple[LayerStatus, ...] = get_args(LayerStatus)

#: What is told beside quantized layers: a field of `Explanation`, whose name is the kind of its
#: records, and the pass that they are about: "fused" by it, or "canonical" where it stood back.
BESIDE = {
    "attention": "causal_attention",
    "loss": "chunk_loss",
    "checkpointing": "keep_checkpointed",
}


@dataclass(frozen=True)
class Frame:
    """Name a place in Python source. `text` is the line as it stood when the run ended."""

    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True)
class GraphBreak:
    """Describe a distinct graph break: the same cause at the same place, `count` times.

    `user` is the innermost frame of the user's own code, `origin` the frame that broke and
    `library` the distribution that owns it ("peft 0.21.2", or "your code"). `gb_id` is torch's
    ("GB0170"; empty where torch gives none), `fix` what to change, in one sentence.
    """

    reason: str
    count: int = 1
    gb_id: str = ""
    explanation: str = ""
    hints: tuple[str, ...] = ()
    fix: str = ""
    library: str = ""
    user: Frame = Frame()
    origin: Frame = Frame()
    compile_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recompile:
    """Give a reason to compile a function again: the guard that failed, and on what values."""

    function: str
    where: Frame
    guard: str
    before: str = ""
    after: str = ""
    fix: str = ""
    count: int = 1
    hit_limit: bool = False


@dataclass(frozen=True)
class Fallback:
    """Name a frame that ran in eager mode although it was to be compiled."""

    function: str
    where: Frame
    reason: str
    count: int = 1


@dataclass(frozen=True)
class SuppressedError:
    """Describe an error that `suppress_errors` turned into eager execution."""

    function: str
    where: Frame
    error: str
    count: int = 1


@dataclass(frozen=True)
class CudagraphSkip:
    """Give a reason for which compiled code was not recorded as a CUDA graph."""

    reason: str
    count: int = 1


@dataclass(frozen=True)
class Phase:
    """Give the wall seconds of one compile phase over all compiles.

    Phases nest, so they do not add up.
    """

    name: str
    seconds: float
    calls: int = 1


@dataclass(frozen=True)
class SavedTensors:
    """Count what one op's outputs keep alive for backward (inputs and weights not counted)."""

    op: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Step:
    """Record what one pass did at a layer: it was rewritten by `provider`, or `rejected` for a
    reason.
    """

    pass_name: str
    provider: str = ""
    rejected: str = ""
    by_choice: bool = False
    bytes_saved: int = 0
    count: int = 1


@dataclass(frozen=True)
class Serving:
    """Name who computes with a packed weight, and the bytes of it that one product moves.

    `provider` serves `op` of qfuse's; without an `op` it is the library itself, whose bytes are not
    known. `packed` are the bytes that store the weight. `written` are those of its values, in 16
    bits, or in 8 for "requantize": a provider that decodes first writes them, and the product reads
    them again; 0 where a kernel reads the weight packed. `passed_over` are providers that come
    before this one on the device, each with what stands against it.
    """

    op: str
    provider: str
    packed: int = 0
    written: int = 0
    passed_over: tuple[str, ...] = ()

    @property
    def moved(self) -> int:
        return self.packed + 2 * self.written


@dataclass(frozen=True)
class Layer:
    """Give the fusion coverage of one quantized linear or expert, of attention under a mask, of a
    loss, or of what a checkpointed module keeps.

    `status`: "fused" (its dequantization is in a rewritten product), "left" (to its library, since
    a threshold prefers that), "canonical" (recognized, its adapter or product left alone),
    "rejected" (`reason` says why), "unseen" (in no compiled graph).
    `would` is true where another backend compiled it: the steps are then what qfuse would do.
    `library` has packed the weight, in what it calls `format`; `layout` is the name of the same
    among `qfuse formats`, or "" where nothing of ours reads it. `serving` says who computes with
    it, and at what cost: several where graphs differ, for few rows and for many.
    """

    module: str
    kind: str
    format: str
    status: LayerStatus
    reason: str = ""
    shape: tuple[int, ...] = ()
    source: str = ""
    steps: tuple[Step, ...] = ()
    would: bool = False
    library: str = ""
    layout: str = ""
    serving: tuple[Serving, ...] = ()


@dataclass(frozen=True)
class ProductError:
    """Give the error of a layer's products in eight bits, relative to the norm of those in 16.

    Both are of the same inputs: `forward`, and for the gradient of the input, `backward`; 0.0 where
    there was none.
    """

    module: str
    forward: float = 0.0
    backward: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class Compile:
    """Describe a graph that a backend compiled; if `observed`, fusion and saved bytes are known."""

    compile_id: str
    function: str
    where: Frame
    backend: str
    ops: int = 0
    seconds: float = 0.0
    cached: bool = False
    stack: str = ""
    observed: bool = True


@dataclass(frozen=True)
class Exit:
    """Say how the target ended: exit status, the exception that left it, the signal."""

    status: int = 0
    exception: str = ""
    signal: str = ""


@dataclass(frozen=True)
class Explanation:
    """Hold all that was observed in one process; `rank` is one of `world_size` under torchrun.

    `target` and the arguments after it, `argv`, are what was run; `memory` are the plans of
    `qfuse.memory`, a sentence each; `numerics` what `--numerics` measured, the worst layer first.
    """

    target: str
    argv: tuple[str, ...] = ()
    exit: Exit = Exit()
    rank: int = 0
    world_size: int = 1
    created: float = 0.0
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, dict[str, str]] = field(default_factory=dict)
    compiles: tuple[Compile, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    suppressed: tuple[SuppressedError, ...] = ()
    cudagraph_skips: tuple[CudagraphSkip, ...] = ()
    phases: tuple[Phase, ...] = ()
    saved: tuple[SavedTensors, ...] = ()
    layers: tuple[Layer, ...] = ()
    attention: tuple[Layer, ...] = ()
    loss: tuple[Layer, ...] = ()
    checkpointing: tuple[Layer, ...] = ()
    memory: tuple[str, ...] = ()
    numerics: tuple[ProductError, ...] = ()
    warnings: tuple[str, ...] = ()
    dump: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def break_count(self) -> int:
        return sum(b.count for b in self.breaks)

    @property
    def recompile_count(self) -> int:
        return sum(r.count for r in self.recompiles)

    @property
    def saved_bytes(self) -> int:
        return sum(s.bytes for s in self.saved)

    @property
    def fused_share(self) -> float:
        """The share of quantized layers that are fused; 1.0 where there are no layers.

        Layers left to their library count as not fused.
        """
        fused = sum(layer.status == "fused" for layer in self.layers)
        return fused / len(self.layers) if self.layers else 1.0
