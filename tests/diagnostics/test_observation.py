"""What an observed run tells, on real compiles: causes, counts, places, and nothing left behind."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.diagnostics import coverage, recompiles
from inductor_q.diagnostics.explanation import Explanation, Frame
from inductor_q.diagnostics.observation import observe
from inductor_q.diagnostics.render import words
from inductor_q.graph_report import Report, SiteRecord
from inductor_q.integrations import prepare_checkpointing
from inductor_q.passes.causal_attention import CausalAttention
from tests.support.compiling import no_codegen, skip_unless_regions_chain
from tests.support.processes import environment


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def observed(run: Callable[[], Any], **options: Any) -> Explanation:
    with observe(**options) as observation:
        run()
    return observation.explanation()


# --- graph breaks ---------------------------------------------------------------------------------


def in_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


def test_a_break_that_the_counters_miss() -> None:
    run = observed(lambda: torch.compile(in_loop, backend="eager")(torch.ones(4)))
    (only,) = run.breaks
    assert (only.count, only.gb_id, only.library) == (1, "GB0025", "your code")
    assert only.user == only.origin
    assert only.user.function == "in_loop"
    assert only.user.text == "torch._dynamo.graph_break()"
    assert "remove" in only.fix
    (left,) = run.fallbacks
    assert left.function == "in_loop"
    assert "Call to `torch._dynamo.graph_break()`" in left.reason


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def test_the_same_break_twice_is_one_cause() -> None:
    def call() -> None:
        torch.compile(scale, backend="eager")(torch.ones(4))
        torch._dynamo.reset()
        torch.compile(scale, backend="eager")(torch.ones(4))

    (only,) = observed(call).breaks
    assert only.count == 2
    assert only.user.text == "return x * x.sum().item()"
    assert "capture_scalar_outputs" in only.fix


def test_a_break_under_fullgraph_is_told_too() -> None:
    def call() -> None:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(in_loop, backend="eager", fullgraph=True)(torch.ones(4))

    run = observed(call)
    (only,) = run.breaks
    assert only.user.function == "in_loop"
    assert run.fallbacks == ()


# --- recompiles -----------------------------------------------------------------------------------


def add(x: torch.Tensor, n: Any) -> torch.Tensor:
    return x + len(n) if isinstance(n, str) else x + n


def test_recompiles_until_the_limit() -> None:
    def call() -> None:
        compiled = torch.compile(add, backend="eager")
        for i in range(12):
            compiled(torch.ones(4), "a" * i)

    run = observed(call)
    (only,) = run.recompiles
    assert only.count == torch._dynamo.config.recompile_limit - 1 == len(run.compiles) - 1
    assert only.hit_limit
    assert (only.function, only.guard) == ("add", "n == ''")
    assert (only.before, only.after) == ("''", "'a', 'aa', 'aaa', 'aaaa', ...")
    assert {f.reason for f in run.fallbacks} == {"the recompile limit was reached"}


def test_one_size_that_recompiles_many_functions_is_one_record() -> None:
    """A broken graph has many frames; a batch of another length recompiles each of them."""
    where = Frame("model.py", 1, "forward")
    text = "tensor '{}' size mismatch at index 1. expected {}, actual {}"
    seen = [("forward", "ids", 79, 68), ("mask", "ids", 79, 68), ("head", "y", 79, 68)]
    seen += [("other", "z", 4, 5)]
    found = recompiles.distinct(
        (name, where, recompiles.parse(f"0/0: {text.format(tensor, before, after)}"), False)
        for name, tensor, before, after in seen
    )
    assert [(r.function, r.count) for r in found] == [("forward", 3), ("other", 1)]
    assert found[0].fix.endswith("; the same size recompiles mask, head")


def test_lengths_under_a_trainer_are_one_record_with_advice_for_it() -> None:
    """A shift by one, two rows in one, another function: all follow from the batch. What a hook
    recompiles has the hook's own way out; a batch of one row stays apart."""
    text = "tensor '{}' {} mismatch at index {}. expected {}, actual {}"
    library = Frame("/site-packages/transformers/modeling_utils.py", 2143)
    hook = Frame(library.file, 2143, "make_inputs_require_grads")
    seen = [
        ("forward", library, text.format("kwargs['input_ids']", "size", 1, 38, 82)),
        ("head", library, text.format("mask", "size", 1, 37, 81)),
        ("__init__", library, text.format("tile", "size", 0, 74, 162)),
        ("forward", library, text.format("kwargs['input_ids']", "size", 0, 2, 1)),
        ("make_inputs_require_grads", hook, "tensor 'output' requires_grad mismatch. expected 0"),
    ]
    found = recompiles.distinct(
        ((name, where, recompiles.parse(f"0/0: {reason}"), False) for name, where, reason in seen),
        by_trainer=True,
    )
    lengths, row, of_hook = found
    assert lengths.count == 3 and lengths.fix.endswith("recompiles head, __init__")
    assert "QfuseCallback(dynamic=True)" in lengths.fix and "mark_dynamic" not in lengths.fix
    assert row.fix.startswith("size 1 is compiled apart")
    assert "enable_input_require_grads() cannot be compiled" in of_hook.fix


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("kwargs['input_ids']", " (torch._dynamo.mark_dynamic(input_ids, 1))"),
        ("x", " (torch._dynamo.mark_dynamic(x, 1))"),
        ("___stack0", ""),
        ("loss['log_probs']", ""),
        ("self.cache", ""),
        ("kwargs", ""),
        ("args", ""),
        ("args[0]", ""),
    ],
)
def test_only_what_a_caller_can_name_is_to_be_marked(name: str, advice: str) -> None:
    guard = recompiles.parse(f"0/0: tensor '{name}' size mismatch at index 1. expected 4, actual 5")
    assert recompiles.fix_for(guard).endswith(f"or compile with dynamic=True{advice}")


@pytest.mark.parametrize(
    ("calls", "guard", "before", "after", "fix"),
    [
        (
            [torch.ones(4, 2), torch.ones(5, 2)],
            "tensor 'x' size mismatch at index 0. expected 4, actual 5",
            "4",
            "5",
            "mark_dynamic(x, 0)",
        ),
        ([torch.ones(4), torch.ones(4).double()], "dtype", "Float", "Double", "one dtype"),
        ([torch.ones(4), torch.ones(4, requires_grad=True)], "requires_grad", "", "", "same"),
    ],
)
def test_recompiles_by_tensor(
    calls: list[torch.Tensor], guard: str, before: str, after: str, fix: str
) -> None:
    def call() -> None:
        compiled = torch.compile(add, backend="eager")
        for x in calls:
            compiled(x, 1)

    (only,) = observed(call).recompiles
    assert only.count == 1
    assert guard in only.guard
    assert before in only.before
    assert after in only.after
    assert fix in only.fix


def test_recompiles_by_a_constant() -> None:
    def call() -> None:
        compiled = torch.compile(add, backend="eager", dynamic=False)
        for n in (1, 2, 3):
            compiled(torch.ones(4), n)

    (only,) = observed(call).recompiles
    assert (only.guard, only.before, only.after, only.count) == ("n == 1", "1", "2, 3", 2)
    assert "dynamic=True" in only.fix


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        (
            "4/0: Cache line invalidated because type(L['self']) got deallocated",
            "what was compiled for is gone",
        ),
        (
            "5/0: not hasattr(L['self']._modules['base_layer'], 'base_layer')",
            "give the object the same attributes in every call",
        ),
    ],
)
def test_what_keeps_a_guard_from_failing(reason: str, fix: str) -> None:
    """Guards of PEFT's target_parameters: neither is a value that could be passed as a tensor."""
    assert recompiles.fix_for(recompiles.parse(reason)).startswith(fix)


# --- errors, and nothing at all -------------------------------------------------------------------


def broken_backend(gm: Any, example_inputs: Any) -> Any:
    raise RuntimeError("no code for you")


def test_suppressed_errors() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        run = observed(lambda: torch.compile(scale, backend=broken_backend)(torch.ones(4)))
    assert {(s.function, s.count) for s in run.suppressed} >= {("scale", 1)}
    assert "no code for you" in run.suppressed[0].error


def test_cuda_graphs_that_torch_skips() -> None:
    """What it logs on a GPU, through the function that logs it, whatever TORCH_LOGS shows."""
    skip = torch._inductor.cudagraph_utils.log_cudagraph_skip_and_bump_counter
    mutated = "skipping cudagraphs due to mutated inputs (1 instances)"

    def call() -> None:
        for reason in (mutated, "skipping cudagraphs due to cpu device (arg0_1)", mutated):
            skip(reason)

    found = observed(call).cudagraph_skips
    assert [(s.reason, s.count) for s in found] == [
        (mutated, 2),
        ("skipping cudagraphs due to cpu device (arg0_1)", 1),
    ]


def test_too_many_cuda_graphs_are_a_warning_and_no_skip() -> None:
    from torch._inductor.cudagraph_utils import maybe_warning_due_to_dynamic_shape

    def call() -> None:
        with torch._inductor.config.patch({"triton.cudagraph_dynamic_shape_warn_limit": 2}):
            maybe_warning_due_to_dynamic_shape({(n,): print for n in range(3)}, 3)

    run = observed(call)
    assert not run.cudagraph_skips
    assert any("observed 4 distinct sizes" in warning for warning in run.warnings)


def test_nothing_compiled_says_how_to() -> None:
    run = observed(lambda: scale(torch.ones(4)), backend="eager")
    (warning,) = run.warnings
    assert "torch.compile" in warning
    assert "--backend eager" in warning


def test_forced_backend() -> None:
    run = observed(
        lambda: torch.compile(lambda x: x + 1, backend="inductor")(torch.ones(4)), backend="eager"
    )
    assert [c.backend for c in run.compiles] == ["eager"]


# --- coverage -------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(32, 64, dtype=torch.bfloat16)
        self.seen = testing.quantized_linear(weight)
        self.unseen = testing.quantized_linear(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.seen(x)
        return y


@pytest.mark.parametrize("backend", ["inductor", "qfuse"])
def test_coverage_and_saved_tensors(backend: str) -> None:
    model = Model()
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    name = testing.qfuse_backend() if backend == "qfuse" else backend

    def call() -> None:
        torch.compile(model, backend=name)(x).sum().backward()

    run = observed(call)
    layers = {layer.module: layer for layer in run.layers if layer.module in ("seen", "unseen")}
    seen, unseen = layers["seen"], layers["unseen"]
    assert (seen.status, seen.format, seen.shape) == ("fused", "nf4", (32, 64))
    assert seen.would == (backend == "inductor")
    assert "canonicalize" in [step.pass_name for step in seen.steps]
    assert unseen.status == "unseen"
    assert [c.backend for c in run.compiles] == [backend]
    assert run.warnings == ()
    assert "qfuse.numerics" in run.options


def graphs(gm: Any, example_inputs: Any) -> Any:
    """Inductor up to its last graphs, which run as they are: no code is generated."""
    from functorch.compile import make_boxed_func
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def run(gm: Any, example_inputs: Any, **_: Any) -> Any:
        return make_boxed_func(gm.forward)

    with config.patch(enable_autograd_cache=False):
        return compile_fx(gm, example_inputs, inner_compile=run)


def test_what_cannot_be_told_of_attention_hides_no_quantized_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such mask")

    monkeypatch.setattr(CausalAttention, "match", fail)
    model, x = Model(), torch.randn(8, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        run = observed(lambda: torch.compile(model, backend="inductor")(x))
    (seen,) = (layer for layer in run.layers if layer.module == "seen")
    assert (seen.status, seen.would) == ("fused", True)
    (told,) = run.warnings
    assert "no such mask" in told


ALWAYS = {
    "extend_k.min_rows": 1,
    "fuse_dropout.min_rows": 1,
    "causal_attention.min_positions": 1,
}


def test_the_recipe_of_trainers() -> None:
    """Mask, dropout, checkpointing and loss of a model under autocast: what is done, or why not."""
    for extra in ("bitsandbytes", "peft", "transformers"):
        pytest.importorskip(extra)
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = testing.qlora_model(config, dropout=0.05, randomize_adapters=True)
    prepare_checkpointing(model)
    model.gradient_checkpointing_enable()
    ids = torch.randint(0, 256, (2, 32))
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0

    def run(backend: Any, **options: Any) -> Explanation:
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend=backend, options=options or None)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                found = compiled(input_ids=ids, attention_mask=mask, labels=ids)
            found.loss.backward()

        return observed(step)

    def told(found: Explanation) -> dict[str, list[tuple[str, str]]]:
        return {
            kind: [(layer.status, layer.reason) for layer in getattr(found, kind)]
            for kind in ("attention", "loss", "checkpointing")
        }

    with no_codegen():
        thresholds = {**ALWAYS, "keep_checkpointed.min_ratio": 1}
        done = run(qfuse, **{"qfuse.thresholds": thresholds, "qfuse.loss": "chunked"})
    assert not done.breaks
    again = (
        "attention of 32 positions is computed again, fewer than "
        "keep_checkpointed.min_positions=1048576"
    )
    assert told(done) == {
        "attention": [("fused", "")],
        "loss": [("fused", "")],
        # The projections of q, k and v together, of o, gate and up, and down; the layer's result.
        "checkpointing": [("fused", ""), ("canonical", again), *[("fused", "")] * 4],
    }
    [loss] = done.loss
    provider = "qfuse.linear_cross_entropy, logits on demand"
    assert (loss.module, loss.steps[0].provider) == ("base_model.model.lm_head", provider)
    assert {layer.status for layer in done.layers} == {"fused"}
    passes = [{s.pass_name for s in layer.steps if not s.rejected} for layer in done.layers]
    assert all("fuse_dropout" in found for found in passes)

    would = run(graphs)  # by a CPU's own preset
    assert {layer.status for layer in would.layers} == {"fused"}
    refused = {name: reason for name, reason, _ in words.refusals(would)}
    least = "of the preset"
    assert refused["fuse_dropout"].endswith(least)
    assert refused["extend_k"].startswith("a factor that cannot move (a dropout mask")
    titles = [title for _, title, _ in words.beside(would)]
    assert titles[:2] == [
        "Attention: 0 of 1 mask would be left out",
        "Loss: 0 of 1 head would be computed in chunks",
    ]
    assert "qfuse.loss='chunked' has no such limit" in would.loss[0].reason


def test_what_became_of_attention_is_no_quantized_layer() -> None:
    attention = SiteRecord("causal_attention", "sdpa", module="0.self_attn", provider="sdpa")
    refused = replace(attention, provider="", rejected="it may hold padding", by_choice=True)
    linear = SiteRecord("canonicalize", "gemm_4bit", module="0.self_attn.q_proj")
    reports = [(Report(sites=[attention, linear]), True), (Report(sites=[refused]), True)]
    [layer] = coverage.layers(reports, (), {})
    assert layer.module == "0.self_attn.q_proj"
    [one] = coverage.beside("attention", reports)
    assert (one.module, one.kind, one.would) == ("0.self_attn", "attention", True)
    assert (one.status, one.reason) == ("canonical", "it may hold padding"), "the worst compile"
    assert [s.provider for s in one.steps] == ["sdpa", ""]


class Attention(nn.Module):
    """A mask that is causal, or one that hides one more key."""

    def __init__(self, hidden: int = 0) -> None:
        super().__init__()
        self.linear = testing.quantized_linear(torch.randn(64, 64, dtype=torch.bfloat16))
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        mask = at <= at[:, None]
        if self.hidden:
            mask = mask & (at != self.hidden)
        x = self.linear(x)[:, None]
        attend = nn.functional.scaled_dot_product_attention
        return attend(x, x, x, attn_mask=mask.expand(x.shape[0], 1, -1, -1))


@pytest.mark.parametrize(
    ("hidden", "status", "reason"),
    [
        (0, "fused", ""),
        (9, "canonical", "the mask is computed with the number 9, as a window is"),
    ],
)
def test_attention_that_another_backend_compiles(hidden: int, status: str, reason: str) -> None:
    """What qfuse would do is told; the graph and its guards are as without a look at them."""
    module = Attention(hidden)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)

    def seen(dry_run: bool) -> tuple[Explanation, str, list[str]]:
        kept: list[tuple[str, list[str]]] = []

        def keep(gm: Any, example_inputs: Any) -> Any:
            [size, *_] = (s for s in example_inputs if isinstance(s, torch.SymInt))
            kept.append((str(gm.graph), [str(g.expr) for g in size.node.shape_env.guards]))
            return graphs(gm, example_inputs)

        torch._dynamo.reset()
        with torch.no_grad():
            run = observed(
                lambda: torch.compile(module, backend=keep, dynamic=True)(x), dry_run=dry_run
            )
        [(graph, guards)] = kept
        return run, graph, guards

    looked, *left = seen(True)
    [one] = looked.attention
    assert (one.status, one.reason, one.would, one.shape) == (status, reason, True, (-1, 1, -1, 64))
    unlooked, *untouched = seen(False)
    assert left == untouched
    assert not unlooked.attention


def test_a_layer_that_is_itself_compiled() -> None:
    """It has no path; its parameter has a name."""
    layer: nn.Module = testing.quantized_linear(torch.randn(32, 64, dtype=torch.bfloat16))
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    run = observed(lambda: torch.compile(layer, backend=graphs)(x))
    [found] = [one for one in run.layers if one.status == "fused"]
    assert (found.module, found.format) == ("weight", "nf4")


def test_saved_bytes_are_what_autograd_holds() -> None:
    other = testing.qlora_model(testing.tiny_llama_config(num_hidden_layers=2))  # the same paths
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = testing.qlora_model(config, adapter_dtype=torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (2, 32))
    compiled: Any = torch.compile(model, backend=graphs)
    run = observed(lambda: compiled(input_ids=ids, labels=ids).loss.backward())
    held = testing.count_saved_bytes(lambda: compiled(input_ids=ids, labels=ids).loss, model)
    assert run.saved_bytes == held.total > 0
    assert sum(item.count for item in run.saved) == len(held.tensors)
    assert len(run.layers) == len(testing.PROJECTIONS), other
    assert all(layer.status == "fused" and layer.would for layer in run.layers)


class Region(nn.Module):
    """Torch compiles it once, however often it stands in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = testing.lora_linear(64, 64, adapter_dtype=torch.bfloat16)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def test_layers_that_share_the_graph_of_a_nested_region() -> None:
    """Each has its outcome, and the ops inside are what keeps memory for backward."""
    model = nn.Sequential(*(Region() for _ in range(3)))
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    skip_unless_regions_chain(model, x)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=graphs)
    run = observed(lambda: compiled(x).sum().backward())
    layers = [one for one in run.layers if one.module.endswith("layer.proj")]
    assert [one.module for one in layers] == [f"{n}.layer.proj" for n in range(3)]
    assert all((one.status, one.would) == ("fused", True) for one in layers)
    for one in layers:
        assert {step.pass_name for step in one.steps} >= {"canonicalize", "fold_lora"}
    saved = {item.op: item.count for item in run.saved}
    assert (saved["aten.tanh"], saved["aten.mm"]) == (3, 3)
    assert "invoke_subgraph" not in saved
    held = testing.count_saved_bytes(lambda: compiled(x), model)
    inputs = x.numel() * x.element_size()
    assert run.saved_bytes == held.total - inputs > 0


def test_backends_that_cannot_be_looked_into() -> None:
    model = Model()
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    run = observed(lambda: torch.compile(model, backend="aot_eager")(x))
    seen = next(layer for layer in run.layers if layer.module == "seen")
    assert seen.status == "rejected"
    assert "aot_eager" in seen.reason
    assert "aot_eager" in run.warnings[0]


# --- nothing is left behind -----------------------------------------------------------------------


def state() -> dict[str, Any]:
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import convert_frame
    from torch._dynamo.eval_frame import _stance
    from torch._dynamo.output_graph import OutputGraph
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    from inductor_q.passes import runner

    trace = logging.getLogger("torch.__trace")
    return {
        "handlers": [h for h in trace.handlers if type(h).__module__.startswith("inductor_q")],
        "level": trace.level,
        "finders": list(sys.meta_path),
        "dynamo": dynamo_config.get_serializable_config_copy(),
        "functorch": functorch_config.get_serializable_config_copy(),
        "inductor": {key: repr(value) for key, value in inductor_config.get_config_copy().items()},
        "stance": repr(_stance),
        "compiler": OutputGraph.call_user_compiler,
        "listeners": list(runner.listeners),
        "bytecode": dict(convert_frame._bytecode_hooks),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "argv": list(sys.argv),
        "path": list(sys.path),
        "main": sys.modules["__main__"],
        "hook": sys.excepthook,
    }


@pytest.mark.parametrize("error", [None, ValueError])
def test_nothing_is_left_behind(error: type[Exception] | None, tmp_path: Any) -> None:
    before = state()
    try:
        with observe(backend="eager", dump=tmp_path):
            torch.compile(scale, backend="inductor")(torch.ones(4))
            if error:
                raise error
    except ValueError:
        assert error
    assert state() == before
    index = json.loads((tmp_path / "index.json").read_text())
    assert {entry["kind"] for entry in index} == {"bytecode"}


def test_torch_is_not_imported_before_the_target_does() -> None:
    look = """
        import sys
        from inductor_q.diagnostics.observation import observe
        with observe() as observation:
            before = "torch" in sys.modules
            import torch
            @torch.compile(backend="eager")
            def f(x):
                torch._dynamo.graph_break()
                return x + 1
            f(torch.ones(3))
        run = observation.explanation()
        print(before, run.break_count, [c.backend for c in run.compiles])
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(look)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout == "False 1 ['eager']\n", done.stderr
