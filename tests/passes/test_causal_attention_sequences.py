"""causal_attention of packed rows with numbered documents, as axolotl or transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

from inductor_q import testing  # noqa: E402
from inductor_q.passes.causal_mask import MADE_OUTSIDE  # noqa: E402
from tests.support.attention import ALWAYS, LAYERS, PASS, WINDOW, causal, plain_step  # noqa: E402
from tests.support.captured import CapturedStage  # noqa: E402


def multipack(config: Any, x: Tensor, sequences: Tensor, valid: Tensor | None) -> Tensor:
    """As axolotl's attention_mask of 1 to n means it: by hand, 0 is padding."""
    mask = causal(sequences) & (sequences[:, None, :, None] == sequences[:, None, None, :])
    return mask & (sequences != 0)[:, None, None, :]


def of_mask_functions(config: Any, x: Tensor, sequences: Tensor, valid: Tensor | None) -> Any:
    """As transformers makes it for a model that asks for it, by vmap."""
    masking = transformers.masking_utils
    sees = masking.packed_sequence_mask_function(sequences)
    rest = {"attention_mask": valid, "past_key_values": None, "and_mask_function": sees}
    return masking.create_causal_mask(config=config, inputs_embeds=x, **rest)


def of_each_kind(config: Any, x: Tensor, sequences: Tensor, valid: Tensor | None) -> Any:
    """For layers with a window and without."""
    mask = multipack(config, x, sequences, valid)
    at = torch.arange(x.shape[1], device=x.device)
    near = at[:, None] - at < WINDOW
    return {"full_attention": mask, "sliding_attention": mask & near}


class Packed(torch.nn.Module):
    """A model whose mask is made of sequence ids inside of what is compiled."""

    def __init__(self, model: Any, make: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.make = model, make

    def forward(self, input_ids: Tensor, sequences: Tensor, valid: Any = None, **kw: Any) -> Any:
        x = self.model.get_input_embeddings()(input_ids)
        mask = self.make(self.model.config, x, sequences, valid)
        return self.model(inputs_embeds=x, attention_mask=mask, **kw)


def packed_batch(length: int, generator: torch.Generator, *, valid: bool) -> dict[str, Tensor]:
    """Two rows of documents that are numbered from 1, with padding behind them as 0; where they are
    valid beside that, an attention_mask says so."""
    ids = torch.randint(1, 200, (2, length), generator=generator)
    starts = torch.rand(ids.shape, generator=generator) < 0.2
    sequences = starts.cumsum(-1) + 1
    sequences[0, -(length // 4) :] = 0
    labels = ids.masked_fill(sequences == 0, -100)
    inputs = {"input_ids": ids, "sequences": sequences, "labels": labels}
    keys = (torch.rand(ids.shape, generator=generator) < 0.8).long()
    return inputs | ({"valid": keys} if valid else {})


def sequence_model(kind: str) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 200, **heads}
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=LAYERS, **sizes)
    else:
        window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        config = transformers.Qwen3Config(num_hidden_layers=LAYERS, **window, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


SEQUENCES = "FlexAttention of sequence ids"


@pytest.mark.parametrize(
    ("kind", "make", "valid", "checkpointed", "providers"),
    [
        ("llama", multipack, False, False, [SEQUENCES] * LAYERS),
        ("llama", of_mask_functions, False, True, [SEQUENCES] * LAYERS),
        ("llama", of_mask_functions, True, False, [f"{SEQUENCES}, valid keys"] * LAYERS),
        ("qwen3", of_each_kind, False, False, [SEQUENCES, f"{SEQUENCES}, a window"]),
    ],
)
def test_sequence_ids(
    kind: str, make: Callable[..., Any], valid: bool, checkpointed: bool, providers: list[str]
) -> None:
    """A graph for the first length and one for all others, whichever documents there are. The loss
    and every gradient are eager's. What layers share of a mask is made once."""
    torch.compiler.reset()
    model = sequence_model(kind)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    packed = Packed(model, make).train()
    backend = CapturedStage(PASS, **ALWAYS)
    compiled: Any = torch.compile(packed, backend=backend)
    generator = torch.Generator().manual_seed(2)
    for i in range(24):
        length = 18 + (i * 7) % 29
        inputs = packed_batch(length, generator, valid=valid)
        if i % 5 > 1:
            compiled(use_cache=False, **inputs)
            continue
        expected = plain_step(packed, model, inputs)
        assert all(x.isfinite().all() for x in expected)
        torch.testing.assert_close(plain_step(compiled, model, inputs), expected)
    assert len(backend.graphs) == 2
    assert [site.rejected or site.provider for site in backend.sites] == providers * 2
    for graph in backend.graphs:
        tables = torch.ops.qfuse.block_tables.default
        made = graph.find_nodes(op="call_function", target=tables)
        assert len(made) == len(set(providers))


@pytest.mark.parametrize("make", [multipack, of_mask_functions])
def test_packed_sequences_do_not_move_each_other(make: Callable[..., Any]) -> None:
    """The rows of a document and what flows back to it are the same to the bit, whatever the tokens
    of others are; rows of padding are finite and give nothing back."""
    torch.compiler.reset()
    model = sequence_model("llama")
    packed = Packed(model, make)
    compiled: Any = torch.compile(packed, backend=CapturedStage(PASS, **ALWAYS))
    sequences = torch.tensor([3, 9, 2, 0]).repeat_interleave(torch.tensor([7, 11, 8, 6]))[None]
    results = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(11, 200, sequences.shape, generator=generator)
        ids[:, 7:18] = torch.arange(11)
        embeddings = model.get_input_embeddings()
        embeddings.weight.grad = None
        logits = compiled(input_ids=ids, sequences=sequences, use_cache=False).logits
        assert logits.isfinite().all()
        logits[:, 7:18].square().sum().backward()
        results.append((logits[:, 7:18].detach(), embeddings.weight.grad[:11].clone()))
        assert not embeddings.weight.grad[11:].any()
    (one, other), (same, also) = results
    assert torch.equal(one, same) and torch.equal(other, also)


@pytest.mark.parametrize("numerics", ["default", "strict"])
def test_sequence_ids_under_strict_numerics(numerics: str) -> None:
    """As with positions: what is computed is what the mask says, of every row."""
    torch.compiler.reset()
    model = sequence_model("llama")
    packed = Packed(model, multipack)
    backend = CapturedStage(PASS, **ALWAYS, **{"qfuse.numerics": numerics})
    inputs = packed_batch(24, torch.Generator().manual_seed(0), valid=False)
    expected = plain_step(packed, model, inputs)
    got = plain_step(torch.compile(packed, backend=backend), model, inputs)
    torch.testing.assert_close(got, expected)
    assert [site.provider for site in backend.sites] == [SEQUENCES] * LAYERS


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_is_made_outside(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    model = sequence_model("llama")
    inputs = packed_batch(24, torch.Generator().manual_seed(0), valid=False)
    mask = multipack(None, inputs["input_ids"], inputs.pop("sequences"), None)
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
    backend = CapturedStage(PASS, **ALWAYS)
    got = plain_step(
        torch.compile(model, backend=backend), model, inputs | {"attention_mask": mask}
    )
    torch.testing.assert_close(got, plain_step(model, model, inputs | {"attention_mask": mask}))
    assert [site.rejected for site in backend.sites] == [MADE_OUTSIDE] * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_sequence_ids_by_inductor(dynamic: bool) -> None:
    torch.compiler.reset()
    model: Any = testing.qlora_model(
        testing.tiny_llama_config(num_hidden_layers=LAYERS),
        compute_dtype=torch.float32,
        randomize_adapters=True,
    )
    packed = Packed(model, of_mask_functions)
    options: Any = {**ALWAYS, "fx_graph_cache": False}
    compiled = torch.compile(packed, backend="qfuse", options=options, dynamic=dynamic)
    inputs = packed_batch(24, torch.Generator().manual_seed(0), valid=True)
    expected = plain_step(packed, model, inputs)
    for one, other in zip(plain_step(compiled, model, inputs), expected, strict=True):
        assert testing.relative_error(one, other.double()) < 1e-4
