"""Attention that models write out, with sinks or a softcap: FlexAttention, or why it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers: Any = pytest.importorskip("transformers")

from inductor_q.passes.causal_mask import MADE_OUTSIDE  # noqa: E402
from tests.support.attention import batch, plain_step  # noqa: E402
from tests.support.captured import CapturedStage  # noqa: E402

PASS = "causal_attention"
ALWAYS = {"qfuse.thresholds": {"causal_attention.min_positions": 0}}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 200, "sliding_window": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def gpt_oss() -> Any:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**SIZES, **HEADS, **LAYERS, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def gemma2(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **SIZES, **HEADS, **LAYERS, query_pre_attn_scalar=16, attn_logit_softcapping=0.5, **more
    )
    # sdpa knows no softcap; some versions take it all the same, and leave the softcap out.
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("build", "case", "named"),
    [
        (gpt_oss, "padded", "valid keys, sinks"),
        (gemma2, "documents", "a softcap"),
    ],
)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_models(build: Callable[[], Any], case: str, named: str, checkpointed: bool) -> None:
    """The loss and every gradient, of sinks too, are eager's, under each layer's own mask."""
    torch.compiler.reset()
    model = build()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = CapturedStage(PASS, **ALWAYS)
    inputs = batch(case, 24)
    expected = plain_step(model, model, inputs)
    got = plain_step(torch.compile(model, backend=backend), model, inputs)
    torch.testing.assert_close(got, expected)
    documents = "documents, " if case == "documents" else ""
    providers = [f"FlexAttention of {documents}{window}{named}" for window in ("a window, ", "")]
    assert [site.rejected or site.provider for site in backend.sites] == providers


def test_dynamic_graphs() -> None:
    """Numbers are inputs of a graph that is compiled with dynamic=True."""
    torch.compiler.reset()
    model = gemma2().eval()
    backend = CapturedStage(PASS, **ALWAYS)
    compiled: Any = torch.compile(model, backend=backend, dynamic=True)
    inputs = batch("documents", 24)
    expected = plain_step(model, model, inputs)
    torch.testing.assert_close(plain_step(compiled, model, inputs), expected)
    assert [site.rejected for site in backend.sites] == [""] * 2


def test_only_padding_differs_from_eager() -> None:
    """Without a sink a row that sees no key is a mean of all values in eager. Here it is zero."""
    torch.compiler.reset()
    model = gemma2()
    inputs = batch("padded", 24)
    del inputs["labels"]
    backend = CapturedStage(PASS, **ALWAYS)
    expected = model(**inputs, use_cache=False).logits
    compiled: Any = torch.compile(model, backend=backend)
    got = compiled(**inputs, use_cache=False).logits
    differs = (got - expected).abs().amax(-1) > 1e-4
    assert all(not site.rejected for site in backend.sites)
    valid = inputs["attention_mask"] != 0
    assert not bool((differs & valid).any())
    assert got.isfinite().all()


def written(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    weights: Callable[[Tensor], Tensor] = lambda x: x,
    cap: tuple[float, float] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)) * 0.25
    if cap is not None:
        scores = torch.tanh(scores / cap[0]) * cap[1]
    scores = scores + mask
    probabilities = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32)
    probabilities = torch.nn.functional.dropout(probabilities, p=dropout, training=True)
    return torch.matmul(weights(probabilities.to(query.dtype)), value)


def added(valid: Tensor, least: float = torch.finfo(torch.float32).min) -> Tensor:
    place = torch.arange(valid.shape[1])
    seen = (place[:, None] >= place) & (valid != 0)[:, None, None, :]
    return torch.where(seen, torch.zeros(()), least)


@pytest.mark.parametrize(
    ("options", "least", "found"),
    [
        ({}, None, "FlexAttention of valid keys"),
        ({"cap": (2.0, 2.0)}, None, "FlexAttention of valid keys, a softcap"),
        ({}, -1e4, "the mask that is added is not made by torch.where of a boolean one"),
        ({"cap": (2.0, 3.0)}, None, "attention is written out, but its scores are capped by two"),
        ({"dropout": 0.5}, None, "attention is written out, but its weights are dropped out"),
    ],
)
def test_forms(options: dict[str, Any], least: float | None, found: str) -> None:
    torch.compiler.reset()
    backend = CapturedStage(PASS, **ALWAYS)
    x = torch.randn(2, 2, 24, 16, requires_grad=True)
    valid = torch.ones(2, 24, dtype=torch.int64)
    valid[0, -5:] = 0
    numbers = () if least is None else (least,)

    def attend(x: Tensor, valid: Tensor) -> Tensor:
        return written(x, x + 1, x * 2, added(valid, *numbers), **options)

    got = torch.compile(attend, backend=backend)(x, valid)
    if "dropout" not in options:
        torch.testing.assert_close(got, attend(x, valid))
    (site,) = backend.sites
    assert (site.rejected or site.provider).startswith(found)


def test_a_mask_from_before_the_graph() -> None:
    """As behind a graph break."""
    torch.compiler.reset()
    backend = CapturedStage(PASS, **ALWAYS)
    x, mask = torch.randn(2, 2, 24, 16), added(torch.ones(2, 24))

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return written(x, x, x, mask)

    compiled: Any = torch.compile(attend, backend=backend)
    compiled(x, mask)
    (site,) = backend.sites
    assert site.rejected == MADE_OUTSIDE and site.by_choice


def test_weights_that_are_read_stay() -> None:
    torch.compiler.reset()
    backend = CapturedStage(PASS, **ALWAYS)
    x, valid = torch.randn(2, 2, 24, 16), torch.ones(2, 24, dtype=torch.int64)

    def attend(x: Tensor, valid: Tensor) -> tuple[Tensor, list[Tensor]]:
        read: list[Tensor] = []

        def keep(weights: Tensor) -> Tensor:
            read.append(weights)
            return weights

        return written(x, x, x, added(valid), weights=keep), read

    compiled: Any = torch.compile(attend, backend=backend)
    compiled(x, valid)
    (site,) = backend.sites
    assert site.rejected.endswith("is read elsewhere, too") and site.by_choice


def test_products_that_are_no_attention_are_not_told_of() -> None:
    torch.compiler.reset()
    backend = CapturedStage(PASS, **ALWAYS)

    def routed(x: Tensor) -> Tensor:
        return torch.matmul(torch.softmax(x, 1), x) + torch.matmul(x * 2, x)

    torch.compile(routed, backend=backend)(torch.randn(2, 2, 24, 24))
    assert not backend.sites


def test_strict_numerics_keep_what_is_written() -> None:
    torch.compiler.reset()
    backend = CapturedStage(PASS, **ALWAYS, **{"qfuse.numerics": "strict"})
    x, valid = torch.randn(2, 2, 24, 16), torch.ones(2, 24, dtype=torch.int64)

    def attend(x: Tensor, valid: Tensor) -> Tensor:
        return written(x, x, x, added(valid))

    compiled: Any = torch.compile(attend, backend=backend)
    compiled(x, valid)
    kept = "strict numerics keep attention as it is written out"
    assert [site.rejected for site in backend.sites] == [kept]
