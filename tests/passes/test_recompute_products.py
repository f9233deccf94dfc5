"""What of a checkpointed segment's wide products is kept, where torch leaves them unmarked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

import inductor_q
from inductor_q import testing
from inductor_q.integrations import prepare_checkpointing
from inductor_q.passes import recompute_products
from inductor_q.passes.graph import MM, is_tensor, last_size, peel_rows
from tests.support.compiling import gradients, partition
from tests.support.marks import as_torch_2_11_marks

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

LAYERS = 2
# Rows are whole blocks: bitsandbytes misreads others on a CPU. A segment's input is larger than a
# decoded weight.
ROWS, HIDDEN, INNER = 256, 128, 192


@pytest.fixture(autouse=True)
def _without_marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    as_torch_2_11_marks(monkeypatch)
    yield
    torch.compiler.reset()


def model() -> Any:
    config = testing.tiny_llama_config(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=INNER
    )
    made = testing.qlora_model(config, adapter_dtype=torch.bfloat16, randomize_adapters=True)
    prepare_checkpointing(made)
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def step(run: Any) -> None:
    ids = torch.randint(0, 256, (2, ROWS // 2), generator=torch.Generator().manual_seed(3))
    run(input_ids=ids, labels=ids).loss.backward()


def error(one: Any) -> float:
    """Of all gradients together, against float64's."""
    exact = testing.reference_model(one)
    step(exact)
    vectors = []
    for each in (one, exact):
        found = gradients({}, each)
        assert len(found) == 14 * LAYERS
        vectors.append(torch.cat([found[name].double().flatten() for name in sorted(found)]))
    return testing.relative_error(*vectors)


def kept(forward: fx.Graph) -> Counter[int]:
    """Columns of the wide products that forward keeps for backward."""
    output = next(iter(forward.find_nodes(op="output")))
    products = [peel_rows(n) for n in output.all_input_nodes if is_tensor(n)]
    return Counter(last_size(n) for n in products if recompute_products._is_wide(n))


@pytest.mark.parametrize(
    ("extended", "inputs", "products"),
    [(False, 4, 6), pytest.param(True, 3, 3, marks=pytest.mark.slow)],
    ids=["plain", "extended"],
)
def test_the_widest_products_are_computed_again(extended: bool, inputs: int, products: int) -> None:
    """gate and up have one and a half times as many columns as the segment's input. Of all
    `products`, so many `inputs` hold all but one of these."""
    rows = 1 if extended else 1 << 20
    found, errors = [], []
    for most in (1 << 20, inputs, 0):
        one = model()
        thresholds = {"recompute_products.max_kept": most, "extend_k.min_rows": rows}
        forward, backward = partition(step, one, {"qfuse.thresholds": thresholds})
        report = inductor_q.last_report()
        assert report is not None
        applied = report.applied()["recompute_products"]
        wide = filter(
            recompute_products._is_wide, backward.find_nodes(op="call_function", target=MM)
        )
        found.append((applied, kept(forward)[INNER], len(list(wide))))
        errors.append(error(one))
        torch.compiler.reset()
    own = model()
    step(own)
    assert max(errors) <= 1.25 * error(own)
    never, some, none = found
    assert never[:2] == (0, 2 * LAYERS)
    assert some[:2] == (LAYERS, LAYERS)
    assert none[:2] == (products * LAYERS, 0)
    assert never[2] < some[2] < none[2]


@pytest.mark.parametrize("embedded", [False, True], ids=["tokens", "embedded"])
@pytest.mark.parametrize(("varying", "again"), [(False, 0), (True, 1)], ids=["fixed", "varying"])
def test_where_lengths_vary_products_are_compared_with_the_input(
    varying: bool, again: int, embedded: bool
) -> None:
    """A decoded weight is larger than a short batch's input: its products are kept beside it. Where
    the next batch may be longer, they are compared with the input, computed or given."""
    options = {"qfuse.thresholds": {"recompute_products.max_kept": 4}}

    def run(compiled: Any) -> None:
        ids = torch.randint(0, 256, (2, ROWS // 8), generator=torch.Generator().manual_seed(3))
        given = {"labels": ids}
        given |= {"inputs_embeds": embed(ids).detach()} if embedded else {"input_ids": ids}
        if varying:
            for one in given.values():
                torch._dynamo.maybe_mark_dynamic(one, 1)
        compiled(**given).loss.backward()

    one = model()
    embed = one.get_input_embeddings()
    forward, _ = partition(run, one, options)
    report = inductor_q.last_report()
    assert report is not None
    assert report.applied()["recompute_products"] == again * LAYERS
    assert kept(forward)[INNER] == (2 - again) * LAYERS


def test_a_segment_without_marks_is_none() -> None:
    """Without checkpointing there is nothing to compute again."""
    config = testing.tiny_llama_config(num_hidden_layers=1)
    one = testing.qlora_model(config, adapter_dtype=torch.bfloat16)
    partition(step, one, {"qfuse.thresholds": {"recompute_products.max_kept": 0}})
    report = inductor_q.last_report()
    assert report is not None and not report.applied()["recompute_products"]
