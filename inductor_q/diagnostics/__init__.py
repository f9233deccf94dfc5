"""What happened in a compile, and why."""

from inductor_q.diagnostics.checks import Finding, check_environment, check_model

__all__ = ["Finding", "check_environment", "check_model"]
