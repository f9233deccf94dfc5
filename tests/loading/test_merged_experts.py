"""PEFT's merges in models whose experts are packed and have adapters of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import inductor_q
from inductor_q import exc, experts, kbit
from inductor_q.experts.adapter import adapter_state_dict
from inductor_q.experts.modules import expert_layers
from inductor_q.experts.stack import note_ranks
from inductor_q.loading.merged_experts import merge_experts, unmerge_experts
from inductor_q.loading.merged_values import KEPT
from inductor_q.log import warn_once
from inductor_q.testing import relative_error
from tests.loading.test_merges import peft_as_it_comes as peft_as_it_comes
from tests.loading.test_merges import put_back
from tests.support.compiling import SMALL, no_codegen
from tests.support.moe_models import awaken, model, tokens

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

PROJECTIONS = ("gate_up_proj", "down_proj")

#: Float32 throughout: sums in another order, through two layers.
CLOSE = 1e-5


def adapted(family: str, format: str, targets: Any = PROJECTIONS) -> Any:
    """A PEFT model with adapters on attention and on packed experts, none of them zero."""
    net = experts.quantize(model(family), format)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    whole = peft.get_peft_model(net, config).eval()
    awaken(experts.add_lora(whole, r=4, alpha=8, targets=targets))
    return whole


def stacks(net: nn.Module) -> dict[str, experts.ExpertStack]:
    return {n: m for n, m in net.named_modules() if isinstance(m, experts.ExpertStack)}


def by_hand(stack: experts.ExpertStack, layer: Any) -> Tensor:
    """W + s B A of each expert in float64, as the layer's parameter lies."""
    assert stack.lora_A is not None and stack.lora_B is not None
    weight = stack.dequantize(torch.float32).double()
    weight = weight.mT if stack.transposed else weight
    for e in range(stack.num_experts):
        weight[e] += stack.scaling * stack.lora_B[e].double() @ stack.lora_A[e].double()
    return weight.mT if layer.is_transposed else weight


def logits(net: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = net(tokens()).logits
    return found


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("qwen3_moe", "nf4_b64"),
        ("qwen3_moe", "nf4_b64_nested"),  # whose blocks of scales span experts
        ("mixtral", "mxfp4"),
        ("olmoe", "dense"),
        ("gpt_oss", "mxfp4"),  # a row for each output, where the layer's parameters are transposed
        ("gpt_oss", "kbit4"),
    ],
)
def test_experts_merge_with_the_model(family: str, format: str) -> None:
    """Their parameters are the sums, and unmerging puts the same stacks back, bit by bit."""
    whole = adapted(family, format)
    before, expected = stacks(whole), logits(whole)
    packed = {n: [t.clone() for t in stack.operands] for n, stack in before.items()}
    layers = {n: whole.get_submodule(n.rpartition(".")[0]) for n in before}
    sums = {n: by_hand(stack, layers[n]) for n, stack in before.items()}
    for _ in range(2):
        whole.merge_adapter()
        assert not stacks(whole)
        for name, total in sums.items():
            values = whole.get_parameter(name)
            assert values.dtype is torch.float32 and not values.requires_grad
            assert relative_error(values, total) < 1e-7  # half of float32's last bit
        assert relative_error(logits(whole), expected) < CLOSE
        whole.unmerge_adapter()
        after = stacks(whole)
        assert after.keys() == before.keys()
        for name, stack in after.items():
            assert stack is before[name]
            assert all(map(torch.equal, stack.operands, packed[name]))
        # PEFT's own layers subtract what they have added.
        assert relative_error(logits(whole), expected) < CLOSE
    merged = whole.merge_and_unload()
    assert not stacks(merged) and not any("lora" in name for name, _ in merged.named_parameters())
    assert relative_error(logits(merged), expected) < CLOSE


def test_a_merged_mixture_is_loaded_by_transformers(tmp_path: Path, told: list[str]) -> None:
    warn_once.cache_clear()
    whole = adapted("qwen3_moe", "mxfp4")
    expected = logits(whole)
    with pytest.raises(exc.CannotSave):
        whole.base_model.model.save_pretrained(tmp_path)
    whole.merge_and_unload().save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert relative_error(logits(loaded), expected) < CLOSE
    said = [line for line in told if "takes 4 bytes an element, more than mxfp4 did" in line]
    assert len(said) == 1 and "kept" not in said[0]


def test_what_is_kept_is_said(told: list[str]) -> None:
    warn_once.cache_clear()
    adapted("qwen3_moe", "mxfp4").merge_adapter()
    (said,) = [line for line in told if "takes 4 bytes an element, more than mxfp4 did" in line]
    assert said.endswith("unmerged, or unloaded, as merge_and_unload() does at its end")


def test_16_bit_values_are_rounded_once() -> None:
    """To the embedding's dtype, from a sum in float32 of adapters in 16 bits."""
    whole = adapted("mixtral", "mxfp4").to(torch.bfloat16)
    (name, stack), *_ = stacks(whole).items()
    assert stack.lora_A is not None and stack.lora_A.dtype is torch.bfloat16
    total = by_hand(stack, whole.get_submodule(name.rpartition(".")[0]))
    with torch.autocast("cpu", torch.bfloat16):
        whole.merge_adapter()
    values = whole.get_parameter(name)
    assert values.dtype is torch.bfloat16
    error = (values.double() - total).abs()
    assert (error <= 2**-8 * 1.001 * total.abs() + 1e-6).all()


def test_adapters_are_saved_while_they_are_merged(tmp_path: Path) -> None:
    """As PEFT's are: the same tensors, which then load into another model."""
    whole = adapted("mixtral", "mxfp4")
    expected, output = adapter_state_dict(whole), logits(whole)
    whole.merge_adapter()
    experts.save_adapter(whole, tmp_path)
    whole.unmerge_adapter()
    other = adapted("mixtral", "mxfp4")
    for stack in stacks(other).values():
        assert stack.lora_A is not None
        stack.lora_A.data.zero_()
    experts.load_adapter(other, tmp_path)
    found = adapter_state_dict(other)
    assert found.keys() == expected.keys() and len(found) == 8
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert relative_error(logits(other), output) < CLOSE


def test_a_layer_of_experts_by_itself(tmp_path: Path) -> None:
    """Its projections have no path around them; it is saved, merged and refused as in a model."""
    layer: Any = expert_layers(experts.quantize(model("mixtral"), "mxfp4"))[
        "model.layers.0.mlp.experts"
    ]
    awaken(experts.add_lora(layer, r=4))
    expected = {name: part.clone() for name, part in adapter_state_dict(layer).items()}
    assert len(expected) == 4 and not any(".." in name for name in expected)
    experts.save_adapter(layer, tmp_path)
    awaken([p for p in layer.parameters() if p.requires_grad], seed=1)
    experts.load_adapter(layer, tmp_path)
    merge_experts(layer, keep=True)
    assert not stacks(layer)
    found = adapter_state_dict(layer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    unmerge_experts([(layer, name) for name in PROJECTIONS])
    with pytest.raises(exc.AlreadyAdapted, match=r"^gate_up_proj has"):
        experts.add_lora(layer)
    note_ranks(layer, 2)
    with pytest.raises(exc.CannotMerge, match="into gate_up_proj:"):
        experts.merge_lora(layer)


def test_stacks_without_an_adapter_stay_packed() -> None:
    whole = adapted("qwen3_moe", "mxfp4", targets=["down_proj"])
    expected = logits(whole)
    merged = whole.merge_and_unload()
    assert {name.rpartition(".")[2] for name in stacks(merged)} == {"gate_up_proj"}
    assert relative_error(logits(merged), expected) < CLOSE


def test_a_model_without_peft_merges_too() -> None:
    net = experts.quantize(model("qwen3_moe"), "nf4_b64")
    awaken(experts.add_lora(net, r=4))
    expected = logits(net)
    assert experts.merge_lora(net) is net and not stacks(net)
    assert relative_error(logits(net), expected) < CLOSE


@pytest.mark.parametrize("mixed", [False, True], ids=["PeftModel", "PeftMixedModel"])
def test_experts_go_with_any_tuner_of_pefts(mixed: bool) -> None:
    net = experts.quantize(model("mixtral"), "mxfp4")
    base = logits(net)
    config = peft.LoHaConfig(r=4, target_modules=["q_proj"])
    whole = peft.get_peft_model(net, config, mixed=mixed).eval()
    awaken(experts.add_lora(whole, r=4))
    expected = logits(whole)
    with whole.disable_adapter():
        assert relative_error(logits(whole), base) < CLOSE
    whole.merge_adapter()
    assert not stacks(whole) and relative_error(logits(whole), expected) < CLOSE
    whole.unmerge_adapter()
    assert len(stacks(whole)) == 4
    merged = whole.merge_and_unload()
    assert not stacks(merged) and relative_error(logits(merged), expected) < CLOSE


def quantize_anew(whole: Any, folder: Path) -> None:
    experts.quantize(whole, "dense", weights=lambda name, parameter: torch.zeros_like(parameter))


BESIDE: dict[str, Callable[[Any, Path], object]] = {
    "add_lora": lambda whole, folder: experts.add_lora(whole, r=2),
    "load_adapter": experts.load_adapter,
    "shard": lambda whole, folder: experts.shard(whole),
    "quantize": quantize_anew,
}


@pytest.mark.parametrize("asked", BESIDE)
def test_a_merged_adapter_is_not_left_in_the_weights(asked: str, tmp_path: Path) -> None:
    """By a call that would put a stack of the sum in their place: nothing could unmerge that."""
    whole = adapted("mixtral", "mxfp4", targets=["down_proj"])
    before, expected = stacks(whole), logits(whole)
    experts.save_adapter(whole, tmp_path)
    whole.merge_adapter()
    merged, values = stacks(whole), dict(whole.named_parameters())
    match = rf"{asked}.*experts\.down_proj.*unmerge_adapter"
    with pytest.raises(exc.StillMerged, match=match):
        BESIDE[asked](whole, tmp_path)
    assert stacks(whole) == merged and len(merged) == 2
    found = dict(whole.named_parameters())
    assert found.keys() == values.keys() and all(found[name] is values[name] for name in found)
    whole.unmerge_adapter()
    assert stacks(whole) == before
    assert relative_error(logits(whole), expected) < CLOSE


def test_what_is_not_merged_is_quantized_beside_what_is() -> None:
    whole = adapted("mixtral", "dense", targets=["down_proj"])
    before = stacks(whole)
    whole.merge_adapter()
    given: list[str] = []

    def weights(name: str, parameter: nn.Parameter) -> Tensor:
        given.append(name.rpartition(".")[2])
        return parameter.detach()

    experts.quantize(whole, "mxfp4", targets=["gate_up_proj"], weights=weights)
    assert given == ["gate_up_proj"] * 2
    whole.unmerge_adapter()
    after = stacks(whole)
    assert [stack.format for stack in after.values()] == ["mxfp4", "dense"] * 2
    assert all(after[name] is stack for name, stack in before.items() if "down_proj" in name)


def broken(whole: Any) -> experts.ExpertStack:
    """Put a NaN into the last adapter, and return its stack."""
    *_, last = stacks(whole).values()
    assert last.lora_B is not None
    last.lora_B.data[-1, 0, 0] = torch.nan
    return last


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_a_sum_that_is_not_finite_changes_nothing(merge: str) -> None:
    whole = adapted("mixtral", "mxfp4")
    before = stacks(whole)
    broken(whole)
    match = r"NaNs detected in the merged weights: .*layers\.1\.mlp\.experts\.down_proj"
    with pytest.raises(ValueError, match=match):
        getattr(whole, merge)(safe_merge=True)
    assert all(stack is before[name] for name, stack in stacks(whole).items())
    assert not whole.base_model.model.model.layers[0].self_attn.q_proj.merged


def test_a_sum_that_its_dtype_cannot_hold_is_not_finite() -> None:
    net = experts.quantize(model("mixtral").half(), "mxfp4")
    awaken(experts.add_lora(net, r=4))
    *_, last = stacks(net).values()
    assert last.lora_A is not None and last.lora_B is not None
    for part in (last.lora_A, last.lora_B):
        part.data[0, 0, 0] = part.data[0, :, 0] = 300.0  # 4 * 300 * 300, past float16's 65504
    assert last.merged(torch.float32).isfinite().all()
    with pytest.raises(ValueError, match=r"down_proj, in torch\.float16"):
        experts.merge_lora(net, safe=True)
    assert len(stacks(net)) == 4


def test_experts_come_back_where_another_layer_fails() -> None:
    whole = adapted("mixtral", "mxfp4")
    before = stacks(whole)
    layer = whole.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_B["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        whole.merge_adapter(safe_merge=True)
    assert stacks(whole) == before


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_lora"])
def test_a_merge_for_good_that_fails_in_the_middle_can_go_on(
    merge: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As where memory ends: here a matrix has another shape."""
    whole = adapted("mixtral", "mxfp4")
    expected, before = logits(whole), stacks(whole)
    *_, last = before.values()
    assert last.lora_B is not None
    values = last.lora_B.data
    last.lora_B.data = values[..., :1]
    with pytest.raises(RuntimeError, match="shape"):
        MERGES[merge](whole)
    said = (
        "merging failed after 3 of 4 projections of experts. The adapters of these are merged for"
    )
    assert said in caplog.text
    assert [*stacks(whole).values()] == [last]
    last.lora_B.data = values
    assert relative_error(logits(whole), expected) < CLOSE
    MERGES[merge](whole)
    assert not stacks(whole) and relative_error(logits(whole), expected) < CLOSE


def test_no_adapter_asked_for_merges_no_experts() -> None:
    whole = adapted("mixtral", "mxfp4")
    whole.merge_adapter(adapter_names=[])
    assert len(stacks(whole)) == 4


def test_what_happens_to_merged_experts_reaches_the_stacks() -> None:
    """A cast does; a copy is unmerged by itself; experts quantized anew stay merged."""
    whole = adapted("mixtral", "mxfp4")
    whole.merge_adapter()
    copied = copy.deepcopy(whole)
    whole.to(torch.bfloat16).unmerge_adapter()
    for stack in stacks(whole).values():
        assert stack.lora_A is not None and stack.lora_A.dtype is torch.bfloat16
        assert stack.format == "mxfp4"
    assert not stacks(copied)
    expected = logits(copied)
    experts.quantize(copied, "dense")
    copied.unmerge_adapter()
    dense = stacks(copied)
    assert len(dense) == 4 and all(stack.lora_A is None for stack in dense.values())
    for layer in copied.modules():  # attention is unmerged, and merged again here
        assert not vars(layer).get(KEPT)
    copied.merge_adapter()
    assert relative_error(logits(copied), expected) < CLOSE


def test_nothing_packed_comes_back_into_a_decoded_mixture() -> None:
    whole = adapted("mixtral", "mxfp4")
    expected = logits(whole)
    whole.merge_adapter()
    kbit.dequantize_model(whole)
    whole.unmerge_adapter()
    assert {stack.format for stack in stacks(whole).values()} == {"dense"}
    assert relative_error(logits(whole), expected) < CLOSE
    whole.merge_adapter()
    assert not stacks(whole) and relative_error(logits(whole), expected) < CLOSE


def test_stacks_come_back_in_the_mode_of_their_layer() -> None:
    whole = adapted("mixtral", "mxfp4")
    whole.merge_adapter()
    whole.train().unmerge_adapter()
    assert all(stack.training for stack in stacks(whole).values())
    assert not any(KEPT in vars(layer) for layer in whole.modules())


def unload(whole: Any) -> Any:
    return whole.unload()


def merge_lora(whole: Any) -> Any:
    return experts.merge_lora(whole).unload()  # type: ignore[operator]


@pytest.mark.parametrize("leave", [unload, merge_lora])
def test_what_is_merged_for_good_does_not_come_back(leave: Callable[[Any], Any]) -> None:
    """Neither out of the model that PEFT leaves, nor when PEFT is attached to that again."""
    whole = adapted("mixtral", "mxfp4")
    expected = logits(whole)
    whole.merge_adapter()
    net = leave(whole)
    again = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["k_proj"])).eval()
    again.merge_adapter()
    again.unmerge_adapter()
    assert not stacks(again) and relative_error(logits(again), expected) < CLOSE


def test_merge_lora_leaves_nothing_to_unmerge() -> None:
    whole = adapted("mixtral", "mxfp4")
    whole.merge_adapter()
    experts.merge_lora(whole).unmerge_adapter()  # type: ignore[operator]
    assert not stacks(whole)


def test_unloading_by_no_name_leaves_adapters_with_the_experts() -> None:
    whole = adapted("mixtral", "mxfp4")
    with whole.disable_adapter():
        base = logits(whole)
    whole.disable_adapter_layers()
    net = whole.merge_and_unload(adapter_names=[])
    assert len(stacks(net)) == 4 and all(s.lora_A is not None for s in stacks(net).values())
    assert relative_error(logits(net), base) > 0.01  # nothing of PEFT's is left that disables them


MERGES: dict[str, Callable[[Any], Any]] = {
    "merge_adapter": lambda whole: whole.merge_adapter(),
    "merge_and_unload": lambda whole: whole.merge_and_unload(),
    "merge_lora": experts.merge_lora,
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", MERGES)
def test_experts_under_fsdp_are_refused(how: str) -> None:
    whole = adapted("mixtral", "mxfp4")
    fully_shard(whole, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(exc.CannotMerge, match=r"fully_shard has cut.*get_model_state_dict"):
        MERGES[how](whole)
    assert len(stacks(whole)) == 4
    assert not whole.base_model.model.model.layers[0].self_attn.q_proj.merged


@pytest.mark.parametrize("how", MERGES)
def test_sharded_experts_are_refused(how: str) -> None:
    """Two processes are not needed to see it: a layer knows how many ranks share it."""
    whole = adapted("mixtral", "mxfp4")
    *_, layer = expert_layers(whole).values()
    note_ranks(layer, 2)
    with pytest.raises(exc.CannotMerge, match=r"shared by 2 ranks.*save_adapter.*load_adapter"):
        MERGES[how](whole)
    assert len(stacks(whole)) == 4
    assert not whole.base_model.model.model.layers[0].self_attn.q_proj.merged


def without_adapters(whole: Any) -> Tensor:
    """The logits of a copy whose adapters add zero."""
    copied = copy.deepcopy(whole)
    for name, parameter in copied.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    return logits(copied)


@pytest.mark.parametrize("merged", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_disabled_adapters_are_those_of_experts_too(compiled: bool, merged: bool) -> None:
    """What DPO, KTO and GRPO take for their reference; afterwards all adapters are on again."""
    whole = adapted("qwen3_moe", "mxfp4")
    expected, base = logits(whole), without_adapters(whole)
    assert relative_error(base, expected) > 0.01
    with no_codegen():
        if compiled:
            inductor_q.compile(whole, options=SMALL)
            assert relative_error(logits(whole), expected) < CLOSE
        for _ in range(2):  # each state has been met, the second time
            if merged:
                whole.merge_adapter()
                assert relative_error(logits(whole), expected) < CLOSE
            with whole.disable_adapter():
                assert relative_error(logits(whole), base) < CLOSE
            assert relative_error(logits(whole), expected) < CLOSE
            assert len(stacks(whole)) == 4
    torch._dynamo.reset()


def test_a_graph_of_the_users_is_of_adapters_on_or_off() -> None:
    """Dynamo looks at what disables a stack, also where nothing of PEFT's is in the graph."""
    net = experts.quantize(model("qwen3_moe"), "mxfp4")
    awaken(experts.add_lora(net, r=4))
    layer = expert_layers(net)["model.layers.0.mlp.experts"]
    whole = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    torch.manual_seed(0)
    x = torch.randn(8, layer.hidden_dim)
    given = x, torch.randint(layer.num_experts, (8, 2)), torch.rand(8, 2)
    call: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    on = call(*given)
    with whole.disable_adapter():
        off = call(*given)
        assert torch.equal(off, layer(*given)) and not torch.equal(off, on)
    assert torch.equal(call(*given), on)
    torch._dynamo.reset()


def test_nothing_trains_while_it_is_disabled() -> None:
    whole = adapted("mixtral", "mxfp4")
    with whole.disable_adapter():
        loss = whole(tokens()).logits.sum()
    assert not loss.requires_grad
    whole(tokens()).logits.sum().backward()
    for stack in stacks(whole).values():
        assert stack.lora_A is not None and stack.lora_A.grad is not None


def test_adapters_stay_disabled_whatever_happens_to_the_weight() -> None:
    """Also where they are merged, as PEFT's layers take theirs out again, or the weight decoded."""
    whole = adapted("mixtral", "mxfp4")
    expected, base = logits(whole), without_adapters(whole)
    with whole.disable_adapter():
        whole.merge_adapter()
        assert relative_error(logits(whole), base) < CLOSE
        kbit.dequantize_model(whole)
        assert relative_error(logits(whole), base) < CLOSE
    assert relative_error(logits(whole), expected) < CLOSE


def test_an_adapter_of_another_name_is_said_to_be_with_those_of_experts(told: list[str]) -> None:
    """As TRL's trainers switch to "ref" for a reference."""
    warn_once.cache_clear()
    whole = adapted("mixtral", "mxfp4")
    whole.add_adapter("ref", whole.peft_config["default"])
    whole.set_adapter("default")
    assert not any("set_adapter" in line for line in told)
    whole.set_adapter("ref")
    whole.set_adapter("default")
    (said,) = [line for line in told if "set_adapter" in line]
    assert "leaves the adapters of experts on" in said and "peft_config" in said


@pytest.mark.parametrize("kind", [peft.LoraConfig, peft.LoHaConfig])
@pytest.mark.parametrize("mixed", [False, True])
def test_adapters_of_experts_train_whatever_peft_adds(kind: Any, mixed: bool) -> None:
    """Before they are there or after; one that somebody has frozen stays so."""
    net = experts.quantize(model("mixtral"), "mxfp4")
    first, *others = experts.add_lora(net, r=4)
    first.requires_grad_(False)
    config = kind(r=4, target_modules=["q_proj"])
    whole = peft.get_peft_model(net, config, mixed=mixed)
    whole.add_adapter("second", config)
    assert not first.requires_grad and all(part.requires_grad for part in others)
    (*_, own) = (p for name, p in whole.named_parameters() if "q_proj.base_layer" in name)
    assert not own.requires_grad


def test_adapters_of_experts_do_not_train_in_inference() -> None:
    """But where another adapter trains, as beside the one of TRL's reference."""
    net = experts.quantize(model("mixtral"), "mxfp4")
    added = experts.add_lora(net, r=4)
    reference = peft.LoraConfig(r=4, target_modules=["q_proj"], inference_mode=True)
    whole = peft.get_peft_model(net, reference)
    assert not any(part.requires_grad for part in whole.parameters())
    for part in added:
        part.requires_grad_(True)
    whole.add_adapter("trained", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    whole.set_adapter("trained")
    whole.add_adapter("ref", reference)
    assert all(part.requires_grad for part in added)


def test_adapters_of_experts_that_do_not_train_are_told(told: list[str]) -> None:
    warn_once.cache_clear()
    net = experts.quantize(model("mixtral"), "mxfp4")
    added = experts.add_lora(net, r=4)
    net = peft.prepare_model_for_kbit_training(net, use_gradient_checkpointing=False)
    inductor_q.compile(net)
    assert not any("are frozen" in line for line in told)  # nothing trains
    whole = inductor_q.compile(peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj"])))
    (said,) = [line for line in told if "are frozen" in line]
    assert "add_lora after" in said and "prepare_model_for_kbit_training" in said
    warn_once.cache_clear()
    for part in added:
        part.requires_grad_(True)
    inductor_q.compile(whole)
    assert len([line for line in told if "are frozen" in line]) == 1


@pytest.mark.parametrize("by", ["add_lora", "load_adapter"])
def test_adapters_by_any_call_can_be_disabled(by: str, tmp_path: Path) -> None:
    whole = adapted("mixtral", "mxfp4")
    experts.save_adapter(whole, tmp_path)
    put_back()
    net = model("mixtral")
    other = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["q_proj"])).eval()
    base = logits(other)
    if by == "add_lora":
        awaken(experts.add_lora(other, r=4))
    else:
        experts.load_adapter(other, tmp_path)
    assert relative_error(logits(other), base) > 0.01
    with other.disable_adapter():
        assert relative_error(logits(other), base) < CLOSE
