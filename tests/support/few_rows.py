"""Let the CPU have a kernel of few rows, so that graphs are those of a GPU."""

from __future__ import annotations

import pytest

from inductor_q.kernels import PROVIDERS, linear_rows_reference


class Packed(linear_rows_reference.Reference):
    """The reference, under the name of a kernel that reads packed weights."""

    name = "packed"


def serve_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PROVIDERS["linear_rows"]
    monkeypatch.setitem(PROVIDERS, "linear_rows", {**table, "cpu": (Packed(), *table["cpu"])})
