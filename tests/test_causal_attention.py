"""causal_attention: a causal mask that was written out is left out, any other is kept and said."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

from inductor_q import testing  # noqa: E402
from inductor_q.passes.causal_attention import CausalAttention  # noqa: E402
from inductor_q.passes.causal_mask import CHECKPOINT, why_not_causal  # noqa: E402
from inductor_q.passes.grouped_keys import no_kernel  # noqa: E402

LAYERS = 2
PASS = "causal_attention"
LARGE = "the mask is computed with sums or copies as large as a window may be"


def captured(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> fx.GraphModule:
    """Dynamo's graph of a function."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    torch.compile(fn, backend=keep, dynamic=dynamic, fullgraph=True)(*args)
    (graph,) = graphs
    return graph


def result(graph: fx.Graph) -> fx.Node:
    """What a graph with one result returns."""
    (found,) = graph.output_node().all_input_nodes
    return found


def reason(mask: Callable[..., Tensor], *args: Any, dynamic: bool = False) -> str:
    graph = captured(mask, *args, dynamic=dynamic).graph
    return why_not_causal(result(graph), {}, [graph])


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(x.shape[1], device=x.device)
    return at[None, None, :, None], at[None, None, None, :]


def causal(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q).expand(x.shape[0], 1, -1, -1)


def packed(x: Tensor) -> Tensor:
    """As transformers writes it: causal, and within one sequence of consecutive positions."""
    at = torch.arange(x.shape[1], device=x.device)[None].expand(x.shape[0], -1)
    sequence = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return causal(x) & (sequence[:, None, :, None] == sequence[:, None, None, :])


def lower_triangle(x: Tensor) -> Tensor:
    n = x.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril().view(1, 1, n, n)


def one_of_four_copies(x: Tensor) -> Tensor:
    """As Qwen3.5 of transformers writes it: positions of text, time, height and width."""
    n = x.shape[1]
    at = torch.arange(n).view(1, 1, -1).expand(4, x.shape[0], -1)[0]
    sequence = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return causal(x) & (sequence[:, None, :, None] == sequence[:, None, None, :])


def beside_what_is_written(x: Tensor) -> Tensor:
    """Angles are computed from the positions, and written to."""
    at = torch.arange(x.shape[1])
    angles = at.float() * 0.5
    angles[None][..., :1] = 0
    return (at <= at[:, None]).expand(x.shape[0], 1, -1, -1)


def of_four_heads(x: Tensor) -> Tensor:
    return causal(x).expand(-1, 4, -1, -1) & torch.ones(1, 4, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(2, 16), (16, 16), (4, 24), (3, 5000)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        *(causal, packed, lower_triangle),
        *(one_of_four_copies, beside_what_is_written, of_four_heads),
    ],
)
def test_causal_masks_are_known(
    mask: Callable[[Tensor], Tensor], shape: tuple[int, int], dynamic: bool
) -> None:
    assert reason(mask, torch.zeros(shape), dynamic=dynamic) == ""


def strictly_causal(x: Tensor) -> Tensor:
    q, k = positions(x)
    return k < q


def anti_causal(x: Tensor) -> Tensor:
    q, k = positions(x)
    return k >= q


def everything(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) | (k > q)


def window(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) & (k > q - 4000)


def prefix(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k <= q) | (k < 64)


def halves(x: Tensor) -> Tensor:
    q, k = positions(x)
    half = x.shape[1] // 2
    return (k <= q) & ((k < half) == (q < half))


def longer(x: Tensor) -> Tensor:
    q, _ = positions(x)
    return torch.arange(x.shape[1] + 1)[None, None, None, :] <= q


def additive(x: Tensor) -> Tensor:
    return torch.zeros(1, 1, x.shape[1], x.shape[1])


def padded(x: Tensor) -> Tensor:
    return causal(x) & (x != 0)[:, None, None, :]


def in_bytes(x: Tensor) -> Tensor:
    q, k = positions(x)
    return (k.to(torch.int8) <= q.to(torch.int8)).expand(2, 1, -1, -1)


def cleared(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    mask[0, :, :, :3] = False
    return mask


def cleared_through_a_view(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    mask[0].squeeze(0).fill_(False)
    return mask


def with_positions_written(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]) + 0
    at[None][..., :1] = 5
    return (at <= at[:, None]).expand(x.shape[0], 1, -1, -1)


def narrowed(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    mask &= (x != 0)[:, None, None, :]
    return mask


@torch.library.custom_op("qfuse_test::clear", mutates_args=("mask",))
def clear(mask: Tensor) -> None:
    mask.zero_()


def cleared_by_an_operator(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    torch.ops.qfuse_test.clear(mask)
    return mask


def cleared_in_a_list(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    torch._foreach_zero_([mask])
    return mask


def cleared_by_keyword(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    torch.fill_(input=mask, value=False)
    return mask


def one_more(x: Tensor) -> Tensor:
    """The distance is the number of sequences, which was once taken for any other."""
    q, k = positions(x)
    return (k - q + 1 < 3).expand(3, 1, -1, -1)


def within(x: Tensor, width: Tensor, *, doubled: int = 0) -> Tensor:
    q, k = positions(x)
    for _ in range(doubled):
        width = width + width
    return ((k <= q) & (k > q - width)).expand(x.shape[0], 1, -1, -1)


def one() -> Tensor:
    return torch.ones((), dtype=torch.int64)


def window_of_sums(x: Tensor) -> Tensor:
    return within(x, one(), doubled=4)


def window_of_many_sums(x: Tensor) -> Tensor:
    return within(x, one(), doubled=9)


def window_of_sequences(x: Tensor) -> Tensor:
    """As long as what stands for the sequences is, doubled, more than all positions."""
    return within(x, one().expand(x.shape[0]).cumsum(0)[-1], doubled=6)


def window_of_sums_of_sums(x: Tensor) -> Tensor:
    width = one().expand(x.shape[0])
    for _ in range(9):
        width = width.cumsum(0)
    return within(x, width[-1])


def window_of_copies(x: Tensor) -> Tensor:
    return within(x, one().expand(4).cumsum(0)[-1])


def window_of_many_copies(x: Tensor) -> Tensor:
    return within(x, one().expand(4).cumsum(0)[-1], doubled=6)


def window_of_merged_copies(x: Tensor) -> Tensor:
    return within(x, one().expand(4, 4, 4, 4, 4, 4).reshape(-1).cumsum(0)[-1])


def window_between_copies(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]).expand(4, -1).cumsum(0)
    return within(x, at[-1][1])


def chunk(x: Tensor, *copies: int) -> Tensor:
    """Keys of the query's chunk, which is as long as there are copies."""
    at = torch.arange(x.shape[1]).view(-1, *(1 for _ in copies)).expand(-1, *copies)
    at = at.reshape(-1)[: x.shape[1]]
    return causal(x) & (at[:, None] == at)


def chunk_of_copies(x: Tensor) -> Tensor:
    return chunk(x, 4)


def chunk_of_many_copies(x: Tensor) -> Tensor:
    return chunk(x, *[4] * 9)


def as_many_copies_as_stand_for_them(x: Tensor) -> Tensor:
    """Up to the query if there were three copies: three is what is put for four, once."""
    q, k = positions(x)
    return (k - q < one().expand(4).cumsum(0)[-1] - 1 - 1).expand(2, 1, -1, -1)


def copies_of_two_numbers(x: Tensor) -> Tensor:
    """Up to the query if the two were one number."""
    q, k = positions(x)
    more = one().expand(6).cumsum(0)[-1] - one().expand(4).cumsum(0)[-1]
    return (k - q < more + 1).expand(2, 1, -1, -1)


def copies_and_heads(x: Tensor) -> Tensor:
    q, k = positions(x)
    more = one().expand(6).cumsum(0)[-1] - one().expand(4).cumsum(0)[-1]
    return (k - q < more + 1).expand(2, 6, -1, -1)


def as_many_ones_as_copies(x: Tensor) -> Tensor:
    """What is let through for `expand` is not, once it is known, for anything else."""
    many = one().expand(4).cumsum(0)[-1] - torch.arange(4)[-1]
    return causal(x) & (many == 1)


def another_copy(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]).expand(4, -1)[3]
    return causal(x) & (at == at)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (strictly_causal, "the mask is another than the causal one"),
        (anti_causal, "the mask is another than the causal one"),
        (everything, "the mask is another than the causal one"),
        (window, "the mask is computed with the number 4000, as a window is"),
        (prefix, "the mask is computed with the number 64, as a window is"),
        (halves, "the mask is computed with the number"),
        (longer, "queries and keys differ in number"),
        (additive, "the mask is not boolean and four-dimensional"),
        (padded, "the mask depends on the input x: it may hold padding"),
        (in_bytes, "the mask is computed in torch.int8, which does not hold all positions"),
        (cleared, "the mask, or what it is made of, is written to by setitem"),
        (cleared_through_a_view, "the mask, or what it is made of, is written to by fill_"),
        (with_positions_written, "the mask, or what it is made of, is written to by setitem"),
        (narrowed, "the mask"),
        (cleared_by_an_operator, "the mask, or what it is made of, is written to by clear"),
        (cleared_in_a_list, "the mask, or what it is made of, is written to by _foreach_zero_"),
        (cleared_by_keyword, "the mask, or what it is made of, is written to by fill_"),
        (one_more, "the mask is "),
        (window_of_sums, "the mask is another than the causal one"),
        (window_of_many_sums, LARGE),
        (window_of_sequences, LARGE),
        (window_of_sums_of_sums, LARGE),
        (window_of_copies, "the mask is another than the causal one"),
        (window_of_many_copies, LARGE),
        (window_of_merged_copies, LARGE),
        (window_between_copies, "the mask is another than the causal one"),
        (chunk_of_copies, "the mask is another than the causal one"),
        (chunk_of_many_copies, LARGE),
        (as_many_copies_as_stand_for_them, "the mask is another than the causal one"),
        (copies_of_two_numbers, "the mask is computed with the number"),
        (copies_and_heads, "the mask is computed with the number 4, as a window is"),
        (as_many_ones_as_copies, "the mask is computed with the number 4, as a window is"),
        (another_copy, "the mask is computed with the number 3, as a window is"),
    ],
)
def test_other_masks_are_not(
    mask: Callable[[Tensor], Tensor], expected: str, dynamic: bool
) -> None:
    assert reason(mask, torch.ones(2, 48), dynamic=dynamic).startswith(expected)


def test_a_function_that_is_not_listed_proves_nothing() -> None:
    def sorted_mask(x: Tensor) -> Tensor:
        return causal(x).float().sort().values.bool()

    assert reason(sorted_mask, torch.ones(2, 8)) == "the mask is computed with sort"


def test_looking_at_a_mask_adds_no_guard() -> None:
    def shifted(x: Tensor) -> Tensor:
        q, k = positions(x)
        return (k <= q + (x.shape[1] - 5)).expand(2, 1, -1, -1)

    graph = captured(shifted, torch.ones(2, 48), dynamic=True).graph
    size = result(graph).meta["example_value"].shape[-1]
    before = len(size.node.shape_env.guards)
    assert why_not_causal(result(graph), {}, [graph]).startswith("the mask is computed with")
    assert len(size.node.shape_env.guards) == before


def test_a_body_that_is_called_with_two_masks() -> None:
    """Dynamo gives each call of a checkpoint a body of its own; other writers of graphs may not."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def layer(x: Tensor, mask: Tensor) -> Tensor:
        return attend(x, x, x, attn_mask=mask)

    def twice(x: Tensor) -> Tensor:
        mask, other = causal(x[:, 0]), everything(x[:, 0])
        checkpoint = torch.utils.checkpoint.checkpoint
        x = checkpoint(layer, x, other, use_reentrant=False)
        out: Tensor = checkpoint(layer, x, mask, use_reentrant=False)
        return out

    module = captured(twice, torch.ones(2, 1, 8, 8, requires_grad=True))
    context: Any = None

    def rejected() -> list[str]:
        return [s.rejected for s in CausalAttention().match(module.graph, context)]

    assert rejected() == ["the mask is another than the causal one", ""]
    first, second = (
        n for n in module.graph.nodes if getattr(n.target, "__name__", "") == CHECKPOINT
    )
    second.args = (first.args[0], *second.args[1:])
    assert [bool(reason) for reason in rejected()] == [True]


# --- grouped keys -------------------------------------------------------------------------------

attend = torch.nn.functional.scaled_dot_product_attention
GROUPED = "sdpa, grouped keys"
GROUPS, REPEATS = 2, 3


def repeated(x: Tensor, times: int = REPEATS) -> Tensor:
    """As transformers writes it."""
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def unsqueezed(x: Tensor) -> Tensor:
    return x.unsqueeze(-3).expand(-1, -1, REPEATS, -1, -1).flatten(1, 2)


def with_ellipsis(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return torch.reshape(x[:, :, None, ...].expand(b, h, REPEATS, s, d), (b, h * REPEATS, s, d))


def in_turn(x: Tensor, times: int = REPEATS) -> Tensor:
    """Keys a b a b where queries in groups want a a b b."""
    b, h, s, d = x.shape
    return x[:, None].expand(b, times, h, s, d).reshape(b, h * times, s, d)


def under_causal(q: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return attend(q, key, value, attn_mask=causal(q[:, 0]), **options)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return under_causal(q, repeated(k), repeated(v))


def tensors(groups: int = GROUPS, of_values: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = GROUPS * REPEATS, groups, groups if of_values is None else of_values
    return [torch.randn(2, h, 24, 8, generator=generator).requires_grad_() for h in heads]


def rewritten(
    fn: Callable[..., Any], inputs: list[Tensor], dynamic: bool = False
) -> tuple[str, list[Tensor], fx.GraphModule]:
    """Who computes the attention of `fn` after the pass; its result and gradients, which are those
    of `fn`; the graph."""
    found: list[tuple[str, fx.GraphModule]] = []
    context: Any = None

    def backend(gm: fx.GraphModule, _: list[Tensor]) -> Any:
        sizes = [n.meta.get("example_value") for n in gm.graph.nodes]
        guards = [s.node.shape_env.guards for s in sizes if isinstance(s, torch.SymInt)]
        before = [len(known) for known in guards]
        (site,) = list(CausalAttention().match(gm.graph, context))
        assert [len(known) for known in guards] == before
        assert site.rejected == ""
        CausalAttention().apply(gm.graph, site, context)
        gm.graph.lint()
        gm.recompile()
        found.append((site.provider, gm))
        return gm.forward

    def run(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        out = call(*inputs)
        out = out if isinstance(out, Tensor) else out[0]
        with_grad = [x for x in inputs if x.requires_grad]
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(out.shape, generator=generator).to(out.dtype)
        return [out, *torch.autograd.grad(out, with_grad, grad)]

    torch.compiler.reset()
    got, expected = run(torch.compile(fn, backend=backend, dynamic=dynamic)), run(fn)
    for one, other in zip(got, expected, strict=True):
        assert testing.relative_error(one, other.double()) < (
            1e-5 if got[0].dtype is torch.float32 else 1e-2
        )
    ((provider, gm),) = found
    return provider, got, gm


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("repeat", [repeated, unsqueezed, with_ellipsis])
def test_repeated_keys_are_taken_as_they_were(
    repeat: Callable[[Tensor], Tensor], dynamic: bool
) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return under_causal(q, repeat(k), repeat(v), scale=0.5)

    provider, _, gm = rewritten(fn, tensors(), dynamic)
    assert provider == GROUPED
    (call,) = gm.graph.find_nodes(op="call_function", target=attend)
    assert all(call.args[i].op == "placeholder" for i in (1, 2))
    assert call.kwargs["enable_gqa"] and call.kwargs["is_causal"]
    assert call.kwargs["scale"] == 0.5 and call.kwargs["attn_mask"] is None


def of_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return under_causal(q, repeated(k, 6), repeated(v, 6))


def keys_in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return under_causal(q, in_turn(k), repeated(v))


def both_in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return under_causal(q, in_turn(k), in_turn(v))


def as_often_as_there_are_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of the same sizes as a repetition."""
    return under_causal(q[:, :4], in_turn(k, 2), in_turn(v, 2))


def keys_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return under_causal(q, repeated(k), v)


def by_other_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return under_causal(q, repeated(k), repeated(v, 2))


def of_fewer_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return under_causal(q, repeated(k), repeated(v[..., :4]))


def of_features_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return under_causal(q, repeated(k.mT.contiguous().mT), repeated(v))


def used_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    key = repeated(k)
    return under_causal(q, key, repeated(v)), key


def written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What was repeated is not what the key holds by then."""
    k = k + 0
    key = repeated(k)
    k.mul_(2)
    return under_causal(q, key, repeated(v))


def written_to_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = (k + 0).mul_(2)
    return under_causal(q, repeated(k), repeated(v))


def dropping_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return under_causal(q, repeated(k), repeated(v), dropout_p=0.1)


def by_the_math_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return under_causal(q, repeated(k), repeated(v))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("fn", "groups", "provider"),
    [
        (plain, (2,), GROUPED),
        (of_one_head, (1,), GROUPED),
        (written_to_before, (2,), GROUPED),
        (both_in_turn, (2,), "sdpa"),
        (as_often_as_there_are_groups, (2,), "sdpa"),
        (keys_in_turn, (2,), "keys and values are not repeated alike"),
        (keys_alone, (2, 6), "keys and values are not repeated alike"),
        (by_other_numbers, (2, 3), "keys and values are not repeated alike"),
        (of_fewer_features, (2,), "queries, keys and values differ in size"),
        (of_features_apart, (2,), "features do not lie side by side"),
        (used_elsewhere, (2,), "repeated keys are used elsewhere"),
        (written_to, (2,), "something is written to once keys are repeated"),
        (dropping_out, (2,), "no fused kernel of a CPU drops out"),
        (by_the_math_kernel, (2,), "the program chooses the kernel"),
    ],
)
def test_keys_that_stay_repeated(
    fn: Callable[..., Any], groups: tuple[int, ...], provider: str, dynamic: bool
) -> None:
    """Each is computed by the rewritten graph, and is what it was."""
    expected = provider if provider.startswith("sdpa") else f"sdpa, repeated keys: {provider}"
    assert rewritten(fn, tensors(*groups), dynamic)[0] == expected


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "expected"),
    [
        ("cuda", torch.bfloat16, 128, (9, 0), ""),
        ("cuda", torch.float16, 256, (8, 0), ""),
        ("cuda", torch.float16, 256, (10, 3), ""),
        ("cuda", torch.float16, 192, (8, 6), ""),
        (
            "cuda",
            torch.float16,
            256,
            (8, 9),
            "no fused kernel is known to take grouped keys of 256",
        ),
        (
            "cuda",
            torch.float16,
            256,
            (12, 0),
            "no fused kernel is known to take grouped keys of 25",
        ),
        (
            "cuda",
            torch.float16,
            288,
            (9, 0),
            "no fused kernel is known to take grouped keys of 288",
        ),
        ("cuda", torch.bfloat16, 64, (7, 5), "no fused kernel takes grouped keys below compute"),
        ("cuda", torch.float32, 64, (9, 0), "no fused kernel takes grouped keys in torch.float32"),
        ("cpu", torch.float32, 512, None, ""),
        ("mps", torch.float16, 64, None, "fused kernels of mps are not known"),
    ],
)
def test_where_a_fused_kernel_takes_grouped_keys(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int] | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    reason = no_kernel(torch.device(device), dtype, head_dim, 0.0)
    assert reason.startswith(expected) and bool(reason) == bool(expected)


def test_flash_attention_that_is_turned_off() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        provider = rewritten(plain, tensors())[0]
    assert provider == "sdpa, repeated keys: flash attention is turned off"


def test_under_autocast_the_kernel_is_that_of_the_lower_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms in float32 make queries and keys float32; attention computes in autocast's dtype."""
    asked: list[torch.dtype] = []

    def keep(device: torch.device, dtype: torch.dtype, head_dim: Any, dropout: Any) -> str:
        asked.append(dtype)
        return ""

    monkeypatch.setattr("inductor_q.passes.grouped_keys.no_kernel", keep)
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        provider, (out, *_), _ = rewritten(plain, [q, k, v.detach().bfloat16()])
    assert (provider, asked, out.dtype) == (GROUPED, [torch.bfloat16], torch.bfloat16)


class Attention(torch.nn.Module):
    """Queries, keys and values of 4, 2 and 2 heads out of one quantized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = testing.quantized_linear(torch.randn(128, 64), compute_dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).unflatten(-1, (8, 16)).transpose(1, 2)
        q, k, v = heads.split((4, 2, 2), dim=1)
        return under_causal(q, repeated(k, 2), repeated(v, 2))


def test_a_size_that_an_operator_is_given_is_not_written_to() -> None:
    """Under dynamic shapes an autograd.Function, here of a quantized weight, is given sizes."""
    x = torch.randn(2, 64, 64, requires_grad=True)
    gm = captured(Attention(), x, dynamic=True)
    context: Any = None
    (site,) = CausalAttention().match(gm.graph, context)
    assert (site.rejected, site.provider) == ("", GROUPED)


def test_grouped_keys_keep_less_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Attention()
    x = torch.randn(2, 64, 64, requires_grad=True)

    def saved() -> int:
        torch.compiler.reset()
        options: Any = {"fx_graph_cache": False}
        compiled = torch.compile(module, backend="qfuse", options=options)
        compiled(x)
        return testing.count_saved_bytes(lambda: compiled(x), module).total

    grouped = saved()
    monkeypatch.setattr("inductor_q.passes.grouped_keys.no_kernel", lambda *_: "not asked for")
    of_a_head = 2 * 64 * 16 * x.itemsize
    assert saved() - grouped >= (2 * 4 - 2 * 2) * of_a_head


# --- whole models -------------------------------------------------------------------------------


def sites(path: Path) -> list[dict[str, Any]]:
    compiles = json.loads(path.read_text())["compiles"]
    return [s for c in compiles for s in c["sites"] if s["pass_name"] == PASS]


def step(call: Any, model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    loss = call(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    gradients = [p.grad.clone() for p in testing.adapter_parameters(model) if p.grad is not None]
    model.zero_grad()
    return loss.detach(), gradients


def qlora(config: Callable[..., Any] = testing.tiny_llama_config) -> Any:
    sizes = config(num_hidden_layers=LAYERS)
    return testing.qlora_model(sizes, compute_dtype=torch.float32, randomize_adapters=True)


QWEN3_5 = functools.partial(testing.tiny_qwen3_5_config, layer_types=["full_attention"] * LAYERS)


@pytest.mark.parametrize(
    ("config", "checkpointed"),
    [
        (testing.tiny_llama_config, False),
        (testing.tiny_qwen3_config, True),
        (QWEN3_5, False),
    ],
    ids=["llama", "qwen3-checkpointed", "qwen3.5"],
)
def test_attention_of_a_model_is_causal(
    config: Callable[..., Any], checkpointed: bool, tmp_path: Path
) -> None:
    torch.compiler.reset()
    model = qlora(config)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = step(model, model, ids)
    report = tmp_path / "report.json"
    options: Any = {"qfuse.report": str(report), "fx_graph_cache": False}
    got = step(torch.compile(model, backend="qfuse", options=options), model, ids)
    found = sites(report)
    assert [(s["rejected"], s["provider"]) for s in found] == [("", GROUPED)] * LAYERS
    assert all(s["module"].endswith(f"layers.{i}.self_attn") for i, s in enumerate(found))
    torch.testing.assert_close(got[0], expected[0])
    for one, other in zip(got[1], expected[1], strict=True):
        assert testing.relative_error(one, other.double()) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_grouped_keys_on_a_gpu(
    checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is eager's, by a fused kernel, and takes no more memory than with repeated keys."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    sizes = testing.tiny_qwen3_config(num_hidden_layers=LAYERS, hidden_size=512, **heads)
    model = testing.qlora_model(sizes, randomize_adapters=True, device="cuda")
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    length = 2048
    ids = torch.randint(0, 200, (2, length), device="cuda")

    def measured(call: Any) -> tuple[tuple[Tensor, list[Tensor]], int]:
        step(call, model, ids)  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = step(call, model, ids)
        return result, torch.cuda.max_memory_allocated() - before

    def compiled(name: str) -> tuple[tuple[Tensor, list[Tensor]], int, list[dict[str, Any]]]:
        torch.compiler.reset()
        report = tmp_path / name
        options: Any = {"qfuse.report": str(report), "fx_graph_cache": False}
        return *measured(torch.compile(model, backend="qfuse", options=options)), sites(report)

    expected, _ = measured(model)
    got, grouped, found = compiled("grouped")
    assert [(s["rejected"], s["provider"]) for s in found] == [("", GROUPED)] * LAYERS
    monkeypatch.setattr("inductor_q.passes.grouped_keys.no_kernel", lambda *_: "not asked for")
    same, whole, found = compiled("whole")
    assert [s["provider"] for s in found] == ["sdpa, repeated keys: not asked for"] * LAYERS
    assert grouped <= whole
    torch.testing.assert_close(got[0], expected[0], rtol=1e-2, atol=1e-2)
    for one, other, exact in zip(got[1], same[1], expected[1], strict=True):
        error = testing.relative_error(one, exact.double())
        assert error < max(3e-2, 1.5 * testing.relative_error(other, exact.double()))


def test_a_mask_of_the_users_is_kept(tmp_path: Path) -> None:
    """Padding that nothing but the mask tells: attention must not see it."""
    torch.compiler.reset()
    model = qlora()
    ids = torch.randint(1, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = step(model, model, ids, attention_mask=mask)
    report = tmp_path / "report.json"
    options: Any = {"qfuse.report": str(report), "fx_graph_cache": False}
    compiled = torch.compile(model, backend="qfuse", options=options)
    got = step(compiled, model, ids, attention_mask=mask)
    found = sites(report)
    assert len(found) == LAYERS
    assert all("attention_mask: it may hold padding" in s["rejected"] for s in found)
    assert all(s["by_choice"] for s in found)  # nothing that "qfuse.strict" should refuse
    torch.testing.assert_close(got[0], expected[0])


def test_what_the_captured_graph_mutates_stays() -> None:
    """Dead code of Dynamo's graph is not ours to tell: a mutation has no users either."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = testing.quantized_linear(torch.randn(64, 64))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)  # type: ignore[operator]
            q, k = positions(x[:, :, 0])
            x = self.linear(x).unsqueeze(1)
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(x, x, x, attn_mask=(k <= q).expand(2, 1, -1, -1))

    torch.compiler.reset()
    module = Counting()
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = module(x)
        compiled = torch.compile(module, backend="qfuse", options={"fx_graph_cache": False})
        got = compiled(x)
    from inductor_q import last_report

    report = last_report()
    assert report is not None
    assert [(s.provider, s.rejected) for s in report.sites if s.pass_name == PASS] == [("sdpa", "")]
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert module.calls == 2


def test_a_compile_with_no_other_pass_is_not_told_as_cached() -> None:
    from inductor_q import last_report

    torch.compiler.reset()
    layer = testing.quantized_linear(torch.randn(64, 64))
    options: Any = {"qfuse.passes": [PASS], "fx_graph_cache": False}
    with torch.no_grad():
        compiled: Any = torch.compile(layer, backend="qfuse", options=options)
        compiled(torch.randn(4, 64, dtype=torch.bfloat16))
    report = last_report()
    assert report is not None
    assert [p.name for p in report.passes] == [PASS] and not report.cached
