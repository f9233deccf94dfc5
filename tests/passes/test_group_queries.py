"""Heads of one query that share keys become queries of one head, or it is said why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from inductor_q import testing  # noqa: E402
from tests.support.captured import CapturedStage  # noqa: E402
from tests.support.compiling import Compiled, compile_step, no_codegen  # noqa: E402

attend = torch.nn.functional.scaled_dot_product_attention
GROUPS, REPEATS, LENGTH = 2, 3, 24
PASS, PROVIDER = "group_queries", "sdpa, grouped queries"
BY_ROWS = {"qfuse.thresholds": {"attention_rows.min_keys": LENGTH}}


def repeated(x: Tensor) -> Tensor:
    """As transformers writes it."""
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, REPEATS, s, d).reshape(b, h * REPEATS, s, d)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return attend(q, repeated(k), repeated(v), attn_mask=mask, scale=0.3)


def by_the_flag(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return attend(q, k, v, mask, enable_gqa=True)


def tensors(groups: int = GROUPS, queries: int = 1, of_values: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(GROUPS * REPEATS, queries, 8), (groups, LENGTH, 8), (groups, LENGTH, of_values)]
    made = [torch.randn(2, *size, generator=generator) for size in sizes]
    return [made[0].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(), *made[1:]]


def seen(rows: int = 1, heads: int = 1, queries: int = 1) -> Tensor:
    """Another number of keys for each row; in a cache, those behind are not written yet."""
    last = torch.arange(rows * heads * queries).view(rows, heads, queries, 1) + LENGTH // 2
    return torch.arange(LENGTH) <= last


def compiled(
    fn: Callable[..., Any], inputs: list[Any], dynamic: bool = False
) -> tuple[list[tuple[str, str]], fx.Graph]:
    """The sites of the pass, and the graph, whose result and gradients are those of `fn`."""
    stage = CapturedStage(PASS, **{"qfuse.numerics": "strict"})

    def run(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        out = call(*inputs)
        out = out if isinstance(out, Tensor) else out[0]
        with_grad = [x for x in inputs if x is not None and x.requires_grad]
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return [out, *torch.autograd.grad(out, with_grad, grad)]

    torch.compiler.reset()
    got = run(torch.compile(fn, backend=stage, dynamic=dynamic, fullgraph=True))
    for one, other in zip(got, run(fn), strict=True):
        torch.testing.assert_close(one, other)
    (graph,) = stage.graphs
    return [(site.rejected, site.provider) for site in stage.sites], graph


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "mask", [None, seen(), seen(2), seen()[0, 0]], ids=["unmasked", "one", "each", "flat"]
)
@pytest.mark.parametrize("fn", [plain, by_the_flag])
def test_heads_of_a_group_are_queries_of_one(
    fn: Callable[..., Any], mask: Tensor | None, dynamic: bool
) -> None:
    sites, graph = compiled(fn, [*tensors(), mask], dynamic)
    assert sites == [("", PROVIDER)]
    (call,) = graph.find_nodes(op="call_function", target=attend)
    query, key, value = call.args
    assert query.meta["example_value"].shape[1:] == (GROUPS, REPEATS, 8)
    assert key.op == value.op == "placeholder"
    assert not call.kwargs["enable_gqa"]
    assert call.kwargs["scale"] == (0.3 if fn is plain else None)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ((seen(2), 8, torch.float32, False), "qfuse.attention_rows"),
        ((seen(), 8, torch.float32, False), "qfuse.attention_rows"),
        ((seen()[0, 0], 8, torch.float32, False), "sdpa"),
        ((torch.zeros(1, 1, 1, LENGTH), 8, torch.float32, False), "sdpa"),
        ((None, 8, torch.float32, False), "sdpa"),
        ((seen(), 4, torch.float32, False), "sdpa"),
        ((seen(), 8, torch.bfloat16, False), "sdpa"),
        ((seen(), 8, torch.float32, True), "sdpa"),
        ((seen()[..., :-1], 8, torch.float32, False), "sdpa"),
    ],
)
def test_a_kernel_of_ours_takes_bits_without_gradients(
    case: tuple[Tensor | None, int, torch.dtype, bool], expected: str, dynamic: bool
) -> None:
    """From a number of keys on, and what autocast leaves as it is."""
    mask, width, autocast, trains = case
    q, k, v = tensors(of_values=width)
    keys = LENGTH if mask is None else mask.shape[-1]
    inputs: Any = (q.requires_grad_(trains), k[..., :keys, :], v[..., :keys, :], mask)
    stage = CapturedStage(PASS, **BY_ROWS)
    torch.compiler.reset()
    with torch.autocast("cpu", enabled=autocast is torch.bfloat16):
        got = torch.compile(plain, backend=stage, dynamic=dynamic, fullgraph=True)(*inputs)
        torch.testing.assert_close(got, plain(*inputs))
    assert [site.provider for site in stage.sites] == [f"{expected}, grouped queries"]


def of_other_widths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v[..., :4])


def once_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, repeated(k), repeated(v), is_causal=True)


def dropping_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, repeated(k), repeated(v), dropout_p=1.0)


def masked_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v, seen(heads=6))


def keys_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, repeated(k), torch.cat([v, v, v], 1))


def used_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    key = repeated(k)
    return attend(q, key, repeated(v)), key


def written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What was repeated is not what the cache holds by then."""
    k = k + 0
    key = repeated(k)
    k.mul_(2)
    return attend(q, key, repeated(v))


def written_to_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a cache is."""
    k, v = k + 0, v + 0
    k.index_copy_(2, torch.tensor([3]), q[:, :2])
    return plain(q, k, v, seen())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("fn", "inputs", "expected"),
    [
        (of_other_widths, tensors(), ""),
        (written_to_before, tensors(), ""),
        (once_repeated, tensors(GROUPS * REPEATS), None),
        (plain, tensors(queries=2), None),
        (causal, tensors(), "is_causal of one query, which sees the first key alone"),
        (dropping_out, tensors(), "attention drops scores out (dropout_p=1.0)"),
        (masked_by_head, tensors(), "the mask is not one row for all heads"),
        (keys_alone, tensors(), "keys and values are not repeated alike"),
        (used_elsewhere, tensors(), "repeated keys are used elsewhere"),
        (written_to, tensors(), "something is written to once keys are repeated"),
    ],
)
def test_where_heads_are_grouped(
    fn: Callable[..., Any], inputs: list[Tensor], expected: str | None, dynamic: bool
) -> None:
    sites, _ = compiled(fn, inputs, dynamic)
    assert [reason for reason, _ in sites] == ([] if expected is None else [expected])


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_what_a_transform_maps_stays() -> None:
    """A value of a transform's lives as long as the transform is traced."""

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q[None], k[None], v[None])[0]

    sites, _ = compiled(torch.vmap(one), tensors())
    assert [reason for reason, _ in sites] == ["attention is inside of a transform of torch.func"]


LAYERS, PROMPT = 2, 6


@pytest.mark.parametrize("by_rows", [False, True], ids=["sdpa", "attention_rows"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "config", [testing.tiny_llama_config, testing.tiny_qwen3_config], ids=["llama", "qwen3"]
)
def test_a_step_over_a_static_cache(config: Callable[..., Any], rows: int, by_rows: bool) -> None:
    """No layer copies its cache for the groups; logits are eager's, and so is the cache."""
    from transformers import StaticCache

    model = testing.qlora_model(
        config(num_hidden_layers=LAYERS), compute_dtype=torch.float32
    ).eval()
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids = torch.randint(0, 200, (rows, PROMPT + 1), generator=torch.Generator().manual_seed(0))

    def step(last: Tensor) -> Tensor:
        out: Tensor = model(input_ids=last, past_key_values=cache, use_cache=True).logits
        return out

    options = {"qfuse.thresholds": {"attention_rows.min_keys": 16 if by_rows else 17}}
    with torch.no_grad():
        expected = [(cache.reset(), step(ids[:, :-1]), step(ids[:, -1:]))[2]]
        layer: Any = cache.layers[-1]
        keys = layer.keys.clone()
        cache.reset()
        step(ids[:, :-1])
        result: Compiled = compile_step(
            step, ids[:, -1:], module=model, options=options, context=no_codegen()
        )
    assert result.applied[PASS] == LAYERS
    assert result.ops["qfuse.attention_rows"] == (LAYERS if by_rows else 0)
    torch.testing.assert_close(result.output, expected[0])
    torch.testing.assert_close(layer.keys, keys)
    # A node of the width of all heads is as long as a query, none as a cache.
    (graph,) = result.joint
    shapes = [n.meta["val"].shape for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    heads = model.config.num_attention_heads
    assert (rows, heads, 16, 16) not in [tuple(shape) for shape in shapes]
