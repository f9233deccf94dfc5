"""Experts of checkpoints as they ship: stacked with their scales, and trained as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import inductor_q
from inductor_q import exc, experts
from inductor_q.backend import qfuse
from inductor_q.experts.model import stacks
from inductor_q.experts.stack import ExpertStack
from inductor_q.kbit import meta_parameters
from inductor_q.testing import relative_error
from tests.support.moe_models import EXPERTS as EXPERTS_OF_MODEL
from tests.support.moe_models import awaken, model, tokens
from tests.support.shipped import (
    INDEX,
    Case,
    State,
    e2m1,
    gptq,
    hqq,
    noted_reads,
    random,
    save_packed,
    saved,
)
from tests.support.shipped import seed as seed


def test_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and scales as on disk: bitwise transformers' own decode; every code, every scale."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    state = saved("gpt_oss", tmp_path)
    expected: State = {}
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        e, k, n = state.pop(name).shape
        blocks = random(e, n, k // 32, 16, dtype=torch.uint8)
        scales = (torch.arange(e * n * k // 32) % 255).to(torch.uint8).reshape(e, n, -1)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_packed(tmp_path, state, {"quant_method": "mxfp4"})
    with meta_parameters():
        net = model("gpt_oss")
    read = noted_reads(monkeypatch)
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert sorted(read) == sorted(state)  # each tensor once
    found = dict(stacks(net))
    assert set(found) == set(expected) and len(found) == 4
    for name, stack in found.items():
        assert (stack.format, stack.transposed) == ("mxfp4", False)
        assert torch.equal(stack.dequantize(torch.float32).transpose(1, 2), expected[name])
        blocks = state[f"{name}_blocks"]  # as they are
        assert torch.equal(stack.get_buffer("qweight"), blocks.reshape(-1))
    for name, value in net.state_dict().items():
        if name in state:
            assert torch.equal(value, state[name]), name


def fp8_of_experts(state: State) -> tuple[State, State]:
    """Pack the experts' matrices in E4M3 with a scale per tile; return the file and the values."""
    packed, values = dict(state), {}
    for name in [n for n in state if ".experts." in n]:
        rows, columns = state[name].shape
        scale = random(-(-rows // 128), -(-columns // 128), dtype=torch.float32)
        spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        packed[name] = random(rows, columns, dtype=torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale
        values[name] = packed[name].float() * spread
    return packed, values


def linear_layers_of_experts(
    case: Callable[..., Case], group: int
) -> Callable[[State], tuple[State, State]]:
    """Give each matrix the tensors of a linear layer."""

    def pack(state: State) -> tuple[State, State]:
        packed, values = dict(state), {}
        for name in [n for n in state if ".experts." in n]:
            rows, columns = packed.pop(name).shape
            _, tensors, value, _ = case(group=group, rows=rows, columns=columns)
            packed |= {name.removesuffix("weight") + n: t for n, t in tensors.items()}
            values[name] = value.float()
        return packed, values

    return pack


def nvfp4_of_experts(state: State) -> tuple[State, State]:
    """Each matrix has a scale of its own for all of it."""
    packed, values = dict(state), {}
    for i, name in enumerate([n for n in state if ".experts." in n]):
        rows, columns = state[name].shape
        packed[name] = random(rows, columns // 2, dtype=torch.uint8)
        scale = packed[f"{name}_scale"] = random(rows, columns // 16, dtype=torch.float8_e4m3fn)
        whole = packed[f"{name}_scale_2"] = torch.tensor(0.01 + i / 1000)
        values[name] = e2m1(packed[name]) * (scale.float() * whole).repeat_interleave(16, 1)
    return packed, values


EXPERTS: dict[str, tuple[Callable[[State], tuple[State, State]], dict[str, Any]]] = {
    "fp8_e4m3_128x128": (fp8_of_experts, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int4_g32": (
        linear_layers_of_experts(gptq, 32),
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
    ),
    "hqq4_g64_bf16": (
        linear_layers_of_experts(hqq, 64),
        {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}},
        },
    ),
    "nvfp4_rows": (nvfp4_of_experts, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


def fused(values: State, name: str) -> Tensor:
    """Return the values of a fused parameter, whose experts may lie matrix by matrix."""
    if name in values:
        return values[name]
    layer, _, short = name.rpartition(".")
    parts = ["gate_proj", "up_proj"] if short == "gate_up_proj" else [short]
    rows = [
        torch.cat([values[f"{layer}.{e}.{part}.weight"] for part in parts])
        for e in range(EXPERTS_OF_MODEL)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("format", EXPERTS)
def test_expert_by_expert(format: str, tmp_path: Path) -> None:
    """They are stacked in the order of the fused parameter, with their scales."""
    pack, config = EXPERTS[format]
    state, values = pack(saved("qwen3_moe", tmp_path, hidden_size=128))
    save_packed(tmp_path, state, config)
    with meta_parameters():
        net = model("qwen3_moe", hidden_size=128)
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    found = dict(stacks(net))
    assert len(found) == 4
    for name, stack in found.items():
        assert stack.format == format
        assert torch.equal(stack.dequantize(torch.float32), fused(values, name)), name


def test_experts_without_whole_tiles_are_refused(tmp_path: Path) -> None:
    state, _ = fp8_of_experts(saved("olmoe", tmp_path, intermediate_size=96))
    save_packed(tmp_path, state, EXPERTS["fp8_e4m3_128x128"][1])
    with pytest.raises(exc.WrongCheckpoint, match="128x128, whose scale runs on from expert to"):
        inductor_q.load_checkpoint(model("olmoe", intermediate_size=96), tmp_path, progress=False)


def test_experts_with_act_order_are_refused(tmp_path: Path) -> None:
    pack = linear_layers_of_experts(partial(gptq, True), 32)
    state, _ = pack(saved("qwen3_moe", tmp_path, hidden_size=128))
    save_packed(tmp_path, state, EXPERTS["int4_g32"][1])  # does not say desc_act
    net = model("qwen3_moe", hidden_size=128)
    with pytest.raises(exc.WrongCheckpoint, match="gate_up_proj has its columns in another order"):
        inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert not any(isinstance(stack, ExpertStack) for _, stack in stacks(net))


def test_fused_experts_of_compressed_tensors_are_refused(tmp_path: Path) -> None:
    state = saved("gpt_oss", tmp_path)
    for name in [n for n in state if n.endswith("gate_up_proj")]:
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale"] = torch.ones(*state[name].shape[:2], 1)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    save_packed(tmp_path, state, config)
    with pytest.raises(exc.WrongCheckpoint, match=r"gate_up_proj is .*; what is read is a matrix"):
        inductor_q.load_checkpoint(model("gpt_oss"), tmp_path, progress=False)


def mxfp4_of_gpt_oss(state: State) -> tuple[State, State]:
    """Blocks and scales as gpt-oss has them; the file, and the values of the fused parameters."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, values = dict(state), {}
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        e, k, n = packed.pop(name).shape
        blocks = random(e, n, k // 32, 16, dtype=torch.uint8)
        scales = 122 + random(e, n, k // 32, dtype=torch.uint8) % 3
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return packed, values


def save_in_shards(folder: Path, state: State, config: dict[str, Any]) -> None:
    """Write two files, so that tensors of one layer lie in both, and their index."""
    save_packed(folder, {}, config)
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(state))}
    for file in set(files.values()):
        save_file({n: state[n].contiguous() for n in files if files[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


#: A family, the sizes of its model, what packs its experts, and its quantization_config.
TRAINED: dict[str, tuple[str, dict[str, Any], Callable[[State], tuple[State, State]], Any]] = {
    "mxfp4": ("gpt_oss", {}, mxfp4_of_gpt_oss, {"quant_method": "mxfp4"}),
    "fp8_e4m3_128x128": (
        *("qwen3_moe", {"hidden_size": 128}),
        *EXPERTS["fp8_e4m3_128x128"],
    ),
}


@pytest.mark.usefixtures("graph_or_code")
@pytest.mark.parametrize("format", TRAINED)
def test_experts_train_from_their_own_packing(format: str, tmp_path: Path) -> None:
    """A step of LoRA on every expert, as one graph: loss and gradients of the decoded model's."""
    family, sizes, pack, config = TRAINED[format]
    state, values = pack(saved(family, tmp_path, **sizes))
    save_in_shards(tmp_path, state, config)
    dense = model(family, **sizes)
    with meta_parameters():
        net = model(family, **sizes)
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert [stack.format for _, stack in stacks(net)] == [format] * 4
    for name, _ in stacks(net):
        dense.get_parameter(name).data = fused(values, name)
    losses, gradients = [], []
    for each in (net, dense):
        each.requires_grad_(False)
        added = experts.add_lora(each, r=2)
        awaken(added)
        torch.compiler.reset()
        run: Any = torch.compile(each, backend=qfuse, fullgraph=True) if each is net else each
        out = run(input_ids=tokens(), labels=tokens(), use_cache=False)
        out.loss.backward()
        losses.append(out.loss.detach())
        gradients.append([p.grad for p in added])
    assert relative_error(losses[0], losses[1]) < 1e-5
    for got, expected in zip(*gradients, strict=True):
        assert got is not None and expected is not None
        assert got.any() and relative_error(got, expected) < 1e-4
