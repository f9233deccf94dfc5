"""Layers compiled one by one know what transformers made their mask of."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import inductor_q
from inductor_q import backend, testing
from inductor_q.integrations import mask_parts, prepare_checkpointing
from inductor_q.integrations.mask_parts import note_parts, parts_of
from inductor_q.passes.causal_mask import MADE_OUTSIDE
from tests.support.compiling import SMALL, gradients, no_codegen
from tests.support.layers import layered, qwen3

for extra in ("bitsandbytes", "transformers"):
    pytest.importorskip(extra)
pytest.importorskip("peft")

from transformers import masking_utils  # noqa: E402

ROWS, LENGTH, WINDOW = 2, 12, 5
X = torch.randn(ROWS, LENGTH, 8)
PADDED = torch.ones(ROWS, LENGTH, dtype=torch.int64)
PADDED[0, :3] = PADDED[1, -4:] = 0
#: Two documents in one row, and two others in the next.
POSITIONS = torch.stack([torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (5, 8)])
#: The limit from which a CPU takes masks for what they mean, which is else never.
FROM_ONE = {**SMALL, "qfuse.thresholds": {**SMALL["qfuse.thresholds"]}}
FROM_ONE["qfuse.thresholds"]["causal_attention.min_positions"] = 1
CLOSE = 1e-5


def config() -> Any:
    found = testing.tiny_qwen3_config(num_hidden_layers=2)
    found._attn_implementation = "sdpa"
    return found


@pytest.fixture
def noting() -> Iterator[None]:
    note_parts(nn.ModuleList([qwen3()]))
    yield
    masking_utils.AttentionMaskInterface.register("sdpa", masking_utils.sdpa_mask)


def given(**more: Any) -> dict[str, Any]:
    return {
        "config": config(),
        "inputs_embeds": X,
        "attention_mask": None,
        "past_key_values": None,
        **more,
    }


@pytest.mark.usefixtures("noting")
@pytest.mark.parametrize("window", [None, WINDOW], ids=["", "window"])
@pytest.mark.parametrize("of", ["padding", "documents", "left padding"])
def test_parts_make_the_mask_again(of: str, window: int | None) -> None:
    parts: dict[str, Any] = {
        "padding": {"attention_mask": PADDED},
        "documents": {"position_ids": POSITIONS},
        "left padding": {"attention_mask": PADDED.flip(1)},
    }[of]
    make = masking_utils.create_causal_mask
    if window:
        make = masking_utils.create_sliding_window_causal_mask
    arguments = given(**parts)
    arguments["config"].sliding_window = window
    mask: Any = make(**arguments)
    found = parts_of(mask, X)
    assert found is not None and found.window == window
    apart = found.sequences if found.positions is None else found.positions
    assert (apart is not None) == (of == "documents")
    made = found.mask(X)
    assert torch.equal(made, mask.expand_as(made)) and made.shape == (ROWS, 1, LENGTH, LENGTH)


@pytest.mark.usefixtures("noting")
def test_documents_of_versions_without_positions() -> None:
    """transformers up to 5.17 has numbers of documents alone."""
    sequences = (POSITIONS == 0).cumsum(1)
    function = masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(sequences),
    )
    sizes = {"batch_size": ROWS, "q_length": LENGTH, "kv_length": LENGTH}
    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    mask: Any = make(**sizes, mask_function=function, allow_is_causal_skip=False)
    found = parts_of(mask, X)
    assert found is not None and found.sequences is sequences and found.positions is None
    assert torch.equal(found.mask(X), mask)


@pytest.mark.usefixtures("noting")
def test_a_mask_that_was_written_to_has_no_parts() -> None:
    mask: Any = masking_utils.create_causal_mask(**given(attention_mask=PADDED))
    assert parts_of(mask, X) is not None
    mask[0, 0, 0, 0] = False
    assert parts_of(mask, X) is None and parts_of(mask.clone(), X) is None


@pytest.mark.usefixtures("noting")
def test_a_mask_can_be_copied_and_saved() -> None:
    """As code does that keeps what a layer was called with."""
    mask: Any = masking_utils.create_causal_mask(**given(attention_mask=PADDED))
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(copy.deepcopy(mask), mask) and torch.equal(again, mask)
    buffer = io.BytesIO()
    torch.save(mask, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), mask) and not vars(mask)


@pytest.mark.usefixtures("noting")
def test_inputs_that_the_mask_is_not_of_have_no_parts() -> None:
    """As Gemma3n's layers get [4, B, S, features], and layers on another device."""
    mask: Any = masking_utils.create_causal_mask(**given(attention_mask=PADDED))
    assert parts_of(mask, X) is not None
    for x in (X[None].expand(4, -1, -1, -1), X[:, 1:], X[:1], X.to("meta"), None):
        assert parts_of(mask, x) is None


def prefixed(*args: Any, **kwargs: Any) -> Any:
    made: Any = masking_utils.sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return made | (torch.arange(made.shape[-1]) < 3)


@pytest.fixture
def own_maker() -> Iterator[None]:
    """A user's masks, with three keys that every query sees."""
    masking_utils.AttentionMaskInterface.register("sdpa", prefixed)
    yield
    masking_utils.AttentionMaskInterface.register("sdpa", masking_utils.sdpa_mask)


@pytest.mark.usefixtures("own_maker")
def test_masks_of_another_maker_are_kept() -> None:
    model = qwen3()
    expected = step(model, "padding")
    layered(model, FROM_ONE)
    with no_codegen():
        found = step(model, "padding")
    assert applied() == [0]
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is prefixed
    for name, gradient in expected.items():
        assert testing.relative_error(found[name], gradient) < CLOSE, name


@pytest.mark.usefixtures("noting")
def test_a_maker_that_is_registered_later_takes_the_place() -> None:
    masking_utils.AttentionMaskInterface.register("sdpa", prefixed)
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is prefixed


def test_a_maker_that_is_given_other_sizes_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of transformers 4.57, which gets a `cache_position`."""

    def older(batch_size: int, cache_position: Tensor, kv_length: int, **more: Any) -> Any:
        raise NotImplementedError

    makers = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setattr(masking_utils, "sdpa_mask", older)
    monkeypatch.setitem(type(makers)._global_mapping, "sdpa", older)
    assert not note_parts(nn.ModuleList([qwen3()])) and makers["sdpa"] is older


@pytest.mark.usefixtures("noting")
def test_a_mask_of_any_callable_is_made() -> None:
    class Everything:
        def __call__(self, *at: Any) -> Tensor:
            seen: Tensor = at[2] + at[3] >= 0
            return seen

    make: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    sizes = {"batch_size": ROWS, "q_length": LENGTH, "kv_length": LENGTH}
    for function in (Everything(), functools.partial(Everything())):
        mask = make(**sizes, mask_function=function, allow_is_causal_skip=False)
        assert mask.all() and parts_of(mask, X) is None


def others(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 2


@pytest.mark.usefixtures("noting")
def test_other_masks_have_no_parts() -> None:
    """Those that say more than the parts do, and those of keys that are there already."""
    causal, valid = masking_utils.create_causal_mask, {"attention_mask": PADDED}
    cache = cache_of_three()
    chunked: Any = given(**valid)
    chunked["config"].attention_chunk_size = 4
    masks = [
        causal(**given(**valid, or_mask_function=others)),
        causal(**given(**valid, and_mask_function=others)),
        causal(**given(**valid, block_sequence_ids=torch.zeros(ROWS, LENGTH, dtype=torch.int64))),
        causal(**given(past_key_values=cache, attention_mask=torch.ones(ROWS, LENGTH + 3))),
        masking_utils.create_chunked_causal_mask(**chunked),
        masking_utils.create_bidirectional_mask(config(), X, PADDED),
    ]
    assert all(isinstance(mask, Tensor) for mask in masks)
    assert [parts_of(mask, X) for mask in masks] == [None] * len(masks)
    assert parts_of(None, X) is None and parts_of(torch.ones(2), X) is None


def cache_of_three() -> Any:
    """Hold keys and values of three tokens."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config())
    cache.update(torch.randn(ROWS, 2, 3, 8), torch.randn(ROWS, 2, 3, 8), 0)
    return cache


def step(model: nn.Module, of: str, length: int = LENGTH) -> dict[str, Tensor]:
    ids = torch.arange(ROWS * length).reshape(ROWS, length)
    valid = torch.ones_like(ids)
    if of not in ("nothing padded", "no mask"):
        valid[1, -4:] = 0
    more = {} if of == "no mask" else {"attention_mask": valid}
    if of == "documents":
        places = torch.cat([torch.arange(5), torch.arange(length - 5)])
        more = {"position_ids": places[None].expand(ROWS, -1)}
    labels = ids.masked_fill(valid == 0, -100)
    model(input_ids=ids, labels=labels, **more).loss.backward()
    return gradients({}, model)


def applied() -> list[int]:
    return [each.applied().get("causal_attention", 0) for each in backend._reports]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("of", ["padding", "documents"])
def test_gradients_are_eagers(of: str, checkpointed: bool) -> None:
    """Layers share a graph, which serves every length, and has no mask."""
    model = qwen3()
    if checkpointed:
        model.gradient_checkpointing_enable()
        prepare_checkpointing(model)
    lengths = (LENGTH, 16, 24)
    expected = [step(model, of, length) for length in lengths]
    layered(model, FROM_ONE)
    with no_codegen(), testing.CompileTrace() as trace:
        found = [step(model, of, length) for length in lengths]
    assert (trace.graphs, trace.breaks) == (2, [])
    assert applied() == [1, 1]
    for each, right in zip(found, expected, strict=True):
        assert each.keys() == right.keys()
        for name, gradient in right.items():
            assert testing.relative_error(each[name], gradient) < CLOSE, name


@pytest.mark.parametrize("chunks", [False, True], ids=["", "loss in chunks"])
def test_batches_without_padding_have_the_graph_of_others(
    chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would look for padding, for which a GPU's host waits, and make no mask."""
    model = qwen3()
    kinds = ("padding", "nothing padded", "no mask")
    expected = [step(model, of, length) for of in kinds for length in (LENGTH, 16)]
    options = {**FROM_ONE, "qfuse.thresholds": {**FROM_ONE["qfuse.thresholds"]}}
    options["qfuse.thresholds"]["chunk_loss.min_logits"] = 1 if chunks else 1 << 40
    layered(model, options)
    looked: list[int] = []
    look = masking_utils._ignore_causal_mask_sdpa

    def counted(padding: Any, length: int, *rest: Any) -> bool:
        if not torch.compiler.is_compiling() and padding is not None:
            looked.append(length)
        return look(padding, length, *rest)

    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", counted)
    with no_codegen(), testing.CompileTrace() as trace:
        found = [step(model, of, length) for of in kinds[:2] for length in (LENGTH, 16)]
    assert (trace.graphs, trace.breaks) == (4 if chunks else 2, []), "two for two lengths"
    with no_codegen():
        found += [step(model, "no mask", length) for length in (LENGTH, 16)]
    assert not looked and mask_parts._unseen.get() is None
    for each, right in zip(found, expected, strict=True):
        for name, gradient in right.items():
            assert testing.relative_error(each[name], gradient) < CLOSE, name
    ids = torch.arange(8)[None]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    assert looked == [8], "only steps with gradients go without"
    layer = model.get_base_model().model.layers[0]
    layer.register_forward_pre_hook(torch.compiler.disable(lambda *_: None), with_kwargs=True)
    with no_codegen():
        for _ in range(3):
            step(model, "nothing padded")
    assert looked[1:] == [LENGTH, LENGTH], "a layer was found to read its mask"


@pytest.mark.usefixtures("noting")
def test_short_batches_are_looked_at() -> None:
    """So are those with a very large mask, those without a mask, and those of another mask."""
    seen: list[tuple[int, bool]] = []

    def make(**given: Any) -> None:
        seen.append((given["q_length"], given["allow_is_causal_skip"]))

    noting: Any = mask_parts._Noting(make)
    sizes = {"batch_size": 1, "attention_mask": PADDED[:1], "allow_is_causal_skip": True}
    for length, least in ((15, 16), (16, 16), (16, None), (1 << 15, 16)):
        with mask_parts.without_a_look(least):
            noting(**sizes, q_length=length, kv_length=length)
    with mask_parts.without_a_look(1):
        noting(**{**sizes, "attention_mask": None}, q_length=16, kv_length=16)
        noting(**sizes, q_length=16, kv_length=16, mask_function=others)
    kept = [True, False, True, True, True, True]
    assert seen == [*zip([15, 16, 16, 1 << 15, 16, 16], kept, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        {**FROM_ONE, "qfuse.numerics": "strict"},
        {**FROM_ONE, "qfuse.passes": "-causal_attention"},
    ],
    ids=["of a CPU", "strict", "without the pass"],
)
def test_where_masks_stay_layers_are_given_them(options: Any) -> None:
    """They would make them once for each layer."""
    model = qwen3()
    expected = step(model, "padding")
    layered(model, options)
    with no_codegen():
        found = step(model, "padding")
    (report,) = backend._reports
    assert {*report.rejections().get("causal_attention", ())} <= {MADE_OUTSIDE} and applied() == [0]
    for name, gradient in expected.items():
        assert testing.relative_error(found[name], gradient) < CLOSE, name


def test_a_hook_of_a_layer_reads_its_mask() -> None:
    model, seen = qwen3(), []

    def look(layer: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["attention_mask"])

    for layer in model.get_base_model().model.layers:
        layer.register_forward_pre_hook(torch.compiler.disable(look), with_kwargs=True)
    layered(model, FROM_ONE)
    with no_codegen():
        step(model, "padding")
    assert [type(mask) for mask in seen] == [Tensor, Tensor] and applied() == [0]


@pytest.mark.usefixtures("group")
def test_layers_that_fsdp_shards() -> None:
    """Its hooks stay outside of a graph, which makes the mask behind them."""
    model = qwen3(quant_storage=torch.float32)
    expected = step(model, "padding")
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for part in (*model.get_base_model().model.layers, model):
        fully_shard(part, mesh=mesh)
    torch.compiler.reset()
    inductor_q.compile(model, options=FROM_ONE)
    with no_codegen(), testing.CompileTrace() as trace:
        found = step(model, "padding")
    assert (trace.graphs, trace.breaks) == (1, []) and applied() == [1]
    for name, gradient in expected.items():
        whole: Any = found[name]
        assert testing.relative_error(whole.full_tensor(), gradient) < CLOSE, name


@pytest.mark.usefixtures("group")
def test_a_hook_of_a_layer_that_fsdp_shards_reads_its_mask() -> None:
    model, seen = qwen3(quant_storage=torch.float32), []
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    layers = model.get_base_model().model.layers
    signature = inspect.signature(layers[0].forward)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    torch.compiler.reset()
    inductor_q.compile(model, options=FROM_ONE)
    assert inspect.signature(layers[0].forward) == signature

    def look(layer: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(type(kwargs["attention_mask"]))

    hook = layers[0].register_forward_pre_hook(torch.compiler.disable(look), with_kwargs=True)
    with no_codegen():
        step(model, "padding")
    assert seen == [Tensor]
    hook.remove()
    inductor_q.compile(model, options=FROM_ONE, regions="model")
    assert not any("forward" in vars(layer) for layer in layers)


def test_layers_whose_graphs_keep_their_mask_are_given_it() -> None:
    """Here none is quantized, so no pass runs; each layer would make a mask of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa").train()
    expected = step(model, "padding")
    layered(model, FROM_ONE)
    with no_codegen():
        for _ in range(2):
            found = step(model, "padding")
    assert applied() == [0, 0], "one graph of the first layer, and one of the others"
    for name, gradient in expected.items():
        assert testing.relative_error(found[name], gradient) < CLOSE, name


def test_a_model_whose_masks_are_not_transformers() -> None:
    assert not note_parts(nn.Linear(2, 2))


@pytest.mark.usefixtures("noting")
def test_a_whole_model_reads_its_masks_as_before() -> None:
    model = qwen3()
    expected = step(model, "padding")
    torch.compiler.reset()
    inductor_q.compile(model, options=FROM_ONE, regions="model")
    with no_codegen(), testing.CompileTrace() as trace:
        found = step(model, "padding")
    assert (trace.graphs, trace.breaks) == (1, []) and applied() == [2]
    for name, gradient in expected.items():
        assert testing.relative_error(found[name], gradient) < CLOSE, name
