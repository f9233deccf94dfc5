"""causal_attention by what a mask is made of: padding, documents, windows, at any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

from inductor_q import testing  # noqa: E402
from tests.support.attention import (  # noqa: E402
    ALWAYS,
    DOCUMENTS,
    GROUPED,
    LAYERS,
    PASS,
    VALID_FIRST,
    WINDOW,
    batch,
    causal,
    plain_step,
)
from tests.support.captured import CapturedStage  # noqa: E402


def plain(**sizes: Any) -> Any:
    """A model of one layer with a sliding window, without quantized weights."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"num_hidden_layers": 1, "sliding_window": WINDOW, **heads, **sizes}
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=48, vocab_size=200, **sizes
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("case", "short", "long"),
    [
        ("", GROUPED, "FlexAttention of a window"),
        ("padded", VALID_FIRST, "FlexAttention of a window, valid keys"),
        ("documents", DOCUMENTS, "FlexAttention of documents, a window"),
        # transformers reads documents from positions only where there is no attention_mask
        ("padded documents", VALID_FIRST, "FlexAttention of a window, valid keys"),
    ],
)
def test_windows(case: str, short: str, long: str) -> None:
    """Two lengths within the window and two beyond: one graph for the first length, one for the
    others within, one for every length. The loss and every gradient are eager's."""
    torch.compiler.reset()
    model = plain()
    backend = CapturedStage(PASS, **ALWAYS)
    compiled = torch.compile(model, backend=backend)
    for length in (14, 15, 16, 24, 31, 13):
        inputs = batch(case, length)
        expected = plain_step(model, model, inputs)
        torch.testing.assert_close(plain_step(compiled, model, inputs), expected)
    assert [(s.rejected, s.provider) for s in backend.sites] == [("", short)] * 2 + [("", long)]


def collated(case: str, longest: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch as a collator makes it: rows padded on the right, on the left and in between, or one
    row of documents."""

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    length = drawn(5, longest + 1)
    ids = torch.randint(1, 200, (1 if case == "packed" else 3, length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if case == "packed":
        starts = torch.rand(length, generator=generator) < torch.rand((), generator=generator) / 2
        starts[0] = True
        places = torch.arange(length)
        inputs["position_ids"] = (places - torch.where(starts, places, 0).cummax(0).values)[None]
    else:
        mask = torch.ones_like(ids)
        mask[0, drawn(1, length) :], mask[1, : drawn(0, length - 1)] = 0, 0
        mask[2, torch.rand(length, generator=generator) < 0.2] = 0
        # Tokens behind padding have other logits than in eager where that is a real token's row.
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)
        inputs |= {"attention_mask": mask, "labels": labels}
    return inputs


@pytest.mark.parametrize(
    ("case", "window", "checkpointed"),
    [
        ("padded", None, True),
        ("packed", 20, False),
        pytest.param("padded", 20, False, marks=pytest.mark.slow),
        pytest.param("packed", None, True, marks=pytest.mark.slow),
    ],
)
def test_graphs_of_200_batches(case: str, window: int | None, checkpointed: bool) -> None:
    """Neither lengths nor where padding and documents lie make a graph; passing the window does."""
    torch.compiler.reset()
    model = plain(sliding_window=window)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = CapturedStage(PASS, **ALWAYS)
    compiled: Any = torch.compile(model, backend=backend)
    generator = torch.Generator().manual_seed(2)
    for i in range(200):
        inputs = collated(case, 20 if i < 5 else 50, generator)
        if i % 25:
            compiled(use_cache=False, **inputs)
        else:
            expected = plain_step(model, model, inputs)
            torch.testing.assert_close(plain_step(compiled, model, inputs), expected)
    assert len(backend.graphs) == (2 if window is None else 3)
    assert all(site.rejected == "" and "repeated" not in site.provider for site in backend.sites)


def test_a_mask_is_kept_for_few_positions_only() -> None:
    """The second graph would serve every length; a longer batch gets one without the mask."""
    torch.compiler.reset()
    model = plain(sliding_window=None)
    backend = CapturedStage(PASS, **{"qfuse.thresholds": {"causal_attention.min_positions": 20}})
    compiled = torch.compile(model, backend=backend)
    for length in (14, 15, 19, 20, 31, 16):
        inputs = batch("padded", length)
        torch.testing.assert_close(
            plain_step(compiled, model, inputs), plain_step(model, model, inputs)
        )
    kept = "positions, fewer than causal_attention.min_positions=20: the mask is kept"
    found = [site.rejected or site.provider for site in backend.sites]
    assert found == [f"14 {kept}", VALID_FIRST]  # of the second length on, one graph for all


def test_packed_rows_of_a_dynamic_graph() -> None:
    """dynamic=True makes an input of the number that says that no score is dropped."""
    torch.compiler.reset()
    model = plain(sliding_window=None).train()
    backend = CapturedStage(PASS, **ALWAYS)
    compiled: Any = torch.compile(model, backend=backend, dynamic=True)
    inputs = batch("documents", 24)
    expected = plain_step(model, model, inputs)
    torch.testing.assert_close(plain_step(compiled, model, inputs), expected)
    found = {site.rejected or site.provider for site in backend.sites}
    assert found == {DOCUMENTS}


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_with_dropout_of_its_own(dynamic: bool) -> None:
    torch.compiler.reset()
    model = plain(sliding_window=None, attention_dropout=0.1).train()
    backend = CapturedStage(PASS, **ALWAYS)
    compiled: Any = torch.compile(model, backend=backend, dynamic=dynamic)
    compiled(use_cache=False, **batch("documents", 24))
    (site,) = backend.sites
    assert "attention drops scores out (dropout_p=0.1)" in site.rejected


def sliced(x: Tensor, valid: Tensor, mask: Tensor) -> Tensor:
    """As layers of transformers 4 do."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(x, x, x, attn_mask=mask[:, :, :, : x.shape[2]])


def made_inside(x: Tensor, valid: Tensor, mask: Tensor) -> Tensor:
    return sliced(x, valid, padding_mask(x, valid))


def padding_mask(x: Tensor, valid: Tensor) -> Tensor:
    return causal(x[:, 0]) & (valid != 0)[:, None, None, :]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("layer", "provider", "tables"),
    [(sliced, "sdpa, valid first", 1), (made_inside, "the mask is made inside of a checkpoint", 0)],
)
def test_masks_in_checkpoints(
    layer: Callable[..., Tensor], provider: str, tables: int, dynamic: bool
) -> None:
    """A slice that leaves nothing out is the mask, and all layers share what is made of it."""

    def two(x: Tensor, valid: Tensor) -> Tensor:
        mask = padding_mask(x, valid)
        for _ in range(LAYERS):
            x = torch.utils.checkpoint.checkpoint(layer, x, valid, mask, use_reentrant=False)
        return x

    torch.compiler.reset()
    backend = CapturedStage(PASS, **ALWAYS)
    x, valid = torch.randn(2, 2, 24, 8, requires_grad=True), torch.ones(2, 24, dtype=torch.int64)
    got = torch.compile(two, backend=backend, dynamic=dynamic)(x, valid)
    torch.testing.assert_close(got, two(x, valid))
    found = [site.rejected or site.provider for site in backend.sites]
    assert found == [provider] * LAYERS
    (graph,) = backend.graphs
    made = graph.find_nodes(op="call_function", target=torch.ops.qfuse.valid_first.default)
    assert len(made) == tables


@pytest.mark.parametrize("documents", [False, True])
def test_padding_of_negative_numbers(documents: bool) -> None:
    """It is hidden where the mask says so, and is seen where the mask compares with zero."""

    def attend(x: Tensor, given: Tensor, ids: Tensor) -> Tensor:
        mask = causal(x[:, 0]) & (given > 0)[:, None, None, :]
        if documents:
            mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    torch.compiler.reset()
    backend = CapturedStage(PASS, **ALWAYS)
    x, ids = torch.randn(2, 2, 24, 8), torch.arange(3).repeat_interleave(8).repeat(2, 1)
    given = torch.ones(2, 24, dtype=torch.int64)
    given[0, 20:], given[1, 22:] = -1, -100
    got = torch.compile(attend, backend=backend)(x, given, ids)
    seen = (given > 0)[:, None, :, None]
    torch.testing.assert_close(got * seen, attend(x, given, ids) * seen)
    assert [site.rejected for site in backend.sites] == [""]


def test_two_masks_of_one_model() -> None:
    """Layers with a window and without, as of Gemma 3: what each kind needs is made once."""
    torch.compiler.reset()
    sizes = testing.tiny_llama_config().to_dict()
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        **{n: sizes[n] for n in ("hidden_size", "intermediate_size", "vocab_size")},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 16, "sliding_window": WINDOW, "layer_types": kinds},
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    backend = CapturedStage(PASS, **ALWAYS)
    inputs = batch("padded", 24)
    expected = plain_step(model, model, inputs)
    got = plain_step(torch.compile(model, backend=backend), model, inputs)
    torch.testing.assert_close(got, expected)
    providers = [site.provider for site in backend.sites]
    assert providers == ["FlexAttention of a window, valid keys", VALID_FIRST] * 2
    (graph,) = backend.graphs
    for op in (torch.ops.qfuse.block_tables, torch.ops.qfuse.valid_first):
        assert len(graph.find_nodes(op="call_function", target=op.default)) == 1
