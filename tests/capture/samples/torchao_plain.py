"""Make torchao_plain.safetensors: a weight that torchao and mslk quantized on a CPU.

mslk's wheel is for GPUs, but its quantizer is Python. Unpack the wheel, and run this beside it:

    pip download --no-deps mslk-cuda==1.1.0
    unzip mslk_cuda-1.1.0-*.whl -d FOLDER
    MSLK_PYTHON_ONLY=1 PYTHONPATH=FOLDER:. python -m tests.capture.samples.torchao_plain

The file has the weight, and for each group the parts of torchao's `Int4Tensor` and its values.
torchao has no `dequantize` of this class: the values are those of the formula with which its GPTQ
decodes what mslk's quantizer returned, over the stored scales and zero points in float32.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

PATH = Path(__file__).with_suffix(".safetensors")
ROWS, COLUMNS, GROUPS = 8, 128, (32, 64)


def main() -> None:
    quantization: Any = importlib.import_module("torchao.quantization")
    gptq: Any = importlib.import_module("torchao.prototype.gptq.api")
    mslk: Any = importlib.import_module("mslk")
    quantizer: Any = importlib.import_module("mslk.quantize.shuffle")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16)
    state: dict[str, Tensor] = {"weight": weight}
    for group in GROUPS:
        net: Any = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16))
        net[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
        config = quantization.Int4WeightOnlyConfig(group, int4_packing_format="plain")
        quantization.quantize_(net, config)
        packed = net[0].weight
        assert type(packed) is quantization.Int4Tensor
        scale, zero_point = packed.scale, packed.zero_point
        # The values are of the numbers before they are packed, and so not of how we unpack them.
        numbers, *_ = quantizer.int4_row_quantize_zp(weight, group)
        assert torch.equal(quantizer.pack_int4(numbers), packed.qdata)
        values = gptq._int4_row_dequantize_zp(numbers, scale.float(), zero_point.float(), group)
        parts = {"qdata": packed.qdata, "scale": scale, "zero_point": zero_point, "values": values}
        state |= {f"g{group}.{name}": part.contiguous() for name, part in parts.items()}
    said = {
        "library": f"torchao {version('torchao')}",
        "packed_by": "torchao.quantization.quantize_ with Int4WeightOnlyConfig(group_size=GROUP, "
        f"int4_packing_format='plain'), by mslk {mslk.__version__}'s Python, on a CPU",
        "decoded_by": "torchao.prototype.gptq.api._int4_row_dequantize_zp of the numbers of "
        "mslk.quantize.shuffle.int4_row_quantize_zp, in float32",
    }
    save_file(state, PATH, said)


if __name__ == "__main__":
    main()
