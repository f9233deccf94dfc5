"""Frozen weights of 16 bits in eight: which are found, which left, what is kept for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

import inductor_q
from inductor_q import testing
from inductor_q.passes.graph import CAST, is_tensor, tensor
from tests.support.compiling import Compiled, compile_step, no_codegen, partition, step
from tests.support.thresholds import ANY_PRODUCT

BF16 = torch.bfloat16
FP8: dict[str, Any] = {
    "qfuse.compute": "fp8",
    "qfuse.thresholds": ANY_PRODUCT,
}


class Lora(nn.Module):
    """A frozen layer with an adapter written by hand."""

    def __init__(self, n: int = 128, k: int = 64, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(k, n, bias=bias, dtype=BF16).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(8, k, dtype=BF16) * k**-0.5)
        self.lora_B = nn.Parameter(torch.randn(n, 8, dtype=BF16) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return torch.tanh(self.base(x) + (x @ self.lora_A.t()) @ self.lora_B.t())


def tokens(k: int = 64) -> Tensor:
    x = torch.randn(2, 32, k, generator=torch.Generator().manual_seed(3)).to(BF16)
    return x.requires_grad_()


def compiled(
    module: nn.Module, x: Tensor, options: dict[str, Any] | None = None, *, codegen: bool = False
) -> Compiled:
    context = None if codegen else no_codegen()
    return compile_step(module, x, options={**FP8, **(options or {})}, context=context)


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compute", ["fp8", "int8"])
def test_forward_and_gradient_of_the_input(compute: str, bias: bool) -> None:
    block, x = Lora(bias=bias), tokens()
    expected, grads = step(block, x, module=block)
    outcome = compiled(block, x, {"qfuse.compute": compute}, codegen=True)
    assert outcome.report.in_eight_bits() == (2, 2)
    assert outcome.report.multiplied() == ("base",)
    assert outcome.ops["addmm"] == 0
    assert 1e-3 < error(outcome.output, expected) < 0.04
    assert grads.keys() == outcome.gradients.keys()
    for name, grad in grads.items():
        assert error(outcome.gradients[name], grad) < 0.05, name


def test_it_is_no_quantized_layer() -> None:
    outcome = compiled(Lora(), tokens())
    assert outcome.report.verdicts() == {}
    assert "quantized" not in outcome.report.summary()
    assert "2 of 2 products with frozen weights in fp8" in outcome.report.summary()


def test_nothing_of_the_weight_is_kept() -> None:
    """Backward takes the weight itself, and at most the scales of its rows."""

    def run(call: Any) -> None:
        call(tokens()).sum().backward()

    _, backward = partition(run, Lora(), FP8)
    given = [n.meta["val"] for n in backward.find_nodes(op="placeholder")]
    assert torch.float8_e4m3fn not in {v.dtype for v in given}
    assert [v.dtype for v in given if v.numel() == 128 * 64 and v.shape[-1] == 64] == [BF16]
    assert all(v.numel() <= 128 for v in given if v.dtype is torch.float32)


def test_what_has_the_size_of_the_weight_is_computed_again() -> None:
    """By a mark, for torch (2.11) may merge the casts of forward and backward, and keep one."""
    (joint,) = compiled(Lora(192, 32), tokens(32)).joint
    casts = [n for n in joint.nodes if n.op == "call_function" and is_tensor(n)]
    sized = [n for n in casts if tensor(n).numel() == 192 * 32 and tensor(n).dim() == 2]
    kinds = {tensor(n).dtype for n in sized if "recompute" in n.meta}
    assert kinds == {torch.float32, torch.float8_e4m3fn}
    eight = [n for n in sized if tensor(n).dtype is torch.float8_e4m3fn and n.target is CAST]
    assert len(eight) == 2
    assert {n.meta.get("recompute") for n in eight} == {CheckpointPolicy.MUST_RECOMPUTE}


def test_weights_that_train_are_left() -> None:
    block = Lora()
    block.base.requires_grad_(True)
    assert compiled(block, tokens()).report.in_eight_bits() == (0, 0)


def test_by_default_the_graph_is_left_to_inductor() -> None:
    assert compiled(Lora(), tokens(), {"qfuse.compute": "bf16"}).report.passes == []


def test_adapters_that_do_not_train_are_left() -> None:
    block = Lora(n=64)
    block.lora_A.requires_grad_(False)
    block.lora_B.requires_grad_(False)
    assert compiled(block, tokens()).report.in_eight_bits() == (2, 2)  # of the base alone


def test_layers_are_excluded_by_name() -> None:
    outcome = compiled(Lora(), tokens(), {"qfuse.compute.exclude": "ba*"})
    assert outcome.reasons["quantize_products"] == {"qfuse.compute.exclude has 'ba*'": 2}
    assert not outcome.report.nothing_fused()


class Model(nn.Module):
    """A layer between embeddings and a head of some name."""

    def __init__(self, name: str, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64, dtype=BF16)
        self.layer = Lora(64, 64)
        self.name = name
        head = nn.Linear(64, 64, bias=False, dtype=BF16)
        self.add_module(name, head)
        if tied:
            head.weight = self.embed.weight
        self.embed.requires_grad_(False)
        head.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.get_submodule(self.name)(self.layer(self.embed(ids)))
        return logits


class Loss(Model):
    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1))


@pytest.mark.parametrize(
    ("model", "multiplied"),
    [
        (lambda: Model("lm_head"), {"layer.base"}),
        (lambda: Model("output", tied=True), {"layer.base"}),
        (lambda: Model("output"), {"layer.base", "output"}),
        (lambda: Loss("output"), {"layer.base"}),
    ],
    ids=["by name", "tied", "unknown", "of a loss"],
)
def test_the_head_is_left(model: Any, multiplied: set[str]) -> None:
    ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    block = model()
    outcome = compile_step(block, ids, module=block, options=FP8, context=no_codegen())
    assert set(outcome.report.multiplied()) == multiplied
    count, of = outcome.report.in_eight_bits()
    assert count == of == (3 if "output" in multiplied else 1)  # the embeddings are frozen


class Router(nn.Module):
    """A layer and a router, which chooses experts before or behind its softmax or sigmoid."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.layer, self.choose = Lora(64, 64), choose
        self.gate = nn.Linear(64, 32, dtype=BF16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        chosen: Tensor = self.choose(self.gate(hidden))
        return hidden * chosen.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "choose",
    [
        lambda logits: F.softmax(logits.float(), -1).topk(4)[0].to(BF16),
        lambda logits: F.softmax(logits.topk(4)[0], -1),
        lambda logits: logits.topk(1)[0].float().sigmoid().to(BF16),
        lambda logits: logits.sigmoid().topk(4)[0],
    ],
    ids=["softmax, top-k", "top-k, softmax", "top-k, sigmoid", "sigmoid, top-k"],
)
def test_routers_are_left(choose: Any) -> None:
    """In eight bits other experts would be chosen."""
    assert compiled(Router(choose), tokens()).report.multiplied() == ("layer.base",)


def test_a_model_with_peft() -> None:
    """transformers and PEFT as they are: seven products a layer, and their gradients."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = testing.tiny_qwen3_config()
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=list(testing.PROJECTIONS))
    model = peft.get_peft_model(base, lora)
    ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    with no_codegen(), torch.autocast("cpu", BF16):
        call: Any = torch.compile(model, backend=testing.qfuse_backend(), options=FP8)
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        expected = model(input_ids=ids, labels=ids).loss
    report = inductor_q.last_report()
    assert report is not None
    products = 7 * config.num_hidden_layers
    # The gradient of the first layer's input is nobody's: the embeddings are frozen.
    assert report.in_eight_bits() == (2 * products - 3, 2 * products - 3)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.01)
