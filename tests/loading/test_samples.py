"""Layers that libraries packed, one a file: their values are those that the library decodes.

`samples/` has what libraries that our tests do not install packed on a CPU, of random weights,
codes or scales. The metadata of a file says which library that was, what it called, and the
quantization_config of such a checkpoint. `values` is what the library itself decoded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import inductor_q
from inductor_q.kbit import meta_parameters
from tests.support.quantized import assert_same_bits

SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.safetensors"))
LIBRARIES = {"auto-gptq", "autoawq", "gptqmodel", "hqq", "nvidia-modelopt"}


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        said: dict[str, str] = file.metadata()
    return said


def test_each_says_where_it_comes_from() -> None:
    said = [metadata(path) for path in SAMPLES]
    assert all(of["packed_by"] and of["decoded_by"] for of in said)
    assert {of["library"].split()[0] for of in said} == LIBRARIES


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_values_are_the_librarys(path: Path, tmp_path: Path) -> None:
    """Bitwise but for the sign of a zero, which ModelOpt's table of numbers has not."""
    said, state = metadata(path), load_file(path)
    values = state.pop("values")
    save_file({f"0.{name}": part for name, part in state.items()}, tmp_path / "model.safetensors")
    config = {"quantization_config": json.loads(said["quantization_config"])}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows, columns = values.shape
    with meta_parameters():
        net: Any = nn.Sequential(nn.Linear(columns, rows, bias=False))
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert net[0].format == said["format"] and values.unique().numel() >= 64
    assert_same_bits(net[0].dequantize(values.dtype) + 0.0, values + 0.0)
