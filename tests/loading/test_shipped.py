"""Checkpoints as they ship: packed layers of bitwise the values that their libraries give.

GPTQ's, AWQ's, ModelOpt's and compressed-tensors' are their documented formulas, written here in
plain torch from the file; where transformers has the function itself, that is run. What
compressed-tensors packs itself is in test_compressed_tensors.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as transformers_package
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import inductor_q
from inductor_q import exc, experts, kbit
from inductor_q.backend import qfuse
from inductor_q.experts.model import stacks
from inductor_q.experts.stack import ExpertStack
from inductor_q.integrations import prepare_dora
from inductor_q.kbit import meta_parameters
from inductor_q.loading.files import Checkpoint
from inductor_q.loading.linear import PackedLinear
from inductor_q.testing import relative_error
from tests.support.compiling import compile_step, no_codegen
from tests.support.merged import merged_by_hand
from tests.support.moe_models import EXPERTS as EXPERTS_OF_MODEL
from tests.support.moe_models import awaken, model, tokens

transformers: Any = transformers_package
BF16 = torch.bfloat16
ROWS, COLUMNS = 192, 256  # a tile of 128 rows and a cut one; two of columns
State = dict[str, Tensor]
#: A quantization_config, tensors of the layer, their values, and the format.
Case = tuple[dict[str, Any], State, Tensor, str]
GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def seed() -> None:
    GENERATOR.manual_seed(0)


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


# --- linear layers: what lies in the file, and its values by the library's formula ---------------


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


@pytest.mark.parametrize("case", CASES)
def test_a_linear_layer(case: str, tmp_path: Path) -> None:
    """Values, bitwise in float32 and in 16 bits; the product and its gradient; the rest of it."""
    config, state, values, format = CASES[case]()
    rest = write(tmp_path, config, state)
    with meta_parameters():
        net: Any = Net()
    assert inductor_q.load_checkpoint(net, tmp_path, progress=False) is net
    layer = net.packed
    assert type(layer) is PackedLinear and layer.format == format
    for dtype in (torch.float32, BF16, torch.float16):
        assert torch.equal(layer.dequantize(dtype), values.to(dtype)), dtype
    for name, value in rest.items():
        assert torch.equal(net.state_dict()[name], value)
    assert not any(t.is_meta for t in (*net.parameters(), *net.buffers()))
    x = torch.randn(3, COLUMNS, generator=GENERATOR).requires_grad_()
    y = layer.float()(x)  # a cast leaves codes and scales alone
    exact = x.detach().double().requires_grad_()
    bias = rest["packed.bias"].double()
    expected = exact @ values.double().t() + bias
    assert relative_error(y, expected) < 1e-6
    gradient = torch.randn(y.shape, generator=GENERATOR)
    y.backward(gradient)
    expected.backward(gradient.double())
    assert x.grad is not None and exact.grad is not None
    assert relative_error(x.grad, exact.grad) < 1e-6


@pytest.mark.parametrize("case", ["fp8 tiles", "gptq act-order", "nvfp4 of modelopt", "awq", "hqq"])
def test_a_step_of_lora_is_fused(case: str, tmp_path: Path) -> None:
    """PEFT takes the layer for the linear layer that it is, and passes read its weight."""
    peft: Any = pytest.importorskip("peft")
    config, state, _, _ = CASES[case]()
    write(tmp_path, config, state)
    with meta_parameters():
        net: Any = Net()
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    adapted = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["packed"])).to(BF16)
    x = torch.randn(4, COLUMNS, generator=GENERATOR).to(BF16)
    with no_codegen():
        result = compile_step(adapted, x.requires_grad_(), fullgraph=True)
    assert [v.status for v in result.report.verdicts().values()] == ["fused"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quark": ({"quant_method": "quark"}, "quant_method 'quark' has no reader; those that have are"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "from_pretrained loads bitsandbytes packed"),
    "gptq bits": ({"quant_method": "gptq", "bits": 3}, "GPTQ in 3 bits"),
    "hqq of nothing": (
        {"quant_method": "hqq", "quant_config": None},
        "HQQ with quant_config None, which has no weight_quant_params",
    ),
    "hqq along columns": (
        {
            **{"quant_method": "hqq"},
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 0}},
        },
        "HQQ along axis 0; what is read is axis 1",
    ),
    "hqq bits": (
        {"quant_method": "hqq", "quant_config": {"q": {"weight_quant_params": {"nbits": 1}}}},
        "HQQ in 1 bits",
    ),
    "hqq as numbers": (
        {
            **{"quant_method": "hqq"},
            "quant_config": {"weight_quant_params": {"nbits": 4, "axis": 1, "view_as_float": True}},
        },
        "view_as_float",
    ),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [1, 32]}, "block_size is .1, 32."),
    "rotated": (
        {
            **{"quant_method": "compressed-tensors", "format": "float-quantized"},
            **{"sparsity_config": None, "transform_config": {"config_groups": {"R4": {}}}},
        },
        "it has a transform_config: the inputs",
    ),
    "odd": (
        {"quant_method": "fp8", "weight_block_size": 128},
        "is not as fp8's are: TypeError.*'weight_block_size': 128",
    ),
    "marlin": ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24'; what"),
}


def test_tensors_lie_where_they_are_asked_for(tmp_path: Path) -> None:
    config, state, _, _ = CASES["awq"]()
    write(tmp_path, config, state)
    with meta_parameters():
        net = Net()
    inductor_q.load_checkpoint(net, tmp_path, device="meta", progress=False)
    assert {t.device.type for t in net.state_dict().values()} == {"meta"}


def adapted_net(case: str, folder: Path, *, dora: bool = False) -> Any:
    peft: Any = pytest.importorskip("peft")
    config, state, _, _ = CASES[case]()
    write(folder, config, state)
    with meta_parameters():
        net: Any = Net()
    inductor_q.load_checkpoint(net, folder, progress=False)
    torch.manual_seed(2)
    lora = peft.LoraConfig(r=4, target_modules=["packed"], use_dora=dora, init_lora_weights=False)
    return peft.get_peft_model(net, lora).to(BF16)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("case", ["fp8 tiles", "gptq act-order", "awq"])
def test_an_adapter_is_merged_into_ordinary_layers(case: str, dora: bool, tmp_path: Path) -> None:
    """PEFT puts them in the place of packed ones, which come back bit by bit, or decoded."""
    adapted = adapted_net(case, tmp_path, dora=dora)
    x = torch.randn(40, COLUMNS, generator=GENERATOR).to(BF16)
    before, expected = copy.deepcopy(adapted.state_dict()), adapted(x)
    layer = adapted.base_model.model.packed
    values = layer.base_layer.dequantize(torch.float32)
    adapted.merge_adapter()
    weight = merged_by_hand(layer, values, dora=dora)
    assert relative_error(layer.base_layer.weight, weight) < 2**-9
    assert relative_error(adapted(x), expected) < 0.02
    adapted.unmerge_adapter()
    assert all(torch.equal(t, before[name]) for name, t in adapted.state_dict().items())
    plain: Any = kbit.dequantize_model(copy.deepcopy(adapted), torch.float32).float()
    merged = plain.merge_and_unload()
    assert type(merged.packed) is nn.Linear
    assert relative_error(merged(x.float()), expected) < 0.02  # of bfloat16


@pytest.mark.parametrize("case", ["fp8 tiles", "gptq act-order", "awq"])
def test_the_norms_of_dora_are_those_of_the_values(case: str, tmp_path: Path) -> None:
    adapted = adapted_net(case, tmp_path, dora=True)
    layer = adapted.base_model.model.packed
    a, b = (part["default"].weight.float() for part in (layer.lora_A, layer.lora_B))
    values = layer.base_layer.dequantize(torch.float32) + 2 * b @ a
    magnitude = layer.lora_magnitude_vector["default"].weight
    assert relative_error(magnitude, values.norm(dim=1)) < 0.01  # of bfloat16
    x = torch.randn(40, COLUMNS, generator=GENERATOR).to(BF16)
    expected = adapted(x)
    prepare_dora(adapted)
    with no_codegen():
        result = compile_step(adapted, x.requires_grad_(), fullgraph=True)
    assert relative_error(result.output, expected) < 0.02
    assert [v.status for v in result.report.verdicts().values()] == ["fused"]


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_reader_is_refused(case: str, tmp_path: Path) -> None:
    config, reason = REFUSED[case]
    write(tmp_path, config, {"weight": torch.zeros(ROWS, COLUMNS)})
    with pytest.raises(exc.UnreadCheckpoint, match=reason):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    config, state, _, _ = fp8_tiles()
    write(tmp_path, config, {**state, "weight_scale_inv": torch.ones(3, 2)})
    net = Net()
    with pytest.raises(exc.WrongCheckpoint, match=r"weight_scale_inv is \(3, 2\), for a weight"):
        inductor_q.load_checkpoint(net, tmp_path, progress=False)
    write(tmp_path, config, state)
    with pytest.raises(exc.WrongCheckpoint, match=r"packed.weight is \(192, 256\) in it"):
        inductor_q.load_checkpoint(Net(128), tmp_path, progress=False)
    assert type(net.packed) is nn.Linear


def test_codes_are_not_read_as_values(tmp_path: Path) -> None:
    """A weight in FP8 without the scale that its reader knows has the shape of the layer's."""
    _, state, _, _ = fp8_whole("weight_scale")
    for config in ({"quant_method": "mxfp4"}, {"quant_method": "gptq", "bits": 4}):
        write(tmp_path, config, state)
        net = Net()
        with pytest.raises(exc.WrongCheckpoint, match=r"packed.weight is torch.float8_e4m3fn in"):
            inductor_q.load_checkpoint(net, tmp_path, progress=False)
        assert type(net.packed) is nn.Linear and net.packed.weight.dtype is BF16
    write(tmp_path, {"quant_method": "fp8"}, {**state, "weight": state["weight"].view(torch.int8)})
    with pytest.raises(exc.CorruptQuantState, match=r"should be torch.float8_e4m3fn, is"):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", b"[]", r"config.json.*\n  it is no mapping"),
        ("config.json", b"\xff\xfe{}", r"config.json.*\n  'utf-8' codec can't decode"),
        ("config.json", b'{"text_config": "x"}', "its text_config is 'x', which is no mapping"),
        ("config.json", b'{"quantization_config": "fp8"}', "its quantization_config is 'fp8'"),
        ("hf_quant_config.json", b'{"quantization": 4}', "its quantization is 4, which is no map"),
        (INDEX, b"{}", r"index.json.*\n  it has no weight_map from names to files"),
        (INDEX, b"[]", r"index.json.*\n  it is no mapping"),
        (INDEX, b"{", r"index.json.*\n  Expecting property name"),
        (INDEX, b"\xff\xfe{}", r"index.json.*\n  'utf-8' codec can't decode"),
        (INDEX, b'{"weight_map": {"a": null}}', "its weight_map has None for a, which names no"),
    ],
)
def test_a_file_that_is_something_else_is_named(
    file: str, content: bytes, problem: str, tmp_path: Path
) -> None:
    config, state, _, _ = fp8_tiles()
    write(tmp_path, config, state)
    (tmp_path / file).write_bytes(content)
    if file == INDEX:
        (tmp_path / "model.safetensors").unlink()
    if file == "hf_quant_config.json":
        (tmp_path / "config.json").unlink()
    with pytest.raises(exc.WrongCheckpoint, match=problem):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


def test_one_file_is_taken_before_what_lies_beside_it(tmp_path: Path) -> None:
    """As transformers takes it: not another file's values, and no index of an earlier save."""
    config, state, values, _ = fp8_whole()
    rest = write(tmp_path, config, state)
    others = {name: torch.zeros_like(value) for name, value in rest.items()}
    save_file(others, tmp_path / "old.safetensors")
    for file in ("old.safetensors", "gone.safetensors"):
        index = {"weight_map": dict.fromkeys(rest, file)}
        (tmp_path / INDEX).write_text(json.dumps(index))
        net: Any = Net()
        inductor_q.load_checkpoint(net, tmp_path, progress=False)
        assert torch.equal(net.plain.weight, rest["plain.weight"])
        assert torch.equal(net.packed.dequantize(torch.float32), values)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    config, state, _, _ = fp8_whole()
    rest = write(tmp_path, config, state)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"plain.weight": rest["plain.weight"]}, tmp_path / "b.safetensors")
    with pytest.raises(
        exc.WrongCheckpoint, match=r"plain.weight is in a.safetensors and in b.safe"
    ):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


@pytest.mark.parametrize(("nbits", "dtype"), [(4, BF16), (3, torch.float16)], ids=str)
def test_hqq_of_the_library(nbits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """A layer that hqq 0.2.8 has quantized and saved, and what it dequantizes to."""
    state = load_file(Path(__file__).parent / f"hqq{nbits}.safetensors")
    expected = state.pop("dequantized")
    params = {"nbits": nbits, "group_size": 64, "axis": 1, "view_as_float": False}
    config = {"quant_config": {"packed": {"weight_quant_params": params}}, "quant_method": "hqq"}
    save_file({f"packed.{n}": t for n, t in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    net: Any = nn.Sequential()
    rows, columns = expected.shape
    net.packed = nn.Linear(columns, rows, bias=False, dtype=dtype)
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert expected.dtype == dtype
    assert torch.equal(net.packed.dequantize(dtype), expected)


def test_hqq_that_does_not_fit(tmp_path: Path) -> None:
    config, state, _, _ = hqq()

    def load(**changed: Tensor) -> None:
        write(tmp_path, config, {**state, **changed})
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)

    with pytest.raises(exc.WrongCheckpoint, match=r"packed.zero is \(3, 1\); what is read"):
        load(zero=state["zero"][:3])
    with pytest.raises(exc.WrongCheckpoint, match="weight is computed in another dtype"):
        load(compute_dtype=torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(exc.CorruptQuantState, match=r"should be torch.bfloat16, is torch.float32"):
        load(scale=state["scale"].float())
    with pytest.raises(exc.WrongCheckpoint, match="groups of 24 of packed"):
        load(W_q=state["W_q"][:, :24])
    few = {"W_q": state["W_q"][:3], "scale": state["scale"][:6], "zero": state["zero"][:6]}
    with pytest.raises(exc.WrongCheckpoint, match="has 384 elements in it, no rows of 256"):
        load(**few)
    by_tag = {"other": config["quant_config"]}
    write(tmp_path, {"quant_method": "hqq", "quant_config": by_tag}, state)
    with pytest.raises(exc.WrongCheckpoint, match="has nothing on 'packed'"):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


@pytest.mark.parametrize("part", ["scales", "qzeros", "g_idx"])
def test_what_a_packed_weight_lacks_is_named(part: str, tmp_path: Path) -> None:
    config, state, _, _ = gptq(act_order=True)
    write(tmp_path, config, {name: t for name, t in state.items() if name != part})
    with pytest.raises(exc.WrongCheckpoint, match=f"packed.{part} is not in it"):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)
    write(tmp_path, config, {**state, part: state[part][:1]})
    with pytest.raises(exc.WrongCheckpoint, match=f"packed.{part} is .*; what is read is"):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


@pytest.mark.parametrize(
    "said", [{}, {"desc_act": False, "dynamic": {"+:packed": {"desc_act": True}}}], ids=str
)
def test_the_order_of_inputs_is_read_where_it_is(said: dict[str, Any], tmp_path: Path) -> None:
    """GPTQModel may set act-order by layer, and a configuration may say nothing of it."""
    config, state, values, _ = gptq(act_order=True)
    del config["desc_act"]
    write(tmp_path, {**config, **said}, state)
    net: Any = Net()
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert torch.equal(net.packed.dequantize(torch.float32), values)


@pytest.mark.parametrize("act_order", [False, True])
def test_groups_of_other_sizes_are_refused(act_order: bool, tmp_path: Path) -> None:
    config, state, _, _ = gptq(act_order=act_order)
    uneven = state["g_idx"].clone()
    uneven[uneven == 0] = 1
    for wrong, found in ((uneven, "group 0 for 0"), (0 * uneven + 1, "group 0 for 0")):
        write(tmp_path, config, {**state, "g_idx": wrong})
        with pytest.raises(exc.CorruptQuantState, match=f"4 groups for 64 inputs, is {found}"):
            inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


def test_an_order_of_zeros_is_none(tmp_path: Path) -> None:
    config, state, values, _ = gptq(act_order=False)
    write(tmp_path, config, {**state, "g_idx": torch.zeros_like(state["g_idx"])})
    net: Any = Net()
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert torch.equal(net.packed.dequantize(torch.float32), values)


@pytest.mark.parametrize(
    ("case", "part"),
    [
        *(("fp8 tiles", "weight"), ("fp8 whole", "weight"), ("gptq", "qweight"), ("hqq", "W_q")),
        *(("awq", "qweight"), ("nvfp4 of modelopt", "weight")),
        ("nvfp4 of compressed-tensors", "weight_packed"),
        *(("integers of compressed-tensors", n) for n in ("weight_packed", "weight_scale")),
    ],
)
def test_what_is_no_matrix_is_named(case: str, part: str, tmp_path: Path) -> None:
    config, state, _, _ = CASES[case]()
    write(tmp_path, config, {**state, part: state[part].reshape(-1)})
    with pytest.raises(exc.WrongCheckpoint, match=rf"packed.{part} is \(\d+,\); what is read is a"):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


def test_fused_experts_of_compressed_tensors_are_refused(tmp_path: Path) -> None:
    state = saved("gpt_oss", tmp_path)
    for name in [n for n in state if n.endswith("gate_up_proj")]:
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale"] = torch.ones(*state[name].shape[:2], 1)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    save_packed(tmp_path, state, config)
    with pytest.raises(exc.WrongCheckpoint, match=r"gate_up_proj is .*; what is read is a matrix"):
        inductor_q.load_checkpoint(model("gpt_oss"), tmp_path, progress=False)


def test_experts_with_act_order_are_refused(tmp_path: Path) -> None:
    pack = linear_layers_of_experts(partial(gptq, True), 32)
    state, _ = pack(saved("qwen3_moe", tmp_path, hidden_size=128))
    save_packed(tmp_path, state, EXPERTS["int4_g32"][1])  # does not say desc_act
    net = model("qwen3_moe", hidden_size=128)
    with pytest.raises(exc.WrongCheckpoint, match="gate_up_proj has its columns in another order"):
        inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert not any(isinstance(stack, ExpertStack) for _, stack in stacks(net))


@pytest.mark.parametrize("case", CASES)
def test_what_nothing_takes_is_told_once(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a few names; not of what lies beside codes, nor of what transformers passes over."""
    config, state, _, _ = CASES[case]()
    write(tmp_path, config, {**state, "input_scale": torch.ones(1)})
    inductor_q.load_checkpoint(Net(), tmp_path, progress=False)
    assert not [r for r in caplog.records if r.name == "inductor_q"]
    rest = load_file(tmp_path / "model.safetensors")
    old = {"layers.0.rotary_emb.inv_freq": torch.ones(2), "plain.bias": torch.zeros(8)}
    others = {f"mtp.{i}.weight": torch.ones(2) for i in range(5)}
    save_file({**rest, **old, **others}, tmp_path / "model.safetensors")
    for _ in range(2):
        inductor_q.load_checkpoint(Net(), tmp_path, progress=False)
    (record,) = [r for r in caplog.records if r.name == "inductor_q"]
    names = "mtp.0.weight, mtp.1.weight, mtp.2.weight, ..."
    assert f"5 of its tensors are not loaded, since nothing in Net takes them ({names})" in (
        record.getMessage()
    )


def test_a_bias_that_no_module_takes_is_an_error(tmp_path: Path) -> None:
    config, state, _, _ = gptq()
    rest = write(tmp_path, config, state)
    net: Any = Net()
    net.packed.bias = None
    with pytest.raises(exc.WrongCheckpoint, match=r"packed.bias is not zero in it, and its layer"):
        inductor_q.load_checkpoint(net, tmp_path, progress=False)
    packed = {f"packed.{name}": value for name, value in state.items()}
    zeros = {"packed.bias": torch.zeros_like(rest["packed.bias"])}
    save_file({**rest, **packed, **zeros}, tmp_path / "model.safetensors")
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert type(net.packed) is PackedLinear and net.packed.bias is None


def test_a_packed_weight_of_two_modules_is_refused(tmp_path: Path) -> None:
    """One module under two names has one weight, and is replaced under both."""
    config, state, values, _ = fp8_whole()
    write(tmp_path, config, state)
    net: Any = Net()
    net.other = nn.Linear(COLUMNS, ROWS, bias=False, dtype=BF16)
    net.other.weight = net.packed.weight
    with pytest.raises(exc.WrongCheckpoint, match=r"tied here \(packed.weight, other.weight\)"):
        inductor_q.load_checkpoint(net, tmp_path, progress=False)
    net.other = net.packed
    inductor_q.load_checkpoint(net, tmp_path, progress=False)
    assert net.other is net.packed and torch.equal(net.other.dequantize(torch.float32), values)


def test_a_model_that_was_loaded_is_saved(tmp_path: Path) -> None:
    """Packed by kbit.save, or dequantized; else what save_pretrained writes names these."""
    state = saved("qwen3_moe", tmp_path)
    for name in [n for n in state if ".self_attn." in n and "_proj" in n]:
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = torch.tensor(0.5)
    save_packed(tmp_path, state, {"quant_method": "fp8"})

    def load(folder: Path = tmp_path) -> Any:
        config = transformers.AutoConfig.from_pretrained(folder)
        with meta_parameters():
            net = transformers.AutoModelForCausalLM.from_config(config)
        return inductor_q.load_checkpoint(net, folder, progress=False)

    net = load()
    expected = net(tokens()).logits
    kbit.save(net, tmp_path / "packed.bin")
    assert torch.equal(kbit.load(load(), tmp_path / "packed.bin")(tokens()).logits, expected)
    with pytest.raises(exc.CannotSave, match=r"kbit\.save"):
        net.save_pretrained(tmp_path / "refused")
    net.save_pretrained(tmp_path / "packed", state_dict=net.state_dict())  # who insists
    with pytest.raises(exc.WrongCheckpoint, match=r"q_proj.qweight.* is saved by .*kbit.save; for"):
        load(tmp_path / "packed")
    kbit.dequantize_model(net)
    net.save_pretrained(tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert relative_error(plain(tokens()).logits, expected) < 1e-5


def test_a_quantizer_names_the_way_to_load_it(tmp_path: Path) -> None:
    config, state, _, _ = fp8_tiles()
    write(tmp_path, config, state)
    with pytest.raises(exc.AlreadyQuantized, match=r"inductor_q\.load_checkpoint\(model, path\)"):
        inductor_q.quantize(Net(), "nf4_b64", checkpoint=tmp_path)


def test_a_checkpoint_that_is_not_packed(tmp_path: Path) -> None:
    net = Net()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    with meta_parameters():
        other = Net()
    inductor_q.load_checkpoint(other, tmp_path, progress=False)
    assert type(other.packed) is nn.Linear
    assert torch.equal(other.packed.weight, net.packed.weight)


# --- experts --------------------------------------------------------------------------------------


def saved(family: str, folder: Path, **sizes: Any) -> State:
    """Save a tiny model and return its tensors as they lie in the file."""
    model(family, **sizes).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def save_packed(folder: Path, state: State, config: dict[str, Any]) -> None:
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "quantization_config": config}))


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
    read: list[str] = []
    original = Checkpoint.read

    def count(self: Checkpoint, name: str) -> Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(Checkpoint, "read", count)
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
