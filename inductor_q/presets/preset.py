"""Define a preset: values for one exact architecture, each with the evidence for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class FrozenMap(Mapping[str, V], Generic[V]):
    """Hold a read-only dict. Unlike MappingProxyType it can be copied deeply and pickled.

    Inductor deep-copies its config, and with it every pass object that holds resolved options.
    """

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Hold a value and its evidence: who measured, on what, how much, when; or the hardware's
    limit.
    """

    value: Any
    evidence: str


def _entries() -> FrozenMap[Entry]:
    return FrozenMap()


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Say which thresholds suit one architecture, and which options of Inductor do or do not.

    No entry repeats what holds without it. Measurements that change nothing stand in `facts`;
    values that were measured to lose stand in `losses`, and a warning follows when a user chooses
    one.
    """

    name: str
    arch: tuple[int, int] | None = None
    thresholds: Mapping[str, Entry] = field(default_factory=_entries)  # over THRESHOLDS
    options: Mapping[str, Entry] = field(default_factory=_entries)  # of Inductor: tuned ones' only
    kernels: Mapping[str, Entry] = field(default_factory=_entries)  # op -> provider: likewise
    losses: Mapping[str, Entry] = field(default_factory=_entries)  # option -> value that loses
    min_memory: Mapping[str, Entry] = field(default_factory=_entries)  # option -> device bytes
    facts: tuple[str, ...] = ()
    reason: str = ""  # why this one: filled by select()

    def __post_init__(self) -> None:
        for name in MAPPINGS:
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))
        object.__setattr__(self, "thresholds", FrozenMap({**THRESHOLDS, **self.thresholds}))


MAPPINGS = ("thresholds", "options", "kernels", "losses", "min_memory")

#: The threshold that no size reaches.
NEVER = 1 << 60

# Every device starts with these, and every preset holds them unless measurements differed there.
THRESHOLDS: Mapping[str, Entry] = FrozenMap(
    {
        # Rows from which the LoRA product rides in the main GEMM.
        "extend_k.min_rows": Entry(
            value=1024,
            evidence="a start value, not a measured crossover: with so many rows a wider GEMM "
            "costs less than the adapter's products do; measured where a preset says otherwise",
        ),
        # Rows from which a product with a quantized weight is computed in eight bits, if asked for.
        "quantize_products.min_rows": Entry(
            value=1024,
            evidence="a start value, not a measured crossover: with fewer rows the decode of the "
            "weight and the cast of the input take a larger share of the layer's time",
        ),
        "quantize_products.min_elements": Entry(
            value=1 << 20,
            evidence="a start value, not a measured crossover: of a small weight's time the casts "
            "take most; the least in a model that was measured has 1024 x 4096 elements",
        ),
        # Elements of an expert's input from which packed experts are computed in FP8, if asked for.
        "quantize_products.min_expert_elements": Entry(
            value=1 << 22,
            evidence="a start value, of one H100: forward of NF4 experts took 0.49 to 0.94 of the "
            "time in 16 bits with so many elements for each or more, and 0.82 to 1.26 with fewer, "
            "in the first projection of four models (torch 2.11.0+cu130, 2026-11-27, "
            "benchmarks/results/moe_fp8-h100.json)",
        ),
        # Elements of an expert's weight from which experts are decoded before the product.
        "fuse_scatter2scatter.min_elements_of_large": Entry(
            value=NEVER,
            evidence="a start value, which is never: all decoded experts are in memory then; "
            "measured where a preset says otherwise",
        ),
        # The rows for each expert from which such experts are.
        "fuse_scatter2scatter.min_rows_of_large": Entry(
            value=1,
            evidence="a start value: whoever sets the number of elements alone has large experts "
            "decoded first, however few rows they have; measured where a preset says otherwise",
        ),
        # The same two where a product reads the weight transposed to how it is stored.
        "fuse_scatter2scatter.min_elements_of_large_transposed": Entry(
            value=NEVER,
            evidence="a start value, which is never; measured where a preset says otherwise",
        ),
        "fuse_scatter2scatter.min_rows_of_large_transposed": Entry(
            value=1,
            evidence="a start value, as that of rows above; measured where a preset says otherwise",
        ),
        # Rows up to which a linear layer reads its packed weight, where a kernel of ours does.
        "linear_rows.max_rows": Entry(
            value=16,
            evidence="a start value, not a measured crossover: two products of tensor cores share "
            "what is decoded; measured where a preset says otherwise",
        ),
        # The same for the kernel in Triton, which serves every format, where no other kernel does.
        "linear_rows.triton_max_rows": Entry(
            value=16,
            evidence="a start value, of a sweep on one H200: int4 in groups, FP8 and MXFP4 took "
            "less time than dequantization and a product up to so many rows, and for 32 rows only "
            "where there are many features",
        ),
        # The same for k-bit weights, whose bits lie apart. From so many elements on, the limits
        # above hold for a k-bit weight too; of a smaller one the CUDA kernel has 16 rows, a launch.
        "linear_rows.triton_max_rows_of_planes": Entry(
            value=1,
            evidence="a start value, of a sweep on one H200: codes of 2 to 4 bits took less time "
            "than dequantization and a product for one row, and more for several",
        ),
        "linear_rows.min_elements_of_planes": Entry(
            value=2**25,
            evidence="a start value, of one H100: with 4 or 16 rows, in CUDA graphs, the kernel in "
            "Triton took 0.61 to 1.00 of the time of dequantization and a product for weights of "
            "50 M elements, and 1.00 to 1.37 for those of 4 and 17 M (codes of 2 to 5 bits, torch "
            "2.11.0+cu130, 2026-11-25, benchmarks/results/rows_kbit-h100.json); with 32 rows the "
            "CUDA kernel took 0.43 to 0.77, 0.90 to 1.11 and 1.09 to 1.44 for weights of 50, 17 "
            "and 4 M (2026-11-26, benchmarks/results/rows_kbit_cuda-h100.json)",
        ),
        # Rows below which bitsandbytes' own gemm_4bit is kept, in inference.
        "canonicalize.min_rows": Entry(
            value=2,
            evidence="a start value: for one row gemm_4bit, which reads packed weights, was the "
            "faster on the one GPU that was measured (sm_90)",
        ),
        # Logits from which the loss is computed in chunks.
        "chunk_loss.min_logits": Entry(
            value=160 << 20,
            evidence="a start value, not a measured crossover: fewer are one chunk",
        ),
        # Logits that are computed at a time there.
        "chunk_loss.elements": Entry(
            value=160 << 20,
            evidence="a start value: 1,024 rows of a vocabulary of 151,936, whose product with the "
            "head is large enough for full speed",
        ),
        # The same for a frozen float32 head, whose parts each chunk rounds twice.
        "chunk_loss.elements_of_rounded": Entry(
            value=160 << 20,
            evidence="a start value: as many as of another head",
        ),
        # Rows from which adapters make their masks of dropout in their own kernels.
        "fuse_dropout.min_rows": Entry(
            value=512,
            evidence="a start value, not a measured crossover: kernels that read the input once "
            "save copies of it that grow with the rows",
        ),
        # The most bytes of casts of adapters, or of their gradients, that one launch makes.
        "cast_together.bytes": Entry(
            value=1 << 23,
            evidence="a start value, not a measured one: it holds the casts of three layers of "
            "Qwen3-8B with adapters of rank 16, or the gradients of one",
        ),
        # Rows from which x W' in 16 bits is computed in float32 on a CPU that is slow in 16 bits.
        "widen_products.min_rows": Entry(
            value=32,
            evidence="a start value, not a measured crossover: the preset of CPUs has one",
        ),
        # Positions from which a mask of padding or of documents is replaced by what it means.
        "causal_attention.min_positions": Entry(
            value=512,
            evidence="a start value, not a measured crossover: attention under a mask computes the "
            "masked half too; measured where a preset says otherwise",
        ),
        # Keys from which attention of one query in decoding has a kernel of ours.
        "attention_rows.min_keys": Entry(
            value=1 << 40,
            evidence="a start value, which is never: measured where a preset says otherwise",
        ),
        # How many times as large as an adapter's projection its input is, for the projection to be
        # kept under checkpointing.
        "keep_checkpointed.min_ratio": Entry(
            value=64,
            evidence="a start value, which bounds memory: the seven adapters of a decoder layer "
            "add at most a 64th of their inputs to what checkpointing keeps",
        ),
        # Positions from which attention is not computed again under checkpointing.
        "keep_checkpointed.min_positions": Entry(
            value=1 << 20,
            evidence="a start value, which is never: attention's result is as large as the layer's "
            "input, so keeping it doubles what checkpointing keeps, which was asked for to save "
            "memory",
        ),
        # How many times the largest tensor that a checkpointed segment reads its products may take,
        # where torch keeps them, before the widest are computed again.
        "recompute_products.max_kept": Entry(
            value=1 << 20,
            evidence="a start value, which is never: as torch 2.11 leaves them",
        ),
    }
)
