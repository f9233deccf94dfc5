"""Keys that a model repeats for the groups of its queries: taken as they were, or why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("bitsandbytes")

from inductor_q import testing
from inductor_q.passes.causal_attention import CausalAttention
from inductor_q.passes.grouped_keys import no_kernel
from tests.support.attention import GROUPED, captured, causal

attend = torch.nn.functional.scaled_dot_product_attention
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
