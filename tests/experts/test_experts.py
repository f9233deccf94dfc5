"""Experts of real models: packed, adapted, saved and loaded, compiled without a break."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft as peft_package
import pytest
import torch
import transformers as transformers_package
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import inductor_q
from inductor_q import exc, experts, kbit, ops
from inductor_q.backend import qfuse
from inductor_q.experts.model import stacks
from inductor_q.experts.modules import expert_layers
from inductor_q.experts.packing import pack
from inductor_q.kbit import meta_parameters
from inductor_q.loading.files import Checkpoint
from inductor_q.log import warn_once
from inductor_q.testing import relative_error
from tests.support.gpu_experts import waits_are_errors
from tests.support.moe_models import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    INTERMEDIATE,
    awaken,
    model,
    model_of_images_and_text,
    tokens,
    unpacked,
)
from tests.support.quantized import assert_same_bits, two_devices

peft: Any = peft_package  # as shipped, it is typed in parts
transformers: Any = transformers_package
quantization: Any = pytest.importorskip("torchao.quantization")

FORMATS = ["nf4_b64", "nf4_b64_nested", "fp4_b64", "kbit3_e4m4", "dense"]

# Sums in another order, in float32, through two layers.
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}

#: Norm-relative, of logits and of each gradient, biases included. Measured: up to 1.3e-6.
EXACT = 3e-6


def step(net: Any, ids: Tensor, run: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of whatever trains."""
    out = (net if run is None else run)(input_ids=ids, labels=ids, use_cache=False)
    if out.loss.requires_grad:
        out.loss.backward()
    grads = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return out.logits.detach(), grads


def adapted(family: str, format: str = "nf4_b64", r: int = 4) -> Any:
    net = model(family).requires_grad_(False)
    if format != "dense":
        experts.quantize(net, format)
    awaken(experts.add_lora(net, r=r, alpha=8))
    return net


# --- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_experts_are_transformers_experts(family: str) -> None:
    """Values and every gradient, those of the experts' own weights, biases and router included."""
    net = model(family)
    logits, grads = step(net, tokens())
    experts.use_qfuse(net)
    got, got_grads = step(net, tokens())
    assert relative_error(got, logits) < EXACT
    assert got_grads.keys() == grads.keys()
    for name, grad in got_grads.items():
        assert relative_error(grad, grads[name]) < EXACT, name


@pytest.mark.parametrize("format", [*FORMATS[:-1], "mxfp4", "mxfp8", "nvfp4", "fp8_row"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_packed_experts(family: str, format: str) -> None:
    net = experts.quantize(model(family), format)
    names = {name.rpartition(".")[2] for name, _ in stacks(net)}
    assert names == {"gate_up_proj", "down_proj"}
    logits, _ = step(unpacked(net), tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)


ASKED = [
    ("mxfp4", "mxfp4"),
    ({"mxfp4": {}}, "mxfp4"),
    ({"bnb": {"quant_type": "fp4", "blocksize": 128, "nested": False}}, "fp4_b128"),
    ({"kbit": {"k": 3}}, "kbit3_e4m4"),
    ({"fp8": {"of": "row"}}, "fp8_e4m3_row"),
    ({"load_in_4bit": True}, "nf4_b64_nested"),
    (
        transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"]
        ),
        "nf4_b64",
    ),
]


@pytest.mark.parametrize(("asked", "format"), ASKED, ids=str)
def test_experts_are_asked_for_as_linear_layers_are(asked: Any, format: str) -> None:
    net = experts.quantize(model("qwen3_moe"), asked)
    assert {stack.format for _, stack in stacks(net)} == {format}


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_row"])
def test_blocks_run_along_what_is_summed(format: str) -> None:
    """Where the columns of a row share a scale, a row makes an output: as gpt-oss has it on disk,
    though its parameters lie the other way."""
    net: Any = model("gpt_oss")
    before = net.model.layers[0].mlp.experts.down_proj.detach().clone()
    stack = experts.quantize(net, format).model.layers[0].mlp.experts.down_proj  # type: ignore[union-attr, index]
    assert not stack.transposed and stack.shape == (EXPERTS, HIDDEN, INTERMEDIATE)
    for values, expert in zip(stack.dequantize(torch.float32), before, strict=True):
        own = pack(expert.t().contiguous(), stack.format)
        shape = (HIDDEN, INTERMEDIATE)
        assert_same_bits(values, ops.dequantize([*own.values()], stack.format, shape, torch.float))


def test_tiles_are_not_cut_between_experts() -> None:
    w = torch.randn(2, 256, 130, generator=torch.Generator().manual_seed(0))
    codes, scale = pack(w, "fp8_e4m3_128x128").values()
    for n, expert in enumerate(w):
        own_codes, own_scale = pack(expert, "fp8_e4m3_128x128").values()
        assert torch.equal(codes.view(2, -1)[n], own_codes)
        assert torch.equal(scale.view(2, -1)[n], own_scale)
    with pytest.raises(exc.WrongScheme, match="its 128 rows to a scale do not divide the 64 of"):
        pack(w[:, :64], "fp8_e4m3_128x128")


def test_only_the_targets_are_packed() -> None:
    net = experts.quantize(model("qwen3_moe"), targets=["down_proj"])
    assert {name.rpartition(".")[2] for name, _ in stacks(net)} == {"down_proj"}
    logits, _ = step(unpacked(net), tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)


@pytest.mark.parametrize("format", ["nf4_b64", "mxfp4", "dense"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_peft_adapters(family: str, format: str, tmp_path: Path) -> None:
    """Saved by us and loaded by PEFT over the same weights: the same model, the same gradients."""
    net = adapted(family, format)
    experts.save_adapter(net, tmp_path)
    plain = peft.PeftModel.from_pretrained(unpacked(net), tmp_path, is_trainable=True)
    logits, grads = step(plain, tokens())
    got, got_grads = step(net, tokens())
    assert relative_error(got, logits) < EXACT
    assert len(got_grads) == 2 * 2 * 2  # layers, projections, A and B
    assert len(grads) == len(got_grads)
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
        for name, above in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
            mine = f"model.layers.{layer}.mlp.experts.{name}"
            a = grads[f"{prefix}{above}.lora_A.default.weight"].unflatten(0, (EXPERTS, -1))
            b = grads[f"{prefix}{above}.lora_B.default.weight"].unflatten(1, (-1, EXPERTS))
            assert relative_error(got_grads[f"{mine}.lora_A"], a) < EXACT, mine
            assert relative_error(got_grads[f"{mine}.lora_B"], b.permute(2, 0, 1)) < EXACT, mine


def test_a_text_model_inside_of_another() -> None:
    net = experts.quantize(model_of_images_and_text().requires_grad_(False))
    names = {name.partition(".layers.")[0] for name, _ in stacks(net)}
    assert names == {"model.language_model"}
    logits, _ = step(unpacked(net), tokens())
    assert relative_error(step(net, tokens())[0], logits) < EXACT
    awaken(experts.add_lora(net, r=2))
    _, grads = step(net, tokens())
    assert len(grads) == 2 * 2 * 2 and all(grad.any() for grad in grads.values())


def test_a_new_adapter_changes_nothing() -> None:
    net = experts.quantize(model("olmoe").requires_grad_(False))
    before, _ = step(net, tokens())
    added = experts.add_lora(net, r=3, alpha=6, targets=["down_proj"])
    assert [tuple(p.shape) for p in added] == [(EXPERTS, 3, INTERMEDIATE), (EXPERTS, HIDDEN, 3)] * 2
    assert all(p.requires_grad for p in added)
    assert {n for n, p in net.named_parameters() if p.requires_grad} == {
        f"model.layers.{i}.mlp.experts.down_proj.lora_{ab}" for i in range(2) for ab in "AB"
    }
    torch.testing.assert_close(step(net, tokens())[0], before)
    (_, stack), *_ = stacks(net)
    assert all(s.scaling == 2.0 for n, s in stacks(net) if n.endswith("down_proj"))
    assert stack.lora_A is None


def test_rank_stabilized_adapters() -> None:
    net = model("olmoe").requires_grad_(False)
    experts.add_lora(net, r=4, alpha=6, rslora=True)
    assert {s.scaling for _, s in stacks(net)} == {6 / 4**0.5}


@pytest.mark.parametrize("implementation", ["grouped_mm", "qfuse"])
def test_expert_parallel_shards_add_up(implementation: str) -> None:
    """Each device has half of the experts; the other's are sentinels, and their terms are zero."""
    net = model("qwen3_moe")
    experts.use_qfuse(net)
    layer = expert_layers(net)["model.layers.0.mlp.experts"]
    layer.config._experts_implementation = implementation
    x = torch.randn(9, HIDDEN)
    ids = torch.rand(9, EXPERTS).argsort(-1)[:, :2]
    gates = torch.rand(9, 2)
    whole = layer(x, ids, gates)
    total = torch.zeros_like(whole)
    for rank in range(2):
        shard = copy.deepcopy(layer)
        shard.num_experts, shard._is_expert_parallel = EXPERTS // 2, True
        mine = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
        for name in ("gate_up_proj", "down_proj"):
            setattr(shard, name, nn.Parameter(getattr(layer, name)[mine].detach()))
        local = ids - rank * EXPERTS // 2
        here = (local >= 0) & (local < EXPERTS // 2)
        sentinel = EXPERTS // 2  # transformers'
        total += shard(x, torch.where(here, local, sentinel), torch.where(here, gates, 0.0))
    torch.testing.assert_close(total, whole, **CLOSE)


def test_a_norm_after_each_expert() -> None:
    net = model("qwen3_moe", "grouped_mm")
    layer = expert_layers(net)["model.layers.0.mlp.experts"]
    if not hasattr(layer, "has_post_expert_norm"):
        pytest.skip("this transformers has no norm after experts")
    layer.has_post_expert_norm, layer.post_expert_norm = True, nn.RMSNorm(HIDDEN)
    args = torch.randn(5, HIDDEN), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    expected = layer(*args)
    experts.use_qfuse(net)
    torch.testing.assert_close(layer(*args), expected, **CLOSE)


def test_autocast() -> None:
    net = adapted("qwen3_moe")
    with torch.autocast("cpu", torch.bfloat16):
        out = net(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    exact, _ = step(copy.deepcopy(net), tokens())
    assert float((out.logits - exact).norm() / exact.norm()) < 0.05
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


# --- bitsandbytes' own packing ------------------------------------------------------------------


def packed_by_bnb(nested: bool = False) -> Any:
    net = model("qwen3_moe").requires_grad_(False)
    for layer in expert_layers(net).values():
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(layer, name, compress_statistics=nested)
    return net


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_parameters_packed_by_bitsandbytes(nested: bool) -> None:
    net = packed_by_bnb(nested)
    logits, _ = step(net, tokens())
    experts.use_qfuse(net)
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)
    experts.quantize(net)  # taken over as it is
    assert len([*stacks(net)]) == 4
    assert {s.format for _, s in stacks(net)} == {"nf4_b64" + "_nested" * nested}
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)
    awaken(experts.add_lora(net))
    assert len(step(net, tokens())[1]) == 8


def test_no_dequantized_layer_leaves_the_graph() -> None:
    """bitsandbytes' cache hooks make a traced layer's experts an output of the graph."""
    net = packed_by_bnb()
    net.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    experts.use_qfuse(net)
    outputs: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        values: Any = gm.graph.output_node().args[0]
        outputs.append([node.meta["example_value"].shape for node in values])
        return gm

    torch.compiler.reset()
    run: Any = torch.compile(net, backend=backend, fullgraph=True)
    run(input_ids=tokens(), labels=tokens(), use_cache=False)
    assert outputs == [[torch.Size([]), torch.Size([2, 7, 96])]]


# --- compiled -----------------------------------------------------------------------------------


def compile_and_step(net: Any, backend: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.compiler.reset()
    counters.clear()
    run = torch.compile(net, backend=backend, fullgraph=True, **kwargs)
    result = step(net, tokens(), run)
    assert not counters["graph_break"]
    return result


def test_dense_experts_are_one_graph() -> None:
    """What a parameter holds is asked while Dynamo traces."""
    net = experts.use_qfuse(model("qwen3_moe"))
    logits, grads = step(net, tokens())
    got, got_grads = compile_and_step(net, "aot_eager")
    torch.testing.assert_close(got, logits, **CLOSE)
    assert grads and grads.keys() == got_grads.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_are_one_graph(family: str) -> None:
    net = adapted(family)
    logits, grads = step(net, tokens())
    got, got_grads = compile_and_step(net, "aot_eager")
    torch.testing.assert_close(got, logits, **CLOSE)
    assert len(grads) == len(got_grads) == 8
    for name, grad in got_grads.items():
        assert grad.any(), name
        torch.testing.assert_close(grad, grads[name], **CLOSE)
    assert counters["stats"]["unique_graphs"] == 1


BACKENDS = ["aot_eager", pytest.param(qfuse, id="qfuse", marks=pytest.mark.slow)]


def with_adapters(net: Any) -> Any:
    """PEFT's on attention, ours on experts, and no gradient of theirs zero."""
    net = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    experts.add_lora(net, r=2)
    awaken([parameter for parameter in net.parameters() if parameter.requires_grad])
    return net


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_peft_on_attention(backend: Any) -> None:
    net: Any = experts.quantize(model("qwen3_moe"))
    net = with_adapters(net)
    logits, grads = step(net, tokens())
    assert len(grads) == 8 + 8
    got, got_grads = compile_and_step(net, backend)
    torch.testing.assert_close(got, logits, **CLOSE)
    assert got_grads.keys() == grads.keys()
    for name, grad in got_grads.items():
        assert grad.any(), name
        torch.testing.assert_close(grad, grads[name], **CLOSE)


@pytest.mark.slow
def test_a_compiled_step_is_the_same_every_time(device: str) -> None:
    """Bit by bit: no sum in it depends on which of its terms is ready first. Nor does the host wait
    for a GPU in it, to know where tokens go or for anything else."""
    net = with_adapters(experts.quantize(model("qwen3_moe", num_hidden_layers=1)))
    net.to(device, torch.bfloat16)
    torch.compiler.reset()
    run: Any = torch.compile(net, backend=qfuse, fullgraph=True, options={"fx_graph_cache": False})
    ids = tokens(4, 16).to(device)
    first, grads = step(net, ids, run)
    assert len(grads) == 4 + 4
    for _ in range(3):
        again, same = step(net, ids, run)
        assert_same_bits(again, first)
        for name, grad in grads.items():
            assert grad.any(), name
            assert_same_bits(same[name], grad)
    if device == "cuda":
        with waits_are_errors():
            step(net, ids, run)


# --- saved and loaded ---------------------------------------------------------------------------


def test_an_adapter_of_peft_is_loaded(tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={"experts.down_proj": 2},
        alpha_pattern={"experts.down_proj": 5},
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(model("mixtral"), config)
    logits, _ = step(theirs, tokens())
    theirs.save_pretrained(tmp_path)
    ours: Any = peft.get_peft_model(
        model("mixtral"),
        peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj"]),
    )
    experts.load_adapter(ours, tmp_path)
    torch.testing.assert_close(step(ours, tokens())[0], logits, **CLOSE)
    experts.save_adapter(ours, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(model("mixtral"), tmp_path / "again")
    torch.testing.assert_close(step(again, tokens())[0], logits, **CLOSE)


def test_an_alpha_and_a_rank_of_one_layer(tmp_path: Path) -> None:
    """The adapter of a PEFT model that is called otherwise than "default"."""
    name = "layers.0.mlp.experts.gate_up_proj"
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={name: 2},
        alpha_pattern={name: 64},
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(model("mixtral"), config)
    logits, _ = step(theirs, tokens())
    theirs.save_pretrained(tmp_path)
    attention = peft.LoraConfig(r=4, target_modules=["q_proj"])
    ours: Any = peft.get_peft_model(model("mixtral"), attention, adapter_name="mine")
    experts.load_adapter(ours, tmp_path)
    torch.testing.assert_close(step(ours, tokens())[0], logits, **CLOSE)
    experts.save_adapter(ours, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(model("mixtral"), tmp_path / "again")
    torch.testing.assert_close(step(again, tokens())[0], logits, **CLOSE)
    both: Any = peft.get_peft_model(model("mixtral"), attention)
    experts.load_adapter(both, tmp_path / "again")
    torch.testing.assert_close(step(both, tokens())[0], logits, **CLOSE)


def test_an_adapter_comes_back(tmp_path: Path) -> None:
    net = adapted("gpt_oss", "nf4_b64_nested")
    experts.save_adapter(net, tmp_path)
    other = experts.quantize(model("gpt_oss").requires_grad_(False), "nf4_b64_nested")
    loaded = experts.load_adapter(other, tmp_path)
    assert len(loaded) == 8 and all(p.requires_grad for p in loaded)
    torch.testing.assert_close(step(other, tokens())[0], step(net, tokens())[0], rtol=0, atol=0)
    short = experts.load_adapter(model("gpt_oss"), tmp_path, dtype=torch.bfloat16)
    assert [p.tolist() for p in short] == [p.bfloat16().tolist() for p in loaded]


def test_only_one_projection_adapted(tmp_path: Path) -> None:
    """PEFT then wraps once, and its names are others."""
    net = model("qwen3_moe").requires_grad_(False)
    awaken(experts.add_lora(net, r=2, targets=["gate_up_proj"]))
    experts.save_adapter(net, tmp_path)
    plain = peft.PeftModel.from_pretrained(unpacked(net), tmp_path)
    torch.testing.assert_close(step(plain, tokens())[0], step(net, tokens())[0], **CLOSE)


@pytest.mark.parametrize("format", FORMATS[:-1])
def test_state_dict_round_trip(format: str) -> None:
    net = adapted("qwen3_moe", format)
    other = adapted("qwen3_moe", format)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(step(other, tokens())[0], step(net, tokens())[0], rtol=0, atol=0)


@pytest.mark.parametrize("format", FORMATS[:-1])
def test_a_cast_leaves_packed_weights_alone(format: str) -> None:
    net = adapted("qwen3_moe", format)
    before = {name: b.clone() for name, b in net.named_buffers() if "experts" in name}
    net.to(torch.bfloat16)
    for name, buffer in net.named_buffers():
        if name in before:
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer, before[name])
    (_, stack), *_ = stacks(net)
    assert stack.lora_A is not None and stack.lora_A.dtype is torch.bfloat16
    assert step(net, tokens())[0].dtype is torch.bfloat16


@pytest.mark.parametrize("shard", ["100KB", "5GB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_straight_from_a_checkpoint(
    family: str, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused or expert by expert, one file or shards; each tensor is read once."""
    whole = model(family)
    whole.save_pretrained(tmp_path, max_shard_size=shard)
    with meta_parameters():
        net = model(family)
    read: list[str] = []
    original = Checkpoint.read

    def count(self: Checkpoint, name: str) -> Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(Checkpoint, "read", count)
    experts.quantize(net, checkpoint=tmp_path)
    assert sorted(read) == sorted(Checkpoint(tmp_path).shapes())
    logits, _ = step(experts.quantize(whole), tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, rtol=0, atol=0)


def test_a_checkpoint_of_which_a_part_is_packed(tmp_path: Path) -> None:
    whole = model("qwen3_moe")
    whole.save_pretrained(tmp_path)
    with meta_parameters():
        net = model("qwen3_moe")
    awaken(experts.add_lora(net, r=2, targets=["gate_up_proj"]))
    experts.quantize(net, checkpoint=tmp_path, targets=["gate_up_proj"])
    assert {name.rpartition(".")[2] for name, _ in stacks(net)} == {"gate_up_proj"}
    awaken(experts.add_lora(whole, r=2, targets=["gate_up_proj"]))
    experts.quantize(whole, targets=["gate_up_proj"])
    logits, _ = step(whole, tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:1", marks=[pytest.mark.gpu, two_devices])]
)
def test_everything_lies_on_the_device_asked_for(device: str, tmp_path: Path) -> None:
    """Another than the current one, as a rank may: a step there is what it is here."""
    model("qwen3_moe").save_pretrained(tmp_path)
    with meta_parameters():
        net = model("qwen3_moe")
    experts.quantize(net, checkpoint=tmp_path, device=device)
    awaken(experts.add_lora(net.requires_grad_(False), r=4))
    assert {p.device for p in net.parameters()} == {torch.device(device)}
    packed = {t.device for _, stack in stacks(net) for t in (*stack.operands, *stack.parameters())}
    assert packed == {torch.device(device)}
    net.to(device, torch.bfloat16)  # rotary frequencies are in no checkpoint
    logits, grads = step(net, tokens().to(device))
    assert {t.device for t in (logits, *grads.values())} == {torch.device(device)}
    with meta_parameters():
        other = model("qwen3_moe")
    experts.quantize(other, checkpoint=tmp_path)
    awaken(experts.add_lora(other.requires_grad_(False), r=4))
    expected, expected_grads = step(other.to("cpu", torch.bfloat16), tokens())
    logits, grads = logits.cpu(), {name: grad.cpu() for name, grad in grads.items()}
    close = 2e-2  # bfloat16 rounds apart in each layer here and there
    assert relative_error(logits, expected) < close
    assert len(grads) == 8
    for name, grad in grads.items():
        assert grad.any() and relative_error(grad, expected_grads[name]) < close, name


def test_another_models_checkpoint(tmp_path: Path) -> None:
    model("olmoe", intermediate_size=64).save_pretrained(tmp_path)
    net = model("olmoe")
    with pytest.raises(exc.WrongCheckpoint, match=r"gate_up_proj is \(4, 128, 64\) in it"):
        experts.quantize(net, checkpoint=tmp_path)
    with pytest.raises(exc.WrongCheckpoint, match=r"router\.weight is not in it"):
        experts.quantize(model("gpt_oss"), checkpoint=tmp_path)
    assert not [*stacks(net)]


def test_a_checkpoint_that_cannot_be_read_to_its_end_changes_nothing(tmp_path: Path) -> None:
    """Its last projection is in codes without a scale, which shows when it is read."""
    state = {name: tensor.clone() for name, tensor in model("qwen3_moe").state_dict().items()}
    last = "model.layers.1.mlp.experts.down_proj"
    save_file({**state, last: state[last].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    net = model("qwen3_moe")
    with pytest.raises(exc.WrongCheckpoint, match=f"left as it was:\n  {last} is torch.float8"):
        experts.quantize(net, checkpoint=tmp_path)
    assert not [*stacks(net)]
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in state.items())


# --- what is packed already ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["mxfp4", "awq", "gptq", "bitsandbytes", "fp8"])
def test_a_quantized_checkpoint_is_refused(method: str, tmp_path: Path) -> None:
    """Its tensors are codes, some in the shape of what they stand for."""
    model("olmoe").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({**said, "quantization_config": {"quant_method": method}}))
    net = model("olmoe")
    for checkpoint in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(exc.AlreadyQuantized, match=f"quant_method='{method}'") as error:
            experts.quantize(net, checkpoint=checkpoint)
        assert ("dequantize=True" in str(error.value)) == (method in ("mxfp4", "fp8"))
    assert not [*stacks(net)]


def test_codes_of_another_library_are_refused() -> None:
    net = model("olmoe")
    layer = net.model.layers[1].mlp.experts
    codes = layer.down_proj.detach().to(torch.float8_e4m3fn)
    layer.down_proj = nn.Parameter(codes, requires_grad=False)
    with pytest.raises(exc.AlreadyQuantized, match=r"layers\.1.*float8_e4m3fn"):
        experts.quantize(net)
    assert not [*stacks(net)]


def test_experts_that_torchao_packs_are_read_as_they_are() -> None:
    net = model("olmoe")
    layer = net.model.layers[1].mlp.experts
    rows = quantization.PerRow()
    packed = quantization.Int8Tensor.from_hp(layer.down_proj.detach(), granularity=rows)
    layer.down_proj = nn.Parameter(packed, requires_grad=False)
    experts.quantize(net)
    assert layer.down_proj.format == "int8_row"
    assert torch.equal(layer.down_proj.dequantize(torch.float32), packed.dequantize())


def test_another_format_over_packed_experts(told: list[str]) -> None:
    net = experts.quantize(model("olmoe"), "nf4_b64", targets=["down_proj"])
    assert experts.quantize(net, "nf4_b64", targets=["down_proj"]) is net  # has what is asked for
    with pytest.raises(exc.NothingToQuantize, match="packed as nf4_b64 already"):
        experts.quantize(net, "kbit3_e4m4", targets=["down_proj"])
    assert not told
    experts.quantize(net, "kbit3_e4m4")
    assert told == ["2 projections of experts are packed already and stay as nf4_b64"]
    assert {name.rpartition(".")[2]: stack.format for name, stack in stacks(net)} == {
        "gate_up_proj": "kbit3_e4m4",
        "down_proj": "nf4_b64",
    }


# --- inductor_q.kbit on models with experts -----------------------------------------------------


def test_kbit_saves_how_experts_are_packed(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    net = adapted("gpt_oss", "nf4_b64")
    kbit.save(net, path)
    other = experts.quantize(model("gpt_oss").requires_grad_(False), "nf4_b64")
    experts.add_lora(other, r=4, alpha=64)
    kbit.load(other, path)
    torch.testing.assert_close(step(other, tokens())[0], step(net, tokens())[0], rtol=0, atol=0)
    fp4 = adapted("gpt_oss", "fp4_b64")
    before, _ = step(fp4, tokens())
    with pytest.raises(exc.CorruptQuantState, match=r"format of .* should be fp4_b64, is nf4_b64"):
        kbit.load(fp4, path)
    torch.testing.assert_close(step(fp4, tokens())[0], before, rtol=0, atol=0)
    with pytest.raises(exc.WrongCheckpoint, match="packed as nf4_b64 in it"):
        kbit.load(model("gpt_oss"), path)


def test_kbit_saves_no_layers_of_bitsandbytes(tmp_path: Path) -> None:
    net = inductor_q.quantize(model("olmoe"), "nf4", progress=False)
    for foreign in (net, packed_by_bnb()):
        with pytest.raises(exc.CannotSave, match="keeps more than tensors"):
            kbit.save(foreign, tmp_path / "m.safetensors")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_dequantize_model_unpacks_experts(family: str, tmp_path: Path) -> None:
    net: Any = experts.quantize(model(family))
    logits, _ = step(net, tokens())
    kbit.dequantize_model(net)
    assert not [*stacks(net)]
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)
    net.save_pretrained(tmp_path)
    again: Any = type(net).from_pretrained(tmp_path)
    torch.testing.assert_close(step(again, tokens())[0], logits, **CLOSE)
    net = adapted(family)
    logits, _ = step(net, tokens())
    kbit.dequantize_model(net)
    assert {stack.format for _, stack in stacks(net)} == {"dense"}
    torch.testing.assert_close(step(net, tokens())[0], logits, **CLOSE)


def test_save_pretrained_writes_nothing_that_does_not_load(tmp_path: Path) -> None:
    packed: Any = kbit.quantize_model(model("olmoe"), 4, progress=False)
    net: Any
    for net in (experts.quantize(model("olmoe")), adapted("olmoe", "dense"), packed):
        with pytest.raises(exc.CannotSave, match=r"layers\.0.*kbit\.save.*save_adapter"):
            net.save_pretrained(tmp_path)
        copy.deepcopy(net).load_state_dict(net.state_dict())
    assert not [*tmp_path.glob("*.safetensors")]

    def _save_checkpoint() -> None:  # as a trainer's, which resumes from it
        packed.save_pretrained(tmp_path)

    _save_checkpoint()
    assert [*tmp_path.glob("*.safetensors")]


def test_peft_saves_no_adapters_of_experts(told: list[str], tmp_path: Path) -> None:
    warn_once.cache_clear()
    net: Any = kbit.quantize_model(model("olmoe"), {"model.layers.0.self_attn.q_proj": 4})
    net = peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj"]))
    net.save_pretrained(tmp_path)
    assert not told
    experts.add_lora(net)
    net.save_pretrained(tmp_path)
    (warning,) = told
    assert "experts.save_adapter" in warning
    experts.save_adapter(net, tmp_path)
    assert len(told) == 1


# --- errors leave a model that computes ---------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", "llm_int8", "int8_row", "nvfp4_tiles", "hqq4_g64_bf16"])
def test_a_format_that_is_only_read(format: str) -> None:
    net = model("olmoe")
    logits, _ = step(net, tokens())
    with pytest.raises(exc.NoQuantizer, match=r"stacks of experts to it\. Quantize to nf4, fp4, "):
        experts.quantize(net, format)
    assert not [*stacks(net)]
    torch.testing.assert_close(step(net, tokens())[0], logits, rtol=0, atol=0)


NOT_OF_STACKS = [
    ({"gguf": {}}, exc.WrongScheme, "'gguf' is none of"),
    (4, exc.WrongScheme, "expected a name, a mapping or"),
    ("nf5", exc.UnknownFormat, "did you mean 'nf4'"),
    ({"torchao": {"format": "int8"}}, exc.NoQuantizer, "int8_row .* stacks of experts to it"),
    ({"torchao": {"format": "nvfp4"}}, exc.NoQuantizer, "nvfp4_tiles .* Quantize to .*nvfp4"),
    (quantization.Int8WeightOnlyConfig(), exc.WrongScheme, "no stacks of experts. Ask for nf4, "),
    ({"bnb": {"quant_storage": "bfloat16"}}, exc.WrongScheme, "Leave it out; .*experts.shard"),
    (
        transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["mlp.experts"]),
        exc.WrongScheme,
        r"it leaves model\.layers\.0\.mlp\.experts alone.* by targets=",
    ),
]


@pytest.mark.parametrize(("asked", "error", "problem"), NOT_OF_STACKS, ids=str)
def test_what_no_stack_can_be(asked: Any, error: Any, problem: str) -> None:
    net = model("olmoe")
    before = dict(net.named_parameters())
    with pytest.raises(error, match=problem):
        experts.quantize(net, asked)
    assert all(parameter is before[name] for name, parameter in net.named_parameters())


def test_tiles_that_no_projection_may_share() -> None:
    """A format that does not fit the last projection changes none."""
    net = model("qwen3_moe")
    config = copy.deepcopy(net.config)
    config.moe_intermediate_size = 64
    config.hidden_size = 64  # so many rows has the second projection, and 128 the first
    net = type(net)(config)
    before = dict(net.named_parameters())
    with pytest.raises(exc.WrongScheme, match="rows to a scale do not divide"):
        experts.quantize(net, "fp8_e4m3_128x128")
    after = dict(net.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in after)


@pytest.mark.parametrize("format", ["kbit4_e4m4", "mxfp4"])
def test_weights_that_cannot_be_packed(format: str) -> None:
    net = model("olmoe")
    net.model.layers[1].mlp.experts.down_proj.data[0, 0] = torch.nan
    with pytest.raises(exc.NotFinite):
        experts.quantize(net, format)
    logits, _ = step(unpacked(net), tokens())
    torch.testing.assert_close(step(net, tokens())[0], logits, equal_nan=True, **CLOSE)


def test_an_adapter_that_lacks_a_tensor(tmp_path: Path) -> None:
    experts.save_adapter(adapted("olmoe", "dense"), tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    del state[sorted(state)[-1]]
    save_file(state, tmp_path / "adapter_model.safetensors")
    net = model("olmoe")
    logits, _ = step(net, tokens())
    with pytest.raises(exc.CorruptAdapter, match=r"layers\.1\..*is missing"):
        experts.load_adapter(net, tmp_path)
    assert not [*stacks(net)]
    torch.testing.assert_close(step(net, tokens())[0], logits, rtol=0, atol=0)


def test_a_second_adapter_does_not_discard_the_first() -> None:
    net = model("olmoe").requires_grad_(False)
    first = experts.add_lora(net, targets=["down_proj"])
    with pytest.raises(exc.AlreadyAdapted, match=r"layers\.0\.mlp\.experts\.down_proj has an"):
        experts.add_lora(net)
    assert all(any(p is q for q in net.parameters()) for p in first)
    assert len([*stacks(net)]) == 2
    experts.add_lora(net, targets=["gate_up_proj"])
    assert len([*stacks(net)]) == 4


# --- mistakes -----------------------------------------------------------------------------------


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(exc.NoExperts, match="Linear"):
        experts.quantize(nn.Linear(2, 2))
    with pytest.raises(exc.UnknownProjection, match="Known: gate_up_proj"):
        experts.quantize(model("olmoe"), targets=["down"])
    net = model("olmoe")
    with pytest.raises(exc.UnknownFormat):
        experts.quantize(net, "nf5")
    assert not [*stacks(net)]
    with pytest.raises(exc.CorruptAdapter, match="no adapters"):
        experts.save_adapter(experts.quantize(model("olmoe")), tmp_path)
    net = adapted("olmoe")
    peft.get_peft_model(
        model("olmoe"),
        peft.LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"]),
    ).save_pretrained(tmp_path)
    with pytest.raises(exc.CorruptAdapter, match="q_proj"):
        experts.load_adapter(net, tmp_path)
    with pytest.raises(exc.CorruptAdapter, match="not"):
        experts.load_adapter(model("olmoe", hidden_size=128), tmp_path)
