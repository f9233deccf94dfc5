"""Give lowerings the context of the compile that is running.

Lowerings are process-wide and take no options. The joint pass hook in Inductor's own configuration
is scoped to one compile, forward and lazy backward alike, and carries our context.
"""

from __future__ import annotations

from typing import Protocol

from torch._inductor import config

from inductor_q.kernels.scatter2scatter_dequantize import Large


class InForce(Protocol):
    def kernel(self, op: str) -> str: ...

    def decoded_from(self) -> Large | None: ...

    def count_provider(self, op: str, provider: str) -> None: ...


class _Defaults:
    """The defaults under another backend, where somebody calls a qfuse:: op directly."""

    def kernel(self, op: str) -> str:
        return "auto"

    def decoded_from(self) -> None:
        return None

    def count_provider(self, op: str, provider: str) -> None:
        pass


def is_ours() -> bool:
    """Whether the compile that is running is one of our backend's: its cache knows our sources."""
    return hasattr(config.joint_custom_pre_pass, "context")


def in_force() -> InForce:
    hook = config.joint_custom_pre_pass
    return getattr(hook, "context", None) or _Defaults()
