"""chunk_loss: losses as libraries write them, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inductor_q import testing
from inductor_q.exc import OneBackward, UnreadableLogits
from inductor_q.logits import Logits
from tests.support.captured import CapturedStage
from tests.support.chunked import (
    ALONE,
    CHUNKS,
    HIDDEN,
    LOSS,
    PASS,
    RETURNED,
    VOCABULARY,
    Adapted,
    LossOnly,
    Model,
    Scaled,
    Tied,
    assert_same,
    batch,
    compiled,
    found,
    gradients,
    shifted_loss,
)
from tests.support.compiling import compile_step


@pytest.mark.parametrize(
    ("model", "given", "provider"),
    [
        (Model(), {}, RETURNED),
        (LossOnly(), {}, ALONE),
        (Model(), {"items": torch.tensor(20)}, RETURNED),
        (Model(), {"items": 20}, RETURNED),
        (Model(shifted_loss), {}, RETURNED),
        (LossOnly(shifted_loss, ignore_index=3), {}, ALONE),
        (Model(trains=True, bias=True), {}, RETURNED),
        (Tied(), {}, RETURNED),
        (Adapted(), {}, RETURNED),
        (Scaled(), {}, RETURNED),
    ],
    ids=["model", "alone", "items", "int", "shift", "ignore", "trained", "tied", "lora", "scaled"],
)
def test_losses_are_chunked(model: Any, given: Mapping[str, Any], provider: str) -> None:
    call, backend = compiled(model)
    x, labels = batch()
    assert_same(model, call(x, labels, **given), model(x, labels, **given))
    assert found(backend) == [("", provider)]
    assert backend.sites[0].bytes_saved >= 3 * 12 * VOCABULARY * 4
    for graph in backend.graphs:
        assert not graph.find_nodes(op="call_function", target=F.cross_entropy)


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "granite", "granite, lora"])
def test_transformers_own_losses(kind: str) -> None:
    """As the installed transformers writes them, with PEFT's LoRA beside a head and without; the
    second length makes a graph of any."""
    transformers = pytest.importorskip("transformers")
    name, _, more = kind.partition(", ")
    sizes = testing.tiny_llama_config(num_hidden_layers=1).to_dict()
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    config = transformers.AutoConfig.for_model(
        name,
        **{n: sizes[n] for n in (*names, "num_key_value_heads", "num_hidden_layers")},
        tie_word_embeddings=more == "tied",
        **({"logits_scaling": 6.0} if name == "granite" else {}),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if more == "lora":
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
    call, backend = compiled(model)
    for length in (12, 17):
        ids = torch.randint(0, config.vocab_size, (3, length))
        labels = ids.masked_fill(ids % 5 == 0, -100)
        for items in (None, torch.tensor(20)):
            given = {"input_ids": ids, "labels": labels, "num_items_in_batch": items}
            ours, eagers = (run(use_cache=False, **given).loss for run in (call, model))
            assert_same(model, ours, eagers)
    assert found(backend) == [("", RETURNED)] * 4


def test_a_division_by_a_tensor_is_part_of_the_op() -> None:
    call, backend = compiled(LossOnly())
    call(*batch(), items=torch.tensor(20))
    (graph,) = backend.graphs
    output = graph.output_node().args[0]
    assert [n.target for n in output] == [torch.ops.qfuse.linear_cross_entropy.default]  # type: ignore[union-attr]


class ReadsItsLogits(Model):
    def forward(self, x: Tensor, labels: Tensor, **given: Any) -> Any:
        loss, logits = super().forward(x, labels)
        return loss + logits.logsumexp(-1).mean()


class Divides(Model):
    """A number over the logits is no product of theirs."""

    def logits(self, x: Tensor) -> Tensor:
        return 2.0 / super().logits(x)


class NoProduct(Model):
    def logits(self, x: Tensor) -> Tensor:
        return torch.tanh(super().logits(x))


class RoundsItsLogits(Model):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x).bfloat16()


class ReturnsSome(Model):
    def forward(self, x: Tensor, labels: Tensor, **given: Any) -> Any:
        flat = self.logits(x).view(-1, VOCABULARY)
        return F.cross_entropy(flat, labels.view(-1)), flat


class ComputesItsHead(Model):
    def logits(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.body(x)), self.head.weight * 2)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (Model(label_smoothing=0.1), {}, "label smoothing"),
        (Model(weight=torch.ones(VOCABULARY)), {}, "weights of classes"),
        (LossOnly(shifted_loss, reduction="none"), {}, "reduction='none'"),
        (ReadsItsLogits(), {}, f"the graph reads its logits: logsumexp at {__file__}"),
        (NoProduct(), {}, "come from tanh, not from a product"),
        (Divides(), {}, "come from truediv, not from a product"),
        (RoundsItsLogits(), {}, "are torch.float32, and rounded to torch.bfloat16"),
        (ReturnsSome(), {}, "in another shape"),
        (ComputesItsHead(), {}, "the graph computes the head's weight"),
        (Adapted(torch.float64), {}, "the head's adapter computes in torch.float64"),
        (Model(), {"qfuse.loss": "whole"}, "qfuse.loss='whole'"),
        (
            Model(),
            {"qfuse.thresholds": {"chunk_loss.min_logits": 39 * VOCABULARY + 1}},
            "1950 logits, fewer than chunk_loss.min_logits=1951",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_losses_are_left_and_say_why(
    model: Any, options: dict[str, Any], reason: str
) -> None:
    torch.compiler.reset()
    backend = CapturedStage(PASS, **{**CHUNKS, **options})
    call: Any = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    x, labels = batch()
    got, expected = call(x, labels), model(x, labels)
    for one, other in zip(got, expected, strict=True) if isinstance(got, tuple) else ():
        assert type(one) is Tensor
        torch.testing.assert_close(one, other)
    ((rejected, _),) = found(backend)
    assert reason in rejected
    assert backend.sites[0].by_choice  # nothing that "qfuse.strict" should refuse


class Custom(Adapted):
    """A step whose loss is written by hand."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor, labels: Tensor, **given: Any) -> Any:
        return self.step(self, torch.tanh(self.body(x)), labels)


def flat_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def clamped(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x)
    logits.clamp_(-0.1, 0.1)
    return flat_loss(logits * 3.0, labels)


def assigned(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x)
    logits[..., :25] = -5.0
    return flat_loss(logits * 1.0, labels)


def base_written(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
    base = model.head(x)
    base.mul_(3.0)
    return flat_loss(base + model.b(model.a(x)), labels)


def another_name(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
    """`.to()` of the same dtype is the tensor itself."""
    logits = model.head(x)
    same = logits.to(torch.float32)
    same.mul_(2.0)
    return flat_loss(logits, labels)


def input_written(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
    x = x * 1.0
    logits = model.head(x)
    x += 1.0
    return flat_loss(logits, labels)


def base_without_gradient(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        base = model.head(x)
    return flat_loss(base + model.b(model.a(x)), labels)


def adapter_without_gradient(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        low = model.b(model.a(x))
    return flat_loss(model.head(x) + low, labels)


def rows_of_a_view(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x).view(-1, VOCABULARY)
    return F.cross_entropy(logits[:-1], labels.reshape(-1)[1:].clamp(min=0))


def part_returned(model: Custom, x: Tensor, labels: Tensor) -> Any:
    shifted = model.head(x)[..., :-1, :].float()
    return flat_loss(shifted, labels[:, 1:].clamp(min=0)), shifted


def repeated_rows(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
    return flat_loss(model.head(x) + model.b(model.a(x[:, :1])), labels)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (clamped, "clamp_ at "),
        (assigned, "setitem at "),
        (base_written, "mul_ at "),
        (another_name, "mul_ at "),
        (input_written, "iadd at "),
        (base_without_gradient, "under torch.no_grad()"),
        (adapter_without_gradient, "under torch.no_grad()"),
        (rows_of_a_view, "rows are left out of a view"),
        (part_returned, "in another shape, or a part of them"),
        (repeated_rows, "a sum of which a part is repeated"),
    ],
)
def test_steps_that_write_or_leave_out_are_what_they_were(
    step: Callable[..., Any], reason: str
) -> None:
    model = Custom(step)
    model.head.requires_grad_(step not in (base_without_gradient, input_written))
    call, backend = compiled(model)
    x, labels = batch()
    got, expected = call(x, labels), model(x, labels)
    if isinstance(expected, tuple):
        torch.testing.assert_close(got[1], expected[1])
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = [y[0] if isinstance(y, tuple) else y for y in (got, expected)]
    ours, eagers = (torch.autograd.grad(y, trained, allow_unused=True) for y in losses)
    torch.testing.assert_close(losses[0], losses[1])
    for mine, exact in zip(ours, eagers, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(zero if mine is None else mine, zero if exact is None else exact)
    ((rejected, _),) = found(backend)
    assert reason in rejected


def test_a_loss_of_named_arguments() -> None:
    def step(model: Custom, x: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(x)
        logits /= 2.0
        return F.cross_entropy(input=logits.view(-1, VOCABULARY), target=labels.reshape(-1))

    model = Custom(step)
    call, backend = compiled(model)
    x, labels = batch()
    torch.testing.assert_close(call(x, labels), model(x, labels))
    assert [rejected for rejected, _ in found(backend)] == [""]


def test_a_loss_under_torch_func() -> None:
    model = LossOnly()
    x, labels = batch()
    backend = CapturedStage(PASS, **CHUNKS)
    torch.compiler.reset()
    got = torch.compile(torch.func.grad(lambda x: model(x, labels)), backend=backend)(x)
    torch.testing.assert_close(got, torch.func.grad(lambda x: model(x, labels))(x))
    assert found(backend) == [("the loss is inside of a transform of torch.func", "")]


def test_a_gradient_of_the_gradient_is_refused() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8)
    labels = torch.arange(6) % 5
    loss = torch.ops.qfuse.linear_cross_entropy([x], [weight], None, labels, None, True, -100, 64)
    with pytest.raises(OneBackward, match=r"'qfuse\.loss': 'whole'"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_logits_of_hidden_states_that_were_written_to_are_refused() -> None:
    def step(model: Custom, x: Tensor, labels: Tensor) -> Any:
        logits = model.head(x)
        return flat_loss(logits, labels), logits, x

    call, _ = compiled(Custom(step))
    x, labels = batch()
    with torch.no_grad():
        x.requires_grad_()
    _, logits, hidden = call(x, labels)
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(UnreadableLogits, match="the hidden states were written to"):
        logits.sum()


def test_asked_for_chunks_are_made_of_any_number_of_rows() -> None:
    torch.compiler.reset()
    backend = CapturedStage(PASS, **{"qfuse.loss": "chunked"})  # a CPU's preset would refuse
    model = Model()
    assert_same(model, torch.compile(model, backend=backend)(*batch()), model(*batch()))
    assert found(backend) == [("", RETURNED)]


@pytest.mark.parametrize("least", [50 << 20, 1 << 40])
def test_a_graph_of_any_length_is_taken_for_a_long_one(least: int) -> None:
    """One graph serves the lengths to come, which may be longer; a CPU's preset is above all."""
    torch.compiler.reset()
    options: Any = {"qfuse.thresholds": {"chunk_loss.min_logits": least}}
    backend = CapturedStage(PASS, **options)
    torch.compile(Model(), backend=backend, dynamic=True)(*batch())
    assert [provider for _, provider in found(backend)] == [RETURNED if least == 50 << 20 else ""]


def test_without_gradients_logits_are_kept() -> None:
    call, backend = compiled(Model())
    with torch.no_grad():
        _, logits = call(*batch())
    assert type(logits) is Tensor
    assert found(backend) == [("nothing trains here: the logits are kept", "")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Products are in the dtype of autocast; logits are float32, as accelerate returns them."""

    class Wrapped(Model):
        def forward(self, x: Tensor, labels: Tensor, **given: Any) -> Any:
            with torch.autocast("cpu", dtype):
                loss, logits = super().forward(x, labels)
            return loss, logits.float()

    model = Wrapped()
    call, backend = compiled(model)
    x, labels = batch()
    (loss, logits), (expected, exact) = call(x, labels), model(x, labels)
    assert found(backend) == [("", RETURNED)]
    (graph,) = backend.graphs
    heads = [n for n in graph.find_nodes(op="placeholder") if "head" in n.name]
    assert heads and all(user.target != "to" for head in heads for user in head.users)
    assert isinstance(logits, Logits) and logits.dtype == torch.float32
    assert not logits._read
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits.detach(), exact.detach(), rtol=1e-2, atol=1e-2)
    ours, eagers = gradients(model, loss), gradients(model, expected)
    for name, one in ours.items():
        assert testing.relative_error(one, eagers[name].double()) < 2e-2


@pytest.mark.parametrize(
    ("autocast", "trains", "rows"),
    [(False, False, 8), (True, False, 16), (True, True, 8)],
    ids=["of one dtype", "rounded", "trained"],
)
def test_a_head_that_each_chunk_rounds_has_larger_chunks(
    autocast: bool, trains: bool, rows: int
) -> None:
    model = LossOnly(trains=trains)
    call, backend = compiled(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        call(*batch())
    (graph,) = backend.graphs
    (loss,) = graph.find_nodes(op="call_function", target=LOSS)
    assert loss.args[-1] == VOCABULARY * rows


def test_no_graph_holds_the_logits() -> None:
    """Neither forward nor backward has a tensor of all rows and columns."""

    class Quantized(LossOnly):
        def __init__(self) -> None:
            super().__init__()
            self.body = testing.quantized_linear(
                torch.randn(HIDDEN, HIDDEN) * 0.1, compute_dtype=torch.float32
            )
            self.first = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor, labels: Tensor, **given: Any) -> Any:
            return super().forward(self.first(x), labels)

    pytest.importorskip("bitsandbytes")
    model = Quantized()
    x, labels = batch()
    result = compile_step(model, x, labels, options=CHUNKS)
    exact = model(x, labels)
    torch.testing.assert_close(result.output, exact.detach(), rtol=1e-3, atol=1e-3)
    assert result.applied[PASS] == 1
    expected = gradients(model, exact)["first.weight"]
    expected *= torch.randn((), generator=torch.Generator().manual_seed(7))  # its cotangent
    assert testing.relative_error(result.gradients["first.weight"], expected.double()) < 1e-2
    wide = [
        tuple(value.shape)
        for graph in (*result.joint, *result.partitioned)
        for node in graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor) and VOCABULARY in value.shape
    ]
    assert len(result.partitioned) == 2 and set(wide) == {(VOCABULARY, HIDDEN)}


@pytest.mark.gpu
def test_gpu_peak_hardly_grows_with_the_vocabulary() -> None:
    """A step of 4,096 tokens takes at most 0.7 GB more under 151,936 words than under 1,000."""

    def transient(columns: int) -> int:
        torch.compiler.reset()
        model = Model(columns=columns).to("cuda", torch.bfloat16)
        call: Any = torch.compile(model, backend="qfuse", options={"qfuse.loss": "chunked"})
        x = torch.randn(2, 2048, HIDDEN, device="cuda", dtype=torch.bfloat16)
        labels = torch.randint(0, columns, (2, 2048), device="cuda")

        def step() -> Any:
            loss, logits = call(x, labels)
            loss.backward()
            return logits

        assert isinstance(step(), Logits)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before

    assert transient(151_936) - transient(1000) < 0.7e9
