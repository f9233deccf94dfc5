"""causal_attention in whole models: a causal mask is left out, any other is kept and said."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

from inductor_q import testing  # noqa: E402
from inductor_q.integrations import prepare_checkpointing  # noqa: E402
from inductor_q.passes.causal_mask import MADE_OUTSIDE  # noqa: E402
from tests.support.attention import GROUPED, batch, causal, plain_step, positions  # noqa: E402
from tests.support.captured import CapturedStage  # noqa: E402
from tests.support.compiling import count_ops, no_codegen, partition  # noqa: E402

LAYERS = 2
PASS = "causal_attention"


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
        pytest.param(testing.tiny_llama_config, False, id="llama"),
        pytest.param(
            testing.tiny_qwen3_config, True, id="qwen3-checkpointed", marks=pytest.mark.slow
        ),
        pytest.param(QWEN3_5, False, id="qwen3.5"),
    ],
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
    with no_codegen():
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
    """A step is eager's, by a fused kernel, and takes no more memory than with repeated keys.

    Under checkpoints the peak is that of one layer, and the two differ by what Inductor reuses.
    """
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
    assert grouped <= whole * (1.05 if checkpointed else 1)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-2, atol=1e-2)
    for one, other, exact in zip(got[1], same[1], expected[1], strict=True):
        error = testing.relative_error(one, exact.double())
        assert error < max(3e-2, 1.5 * testing.relative_error(other, exact.double()))


VALID_FIRST = f"sdpa, valid first{GROUPED.removeprefix('sdpa')}"
DOCUMENTS = "FlexAttention of documents"
ALWAYS = {"qfuse.thresholds": {"causal_attention.min_positions": 0}}


def inputs_of(case: str, length: int) -> dict[str, Tensor]:
    """What a collator hands a model beside the tokens: three rows, and labels of real tokens."""
    ids = torch.randint(1, 200, (3, length), generator=torch.Generator().manual_seed(length))
    if case == "documents":
        lengths = (length // 3, 1, length - length // 3 - 1)
        positions = torch.cat([torch.arange(n) for n in lengths])
        return {"labels": ids, "position_ids": positions.expand(3, -1).contiguous()}
    mask = torch.ones_like(ids)
    mask[0, -5:], mask[1, :7], mask[2, 4:6] = 0, 0, 0  # on the right, on the left, and between
    # A row of padding before a real token has other logits than in eager, unless it is the first.
    labels = ids.masked_fill(mask == 0, -100)
    labels[2, 6] = -100
    return {"labels": labels, "attention_mask": mask}


def masked_step(call: Any, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    ids = torch.arange(inputs["labels"].numel()).view_as(inputs["labels"]) % 200
    loss = call(input_ids=ids, use_cache=False, **inputs).loss
    loss.backward()
    gradients = [p.grad.clone() for p in testing.adapter_parameters(model) if p.grad is not None]
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize(
    "checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "checkpointed"]
)
@pytest.mark.parametrize(
    ("case", "provider"),
    [("padded", VALID_FIRST), ("documents", DOCUMENTS)],
)
def test_masks_of_batches_are_replaced_by_what_they_mean(
    case: str, provider: str, checkpointed: bool
) -> None:
    """The loss and every gradient; without checkpoints of two lengths, the second of any length."""
    torch.compiler.reset()
    model = qlora()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = CapturedStage(PASS, **ALWAYS)
    compiled = torch.compile(model, backend=backend)
    lengths = (24,) if checkpointed else (24, 31)
    for length in lengths:
        assert_steps_agree(model, compiled, inputs_of(case, length))
    found = [(site.rejected, site.provider) for site in backend.sites]
    assert found == [("", provider)] * (len(lengths) * LAYERS)


def test_what_layers_share_is_made_once_a_step() -> None:
    """By forward, for all layers: neither backward nor a layer that it computes again makes it."""
    model = qlora()
    prepare_checkpointing(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = inputs_of("padded", 24)

    def run(call: Any) -> None:
        masked_step(call, model, inputs)

    graphs = partition(run, model, ALWAYS)
    counts = [count_ops(graph) for graph in graphs]
    assert [(found["cumsum"], found["scatter"]) for found in counts] == [(1, 1), (0, 0)]


def assert_steps_agree(model: Any, compiled: Any, inputs: dict[str, Tensor]) -> None:
    expected, got = (masked_step(call, model, inputs) for call in (model, compiled))
    torch.testing.assert_close(got[0], expected[0])
    assert len(got[1]) == len(expected[1])
    for one, other in zip(got[1], expected[1], strict=True):
        assert testing.relative_error(one, other.double()) < 1e-4


WINDOW = 16


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


@pytest.mark.slow
@pytest.mark.parametrize("case", ["padded", "documents"])
def test_replaced_masks_by_inductor(case: str) -> None:
    torch.compiler.reset()
    model = qlora()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    options: Any = {**ALWAYS, "fx_graph_cache": False}
    compiled = torch.compile(model, backend="qfuse", options=options)
    assert_steps_agree(model, compiled, inputs_of(case, 24))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_sequence_ids_by_inductor(dynamic: bool) -> None:
    torch.compiler.reset()
    model = qlora()
    packed = Packed(model, of_mask_functions)
    options: Any = {**ALWAYS, "fx_graph_cache": False}
    compiled = torch.compile(packed, backend="qfuse", options=options, dynamic=dynamic)
    inputs = packed_batch(24, torch.Generator().manual_seed(0), valid=True)
    expected = plain_step(packed, model, inputs)
    for one, other in zip(plain_step(compiled, model, inputs), expected, strict=True):
        assert testing.relative_error(one, other.double()) < 1e-4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "24 positions, fewer than causal_attention.min_positions=1048576: the mask is kept"),
        (
            {**ALWAYS, "qfuse.numerics": "strict"},
            "strict numerics keep what rows of padding see",
        ),
    ],
    ids=["cpu", "strict"],
)
def test_a_mask_of_padding_is_kept(options: dict[str, Any], reason: str) -> None:
    torch.compiler.reset()
    model = qlora()
    backend = CapturedStage(PASS, **options)
    assert_steps_agree(model, torch.compile(model, backend=backend), inputs_of("padded", 24))
    assert [site.rejected for site in backend.sites] == [reason] * LAYERS
    # Nothing that "qfuse.strict" should refuse.
    assert all(site.by_choice for site in backend.sites)


def test_what_the_captured_graph_mutates_stays() -> None:
    """Dead code of Dynamo's graph is not ours to tell: a mutation has no users either."""
    generator = torch.Generator().manual_seed(0)

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Small enough that no score drowns the others: the mask then matters to every row.
            weight = torch.randn(64, 64, generator=generator) / 16
            self.linear = testing.quantized_linear(weight.bfloat16())
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)  # type: ignore[operator]
            q, k = positions(x[:, :, 0])
            x = self.linear(x).unsqueeze(1)
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(x, x, x, attn_mask=(k <= q).expand(2, 1, -1, -1))

    torch.compiler.reset()
    module = Counting()
    x = torch.randn(2, 8, 64, generator=generator).bfloat16()
    with torch.no_grad():
        exact = testing.reference_model(module)(x.double())
        compiled = torch.compile(module, backend="qfuse", options={"fx_graph_cache": False})
        got = compiled(x)
    from inductor_q import last_report

    report = last_report()
    assert report is not None
    assert [(s.provider, s.rejected) for s in report.sites if s.pass_name == PASS] == [("sdpa", "")]
    # Weights, which eager's product keeps in float32 here, projections and attention's result are
    # rounded to bfloat16. By itself an element may nearly cancel, and be off by more than its size.
    assert testing.relative_error(got, exact) < 2**-7
    assert module.calls == 1


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
