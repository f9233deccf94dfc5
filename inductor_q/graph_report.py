"""The report of one compile: which pass did what to which quantized weight, or why not."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from inductor_q import verdict
from inductor_q.records import MemoryRecord, PassRecord, SiteRecord

__all__ = ["REPORT_VERSION", "MemoryRecord", "PassRecord", "Report", "SiteRecord"]

REPORT_VERSION = 1  # of the file that `qfuse.report` names


@dataclass
class Report:
    """Report what one compile did. Everything in it is plain data; `to_json` is its file form.

    `graph` is torch's number of the graph, as in its logs: the frame, and which of its compiles.
    `weights` are the paths of all packed weights that the graph reads, also those that no pass
    knows; `off` are the passes that are switched off. `lost` means that the graph came from a cache
    and the report of the compile that filled it is gone. `tag` is that of `Context`.
    """

    graph: str = ""
    preset: str = ""
    preset_reason: str = ""
    torch: str = ""
    device: str = ""
    numerics: str = ""
    compute: str = "bf16"
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    passes: list[PassRecord] = field(default_factory=list)
    sites: list[SiteRecord] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)
    providers: dict[str, dict[str, int]] = field(default_factory=dict)
    memory: MemoryRecord | None = None
    cached: bool = False
    lost: bool = False
    tag: str = ""
    created: float = field(default_factory=time.time)

    def add(self, record: PassRecord, sites: Iterable[SiteRecord]) -> None:
        self.passes.append(record)
        self.sites.extend(sites)

    def count_provider(self, op: str, provider: str) -> None:
        """Note that a lowering chose `provider` for one node of `op`."""
        counts = self.providers.setdefault(op, {})
        counts[provider] = counts.get(provider, 0) + 1

    @property
    def bytes_saved(self) -> int:
        """The bytes of dequantized weights and of logits that stock would keep for backward."""
        return sum(site.bytes_saved * (1 + len(site.also)) for site in self.sites)

    def multiplied(self) -> tuple[str, ...]:
        """Return the layers whose products `qfuse.compute` is for, also those it leaves alone."""
        names = (name for site in self._products() for name in (site.module, *site.also))
        return tuple(dict.fromkeys(filter(None, names)))

    def in_eight_bits(self) -> tuple[int, int]:
        """Return how many products with frozen weights are in eight bits, and of how many."""
        counts = [(not site.rejected, 1 + len(site.also)) for site in self._products()]
        return sum(n for done, n in counts if done), sum(n for _, n in counts)

    def _products(self) -> list[SiteRecord]:
        return [site for site in self.sites if site.pass_name == "quantize_products"]

    def applied(self) -> dict[str, int]:
        """Return the number of sites that each pass rewrote, by pass."""
        totals: Counter[str] = Counter()
        for record in self.passes:
            totals[record.name] += record.applied
        return dict(totals)

    def rejections(self) -> dict[str, Counter[str]]:
        """Return the number of sites by pass and by reason of rejection."""
        found: dict[str, Counter[str]] = {}
        for site in self.sites:
            if site.rejected:
                found.setdefault(site.pass_name, Counter())[site.rejected] += 1
        return found

    def verdicts(self) -> dict[str, verdict.Verdict]:
        """Return the verdict on each quantized layer that the compile read, by module path."""
        return verdict.verdicts(self.sites, self.weights, self._unmatched())

    def _unmatched(self) -> str:
        """Return the reason why a weight may have no site."""
        if self.lost:
            return verdict.LOST
        return verdict.unmatched(self.off, [record.name for record in self.passes])

    def nothing_fused(self) -> str:
        """Say why, where the graph has quantized layers and against expectation none is fused."""
        judged = self.verdicts()
        wrong = Counter(v.reason for v in judged.values() if not v.is_accepted)
        if self.off or self.lost or not wrong or wrong.total() < len(judged):
            return ""
        reason, _ = wrong.most_common(1)[0]
        return f"graph {self.graph}: {verdict.counted(judged)}: {reason}"

    def summary(self) -> str:
        """Sum up in one line the graph, preset and why, fused layers, each pass and its sites."""
        parts = [f"graph {self.graph}"] if self.graph else []
        parts.append(f"preset {self.preset} ({self.preset_reason})")
        if judged := self.verdicts():
            parts.append(verdict.counted(judged) if not self.lost else verdict.unknown(judged))
        sites = []
        rejected = self.rejections()
        for name, count in self.applied().items():
            refused = sum(rejected.get(name, Counter()).values())
            if count or refused:
                sites.append(f"{name} {count}" + (f" (+{refused} rejected)" if refused else ""))
        if sites:
            parts.append(f"sites: {', '.join(sites)}")
        some, products = self.in_eight_bits()
        if products:
            parts.append(f"{some} of {products} products with frozen weights in {self.compute}")
        if self.bytes_saved:
            parts.append(f"{self.bytes_saved / 2**20:.1f} MiB not saved for backward")
        if self.memory is not None:
            parts.append(str(self.memory))
        if self.cached:
            parts.append("from the cache")
        return "qfuse: " + "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "bytes_saved": self.bytes_saved,
            "in_eight_bits": list(self.in_eight_bits()),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """Make a report from the output of `to_dict`."""
        known = {k: v for k, v in data.items() if k not in ("bytes_saved", "in_eight_bits")}
        known["passes"] = [PassRecord(**p) for p in known["passes"]]
        known["sites"] = [
            SiteRecord(**{**s, "shape": tuple(s["shape"]), "also": tuple(s.get("also", ()))})
            for s in known["sites"]
        ]
        if known.get("memory") is not None:
            known["memory"] = MemoryRecord(**known["memory"])
        return cls(**known)
