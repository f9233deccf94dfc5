"""Judge what became of each quantized layer of a compile: one verdict for every reader.

`qfuse.strict`, the summary of a report and `qfuse explain` agree because they read it here: from
the sites of the passes, and from the packed weights that the graph reads, which need not have any.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from inductor_q.records import SiteRecord

Status = Literal["fused", "left", "canonical", "rejected"]

UNKNOWN = "compiled, but no pass knows this kind of quantized weight"
ALL_OFF = "compiled, but the passes are off (qfuse.passes)"
SOME_OFF = "compiled, but no pass that is on took it; off (qfuse.passes): {}"
LOST = (
    "its graph came from torch's cache, and the report of the compile that filled it is lost: "
    "compile with fx_graph_cache=False, or empty the cache, to know"
)
UNREWRITTEN = "its dequantized weight is not saved; its product is left as it was"

#: The pass that only makes a weight known to others.
UNWRAP = "unwrap_weights"

#: The other passes over Dynamo's graph, which are about attention and the loss.
CAPTURED_PASSES = frozenset({"causal_attention", "group_queries", "chunk_loss"})

# Passes whose sites say nothing about a layer's product.
_OTHER_PASSES = CAPTURED_PASSES | {
    "varying_lengths",
    "rotary_tables",
    "recompute_products",
    "keep_checkpointed",
    "decode_again",
    "project_in_place",
    "cast_together",
    "widen_products",
}

_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|modules_to_save)(\..+)?$")


@dataclass(frozen=True)
class Verdict:
    """Judge one layer; `sites` are what the passes reported on its weight and its adapter.

    "fused": a pass rewrote its product, and none was refused. "left": only thresholds kept the
    passes from it, so it runs as its library has it. "canonical": it was recognized, and its
    adapter or product was left alone. "rejected": no pass took it.
    """

    status: Status
    reason: str = ""
    sites: tuple[SiteRecord, ...] = ()

    @property
    def is_accepted(self) -> bool:
        """Whether `qfuse.strict` accepts the layer, because nothing failed to be fused."""
        return self.status in ("fused", "left")


def verdicts(
    sites: Sequence[SiteRecord], weights: Iterable[str], unmatched: str
) -> dict[str, Verdict]:
    """Return the verdict on each quantized layer, by module path.

    Args:
        sites: of every pass.
        weights: the paths of all packed weights that the graph reads.
        unmatched: the reason where a weight has no site.
    """
    groups = _by_layer(sites)
    found = {name: _verdict(of_layer) for name, of_layer in groups.items()}
    for path in weights:
        if not _is_among(path, groups):
            found[path] = Verdict("rejected", unmatched)
    return found


def counted(judged: Mapping[str, Verdict]) -> str:
    """Say how many quantized layers are fused, and how many are left to their library."""
    count = Counter(verdict.status for verdict in judged.values())
    whose = "its" if count["left"] == 1 else "their"
    left = f", {count['left']} left to {whose} library" if count["left"] else ""
    return f"{count['fused']} of {_layers(judged)} fused{left}"


def unknown(judged: Mapping[str, Verdict]) -> str:
    """Say that the verdicts are not known, where the report is lost."""
    return f"what became of {_layers(judged)} is not known, for the report is lost"


def _layers(judged: Mapping[str, Verdict]) -> str:
    return f"{len(judged)} quantized layer{'' if len(judged) == 1 else 's'}"


def unmatched(off: Iterable[str], ran: Iterable[str]) -> str:
    """Return the reason for a weight without a site, from the passes switched off and those that
    ran.
    """
    off = [name for name in off if name not in _OTHER_PASSES]
    if off and {*_OTHER_PASSES, UNWRAP}.issuperset(ran):
        return ALL_OFF
    return SOME_OFF.format(", ".join(off)) if off else UNKNOWN


def match(path: str, names: Iterable[str]) -> str:
    """Return the longest of `names` that ends `path` or is ended by it.

    A graph names a layer from the module that was compiled, which may be a part of the model or a
    wrapper around it.
    """
    parts = path.split(".")
    best, score = "", 0
    for name in names:
        other = name.split(".")
        short = min(len(parts), len(other))
        if short > score and parts[-short:] == other[-short:]:
            best, score = name, short
    return best


def _by_layer(sites: Sequence[SiteRecord]) -> dict[str, list[SiteRecord]]:
    """Group the sites by quantized layer: those about its weight, and those about its adapter."""
    sites = [
        replace(site, module=module)
        for site in sites
        if site.pass_name not in _OTHER_PASSES and not site.plain
        for module in (site.module, *site.also)
    ]
    own = [s.module for s in sites if s.module and not _ADAPTER.search(f".{s.module}")]
    groups: dict[str, list[SiteRecord]] = {name: [] for name in own}
    for site in sites:
        name = _ADAPTER.sub("", site.module)
        target = name if name in groups else match(name, groups)
        if target:
            groups[target].append(site)
    return groups


def _verdict(sites: Sequence[SiteRecord]) -> Verdict:
    refused = [s.rejected for s in sites if s.rejected and not s.by_choice]
    rewritten = [s for s in sites if not s.rejected and s.pass_name not in ("keep_packed", UNWRAP)]
    preferred = [s.rejected for s in sites if s.rejected and s.by_choice]
    if refused:
        return Verdict("canonical" if rewritten else "rejected", refused[0], tuple(sites))
    if rewritten:
        return Verdict("fused", "", tuple(sites))
    if preferred:
        return Verdict("left", preferred[0], tuple(sites))
    return Verdict("canonical", UNREWRITTEN, tuple(sites))


def _is_among(path: str, groups: Mapping[str, object]) -> bool:
    """Return whether a weight has sites, under its own name or that of the module holding it."""
    return path in groups or path.rpartition(".")[0] in groups
