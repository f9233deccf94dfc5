"""Budgets limit what a run may cost before `qfuse explain` and `assert_compiles_clean` fail."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inductor_q.diagnostics.explanation import Explanation
from inductor_q.diagnostics.render import words

_MB = 2**20


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limit a run; None does not limit.

    `max_breaks` and `max_recompiles` count events, not distinct causes; `min_fused` is the share of
    quantized layers that are fused, 0 to 1, and a layer that a threshold leaves to its library is
    not; `max_saved_mb` is in MiB, of one step.
    """

    max_breaks: int | None = None
    max_recompiles: int | None = None
    min_fused: float | None = None
    max_saved_mb: float | None = None

    def missed(self, run: Explanation) -> list[str]:
        """Write a line for each limit that `run` misses: the number, the limit, the first cause."""
        lines = []
        if self.max_breaks is not None and run.break_count > self.max_breaks:
            break_ = run.breaks[0]
            place = words.place(replace(break_.origin, function=""))
            cause = f"{break_.reason} ({break_.library or 'unknown'}, {place})"
            lines.append(_line(_count(run.break_count, "graph break"), self.max_breaks, cause))
        if self.max_recompiles is not None and run.recompile_count > self.max_recompiles:
            again = run.recompiles[0]
            cause = f"{again.function}: {again.guard}"
            lines.append(
                _line(_count(run.recompile_count, "recompile"), self.max_recompiles, cause)
            )
        if self.min_fused is not None and run.fused_share < self.min_fused:
            first = next(layer for layer in run.layers if layer.status != "fused")
            cause = f"{first.module}: {first.reason or first.status}"
            fused = sum(layer.status == "fused" for layer in run.layers)
            share = f"{run.fused_share:.0%}{words.left(run.layers)}"
            found = f"{fused} of {len(run.layers)} quantized layers fused ({share})"
            lines.append(f"{found}, at least {self.min_fused:.0%} wanted; first: {cause}")
        blind = [one for one in run.compiles if not one.observed]
        if self.max_saved_mb is not None and blind:
            lines.append(
                f"what {_count(len(blind), 'graph')} of backend {blind[0].backend!r} "
                f"{'saves' if len(blind) == 1 else 'save'} for backward cannot be seen, at most "
                f"{self.max_saved_mb:g} MiB allowed; run with --backend qfuse"
            )
        if self.max_saved_mb is not None and run.saved_bytes > self.max_saved_mb * _MB:
            most = run.saved[0]
            cause = f"{most.op} keeps {most.bytes / _MB:.1f} MiB in {_count(most.count, 'tensor')}"
            found = f"{run.saved_bytes / _MB:.1f} MiB saved for backward"
            lines.append(_line(found, f"{self.max_saved_mb:g} MiB", cause))
        return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _line(found: str, limit: object, cause: str) -> str:
    return f"{found}, at most {limit} allowed; first: {cause}"
