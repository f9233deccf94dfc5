"""transformers' layers of FP8 checkpoints, in memory: taken over byte for byte, and fused."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inductor_q
from inductor_q import capture, experts, kbit, ops
from inductor_q.backend import qfuse
from inductor_q.capture.fp8_layers import LEFT
from inductor_q.diagnostics import check_model
from inductor_q.exc import UnreadExperts
from inductor_q.experts.model import stacks
from inductor_q.integrations import QfuseCallback, prepare_fp8
from inductor_q.testing import relative_error
from tests.loading.test_merges import peft_as_it_comes as peft_as_it_comes
from tests.support.compiling import SMALL, gradients, no_codegen

pytest.importorskip("transformers.integrations.finegrained_fp8")
peft: Any = pytest.importorskip("peft")
accelerate: Any = pytest.importorskip("accelerate")
safetensors: Any = pytest.importorskip("safetensors.torch")

from tests.support.fp8_models import (  # noqa: E402
    CLOSE,
    LINEARS,
    PROJECTIONS,
    TOKENS,
    addresses,
    emulate_kernels,
    fill,
    fp8,
    layers,
    lora,
    net,
    plain,
    transformers,
    values,
)
from tests.support.thresholds import ANY_PRODUCT  # noqa: E402

BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("default_options", "fresh_compiler")


def train(call: Any, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    loss = call(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.detach(), gradients({}, model)


def same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> bool:
    """Whether loss and gradients are the same, as adapters are named."""
    (loss, grads), (wanted, others) = got, expected
    assert grads.keys() == others.keys() and grads
    assert all(other.any() for other in others.values())
    close = (relative_error(grads[name], others[name]) < CLOSE for name in grads)
    return relative_error(loss, wanted) < CLOSE and all(close)


# --- what the layers hold ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("scales", ["float", "ue8m0", "whole"])
def test_every_code_is_transformers_value(scales: str, dtype: torch.dtype) -> None:
    """Bitwise what transformers dequantizes a checkpoint to, from the bytes where they are."""
    block = None if scales == "whole" else (128, 128)
    layer = fp8.FP8Linear(384, 256, block, scale_fmt="ue8m0" if scales == "ue8m0" else "float")
    fill(layer)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    layer.weight.data = every[torch.randperm(256 * 384) % 256].reshape(256, 384)
    held = capture.packed_weight(layer, "weight")
    assert held is not None and held.read is not None and held.quantizes_input
    assert (held.kind, held.shape, held.reason) == ("linear", (256, 384), "")
    operands, format, shape = held.read()
    assert operands[0].data_ptr() == layer.weight.data_ptr()
    assert format == ("fp8_e4m3_tensor" if block is None else "fp8_e4m3_128x128")
    scale = layer.weight_scale_inv.reshape(1, 1) if block is None else layer.weight_scale_inv
    wanted = fp8.Fp8Dequantize(None)._dequantize_one(layer.weight, scale, dtype)
    got = ops.dequantize(operands, format, shape, dtype)
    assert torch.equal(got.nan_to_num(1e9), wanted.nan_to_num(1e9)) and got.isnan().any()


def test_tiles_that_the_sizes_cut() -> None:
    """transformers' backward reads tiles of 128, as its kernel does; `Fp8Dequantize` here divides
    the rows by the number of scales."""
    layer = fp8.FP8Linear(200, 192, (128, 128))
    fill(layer)
    held = capture.packed_weight(layer, "weight")
    assert held is not None and held.read is not None
    got = ops.dequantize(*held.read(), torch.float32)
    assert torch.equal(got, values(layer.weight, layer.weight_scale_inv))


@pytest.mark.parametrize(
    ("scales", "expert_dtype"), [("float", "fp8"), ("ue8m0", "fp8"), ("ue8m0", "fp4")]
)
def test_experts(scales: str, expert_dtype: str) -> None:
    model = net("moe", intermediate=128, scale_fmt=scales, expert_dtype=expert_dtype)
    layer = model.model.layers[0].mlp.experts
    for name in PROJECTIONS:
        held = capture.packed_weight(layer, name)
        assert held is not None and held.read is not None and held.kind == "experts"
        got = ops.dequantize(*held.read(), torch.float32)
        scale = getattr(layer, f"{name}_scale_inv")
        assert tuple(got.shape) == held.shape
        assert torch.equal(got, values(getattr(layer, name), scale))
        assert held.read().operands[0].data_ptr() == getattr(layer, name).data_ptr()
        assert capture.packed_weight(layer, f"{name}_scale_inv") is None


# --- taken over -----------------------------------------------------------------------------------


def test_the_same_bytes_under_the_same_names(told: list[str], tmp_path: Path) -> None:
    """What it saves is the checkpoint's own; what transformers dequantizes that to computes the
    same, bitwise."""
    model = net()
    before = addresses(model)
    with pytest.raises(ImportError, match="finegrained-fp8 kernel unavailable"):
        model(TOKENS)
    prepare_fp8(model)
    assert told == [
        f"{LINEARS} FP8Linear multiply with their decoded weights from now on; their library's own "
        'products quantize the input to FP8 as well. "qfuse.compute": "fp8" multiplies in FP8, and '
        'inductor_q.compile with "qfuse.numerics": "strict" leaves such layers to their library'
    ]
    prepare_fp8(model)
    assert len(told) == 1 and addresses(model) == before
    assert all(isinstance(layer, fp8.FP8Linear) for layer in layers(model))
    model.save_pretrained(tmp_path)
    saved, state = safetensors.load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert saved.keys() == state.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor.view(torch.uint8), state[name].view(torch.uint8))
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, read(TOKENS).logits)


def test_a_checkpoint_of_ours_computes_the_same(tmp_path: Path) -> None:
    model = net()
    prepare_fp8(model)
    model.save_pretrained(tmp_path)
    with kbit.meta_parameters():
        other = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    inductor_q.load_checkpoint(other, tmp_path, progress=False)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, other(TOKENS).logits)


@pytest.mark.usefixtures("graph_or_code")
@pytest.mark.parametrize(
    ("scales", "first"), [("float", True), ("float", False), ("ue8m0", True), ("whole", True)]
)
def test_a_step_of_lora(scales: str, first: bool) -> None:
    """Eager and fused in one graph, adapters' gradients are those over the decoded weights, whether
    PEFT comes first or we do."""
    how: dict[str, Any] = {"scale_fmt": "ue8m0"} if scales == "ue8m0" else {}
    if scales == "whole":
        how = {"weight_block_size": None}
    base, names = net(intermediate=192, **how), ("q_proj", "v_proj", "down_proj")
    dense = lora(plain(base), *names)
    expected = train(dense, dense)
    if first:
        prepare_fp8(base)
    model = lora(base, *names)
    prepare_fp8(model)
    assert type(model.base_model.model.model.layers[0].mlp.down_proj.base_layer).__name__ == (
        "FP8Linear"
    )
    assert same(train(model, model), expected)
    options = {**SMALL, "qfuse.strict": True}
    compiled: Any = torch.compile(model, backend=qfuse, fullgraph=True, options=options)
    assert same(train(compiled, model), expected)
    found = inductor_q.report(model)
    assert (found.fused, len(found.layers), found.graphs, found.breaks) == (LINEARS, LINEARS, 1, 0)


def test_a_bias_and_autocast() -> None:
    """A scale for activations is not used, and a bias trains, as anywhere."""
    layer = fp8.FP8Linear(128, 256, (128, 128), activation_scheme="static", has_bias=True)
    fill(layer)
    prepare_fp8(layer)
    x = torch.randn(40, 128, requires_grad=True)
    weight = values(layer.weight, layer.weight_scale_inv)
    assert torch.equal(layer(x), nn.functional.linear(x, weight, layer.bias))
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((256,), 40.0))
    assert not layer.weight.requires_grad and not layer.weight_scale_inv.requires_grad
    with torch.autocast("cpu", BF16):
        assert layer(x).dtype is BF16


def test_a_layer_that_is_in_16_bits_by_now() -> None:
    """transformers multiplies with it as it is."""
    layer = fp8.FP8Linear(128, 256, (128, 128))
    fill(layer)
    prepare_fp8(layer)
    layer.weight = nn.Parameter(torch.randn(256, 128))
    x = torch.randn(3, 128)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))


def test_products_in_eight_bits() -> None:
    """`qfuse.compute` multiplies codes with codes again, with scales by row."""
    model = lora(net(), "q_proj")
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.float32 and "scale_inv" not in name:
            parameter.data = parameter.data.to(BF16)
    prepare_fp8(model)
    plainly, _ = train(model, model)
    few = {"qfuse.thresholds": ANY_PRODUCT}
    with no_codegen():
        inductor_q.compile(model, options={**few, "qfuse.compute": "fp8"})
        loss, _ = train(model, model)
    report = inductor_q.last_report()
    assert report is not None and report.in_eight_bits()[0] >= LINEARS
    assert inductor_q.report(model).fused == len(layers(model)) == LINEARS
    assert 0 < relative_error(loss, plainly) < 0.02


@pytest.mark.parametrize("first", [False, True])
def test_layers_that_accelerate_offloads(first: bool) -> None:
    """Their weights are on the meta device between calls, and come with each."""
    model = net()
    if first:
        prepare_fp8(model)
    with torch.no_grad():
        expected = plain(model)(TOKENS).logits
        accelerate.cpu_offload(model, "cpu")
        assert layers(model)[0].weight.is_meta
        prepare_fp8(model)
        assert torch.equal(model(TOKENS).logits, expected)


def test_copies_files_and_hooks() -> None:
    """A copy calls itself; a pickled layer comes back as transformers has it, and is prepared
    again; accelerate's hooks stay around the new forward."""
    layer = fp8.FP8Linear(128, 256, (128, 128))
    fill(layer)
    prepare_fp8(layer)
    x = torch.randn(40, 128)
    assert copy.deepcopy(layer).forward.__self__ is not layer
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    hooked = copy.deepcopy(back)
    accelerate.hooks.add_hook_to_module(hooked, accelerate.hooks.ModelHook())
    for other in (back, hooked):
        with pytest.raises(ImportError, match="finegrained-fp8"):
            other(x)
        prepare_fp8(other)
        assert torch.equal(other(x), layer(x))
    assert "_hf_hook" in vars(hooked)
    accelerate.hooks.remove_hook_from_module(hooked)
    assert torch.equal(hooked(x), layer(x))


def test_a_forward_that_somebody_has_replaced_stays() -> None:
    layer = fp8.FP8Linear(128, 256, (128, 128))
    fill(layer)
    vars(layer)["forward"] = lambda x: x
    prepare_fp8(layer)
    assert layer.forward(1) == 1


# --- who takes them over -------------------------------------------------------------------------


def test_compile_takes_them_over(told: list[str]) -> None:
    model = lora(net(), "q_proj")
    with no_codegen():
        inductor_q.compile(model, options=SMALL)
        train(model, model)
    assert inductor_q.report(model).summary() == (
        f"qfuse: {LINEARS} of {LINEARS} quantized layers fused; 1 graph, 0 breaks"
    )
    assert [said[:12] for said in told if "multiply with" in said] == ["7 FP8Linear "]


@pytest.mark.parametrize("by", ["option", "environment"])
def test_strict_numerics_leave_them(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"qfuse.numerics": "strict"} if by == "option" else {}
    if by == "environment":
        monkeypatch.setenv("QFUSE_NUMERICS", "strict")
    model = net()
    inductor_q.compile(model, options=options)
    call: Any = QfuseCallback(options=options)
    call.on_init_end(transformers.TrainingArguments("out"), None, None, model=model)
    with pytest.raises(ImportError):
        model.model.layers[0].self_attn.q_proj(torch.ones(1, 128))


def test_the_callback_takes_them_over_before_an_evaluation() -> None:
    model, call = net(), QfuseCallback()
    call.on_init_end(transformers.TrainingArguments("out"), None, None, model=model)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain(model)(TOKENS).logits)


def test_a_compile_of_ones_own_says_who_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products stay transformers', bitwise, and the reason is the call that takes them over."""
    emulate_kernels(monkeypatch)
    model = lora(net(), "q_proj", "down_proj")
    expected = train(model, model)
    compiled: Any = torch.compile(model, backend=qfuse, options=SMALL)
    with no_codegen():
        assert same(train(compiled, model), expected)
    found = inductor_q.report(model)
    assert (found.fused, len(found.layers), found.breaks) == (0, LINEARS, 0)
    assert found.reasons() == {LEFT["FP8Linear"]: LINEARS}
    assert "inductor_q.integrations.prepare_fp8(model)" in LEFT["FP8Linear"]
    torch._dynamo.reset()
    with no_codegen():
        inductor_q.compile(model, options=SMALL)
        loss, grads = train(model, model)
    assert inductor_q.report(model).fused == LINEARS
    assert 0 < relative_error(loss, expected[0]) < 0.01  # nearer to the 16-bit model
    dense = plain(model)
    assert same((loss, grads), train(dense, dense))


# --- experts -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("graph_or_code")
@pytest.mark.parametrize("kind", ["float", "ue8m0", "fp4"])
def test_a_mixture(kind: str) -> None:
    """Linear layers and experts are taken over together; no parameter is moved or renamed."""
    how = {"float": {}, "ue8m0": {"scale_fmt": "ue8m0"}}
    given = how.get(kind, {"scale_fmt": "ue8m0", "expert_dtype": "fp4"})
    model = net("moe", intermediate=128, **given)
    before = addresses(model)
    dense = lora(plain(model), "q_proj")
    expected = train(dense, dense)
    adapted = lora(model, "q_proj")
    prepare_fp8(adapted)
    assert same(train(adapted, adapted), expected)
    assert {*before.values()} <= {*addresses(adapted).values()}
    assert {n for n in adapted.state_dict() if "experts" in n} == {
        f"base_model.model.{n}" for n in before if "experts" in n
    }
    options = {**SMALL, "qfuse.strict": True}
    compiled: Any = torch.compile(adapted, backend=qfuse, fullgraph=True, options=options)
    assert same(train(compiled, adapted), expected)
    found = inductor_q.report(adapted)
    assert (found.fused, len(found.layers), found.breaks) == (6, 6, 0)
    assert "base_model.model.model.layers.0.mlp.experts.down_proj" in found.layers


def test_adapters_for_every_expert(told: list[str]) -> None:
    """They need stacks, of the same bytes; the layer keeps no second name for the scales."""
    model = net("moe", intermediate=128)
    held = {pointer for pointer, _ in addresses(model).values()}
    dense = plain(model)
    results = []
    for each in (model, dense):
        torch.manual_seed(3)
        if each is model:
            experts.quantize(each, "nf4_b64")
            prepare_fp8(each)
        for parameter in experts.add_lora(each, r=2):
            parameter.data.normal_(0, 0.1)
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("lora_" in name)
        results.append(train(each, each))
    assert same(*results)
    assert "2 projections of experts are packed already and stay as fp8_e4m3_128x128" in told
    found = dict(stacks(model))
    assert len(found) == 2
    assert {t.data_ptr() for stack in found.values() for t in stack.operands} <= held
    names = [name for name in model.state_dict() if "layers.0.mlp.experts" in name]
    ours = [f"model.layers.0.mlp.experts.{p}" for p in PROJECTIONS]
    parts = ("lora_A", "lora_B", "qweight", "scale")
    assert sorted(names) == sorted(f"{name}.{part}" for name in ours for part in parts)


def test_experts_that_a_compile_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_kernels(monkeypatch)
    model = net("moe", intermediate=128).eval()
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad(), no_codegen():
        expected = model(TOKENS).logits
        compiled: Any = torch.compile(model, backend=qfuse, options=SMALL)
        assert relative_error(compiled(TOKENS).logits, expected) < CLOSE
    reasons = inductor_q.report(model).reasons()
    assert reasons == {LEFT["FP8Linear"]: 4, LEFT["FP8Experts"]: 2}


# --- what is in none of our formats --------------------------------------------------------------


def cut(layer: Any) -> None:
    layer.weight_scale_inv = nn.Parameter(layer.weight_scale_inv[:1])


def turn(layer: Any) -> None:
    layer.weight.data = layer.weight.data.t().contiguous().t()


def other_numbers(layer: Any) -> None:
    layer.weight.data = layer.weight.data.view(torch.uint8).view(torch.float8_e5m2)


REFUSED: dict[str, tuple[Any, str]] = {
    "blocks of 64": (lambda x: setattr(x, "block_size", (64, 64)), "it has blocks of (64, 64)"),
    "no checkpoint": (lambda x: x.to("meta"), "it is on the meta device"),
    "few scales": (cut, "its codes are torch.float8_e4m3fn (256, 128), its scales torch.float32"),
    "turned": (turn, "its codes or scales do not lie row by row"),
    "e5m2": (other_numbers, "its codes are torch.float8_e5m2"),
}


@pytest.mark.parametrize("spoil", REFUSED)
def test_what_is_not_read_stays_and_says_why(spoil: str, told: list[str]) -> None:
    layer = fp8.FP8Linear(128, 256, (128, 128))
    fill(layer)
    change, reason = REFUSED[spoil]
    change(layer)
    held = capture.packed_weight(layer, "weight")
    assert held is not None and held.read is None and held.reason.startswith(reason)
    model = nn.Sequential(layer, nn.Linear(2, 2))
    prepare_fp8(model)
    assert "forward" not in vars(layer)
    assert told == [f"left to its library: 1 x FP8Linear ({held.reason})"]
    assert next(kbit.dequantize_model(model).children()) is layer
    (found,) = (one for one in check_model(model) if one.check == "fp8")
    assert held.reason in found.found and "dequantize=True" in found.remedy


def test_grouped_layers_stay() -> None:
    layer = fp8.FP8GroupedLinear(128, 512, 2, (128, 128))
    fill(layer)
    held = capture.packed_weight(layer, "weight")
    assert held is not None and held.reason == "it has a weight for each part of its input"
    prepare_fp8(layer)
    assert "forward" not in vars(layer)


EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "blocks of 64": ({"weight_block_size": [64, 64]}, r"gate_up_proj: it has blocks of \(64, 64\)"),
    "whole": ({"weight_block_size": None}, "gate_up_proj: it has one scale for a weight"),
    "cut tiles": ({"intermediate": 96}, "gate_up_proj: blocks of 128 rows are cut at the 192 rows"),
    "two to a tile": ({"intermediate": 64}, "gate_up_proj: its codes are .*for values of"),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_that_are_not_read(case: str, told: list[str]) -> None:
    """A call for experts is an error, before anything is changed; beside linear layers it is
    said."""
    how, reason = EXPERTS[case]
    model = net("moe", **{"intermediate": 128, **how})
    for take in (experts.use_qfuse, experts.add_lora):
        with pytest.raises(UnreadExperts, match=reason) as error:
            take(model)
        assert "model.layers.0.mlp.experts (FP8Experts)" in str(error.value)
        assert "FineGrainedFP8Config" in str(error.value)
    assert not [*stacks(model)]
    prepare_fp8(model)
    assert model.config._experts_implementation == "eager"
    assert any("left to its library" in said and "FP8Experts" in said for said in told)
