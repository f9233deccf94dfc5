"""Checkpoints that cannot be read or written."""

from __future__ import annotations

from collections.abc import Collection

from inductor_q.exc.base import QfuseError, first_few


class WrongCheckpoint(QfuseError, ValueError):
    """A file of tensors does not fit the model, or cannot be read; nothing was changed."""

    path: str
    problems: Collection[str]
    message = "{path} does not fit the model, which was left as it was:\n{listing}"

    @property
    def listing(self) -> str:
        return "\n".join(f"  {line}" for line in first_few(self.problems))


class UnreadCheckpoint(QfuseError, ValueError):
    """The weights of a checkpoint are packed in a way that nothing here reads as it is."""

    path: str
    problem: str
    message = "{path} is not loaded as it is: {problem}"


class CannotSave(QfuseError, ValueError):
    """What would be written is not enough to load the model again."""

    what: str
    problem: str
    remedy: str
    message = "{what} cannot be saved in this way: {problem}. {remedy}"
