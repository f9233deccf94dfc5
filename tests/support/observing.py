"""Observe a run as `qfuse explain` does, and return what it tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inductor_q.diagnostics.explanation import Explanation
from inductor_q.diagnostics.observation import observe


def observed(run: Callable[[], Any], **options: Any) -> Explanation:
    with observe(**options) as observation:
        run()
    return observation.explanation()
