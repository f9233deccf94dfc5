"""causal_attention: a causal mask that was written out is left out, any other is kept and said."""

from __future__ import annotations

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

LAYERS = 2
PASS = "causal_attention"


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


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(2, 16), (16, 16), (3, 5000)], ids=str)
@pytest.mark.parametrize("mask", [causal, packed, lower_triangle])
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


def doubled(x: Tensor, times: int) -> Tensor:
    q, k = positions(x)
    width = torch.ones((), dtype=torch.int64)
    for _ in range(times):
        width = width + width
    return ((k <= q) & (k > q - width)).expand(2, 1, -1, -1)


def window_of_sums(x: Tensor) -> Tensor:
    return doubled(x, 6)


def window_of_many_sums(x: Tensor) -> Tensor:
    return doubled(x, 9)


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
        (narrowed, "the mask"),
        (cleared_by_an_operator, "the mask, or what it is made of, is written to by clear"),
        (cleared_in_a_list, "the mask, or what it is made of, is written to by _foreach_zero_"),
        (cleared_by_keyword, "the mask, or what it is made of, is written to by fill_"),
        (one_more, "the mask is "),
        (window_of_sums, "the mask is another than the causal one"),
        (window_of_many_sums, "the mask is computed with more than 8 sums, as a window may be"),
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


def qlora(**config: Any) -> Any:
    sizes = testing.tiny_llama_config(num_hidden_layers=LAYERS, **config)
    return testing.qlora_model(sizes, compute_dtype=torch.float32, randomize_adapters=True)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_attention_of_a_model_is_causal(checkpointed: bool, tmp_path: Path) -> None:
    torch.compiler.reset()
    model = qlora()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = step(model, model, ids)
    report = tmp_path / "report.json"
    options: Any = {"qfuse.report": str(report), "fx_graph_cache": False}
    got = step(torch.compile(model, backend="qfuse", options=options), model, ids)
    found = sites(report)
    assert [s["rejected"] for s in found] == [""] * LAYERS
    assert all(s["module"].endswith(f"layers.{i}.self_attn") for i, s in enumerate(found))
    torch.testing.assert_close(got[0], expected[0])
    for one, other in zip(got[1], expected[1], strict=True):
        assert testing.relative_error(one, other.double()) < 1e-4


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
