"""The loss in chunks: against float64 beside eager's own error, chunk sizes, ignored labels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from inductor_q import testing
from inductor_q.exc import WrongDevice, WrongShape
from inductor_q.kernels import PROVIDERS
from inductor_q.kernels.calls import SoftmaxLoss
from inductor_q.ops import linear_cross_entropy as module
from inductor_q.ops.linear_cross_entropy import STEP, linear_cross_entropy, rows_of_chunk

ROWS, VOCABULARY = 150, 264
#: Logits at a time: all of them, chunks of a multiple of STEP rows, chunks of fewer.
ELEMENTS = (1 << 30, VOCABULARY * STEP, VOCABULARY * 7)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(dtype: torch.dtype, *, device: str = "cpu") -> tuple[list[Tensor], Tensor]:
    """Hidden states, a head, what an adapter makes of the states, its B, a bias; and labels."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.to(device, dtype).requires_grad_()

    x, w = make(2, ROWS // 2, 64), make(VOCABULARY, 64, scale=0.1)
    u, b = make(2, ROWS // 2, 8), make(VOCABULARY, 8, scale=0.1)
    labels = torch.randint(0, VOCABULARY, (2, ROWS // 2), generator=generator)
    labels[0, :9] = -100
    return [x, w, u, b, make(VOCABULARY)], labels.to(device)


def eager(tensors: Sequence[Tensor], labels: Tensor, divisor: Tensor | None = None) -> Tensor:
    """As transformers computes it, with the adapter as PEFT adds it."""
    x, w, u, b, bias = tensors
    logits = F.linear(x, w, bias) + F.linear(u, b)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    reduction = "mean" if divisor is None else "sum"
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), reduction=reduction)
    return loss if divisor is None else loss / divisor


def chunked(
    tensors: Sequence[Tensor],
    labels: Tensor,
    divisor: Tensor | None = None,
    elements: int = ELEMENTS[0],
) -> Tensor:
    x, w, u, b, bias = tensors
    return linear_cross_entropy(
        [x, u],
        [w, b],
        bias,
        labels,
        divisor,
        mean=divisor is None,
        ignore_index=-100,
        elements=elements,
    )


def assert_error_is_eagers(device: str, dtype: torch.dtype, elements: int, items: int) -> None:
    tensors, labels = operands(dtype, device=device)
    divisor = torch.tensor(items, device=device) if items else None
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    exact = eager(doubles, labels, divisor)
    expected = [exact.detach(), *torch.autograd.grad(exact, doubles)]

    def errors(loss: Tensor) -> list[float]:
        got = [loss.detach(), *torch.autograd.grad(loss, tensors)]
        assert [x.dtype for x in got[1:]] == [dtype] * len(tensors)
        return [testing.relative_error(x, y) for x, y in zip(got, expected, strict=True)]

    ours = errors(chunked(tensors, labels, divisor, elements))
    theirs = errors(eager(tensors, labels, divisor))
    # A loss is one number, whose rounding may fall either way: it is held to the dtype's.
    assert ours[0] <= max(1.25 * theirs[0], torch.finfo(dtype).eps / 8)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert one <= max(1.25 * other, 2 * torch.finfo(torch.float32).eps), (ours, theirs)


@pytest.mark.parametrize("items", [0, 143], ids=["mean", "num_items_in_batch"])
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_eagers(dtype: torch.dtype, elements: int, items: int) -> None:
    assert_error_is_eagers("cpu", dtype, elements, items)


@pytest.mark.gpu
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_eagers_on_a_gpu(dtype: torch.dtype, elements: int) -> None:
    assert_error_is_eagers("cuda", dtype, elements, 0)


def test_upstream_gradient_scales_all() -> None:
    tensors, labels = operands(torch.float32)
    once = torch.autograd.grad(chunked(tensors, labels), tensors)
    thrice = torch.autograd.grad(chunked(tensors, labels) * 3, tensors)
    for one, three in zip(once, thrice, strict=True):
        torch.testing.assert_close(three, 3 * one)


def test_ignored_rows_get_no_gradient() -> None:
    tensors, labels = operands(torch.float32)
    (grad,) = torch.autograd.grad(chunked(tensors, labels), tensors[:1])
    assert torch.equal(grad[0, :9], torch.zeros(9, 64)) and bool((grad[1] != 0).any())


def test_all_labels_ignored_are_eagers_nan_without_gradients() -> None:
    tensors, labels = operands(torch.float32)
    labels.fill_(-100)
    for loss in (chunked(tensors, labels), eager(tensors, labels)):
        assert bool(loss.isnan())
        grads = torch.autograd.grad(loss, tensors)
        assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("label", [-1, VOCABULARY])
def test_a_label_outside_of_the_vocabulary_makes_the_loss_nan(label: int) -> None:
    tensors, labels = operands(torch.float32)
    labels[1, 3] = label
    assert bool(chunked(tensors, labels).isnan())


def test_only_what_trains_gets_a_gradient() -> None:
    tensors, labels = operands(torch.float32)
    frozen = [tensors[0], *[x.detach() for x in tensors[1:]]]
    expected = torch.autograd.grad(eager(tensors, labels), tensors[:1])
    torch.testing.assert_close(torch.autograd.grad(chunked(frozen, labels), frozen[:1]), expected)
    with torch.no_grad():
        torch.testing.assert_close(chunked(tensors, labels), eager(tensors, labels))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_head_is_rounded_part_by_part(
    dtype: torch.dtype, elements: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is that of the rounded head; its gradient is summed in float32."""
    monkeypatch.setattr(module, "SLICE", 64 * 100)
    tensors, labels = operands(dtype, device=device)
    x, head, u, b, bias = tensors
    wide = torch.randn(head.shape, generator=torch.Generator().manual_seed(3)).to(device) / 10
    given = [x, wide, u, b.detach().float(), bias]
    cast = [x, wide.to(dtype), u, b.detach(), bias]
    trained = [x, u, bias]
    exact = eager([t.detach().double().requires_grad_() for t in cast], labels)
    loss, whole = (
        chunked(given, labels, elements=elements),
        chunked(cast, labels, elements=elements),
    )
    torch.testing.assert_close(loss, whole, rtol=1e-6 if device == "cpu" else 1e-4, atol=0)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-2, atol=0)
    doubles = [t.detach().double().requires_grad_() for t in cast]
    right = torch.autograd.grad(eager(doubles, labels), [doubles[0], doubles[2], doubles[4]])
    ours, theirs = (torch.autograd.grad(one, trained) for one in (loss, whole))
    for mine, other, one in zip(ours, theirs, right, strict=True):
        assert mine.dtype == dtype
        allowed = 1.25 * testing.relative_error(other, one)
        assert testing.relative_error(mine, one) <= allowed


@pytest.mark.parametrize(
    ("rows", "times"), [(0, 4), (1, 4), (512, 4), (513, 3), (1024, 2), (2048, 1), (8192, 1)]
)
def test_short_batches_have_wider_slices(rows: int, times: int) -> None:
    head, small = torch.empty(151_936, 4096, device="meta"), torch.empty(10, 16, device="meta")
    assert module.slice_of([head, small], torch.bfloat16, rows) == times * module.SLICE
    assert module.slice_of([small], torch.bfloat16, rows) == small.numel()
    assert module.slice_of([head], head.dtype, rows) == 0


def test_no_rows() -> None:
    x, w = torch.randn(0, 64, requires_grad=True), torch.randn(VOCABULARY, 64)
    labels = torch.empty(0, dtype=torch.int64)
    loss = linear_cross_entropy(
        [x], [w], None, labels, torch.tensor(3), mean=False, ignore_index=-100, elements=1 << 20
    )
    assert loss == 0 and torch.autograd.grad(loss, x)[0].shape == (0, 64)


@pytest.mark.parametrize(
    ("rows", "columns", "elements", "size"),
    [
        (4096, 151_936, 160 << 20, 1024),
        (4100, 151_936, 160 << 20, 896),  # five chunks of about the same size
        (300, 151_936, 160 << 20, 384),
        (100, 264, 264 * 7, 7),
        (10, 264, 1, 1),
        (0, 264, 1 << 20, STEP),
    ],
)
def test_chunks_are_even(rows: int, columns: int, elements: int, size: int) -> None:
    assert rows_of_chunk(rows, columns, elements) == size


def test_opcheck() -> None:
    tensors, labels = operands(torch.float32)
    x, w, u, b, bias = tensors
    given = ([x, u], [w, b], bias, labels, None, True, -100, VOCABULARY * STEP)
    # A composite op has no fake and no gradient of its own to check, only what it traces to.
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.qfuse.linear_cross_entropy.default, given, test_utils=tests)
    flat = [t.detach() for t in (x.view(-1, 64), u.view(-1, 8), w, b, bias)]
    for wanted in ([True] * 5, [True, False, False, True, False], [False] * 5):
        arguments = (flat, 2, labels.view(-1), torch.tensor(3), False, -100, 1 << 20, wanted)
        torch.library.opcheck(torch.ops.qfuse.linear_cross_entropy_chunks.default, arguments)


def test_wrong_operands_are_named() -> None:
    (x, w, *_), labels = operands(torch.float32)

    def call(w: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            [x], [w], None, labels, None, mean=True, ignore_index=-100, elements=1 << 20
        )

    with pytest.raises(WrongShape, match="labels"):
        call(w, labels[:, 1:])
    with pytest.raises(WrongShape, match="weight"):
        call(w[:, 1:], labels)
    with pytest.raises(WrongDevice, match="linear_cross_entropy"):
        call(w.to("meta"), labels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [100, 4096, 32_003])
def test_the_kernel_is_the_reference(dtype: torch.dtype, columns: int) -> None:
    logits = torch.randn(64, columns, device="cuda").mul(4).to(dtype)
    labels = torch.randint(0, columns, (64,), device="cuda")
    labels[:3] = torch.tensor([-100, columns, -1])
    results = []
    for provider in PROVIDERS["softmax_loss"]["cuda"]:
        call = SoftmaxLoss(
            logits=logits.clone(),
            labels=labels,
            losses=torch.empty(64, device="cuda"),
            scale=torch.tensor(512.0, device="cuda"),
            ignore_index=-100,
        )
        assert not provider.refuses(call)
        provider.run(call)
        results.append((call.losses, call.logits))
    (losses, gradient), (expected, exact) = results
    torch.testing.assert_close(losses, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    kept = (labels >= 0) & (labels < columns)
    # The last rounding may fall to either side; exp() of a float32 of 20 is 20 roundings off.
    step = max(2 * torch.finfo(dtype).eps, 20 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(gradient[kept], exact[kept], rtol=step, atol=1e-5)
    assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))


@pytest.mark.parametrize("rows", [512, 4096])
def test_a_trained_head_in_float16_has_finite_gradients(rows: int) -> None:
    """A word in a quarter of the rows adds up to more than float16 holds before it is scaled."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 32, generator=generator).half().requires_grad_()
    w = torch.randn(64, 32, generator=generator).half().requires_grad_()
    bias = torch.zeros(64).half().requires_grad_()
    labels = torch.randint(0, 64, (rows,), generator=generator)
    labels[: rows // 4] = 7
    loss = torch.ops.qfuse.linear_cross_entropy(
        [x], [w], bias, labels, None, True, -100, 64 * rows // 2
    )
    ours = torch.autograd.grad(loss, (x, w, bias))
    exact = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    right = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t() + exact[2], labels)
    for mine, truth in zip(ours, torch.autograd.grad(right, exact), strict=True):
        assert mine.dtype is torch.float16
        assert testing.relative_error(mine, truth) < 0.01
