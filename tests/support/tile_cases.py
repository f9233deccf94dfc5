"""List problems of scatter2scatter, and devices, that tiles are chosen for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inductor_q.kernels import tiles
from tests.support.moe import Layer, Sizes, layer

BF16, FP16 = torch.bfloat16, torch.float16
FIT = Sizes(experts=8, in_features=256, out_features=384, tokens=300, top_k=2, rank=16)
#: Problems that every kernel serves.
TILED = {
    "few rows": replace(FIT, tokens=5),
    "some rows": FIT,
    "many rows": replace(FIT, experts=3, tokens=900),
    "one expert, one token": Sizes(1, 128, 64, 1, 1, 8),
    "every expert": Sizes(4, 64, 128, 40, 4, 64),
    "odd rank": replace(FIT, rank=5),
}
WORK = tiles.Work(
    rows=64,
    in_features=2048,
    out_features=1536,
    transposed=False,
    weight_bits=4,
    group=64,
    rank=16,
)
#: Shared memory that a block can have, by capability.
DEVICES = {75: 65_536, 80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def device(arch: int) -> tiles.Limits:
    return tiles.Limits((arch // 10, arch % 10), DEVICES[arch])


def on_gpu(sizes: Sizes, **kwargs: Any) -> Layer:
    return layer(sizes, device="cuda", **{"dtype": BF16, **kwargs})
