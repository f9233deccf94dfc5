"""Checkpoints that are not read: the error names the method or the tensor, and the model stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import inductor_q
from inductor_q import exc
from inductor_q.loading.linear import PackedLinear
from tests.support.shipped import (
    BF16,
    CASES,
    COLUMNS,
    ROWS,
    Net,
    fp8_tiles,
    fp8_whole,
    gptq,
    hqq,
    write,
)
from tests.support.shipped import seed as seed

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


@pytest.mark.parametrize("act_order", [False, True])
def test_groups_of_other_sizes_are_refused(act_order: bool, tmp_path: Path) -> None:
    config, state, _, _ = gptq(act_order=act_order)
    uneven = state["g_idx"].clone()
    uneven[uneven == 0] = 1
    for wrong, found in ((uneven, "group 0 for 0"), (0 * uneven + 1, "group 0 for 0")):
        write(tmp_path, config, {**state, "g_idx": wrong})
        with pytest.raises(exc.CorruptQuantState, match=f"4 groups for 64 inputs, is {found}"):
            inductor_q.load_checkpoint(Net(), tmp_path, progress=False)


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


def test_a_quantizer_names_the_way_to_load_it(tmp_path: Path) -> None:
    config, state, _, _ = fp8_tiles()
    write(tmp_path, config, state)
    with pytest.raises(exc.AlreadyQuantized, match=r"inductor_q\.load_checkpoint\(model, path\)"):
        inductor_q.quantize(Net(), "nf4_b64", checkpoint=tmp_path)
