"""Hold the package's logger, and log warnings that a process gives once."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("inductor_q")


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same text before."""
    log.warning("%s", message)
