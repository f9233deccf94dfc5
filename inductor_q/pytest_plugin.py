"""The pytest plugin: a fixture that fails a test whose compiled code is not clean.

    def test_step(assert_compiles_clean):
        with assert_compiles_clean(max_recompiles=1, min_fused=1.0):
            step(batch)

Loaded by pytest in every environment that has this package, so nothing is imported before a test
asks for the fixture.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from inductor_q.diagnostics.observation import Observation


class CompilesClean:
    """Observe the block of `with assert_compiles_clean(...)`, then hold it to the budget."""

    @contextlib.contextmanager
    def __call__(
        self,
        *,
        max_breaks: int | None = 0,
        max_recompiles: int | None = 0,
        min_fused: float | None = None,
        max_saved_mb: float | None = None,
        backend: str | None = None,
    ) -> Iterator[Observation]:
        """Observe the block; fail with the report when a limit is not kept.

        Args:
            max_breaks, max_recompiles: events allowed; None does not limit.
            min_fused: the share of quantized layers that have to be fused, 0 to 1; one that a
                threshold leaves to its library is not.
            max_saved_mb: MiB that one step may save for backward.
            backend: force this backend.

        An error of the block comes through as it is. A block that compiles nothing fails too, and
        one with an error that `suppress_errors` hides: they would keep any limit.
        """
        from inductor_q.diagnostics.budgets import Budget
        from inductor_q.diagnostics.observation import observe
        from inductor_q.diagnostics.render import text

        __tracebackhide__ = True
        with observe(target="assert_compiles_clean", backend=backend) as observation:
            yield observation
        run = observation.explanation()
        missed = Budget(
            max_breaks=max_breaks,
            max_recompiles=max_recompiles,
            min_fused=min_fused,
            max_saved_mb=max_saved_mb,
        ).missed(run)
        missed += [f"suppressed in {s.function}: {s.error}" for s in run.suppressed]
        if not run.compiles and not run.breaks:
            missed.append("nothing was compiled in the block")
        if missed:
            report = io.StringIO()
            text.write(run, report, missed=missed)
            pytest.fail("\n".join([*missed, "", report.getvalue()]), pytrace=False)


@pytest.fixture
def assert_compiles_clean() -> CompilesClean:
    """Return a context manager that fails when its block misses a budget: see `CompilesClean`."""
    return CompilesClean()
