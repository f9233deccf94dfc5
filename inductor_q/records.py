"""The records of a report: a `SiteRecord` for each site, a `PassRecord` for each run of a pass, a
`MemoryRecord` where there is a budget of memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SiteRecord:
    """Record what one pass did at one site.

    `module` is the module path of the quantized weight, `source` the user's file and line,
    `rejected` the reason when nothing was done, `by_choice` whether another plan was preferred
    (rather than this one impossible), `bytes_saved` the bytes no longer kept for backward. `also`
    names other modules that run by the same graph: a nested compile region is called for each.
    `plain` is for a weight that is not quantized. `op` is the op of ours that reads the weight
    since, if the site made one: `provider` serves it.
    """

    pass_name: str
    target: str
    module: str = ""
    source: str = ""
    shape: tuple[int, ...] = ()
    provider: str = ""
    rejected: str = ""
    by_choice: bool = False
    bytes_saved: int = 0
    also: tuple[str, ...] = ()
    plain: bool = False
    op: str = ""


@dataclass(frozen=True)
class PassRecord:
    name: str
    applied: int
    seconds: float


@dataclass(frozen=True)
class MemoryRecord:
    """Record what `qfuse.memory` planned for one graph that trains, in bytes.

    `limit` is what the budget leaves beside what was allocated before (`base`). `forward`,
    `backward` and `unplanned` are simulated peaks of the graph's own tensors: the plan's, and the
    one without recomputation. `saved` is kept for backward, `recomputed` the results of products,
    attention and other expensive operations that backward computes again. `offloaded` is kept in
    the host's memory; `link` says at which rates the link to it was measured, or why nothing is
    offloaded. `measured` is the most that the process had allocated until its first step had ended;
    where that was before the step (loading a model, say), it is not `exact`, and the step took at
    most that. `difference` is what an earlier step took beyond its plan: this plan is a corrected
    one.
    """

    budget: int
    base: int
    limit: int
    forward: int
    backward: int
    unplanned: int
    saved: int
    recomputed: int
    measured: int = 0
    exact: bool = False
    difference: int = 0
    offloaded: int = 0
    link: str = ""

    @property
    def transient(self) -> int:
        return max(self.forward, self.backward)

    @property
    def peak(self) -> int:
        """The planned peak of the device, with what was there before."""
        return self.base + self.difference + self.transient

    @property
    def fits(self) -> bool:
        return self.transient <= self.limit

    def __str__(self) -> str:
        parts = [
            f"memory planned {_gb(self.peak)} of {_gb(self.budget)} ({_gb(self.saved)} kept for "
            f"backward, {_gb(self.recomputed)} computed again"
        ]
        if self.offloaded:
            parts.append(f", {_gb(self.offloaded)} offloaded to the host")
        if self.link:
            parts.append(f", {self.link}")
        if self.recomputed or self.unplanned != self.transient:
            whole = self.base + self.difference + self.unplanned
            parts.append(f", {_gb(whole)} without recomputation")
        if self.difference:
            sign = "more" if self.difference > 0 else "less"
            parts.append(f", corrected: a step took {_gb(abs(self.difference))} {sign}")
        parts.append(")")
        if self.measured:
            parts.append(f", measured {'' if self.exact else 'at most '}{_gb(self.measured)}")
        if not self.fits:
            parts.append(": THE BUDGET CANNOT BE MET, this is the least")
        return "".join(parts)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.3f} MB"
