"""What `--dump` writes: graphs around each pass, code, bytecode, and an index that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from inductor_q import testing
from inductor_q.diagnostics.observe import observe


def scale(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return x - 1


def test_dump(tmp_path: Path) -> None:
    torch._dynamo.reset()
    layer: Any = testing.quantized_linear(torch.randn(32, 64, dtype=torch.bfloat16))
    try:
        with observe(dump=tmp_path), torch.no_grad():
            torch.compile(scale, backend="eager")(torch.ones(4))
            compiled: Any = torch.compile(layer, backend="inductor")
            compiled(torch.ones(8, 64, dtype=torch.bfloat16))
    finally:
        torch._dynamo.reset()
    index = json.loads((tmp_path / "index.json").read_text())
    named = {entry["file"] for entry in index} | {"index.json"}
    assert named == {path.name for path in tmp_path.iterdir()}

    def text(kind: str, **about: str) -> str:
        [entry] = [e for e in index if e["kind"] == kind and about.items() <= e.items()]
        return Path(tmp_path, entry["file"]).read_text()

    before = text("graph", pass_name="canonicalize", moment="before")
    after = text("graph", pass_name="canonicalize", moment="after")
    assert "bitsandbytes.gemm_4bit" in before
    assert "bitsandbytes.gemm_4bit" not in after
    assert "qfuse.dequantize" in after
    assert "# bfloat16[32, 64]" in after
    assert "def call(" in text("code")
    broken = text("bytecode", compile_id="0/0")  # depyf follows the original, not what has a break
    assert "if x.sum() > 0:" in broken
    assert "as Dynamo left it" in broken
