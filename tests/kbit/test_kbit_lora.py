"""LoRA on k-bit layers: PEFT attaches, saves and loads; every pass does what it does for NF4."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import kbit, testing
from inductor_q.backend import qfuse
from tests.support.compiling import SMALL, Between, Compiled, compile_step, no_codegen, step

peft = pytest.importorskip("peft")

BF16 = torch.bfloat16
N, K, R, M = 256, 192, 8, 48
FORMATS = [(2, "e4m4"), (3, "fp16"), (4, "e4m4"), (5, "e4m4")]


class One(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj: nn.Module = nn.Linear(K, N, bias=bias, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x)
        return y


def config(**settings: Any) -> Any:
    arguments: dict[str, Any] = {
        "r": R,
        "lora_alpha": 2 * R,
        "target_modules": ["proj"],
        **settings,
    }
    return peft.LoraConfig(**arguments)


def adapted(k: int = 4, absmax: str = "e4m4", *, bias: bool = False, **settings: Any) -> nn.Module:
    """A k-bit layer under a bf16 adapter with A and B that are not zero."""
    module = kbit.quantize_model(One(bias), k, absmax=absmax, progress=False)
    module.requires_grad_(False)
    peft.inject_adapter_in_model(config(**settings), module)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
            parameter.data = noise.to(BF16)
    return Between(module.train())


def x_MK() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(M, K, generator=generator).to(BF16).requires_grad_()


# --- PEFT ---------------------------------------------------------------------------------------


def test_peft_attaches_and_only_the_adapter_trains() -> None:
    base = kbit.quantize_model(One(bias=True), 3, progress=False)
    x, plain = x_MK(), base(x_MK())
    model = peft.get_peft_model(base, config())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [name.partition("proj.")[2] for name in trained] == [
        "lora_A.default.weight",
        "lora_B.default.weight",
    ]
    assert torch.equal(model(x), plain)  # B starts at zero
    loss = model(x).square().mean()
    loss.backward()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=10.0)
    optimizer.step()
    assert model(x).square().mean() < loss


def test_adapter_is_saved_and_loaded(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        kbit.quantize_model(One(), 3, progress=False), config(init_lora_weights=False)
    )
    expected = model(x_MK())
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 4 * R * (N + K) + 1000
    fresh = kbit.quantize_model(One(), 3, progress=False)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path)
    assert torch.equal(again(x_MK()), expected)


def test_an_adapter_merges_into_ordinary_layers() -> None:
    """PEFT makes them where it merges, or `dequantize_model` before it."""
    model = peft.get_peft_model(
        kbit.quantize_model(One(), 3, progress=False), config(init_lora_weights=False)
    )
    expected = model(x_MK())
    merged = copy.deepcopy(model).merge_and_unload()
    assert type(merged.proj) is nn.Linear and merged.proj.weight.dtype is BF16
    assert testing.relative_error(merged(x_MK()), expected) < 0.02
    plain: Any = kbit.dequantize_model(model, torch.float32).float()
    merged = plain.merge_and_unload()
    assert type(merged.proj) is nn.Linear
    torch.testing.assert_close(merged(x_MK().float()), expected.float(), atol=0.05, rtol=0.05)


# --- passes -------------------------------------------------------------------------------------


def assert_no_worse_than_eager(result: Compiled, module: nn.Module, x: Tensor) -> None:
    """Against float64, with the packed weight's values in bfloat16 in an ordinary layer."""
    output, grads = step(module, x, module=module)
    double = kbit.dequantize_model(copy.deepcopy(module), BF16).double()
    exact, exact_grads = step(double, x.detach().double().requires_grad_(), module=double)
    pairs = {"output": (result.output, output, exact)}
    assert result.gradients.keys() == grads.keys() == exact_grads.keys()
    pairs |= {n: (result.gradients[n], grads[n], exact_grads[n]) for n in grads}
    for name, (ours, eager, truth) in pairs.items():
        error, limit = testing.relative_error(ours, truth), testing.relative_error(eager, truth)
        assert error <= 1.25 * limit, f"{name}: {error:.2e}, eager {limit:.2e}"


@pytest.mark.parametrize(("k", "absmax"), FORMATS)
def test_passes_and_gradients(k: int, absmax: str) -> None:
    """Each pass finds the layer, and nothing is further from float64 than 1.25 times eager."""
    module, x = adapted(k, absmax), x_MK()
    result = compile_step(module, x)
    assert_no_worse_than_eager(result, module, x)
    # Forward, and the dequantization of backward, which the op wrote itself.
    applied = {"canonicalize": 2, "fold_lora": 3, "extend_k": 2, "keep_packed": 1}
    assert result.applied == {**applied, "read_gradients": 1}
    assert not result.reasons
    assert result.report.bytes_saved == N * K * 2
    assert result.ops["qfuse.dequantize"] == 2
    assert result.ops["qfuse.linear"] == 0
    sites = [site for site in result.report.sites if site.pass_name == "canonicalize"]
    assert [site.module for site in sites] == ["layer.proj", "layer.proj"]


def test_what_applies_is_what_applies_to_nf4() -> None:
    """With a bias and dropout: as many products, and the same reasons for what is left."""
    pytest.importorskip("bitsandbytes")
    ours = compile_step(adapted(4, bias=True, lora_dropout=0.1), x_MK())
    nf4 = testing.lora_linear(N, K, r=R, bias=True, adapter_dtype=BF16, dropout=0.1)
    theirs = compile_step(Between(nf4), x_MK())
    for name in ("extend_k", "keep_packed"):
        assert ours.applied.get(name) == theirs.applied.get(name)
    assert ours.reasons == theirs.reasons
    assert ours.ops["mm"] == theirs.ops["mm"]


def saved(fn: Any, x: Tensor) -> list[tuple[int, ...]]:
    """Shapes of 16- and 32-bit float tensors as large as the weight that a forward keeps."""
    found = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel() >= N * K:
            found.append(tuple(tensor.shape))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn(x)
    return found


@pytest.mark.parametrize("backend", ["eager", "inductor", "qfuse", "qfuse without keep_packed"])
def test_no_weight_is_saved(backend: str) -> None:
    """In eager and stock Inductor the op keeps packed words, under qfuse the pass does."""
    module, x = adapted(3), x_MK()
    torch._dynamo.reset()
    fn: Any = module
    if backend == "inductor":
        fn = torch.compile(module)
    elif backend.startswith("qfuse"):
        options = {**SMALL, "qfuse.passes": {"keep_packed": backend == "qfuse"}}
        fn = torch.compile(module, backend=qfuse, options=options)
    fn(x).sum().backward()
    assert bool(saved(fn, x)) == backend.endswith("without keep_packed")


def test_other_backends_compute_the_same() -> None:
    module, x = adapted(3, bias=True), x_MK()
    expected, grads = step(module, x, module=module)
    for backend in ("inductor", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        output, found = step(compiled, x, module=module)
        assert testing.relative_error(output, expected) < 2**-6
        assert found.keys() == grads.keys()
        for name, grad in found.items():
            assert testing.relative_error(grad, grads[name]) < 2**-5, name


def test_compiled_under_autocast() -> None:
    module = adapted(4)
    x = x_MK().detach().float()
    with torch.autocast("cpu", BF16):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend=qfuse, options=SMALL, fullgraph=True)
        y = compiled(x)
        assert y.dtype == BF16
        assert testing.relative_error(y, module(x)) < 2**-6


def test_a_model_of_mixed_bits() -> None:
    """A transformers model under a budget, adapters on all projections: one graph, all fused."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = testing.tiny_llama_config(num_hidden_layers=1, hidden_size=64, intermediate_size=128)
    base = transformers.AutoModelForCausalLM.from_config(settings, dtype=BF16)
    base.requires_grad_(False)
    kbit.quantize_model(base, bits=3.5, progress=False)
    layers = [m for m in base.modules() if isinstance(m, kbit.KBitLinear)]
    assert len({layer.format for layer in layers}) > 1
    model = peft.get_peft_model(base, config(target_modules=list(testing.PROJECTIONS)))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(BF16)
            nn.init.normal_(parameter, std=0.02)
    ids = torch.randint(0, settings.vocab_size, (1, 40))  # too many to be read packed

    def loss(ids: Tensor) -> Tensor:
        value: Tensor = model(input_ids=ids, labels=ids).loss
        return value

    expected, grads = step(loss, ids, module=model)
    result = compile_step(loss, ids, module=model, context=no_codegen())
    assert len(layers) == 7
    # Backward decodes four more: nothing below the first three layers trains.
    assert result.applied["canonicalize"] == 11
    assert result.ops["qfuse.linear"] == 0
    assert testing.relative_error(result.output, expected) < 1e-2
    assert result.gradients.keys() == grads.keys()
    for name, grad in grads.items():
        assert testing.relative_error(result.gradients[name], grad) < 0.1, name


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "absmax"), FORMATS)
def test_gpu_quantizes_to_the_same_bits(k: int, absmax: str) -> None:
    expected = kbit.quantize_model(One(), k, absmax=absmax, progress=False).state_dict()
    for made in (
        kbit.quantize_model(One(), k, absmax=absmax, device="cuda", progress=False),
        kbit.quantize_model(One().cuda(), k, absmax=absmax, progress=False),
    ):
        for name, tensor in made.state_dict().items():
            assert tensor.is_cuda
            assert torch.equal(tensor.cpu(), expected[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "absmax"), FORMATS)
def test_gpu_passes_and_gradients(k: int, absmax: str) -> None:
    module = adapted(k, absmax).cuda()
    x = x_MK().detach().cuda().requires_grad_()
    result = compile_step(module, x)
    assert_no_worse_than_eager(result, module, x)
    assert (result.applied["canonicalize"], result.applied["keep_packed"]) == (2, 1)
    assert result.ops["qfuse.linear"] == 0


# --- torch.func ---------------------------------------------------------------------------------


def transformed(model: nn.Module) -> list[Tensor]:
    """Gradients of an input, of an adapter for each row, and values for each row."""
    named = dict(model.named_parameters())
    adapter = {n: p.detach() for n, p in named.items() if "lora_" in n}
    frozen = {n: p for n, p in named.items() if "lora_" not in n}

    def loss(adapter: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, {**frozen, **adapter}, (x,))
        return y.float().pow(2).sum()

    x = x_MK().detach()[:4]
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(adapter, x[:, None])
    values = torch.func.vmap(loss, in_dims=(None, 0))(adapter, x[:, None])
    return [torch.func.grad(loss, argnums=1)(adapter, x), *each.values(), values]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_transforms_of_torch_func(compiled: bool) -> None:
    """torch gives an op that has a gradient formula neither a rule for vmap nor one for grad."""
    model = adapted(bias=True)
    dense: Any = kbit.dequantize_model(copy.deepcopy(model))
    call: Any = transformed
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(transformed, backend=qfuse, options=SMALL)
    with no_codegen():
        found = call(model)
    for one, expected in zip(found, transformed(dense), strict=True):
        assert one.shape == expected.shape and testing.relative_error(one, expected) < 0.02
