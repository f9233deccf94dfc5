"""What docs/ takes from the code is what the code says."""

from __future__ import annotations

import pytest

from docs.generate import generated
from inductor_q.commands.presets import tables
from inductor_q.presets import MAPPINGS, PRESETS


@pytest.mark.parametrize(
    ("path", "text"), generated().items(), ids=lambda x: getattr(x, "name", "")
)
def test_generated_file_is_current(path, text) -> None:  # type: ignore[no-untyped-def]
    assert path.read_text(encoding="utf-8") == text, "stale: run make docs"


def test_every_entry_of_every_preset_is_listed_with_its_evidence() -> None:
    listed = {(t.title, *row[1:]) for t in tables() for row in t.rows}
    for preset in PRESETS.values():
        for kind in MAPPINGS:
            for name, entry in getattr(preset, kind).items():
                row = (name, str(entry.value), entry.evidence)
                assert {(preset.name, *row), ("generic", *row)} & listed, (preset.name, name)
