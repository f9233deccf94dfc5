"""Where benchmarks run in tests, and the checks of the file that each of them saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FIELDS = {
    "schema",
    "benchmark",
    "device",
    "machine",
    "versions",
    "commit",
    "load",
    "created",
    "ceilings",
    "settings",
    "rows",
    "notes",
}


def check_file(path: Path, benchmark: str, peers: set[str]) -> list[dict[str, Any]]:
    """Check what every file has, and return its rows."""
    result: dict[str, Any] = json.loads(path.read_text())
    assert set(result) == FIELDS
    assert (result["schema"], result["benchmark"]) == (harness.SCHEMA, benchmark)
    assert result["machine"]["name"]
    assert len(result["commit"]["source"]) == 64
    assert result["versions"]["torch"] == torch.__version__
    assert {row["peer"] for row in result["rows"]} == peers
    for row in result["rows"]:
        timing = row["timing"]
        assert 0 < timing["best"] <= timing["low"] <= timing["median"] <= timing["high"]
        assert row["roof"] > 0
        beside = {other["peer"] for other in result["rows"] if other["case"] == row["case"]}
        assert set(row["ratio_to"]) == beside - {row["peer"]}
    rows: list[dict[str, Any]] = result["rows"]
    return rows
