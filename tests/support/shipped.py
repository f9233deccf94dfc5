"""Write checkpoints of small models as they ship, and their values by the libraries' formulas.

GPTQ's, AWQ's, ModelOpt's and compressed-tensors' are their documented formulas, written here in
plain torch from the file; where transformers has the function itself, that is run. What
compressed-tensors packs itself is in tests/loading/test_compressed_tensors.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inductor_q.loading.files import Checkpoint
from tests.support.moe_models import model

BF16 = torch.bfloat16
ROWS, COLUMNS = 192, 256  # a tile of 128 rows and a cut one; two of columns
State = dict[str, Tensor]
#: A quantization_config, tensors of the layer, their values, and the format.
Case = tuple[dict[str, Any], State, Tensor, str]
GENERATOR = torch.Generator()
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def seed() -> None:
    GENERATOR.manual_seed(0)


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that fills with the names of tensors as they are read from checkpoints."""
    read: list[str] = []
    original = Checkpoint.read

    def note(self: Checkpoint, name: str) -> Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(Checkpoint, "read", note)
    return read


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return any codes of an integer or 8-bit dtype, else numbers from 1/32 to 3/32."""
    if dtype.itemsize == 1 and dtype.is_floating_point:
        codes = torch.randint(256, shape, generator=GENERATOR, dtype=torch.uint8)
        return (codes & 0xBF).view(dtype)  # no NaN
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(
            limits.min, limits.max + 1, shape, generator=GENERATOR, dtype=torch.int64
        ).to(dtype)
    return ((torch.rand(shape, generator=GENERATOR) + 0.5) / 16).to(dtype)


def codes(words: Tensor) -> Tensor:
    """Return the eight codes of int32 words, the lowest first, in a last dimension."""
    return torch.stack([words >> 4 * lane & 15 for lane in range(8)], -1)


class Net(nn.Module):
    """A packed layer, one that is not, and what else a model has."""

    def __init__(self, rows: int = ROWS, columns: int = COLUMNS) -> None:
        super().__init__()
        self.packed = nn.Linear(columns, rows, dtype=BF16)
        self.plain = nn.Linear(rows, 8, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.plain(self.packed(x))
        return out


def write(folder: Path, config: dict[str, Any], weight: State, *, name: str = "packed") -> State:
    """Write a checkpoint of `Net` that holds its first layer as `weight`, and return the rest."""
    torch.manual_seed(1)
    net = Net()
    rest = {n: t.detach() for n, t in net.state_dict().items() if n != "packed.weight"}
    packed = {f"{name}.{n}": t.contiguous() for n, t in weight.items()}
    save_file({**rest, **packed}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return rest


def saved(family: str, folder: Path, **sizes: Any) -> State:
    """Save a tiny model and return its tensors as they lie in the file."""
    model(family, **sizes).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def save_packed(folder: Path, state: State, config: dict[str, Any]) -> None:
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "quantization_config": config}))


# --- linear layers: what lies in the file, and its values by the library's formula ----------------


def fp8_tiles() -> Case:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = random(ROWS, COLUMNS, dtype=torch.float8_e4m3fn)
    scale = random(2, 2, dtype=torch.float32)
    padded = torch.cat([codes.view(torch.uint8), codes.view(torch.uint8)[:64]]).view(codes.dtype)
    values = Fp8Dequantize(None)._dequantize_one(padded, scale, torch.float32)[:ROWS]
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return config, {"weight": codes, "weight_scale_inv": scale}, values, "fp8_e4m3_128x128"


def fp8_whole(scale: str = "weight_scale_inv") -> Case:
    codes = random(ROWS, COLUMNS, dtype=torch.float8_e4m3fn)
    state = {"weight": codes, scale: torch.tensor(0.37)}
    return {"quant_method": "fp8"}, state, codes.float() * 0.37, "fp8_e4m3_row"


def gptq(
    act_order: bool = False,
    group: int = 64,
    layout: str = "gptq",
    rows: int = ROWS,
    columns: int = COLUMNS,
) -> Case:
    """AutoGPTQ: `scales[g_idx] * (weight - (qzeros + 1)[g_idx])`, [K, N]."""
    groups = columns // group if group > 0 else 1
    state = {
        "qweight": random(columns // 8, rows, dtype=torch.int32),
        "qzeros": random(groups, rows // 8, dtype=torch.int32),
        "scales": random(groups, rows, dtype=torch.float16),
    }
    g_idx = torch.arange(columns) // (columns // groups)
    if act_order:
        g_idx = g_idx[torch.randperm(columns, generator=GENERATOR)]
    state["g_idx"] = g_idx.int()
    weight = codes(state["qweight"]).transpose(1, 2).reshape(columns, rows)
    zeros = codes(state["qzeros"]).flatten(1) + (layout == "gptq")
    values = state["scales"][g_idx].float() * (weight - zeros[g_idx])
    config = {
        **{"quant_method": "gptq", "bits": 4, "group_size": group},
        **{"desc_act": act_order, "checkpoint_format": layout},
    }
    return config, state, values.t(), f"int4_g{group if group > 0 else 128}"


def awq() -> Case:
    """AutoAWQ's `dequantize_gemm`: unpacked, put in order, `(weight - zeros) * scales`, [K, N]."""
    state = {
        "qweight": random(COLUMNS, ROWS // 8, dtype=torch.int32),
        "qzeros": random(COLUMNS // 128, ROWS // 8, dtype=torch.int32),
        "scales": random(COLUMNS // 128, ROWS, dtype=torch.float16),
    }
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    weight, zeros = (codes(state[n])[..., order].flatten(1) for n in ("qweight", "qzeros"))
    spread = (t.repeat_interleave(128, 0) for t in (zeros, state["scales"].float()))
    zeros, scales = spread
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    return config, state, ((weight - zeros) * scales).t(), "int4_g128"


def e2m1(packed: Tensor) -> Tensor:
    """Return the numbers of bytes, the low nibble first."""
    from transformers.integrations.mxfp4 import FP4_VALUES

    numbers = torch.tensor(FP4_VALUES)
    both = torch.stack([numbers[(packed & 15).long()], numbers[(packed >> 4).long()]], -1)
    return both.flatten(-2)


def modelopt() -> Case:
    """ModelOpt's `NVFP4QTensor.dequantize`: `number * (scale * scale_2)`."""
    state = {
        "weight": random(ROWS, COLUMNS // 2, dtype=torch.uint8),
        "weight_scale": random(ROWS, COLUMNS // 16, dtype=torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.013),
        "input_scale": torch.tensor(0.1),
    }
    scale = state["weight_scale"].float() * state["weight_scale_2"]
    values = e2m1(state["weight"]) * scale.repeat_interleave(16, 1)
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, state, values, "nvfp4_rows"


def nvfp4_of_compressed_tensors() -> Case:
    """compressed-tensors' `dequantize`: `number * (scale / global_scale)`."""
    state = {
        "weight_packed": random(ROWS, COLUMNS // 2, dtype=torch.uint8),
        "weight_scale": random(ROWS, COLUMNS // 16, dtype=torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([731.0]),
    }
    scale = state["weight_scale"].float() / state["weight_global_scale"]
    values = e2m1(state["weight_packed"]) * scale.repeat_interleave(16, 1)
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    return config, state, values, "nvfp4_divided_rows"


def integers_of_compressed_tensors(
    zeros: bool = False,
) -> Case:
    """`unpack_from_int32` takes 8 off, then `(weight - zero_point) * scale`."""
    state = {
        "weight_packed": random(ROWS, COLUMNS // 8, dtype=torch.int32),
        "weight_scale": random(ROWS, COLUMNS // 32, dtype=BF16),
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    numbers = codes(state["weight_packed"]).flatten(1) - 8
    if zeros:
        state["weight_zero_point"] = random(ROWS // 8, COLUMNS // 32, dtype=torch.int32)
        points = codes(state["weight_zero_point"]).transpose(1, 2).reshape(ROWS, -1) - 8
        numbers = numbers - points.repeat_interleave(32, 1)
    values = numbers * state["weight_scale"].float().repeat_interleave(32, 1)
    config = {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
    }
    return config, state, values, "int4_g32"


def hqq(
    nbits: int = 4,
    group: int = 64,
    dtype: torch.dtype = BF16,
    rows: int = ROWS,
    columns: int = COLUMNS,
) -> Case:
    """HQQ's `Quantizer.dequantize`: `(W_q - zero) * scale` in its dtype, unpacked as it unpacks."""
    groups = rows * columns // group
    codes = torch.randint(2**nbits, (groups, group), generator=GENERATOR)
    lanes = {2: 4, 3: 10, 4: 2, 8: 1}[nbits]
    padded = torch.cat([codes, codes.new_zeros(-groups % lanes, group)])
    words = sum(part << nbits * (lanes - 1 - i) for i, part in enumerate(padded.chunk(lanes)))
    zero = torch.rand(groups, 1, generator=GENERATOR).to(dtype) * 2**nbits
    scale = random(groups, 1, dtype=dtype)
    state = {
        "W_q": torch.as_tensor(words).to(torch.int32 if nbits == 3 else torch.uint8),
        **{"scale": scale, "zero": zero, "shape": torch.tensor([rows, columns])},
        "compute_dtype": torch.tensor([ord(c) for c in str(dtype)], dtype=torch.uint8),
    }
    difference = codes.to(dtype) - zero  # rounded to the dtype; the product is rounded last
    values = (difference.float() * scale.float()).reshape(rows, columns)
    params = {"nbits": nbits, "group_size": group, "axis": 1, "view_as_float": False}
    config = {"quant_method": "hqq", "quant_config": {"weight_quant_params": params}}
    unit, short = min(group, 64), "bf16" if dtype is BF16 else "fp16"
    return config, state, values, f"hqq{nbits}_g{unit}_{short}"


CASES: dict[str, Callable[[], Case]] = {
    "fp8 tiles": fp8_tiles,
    "fp8 whole": fp8_whole,
    "fp8 whole, of vLLM": lambda: fp8_whole("weight_scale"),
    "gptq": gptq,
    "gptq act-order": lambda: gptq(act_order=True),
    "gptq v2": lambda: gptq(layout="gptq_v2"),
    "gptq rows": lambda: gptq(group=-1),
    "awq": awq,
    "nvfp4 of modelopt": modelopt,
    "nvfp4 of compressed-tensors": nvfp4_of_compressed_tensors,
    "integers of compressed-tensors": integers_of_compressed_tensors,
    "zero points of compressed-tensors": lambda: integers_of_compressed_tensors(zeros=True),
    "hqq": hqq,
    "hqq in 2 bits": lambda: hqq(2, 16),
    "hqq in 3 bits, float16": lambda: hqq(3, 64, torch.float16),
    "hqq in 8 bits, long groups": lambda: hqq(8, 128, torch.float16),
}
