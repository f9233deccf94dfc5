"""What a layer of experts in MXFP4 takes: its weights, and what a training step has beside them.

The layer is the one of the table in docs/moe-measured.md, which was measured on a GPU: 32 experts,
2048 wide and 768 inside, 2048 tokens, eight experts a token, adapters of rank 16. Here every size
but the numbers of experts is an eighth, the rank too. So each matrix has a 64th of its elements.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inductor_q import experts
from inductor_q.experts.modules import expert_layers
from inductor_q.formats import FORMATS
from tests.support.allocated import most_beside

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("torchao")

EXPERTS, TOP_K = 32, 8
HIDDEN, INTERMEDIATE, TOKENS, RANK = 2048, 768, 2048, 16
PART = 8
BF16 = torch.bfloat16


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{"hidden_size": HIDDEN // PART, "moe_intermediate_size": INTERMEDIATE // PART},
        **{"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "decoder_sparse_step": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        **{"vocab_size": 8, "num_hidden_layers": 1},
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).requires_grad_(False)


def weights_of(net: nn.Module) -> int:
    """Count the bytes of the experts' own weights, adapters left out."""
    (layer,) = expert_layers(net).values()
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return sum(tensor.nbytes for name, tensor in tensors.items() if "lora_" not in name)


def at_full_size(size: int) -> float:
    """Return megabytes of the layer whose matrices have PART**2 times as many elements."""
    return size * PART**2 / 1e6


def test_weights() -> None:
    """Half a byte for a code and a byte for the scale of 32, and not two bytes: 80 and 302 MB."""
    dense = weights_of(model())
    packed = weights_of(experts.quantize(model(), "mxfp4"))
    elements = EXPERTS * 3 * HIDDEN * INTERMEDIATE
    assert dense * PART**2 == elements * 2
    assert packed * PART**2 == elements * 17 // 32
    assert round(at_full_size(packed)) == 80 and round(at_full_size(dense)) == 302
    shapes = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    stored = [spec for shape in shapes for spec in FORMATS["mxfp4"].requirements(shape)]
    assert sum(spec.numel for spec in stored) == elements * 17 // 32  # all of them bytes


def transient(layer: Any, trained: list[nn.Parameter]) -> int:
    """Measure what forward and backward take at most, beyond what they are given and return."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden = TOKENS // PART, HIDDEN // PART
    x, grad = (torch.randn(tokens, hidden, generator=generator).to(BF16) for _ in range(2))
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    gates = torch.rand(tokens, TOP_K, generator=generator).to(BF16)

    def step() -> tuple[Tensor, ...]:
        input = x.requires_grad_()
        output = layer(input, ids, gates)
        return output, *torch.autograd.grad(output, [input, *trained], grad)

    return most_beside(step)


def test_a_training_step() -> None:
    """At full size it has less than 489 MB beside the weights, and even less than they take where
    they are not packed; and less than transformers' own implementations with PEFT's adapters
    have."""
    packed = experts.quantize(model(), "mxfp4")
    trained = experts.add_lora(packed, r=RANK // PART)
    (layer,) = expert_layers(packed).values()
    ours = transient(layer, trained)
    assert at_full_size(ours) < 489
    assert ours < weights_of(model())
    for implementation in ("eager", "grouped_mm"):
        net = model()
        net.set_experts_implementation(implementation)
        names = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=RANK // PART, target_modules=[], target_parameters=names)
        adapted = peft.get_peft_model(net, config)
        layer = adapted.base_model.model.model.layers[0].mlp.experts
        theirs = transient(layer, [p for p in adapted.parameters() if p.requires_grad])
        assert ours < theirs
