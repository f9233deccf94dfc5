"""The faults that `qfuse doctor --model` knows, each in a real model: that the check sees it, that
the fault is real, and that the remedy ends both."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import nn
from torch._dynamo import config

import inductor_q.experts
from inductor_q import testing
from inductor_q.diagnostics import Finding, check_model
from tests.support import fp8_models
from tests.support.captured import CapturedStage
from tests.support.quantized import packs_on_cpu

EXPERTS = ("gate_up_proj", "down_proj")
IDS = torch.arange(32).reshape(2, 16)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def finding(model: nn.Module, check: str) -> Finding:
    """What `check` says of the model; there is exactly one such line."""
    [found] = [f for f in check_model(model) if f.check == check]
    return found


def traced(model: nn.Module, call: Callable[[nn.Module], object]) -> testing.CompileTrace:
    """`call` on the compiled model (or on one that has compiled parts), under the trace."""
    parts = any(m._compiled_call_impl is not None for m in model.modules())
    with testing.CompileTrace() as trace:
        call(model if parts else torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    return trace


def step(model: nn.Module) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()


def from_config(config: Any) -> Any:
    torch.manual_seed(0)
    build: Any = transformers.AutoModelForCausalLM.from_config
    return build(config, dtype=torch.bfloat16)


def moe(**lora: Any) -> Any:
    model = from_config(testing.tiny_qwen3_moe_config(num_hidden_layers=1))
    return adapt(model, **lora)


def adapt(model: Any, **lora: Any) -> Any:
    settings = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"], **lora}
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


def test_a_qlora_llama_has_no_fault() -> None:
    model = testing.qlora_model(testing.tiny_llama_config())
    assert {f.status for f in check_model(model)} == {"ok"}
    assert finding(model, "compute_dtype").found == "bfloat16"
    assert not traced(model, step).breaks
    assert {f.status for f in check_model(model)} == {"ok"}


def test_a_state_that_lacks_a_part() -> None:
    model = testing.qlora_model(testing.tiny_llama_config())
    layer = model.base_model.model.model.layers[1].mlp.up_proj.base_layer
    absmax, layer.weight.quant_state.absmax = layer.weight.quant_state.absmax, None
    found = finding(model, "quant_state")
    assert found.status == "fail" and "layers.1.mlp.up_proj): absmax" in found.found
    with pytest.raises(AttributeError, match="'NoneType'"):  # the fault is real
        step(model)
    layer.weight.quant_state.absmax = absmax
    assert finding(model, "quant_state").status == "ok"


def test_a_plain_model_has_no_fault() -> None:
    assert {f.status for f in check_model(nn.Linear(4, 4))} == {"ok"}


# --- bitsandbytes -------------------------------------------------------------------------------


def test_compute_dtype_left_float32() -> None:
    bits_and_bytes_config: Any = transformers.BitsAndBytesConfig
    dtype = bits_and_bytes_config(load_in_4bit=True).bnb_4bit_compute_dtype
    layer = testing.quantized_linear(torch.randn(64, 64), compute_dtype=dtype)
    found = finding(nn.Sequential(nn.Identity(), layer), "compute_dtype")
    assert found.status == "warn"
    assert found.found == "1 4-bit layer (1) compute in float32"
    assert "bnb_4bit_compute_dtype=torch.bfloat16" in found.remedy
    layer.compute_dtype = torch.bfloat16
    assert finding(layer, "compute_dtype").status == "ok"


def test_a_bias_that_the_first_call_would_cast() -> None:
    """As `prepare_model_for_kbit_training` leaves those of Qwen2."""
    layer = testing.quantized_linear(torch.randn(64, 64), torch.randn(64))
    model, x = nn.Sequential(nn.Identity(), layer), torch.randn(2, 64)

    def run(model: Any) -> None:
        model(x.clone().requires_grad_())

    found = finding(model, "bias_dtype")
    assert found.status == "warn"
    assert found.found == "1 4-bit layer (1): the first call casts the bias in place"
    assert traced(model, run).breaks
    layer.bias.data = layer.bias.data.float()  # as it was before that call
    exec(found.remedy, {"model": model})
    assert finding(model, "bias_dtype").status == "ok"
    torch._dynamo.reset()
    trace = traced(model, run)
    assert (trace.graphs, trace.breaks) == (1, [])


@packs_on_cpu
def test_weights_that_inference_packs_lose_gradients() -> None:
    """In eager mode: bitsandbytes' own fault, on wherever the CPU has its kernel."""

    def build() -> nn.Sequential:
        layers = (testing.lora_linear(64, 64, cpu_packing=True, seed=seed) for seed in (0, 1))
        return nn.Sequential(*layers)

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model.eval()(x)
        model.train()

    def gradient(model: nn.Sequential) -> torch.Tensor:
        """Of the first layer's adapter, in eager mode."""
        model(x).float().sum().backward()
        return torch.cat([p.grad.flatten() for p in model[0].parameters() if p.grad is not None])

    x = torch.randn(4, 64, dtype=torch.bfloat16)
    model, expected = build(), gradient(build())
    found = finding(model, "cpu_packing")
    assert found.status == "warn"
    assert "the first inference call will pack 2 4-bit layers (0.proj, ...)" in found.found
    evaluate(model)
    assert testing.relative_error(gradient(model), expected) > 0.1
    broken = finding(model, "cpu_packing")
    assert broken.status == "fail"
    assert "2 4-bit layers (0.proj, ...) packed for inference: no gradient" in broken.found
    assert finding(model.eval(), "cpu_packing").status == "warn"
    model.zero_grad()
    exec(broken.remedy, {"model": model})
    evaluate(model)
    assert testing.relative_error(gradient(model), expected) < 0.01
    model = build()
    exec(found.remedy, {"model": model})
    assert finding(model, "cpu_packing").status == "ok"
    evaluate(model)
    assert torch.equal(gradient(model), expected)


def int8(threshold: float) -> nn.Sequential:
    layer = testing.bitsandbytes().nn.Linear8bitLt(
        64, 64, bias=False, has_fp16_weights=False, threshold=threshold
    )
    return nn.Sequential(layer).to("cpu")


def outlier(model: nn.Module) -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    x[0, 0] = 20.0
    model(x)


def test_int8_outliers_in_inference() -> None:
    model = int8(6.0).eval()
    found = finding(model, "int8_outliers")
    assert found.status == "warn"
    assert "1 8-bit layer (0) with threshold 6" in found.found
    assert traced(model, outlier).breaks


def test_int8_outliers_with_dynamic_output_shapes() -> None:
    remedy = finding(int8(6.0).eval(), "int8_outliers").remedy
    assert remedy.startswith("torch._dynamo.config.capture_dynamic_output_shape_ops = True")
    with config.patch(capture_dynamic_output_shape_ops=True):
        model = int8(6.0).eval()
        assert finding(model, "int8_outliers").status == "ok"
        assert not traced(model, outlier).breaks


@pytest.mark.parametrize(("threshold", "training"), [(0.0, False), (6.0, True)])
def test_int8_without_a_decomposition(threshold: float, training: bool) -> None:
    """Without a threshold; and on a CPU in training, where bitsandbytes takes another path."""
    model = int8(threshold).train(training)
    assert finding(model, "int8_outliers").status == "ok"
    assert not traced(model, outlier).breaks


# --- experts ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_experts_eager_and_the_way_out() -> None:
    model = moe()
    assert finding(model, "experts").status == "ok"
    model.set_experts_implementation("eager")
    found = finding(model, "experts")
    assert found.status == "warn"
    assert found.found.startswith(
        '"eager" in 1 layer (base_model.model.model.layers.0.mlp.experts)'
    )
    assert traced(model, step).breaks
    exec(found.remedy, {"model": model})
    assert finding(model, "experts").status == "ok"
    assert not traced(model, step).breaks


def test_experts_batched_in_training_only() -> None:
    model = moe()
    grouped = saved(model)
    model.set_experts_implementation("batched_mm")
    assert finding(model, "experts").status == "warn"
    assert saved(model) > 1.5 * grouped
    assert finding(model.eval(), "experts").status == "ok"


def saved(model: nn.Module) -> int:
    return testing.count_saved_bytes(lambda: model(input_ids=IDS, labels=IDS).loss, model).total


@pytest.mark.slow
def test_target_parameters_under_compile_and_the_way_out() -> None:
    model = moe(target_parameters=[f"mlp.experts.{name}" for name in EXPERTS])
    found = finding(model, "target_parameters")
    assert found.status == "warn"
    assert "LoRA on 2 parameters" in found.found
    assert len(traced(model, step).breaks) > 5
    torch._dynamo.reset()
    exec(found.remedy, {"model": model, "inductor_q": inductor_q})
    assert finding(model, "target_parameters").status == "ok"
    assert not traced(model, step).breaks


def quantized_experts(**lora: Any) -> Any:
    model = from_config(testing.tiny_qwen3_moe_config(num_hidden_layers=1))
    for name in EXPERTS:
        replace_parameter_4bit(model.model.layers[0].mlp.experts, name, quant_type="nf4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # PEFT: "no parameter was matched"
        return adapt(model, **lora)


def test_target_parameters_silently_without_parameters() -> None:
    names = [f"mlp.experts.{name}" for name in EXPERTS]
    model = quantized_experts(target_parameters=names)
    assert not [n for n, _ in model.named_parameters() if "lora" in n and "experts" in n]
    found = finding(model, "target_parameters")
    assert found.status == "fail"
    assert "no LoRA parameters were made for mlp.experts.down_proj" in found.found
    assert "4-bit parameters of bitsandbytes hide from PEFT" in found.found
    model = quantized_experts()
    assert finding(model, "target_parameters").status == "ok"
    exec(found.remedy, {"model": model, "inductor_q": inductor_q})
    assert not traced(model, step).breaks
    adapters = [p for n, p in model.named_parameters() if "lora" in n and "experts" in n]
    assert len(adapters) == 4
    assert all(p.grad is not None for p in adapters)


def test_target_parameters_that_reach_quantized_experts_lose_gradients() -> None:
    """With their full names PEFT finds them, and one of two nested adapters never trains."""
    names = [f"model.layers.0.mlp.experts.{name}" for name in EXPERTS]
    model = quantized_experts(target_parameters=names)
    found = finding(model, "target_parameters")
    assert found.status == "fail"
    assert "gradients are lost" in found.found
    step(model)
    adapters = [p for n, p in model.named_parameters() if "lora" in n and "experts" in n]
    assert [p.grad is None for p in adapters].count(True) == len(adapters) / 2


def test_target_parameters_that_match_nothing() -> None:
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        model = moe(target_parameters=["mlp.experts.up_proj"])
    found = finding(model, "target_parameters")
    assert (found.status, "hide" in found.found) == ("fail", False)
    assert found.remedy.startswith("LoraConfig(target_parameters=")


# --- checkpointing ------------------------------------------------------------------------------


def checkpointed(reentrant: bool) -> Any:
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = testing.qlora_model(config, randomize_adapters=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    step(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
def test_require_grads_hook_and_the_way_out() -> None:
    model = checkpointed(reentrant=False)
    found = finding(model, "require_grads_hook")
    assert found.status == "warn"
    assert "make_inputs_require_grads on base_model.model.model.embed_tokens" in found.found
    assert len(traced(model, step).breaks) >= 3
    before = gradients(model)
    torch._dynamo.reset()
    exec(found.remedy, {"model": model})
    assert finding(model, "require_grads_hook").status == "ok"
    assert not traced(model, step).breaks
    after = gradients(model)
    assert len(after) == len(before) == 14  # A and B of seven projections
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_reentrant_checkpointing_is_mended_with_the_hook() -> None:
    """Without the hook, reentrant checkpointing would compute no gradient at all."""
    model = checkpointed(reentrant=True)
    before = gradients(model)
    exec(finding(model, "require_grads_hook").remedy, {"model": model})
    assert finding(model, "require_grads_hook").status == "ok"
    after = gradients(model)
    assert len(after) == len(before) == 14
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_whose_handles_were_lost(reentrant: bool) -> None:
    model = checkpointed(reentrant)
    model.enable_input_require_grads()
    model.disable_input_require_grads()
    assert finding(model, "require_grads_hook").status == "warn", "transformers kept one handle"
    model.enable_input_require_grads()
    exec(finding(model, "require_grads_hook").remedy, {"model": model})
    assert finding(model, "require_grads_hook").status == "ok"
    assert len(gradients(model)) == 14


# --- what was compiled before -------------------------------------------------------------------


def test_an_adapter_added_after_the_compile() -> None:
    model = testing.qlora_model(testing.tiny_llama_config(num_hidden_layers=1))
    compiled: Any = torch.compile(model, backend="eager")
    assert finding(compiled, "late_adapter").found == "nothing was compiled yet"
    step(compiled)
    assert finding(compiled, "late_adapter").status == "ok"
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    model.add_adapter("second", lora)
    assert finding(compiled, "late_adapter").status == "ok", "it is not active"
    model.set_adapter("second")
    found = finding(compiled, "late_adapter")
    assert found.status == "warn"
    assert found.found == "second: active, and in no graph compiled so far"
    with testing.CompileTrace() as trace:
        step(compiled)
    assert len(trace.recompiles) == 1
    assert finding(compiled, "late_adapter").status == "ok"


def test_peft_around_a_model_that_was_compiled_and_run() -> None:
    model = from_config(testing.tiny_llama_config(num_hidden_layers=1))
    model.compile(backend="eager")
    step(model)
    found = finding(adapt(model), "late_adapter")
    assert (found.status, found.found.partition(":")[0]) == ("warn", "default")


def regions(widths: list[int]) -> nn.ModuleList:
    layers = nn.ModuleList(testing.quantized_linear(torch.randn(n, 64)) for n in widths)
    for layer in layers:
        layer.compile(backend="eager")
    return layers


def run_each(layers: nn.Module) -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    for layer in layers.children():
        layer(x)


def hit_the_limit() -> bool:
    from torch._dynamo.utils import counters

    return any("recompile limit" in reason for reason in counters["unimplemented"])


def test_more_shapes_than_the_recompile_limit_and_the_way_out() -> None:
    layers = regions([64 * n for n in range(1, 11)])
    found = finding(layers, "compiled_regions")
    assert found.status == "fail"
    assert "10 distinct sets of shapes go through Linear4bit.forward" in found.found
    traced(layers, run_each)
    assert hit_the_limit()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with config.patch(recompile_limit=int(found.remedy.rpartition("=")[2])):
        assert finding(layers, "compiled_regions").status == "ok"
        traced(layers, run_each)
    assert not hit_the_limit()


def test_layers_that_are_alike_share_one_graph() -> None:
    layers = regions([64] * 10)
    assert finding(layers, "compiled_regions").status == "ok"
    assert not traced(layers, run_each).recompiles


def with_softcap() -> Any:
    sizes = testing.tiny_llama_config(num_hidden_layers=1).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    given: Any = {n: sizes[n] for n in (*names, "num_attention_heads", "num_key_value_heads")}
    return from_config(transformers.Gemma2Config(**given))


def with_quantized_head() -> Any:
    model = from_config(testing.tiny_llama_config(num_hidden_layers=1))
    model.lm_head = testing.quantized_linear(model.lm_head.weight.detach())
    return model


@pytest.mark.parametrize(
    ("make", "what"),
    [(with_softcap, "final_logit_softcapping=30.0"), (with_quantized_head, "is quantized")],
)
def test_a_head_whose_loss_keeps_all_logits(make: Callable[[], Any], what: str) -> None:
    model = make()
    found = finding(model, "loss_head")
    assert found.status == "warn" and what in found.found
    stage = CapturedStage("chunk_loss", **{"qfuse.loss": "chunked"})
    compiled: Any = torch.compile(model, backend=stage)
    compiled(input_ids=IDS, labels=IDS)
    assert [bool(site.rejected) for site in stage.sites] == [True]
    plain = from_config(testing.tiny_llama_config(num_hidden_layers=1))
    assert finding(plain, "loss_head").status == "ok"


def test_fp8() -> None:
    """Layers of both kinds are left to transformers, until the remedy has taken them over."""
    model = fp8_models.net("moe")
    linears, experts = (found for found in check_model(model) if found.check == "fp8")
    assert (linears.status, linears.found) == (
        "warn",
        "4 FP8Linears (model.layers.0.self_attn.q_proj, ...) quantize their input as well, and are "
        "left to their library",
    )
    assert experts.found.startswith("1 FP8Experts (model.layers.0.mlp.experts) quantize")
    with pytest.raises(ImportError, match="finegrained-fp8"):  # here; no pass reads it on a GPU
        step(model)
    exec(linears.remedy, {"model": model})
    assert finding(model, "fp8").status == "ok"
    assert not traced(model, step).breaks
