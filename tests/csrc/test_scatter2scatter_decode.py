"""How csrc/scatter2scatter.cu decodes a stage, on a CPU: the CUDA source compiled as C++.

Each of the 256 threads that multiply finds its part of the left operand in a stage, which is laid
out here as the threads that copy lay it out. What surrounds that, copies, barriers and products,
runs on a GPU alone (tests/kernels/test_scatter2scatter_cuda.py).
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inductor_q.formats import FORMATS
from inductor_q.kernels import nibbles, scatter2scatter_cuda
from tests.support.emulated import built, needs_compiler

pytestmark = needs_compiler

CSRC = Path(__file__).parents[2] / "csrc"
FEATURES, DEPTH = scatter2scatter_cuda.FEATURES, scatter2scatter_cuda.DEPTH
#: What stands for each instruction of a decode; the other ones are left out.
INSTRUCTIONS = {
    "prmt.b32": "permute_bytes",
    "mul.rn.bf16x2": "multiply_pairs",
    "fma.rn.bf16x2": "multiply_and_add_pairs",
    "set.gt.u32.bf16x2": "greater_pairs",
}
DECODE = """
// A stage's packed rows, scales and planes in, each thread's operands out.
EXPORT void decode{i}(const uint8* packed, const uint32* scales, const uint32* planes,
                      uint32* out) {{
  using F = Form<{transposed}, 32, 4, {scales}, {codes}>;
  alignas(16) static uint8 stage[F::kWeight];
  for (int row = 0; row < F::kPackedRows; row++)
    for (int chunk = 0; chunk < F::kChunks; chunk++)
      std::memcpy(stage + packed_chunk<F>(row, chunk),
                  packed + (row * F::kChunks + chunk) * 16, 16);
  Codebook codebook;
  for (int i = 0; i < 8; i++) codebook.planes[i] = planes[i];
  for (int thread = 0; thread < 256; thread++) {{
    uint32 a[16];
    decode<F>(codebook, stage, scales, Place(thread), a);
    std::memcpy(out + 16 * thread, a, sizeof a);
  }}
}}
"""
#: Whether it is transposed, how many scales a stage of a row has, the codes.
FORMS = [
    (transposed, scales, codes)
    for transposed in (False, True)
    for codes, counts in (("kHighFirst", (1, 4)), ("kLowFirst", (2, 4)), ("kE4M3", (1, 2)))
    for scales in counts
]


def as_cpp(name: str) -> str:
    """A source with its headers in it, as C++."""

    def stand_in(found: re.Match[str]) -> str:
        name = next((name for name in INSTRUCTIONS if name in found[1]), None)
        if name is None:
            return ";"
        result, *given = re.findall(r'"=?r"\(([\w.]+)\)', found[1])
        return f"{result} = {INSTRUCTIONS[name]}({', '.join(given)});"

    text = (CSRC / name).read_text().replace("#pragma once", "")
    text = re.sub(r'#include "(.*)"\n', lambda found: as_cpp(found[1]), text)
    text = re.sub(r"\basm(?: volatile)?\((.*?)\);(?=\s)", stand_in, text, flags=re.DOTALL)
    return text.replace("extern __shared__ uint8 raw[];", "static uint8 raw[1 << 18];")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    lines = ['#include "bf16_pairs.h"', as_cpp(scatter2scatter_cuda.SOURCE)]
    for i, (transposed, scales, codes) in enumerate(FORMS):
        flag = "true" if transposed else "false"
        lines.append(DECODE.format(i=i, transposed=flag, scales=scales, codes=codes))
    return built(tmp_path_factory.mktemp("decode"), lines)


def values_of(codes: Tensor, name: str, table: Tensor) -> Tensor:
    """What packed rows hold, in the order of their elements."""
    if name == "kE4M3":
        return codes.view(torch.float8_e4m3fn).double()
    high, low = codes >> 4, codes & 15
    in_order = (high, low) if name == "kHighFirst" else (low, high)
    return table.double()[torch.stack(in_order, -1).flatten(1).int()]


@pytest.mark.parametrize("exact", [True, False], ids=["scales of one part", "of two"])
@pytest.mark.parametrize("form", range(len(FORMS)), ids=lambda i: "-".join(map(str, FORMS[i])))
def test_every_thread_has_its_part_of_a_stage(library: ctypes.CDLL, form: int, exact: bool) -> None:
    transposed, groups, name = FORMS[form]
    rows, columns = (DEPTH, FEATURES) if transposed else (FEATURES, DEPTH)
    generator = torch.Generator().manual_seed(form)
    per_byte = 1 if name == "kE4M3" else 2
    packed = torch.randint(256, (rows, columns // per_byte), generator=generator).to(torch.uint8)
    planes, _ = scatter2scatter_cuda._codebook(FORMATS["nf4_b64"], torch.device("cpu"))
    table, _ = nibbles.fit(FORMATS["nf4_b64"].lut16 or (), torch.bfloat16)
    # A scale for each row and group of its columns, as the launch before writes them.
    blocks = groups * columns // DEPTH
    exponents = torch.randint(-9, 9, (blocks, rows), generator=generator)
    scale = torch.ldexp(0.5 + torch.rand(blocks, rows, generator=generator), exponents)
    high = scale.bfloat16()
    low = torch.zeros_like(high) if exact else (scale - high.float()).bfloat16()
    pairs = high.view(torch.int16).int() & 0xFFFF | low.view(torch.int16).int() << 16
    out = torch.empty(256, 16, 2, dtype=torch.bfloat16)
    run = getattr(library, f"decode{form}")
    run(*(ctypes.c_void_p(t.data_ptr()) for t in (packed, pairs, planes, out)))

    weight = values_of(packed, name, table)
    weight = weight * (high.double() + low.double()).repeat_interleave(columns // blocks, 0).t()
    weight = weight.t() if transposed else weight  # [features, depth]
    thread = torch.arange(256)
    warp, g, q = thread // 32, thread % 32 // 4, thread % 4
    expected = torch.empty(256, 16, 2, dtype=torch.float64)
    for i in range(16):
        k16, half, row = i // 4, i // 2 % 2, i % 2
        feature, depth = warp * 16 + 2 * g + row, k16 * 16 + half * 8 + 2 * q
        expected[:, i] = torch.stack([weight[feature, depth], weight[feature, depth + 1]], -1)
    assert torch.equal(out.isnan(), expected.isnan())
    assert expected.isnan().any() == (name == "kE4M3")
    found, truth = out.double().nan_to_num(), expected.nan_to_num()
    if exact:
        assert torch.equal(found, truth.bfloat16().double())
    assert ((found - truth).abs() <= 2**-8 * truth.abs()).all()
