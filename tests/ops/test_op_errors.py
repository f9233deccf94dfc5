"""What the `qfuse::` ops say of states, inputs and adapters that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import inductor_q
from inductor_q import exc, ops
from tests.support.op_layers import layer
from tests.support.quantized import quantize

QFUSE = torch.ops.qfuse


pytestmark = pytest.mark.usefixtures("fresh_compiler")


REMEDY = "The state belongs to another weight, blocksize or format: quantize the weight again."
FLOATS = "(torch.float32, torch.bfloat16, torch.float16)"


def plain() -> tuple[list[Tensor], str, list[int]]:
    return quantize((48, 64), nested=False).operands


def nested() -> tuple[list[Tensor], str, list[int]]:
    return quantize((48, 64), nested=True).operands


def replaced(
    case: tuple[list[Tensor], str, list[int]], index: int, change: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], str, list[int]]:
    operands, name, shape = case
    operands[index] = change(operands[index])
    return operands, name, shape


CORRUPT: list[tuple[str, Callable[[], tuple[list[Tensor], str, list[int]]], str]] = [
    (
        "packed weight of another shape",
        lambda: (plain()[0], "nf4_b64", [48, 128]),
        "packed weight should be 3072 bytes for shape (48, 128), is 1536 bytes. " + REMEDY,
    ),
    (
        "packed weight too long",
        lambda: (plain()[0], "nf4_b64", [47, 64]),
        "packed weight should be 1504 bytes for shape (47, 64), is 1536 bytes. " + REMEDY,
    ),
    (
        "absmax of another blocksize",
        lambda: (plain()[0], "nf4_b128", [48, 64]),
        "number of elements of absmax should be 24, is 48. " + REMEDY,
    ),
    (
        "absmax cut off",
        lambda: replaced(plain(), 1, lambda t: t[:-1]),
        "number of elements of absmax should be 48, is 47. " + REMEDY,
    ),
    (
        "nested absmax in float",
        lambda: replaced(nested(), 1, lambda t: t.float()),
        "dtype of absmax should be torch.uint8, is torch.float32. " + REMEDY,
    ),
    (
        "codebook cut off",
        lambda: replaced(nested(), 2, lambda t: t[:16]),
        "number of elements of nested_codebook should be 256, is 16. " + REMEDY,
    ),
    (
        "nested absmax too long",
        lambda: replaced(nested(), 3, lambda t: t.repeat(2)),
        "number of elements of nested_absmax should be 1, is 2. " + REMEDY,
    ),
    (
        "two offsets",
        lambda: replaced(nested(), 4, lambda t: torch.stack([t, t])),
        "number of elements of nested_offset should be 1, is 2. " + REMEDY,
    ),
    (
        "operands of the nested format",
        lambda: (nested()[0], "nf4_b64", [48, 64]),
        "number of operands of nf4_b64 should be 2 (qweight, absmax), is 5. "
        "Pass the operands in the order of FORMATS[format].operands.",
    ),
    (
        "two devices",
        lambda: replaced(plain(), 1, lambda t: t.to("meta")),
        "device of the operands of nf4_b64 should be one device, is qweight on cpu, "
        "absmax on meta. Move the quantization state with the weight: module.to(device).",
    ),
]


@pytest.mark.parametrize(
    ("make", "text"), [row[1:] for row in CORRUPT], ids=[r[0] for r in CORRUPT]
)
def test_corrupt_state(make: Callable[[], tuple[list[Tensor], str, list[int]]], text: str) -> None:
    operands, name, shape = make()
    calls: list[Callable[[], Tensor]] = [
        lambda: ops.dequantize(operands, name, shape, torch.bfloat16),
        lambda: QFUSE.dequantize(operands, name, shape, torch.bfloat16),
    ]
    if len({t.device for t in operands}) == 1:  # else `linear` names the one that is not with x
        calls.append(lambda: ops.linear(torch.ones(2, shape[1]), operands, name, shape))
    for call in calls:
        with pytest.raises(exc.CorruptQuantState) as error:
            call()
        assert str(error.value) == f"corrupt quantization state: {text}"


def test_corrupt_state_of_bitsandbytes() -> None:
    """The state of one weight with the packed bytes of another, as after a bad checkpoint load."""
    w, other = quantize((48, 64)), quantize((24, 64))
    with pytest.raises(exc.CorruptQuantState) as error:
        inductor_q.dequantize(other.packed, w.state)
    assert str(error.value) == (
        "corrupt quantization state: packed weight should be 1536 bytes for shape (48, 64), "
        f"is 768 bytes. {REMEDY}"
    )


def test_corrupt_state_while_compiling() -> None:
    operands, name, _ = plain()
    compiled = torch.compile(
        lambda *t: ops.dequantize(t, name, [48, 128], torch.bfloat16), backend="eager"
    )
    with pytest.raises(Exception, match="packed weight should be 3072 bytes") as error:
        compiled(*operands)
    assert "corrupt quantization state" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_wrong_dtype(dtype: torch.dtype) -> None:
    w = quantize((48, 64))
    text = f"dequantized weight is {dtype}, expected {FLOATS}. Cast it with .to(...)"
    calls: list[Callable[[], Tensor]] = [
        lambda: ops.dequantize(*w.operands, dtype),
        lambda: inductor_q.dequantize(w.packed, w.state, dtype=dtype),
        lambda: ops.linear(torch.ones(2, 64).to(dtype), *w.operands),
    ]
    for call in calls:
        with pytest.raises(exc.WrongDtype) as error:
            call()
        assert str(error.value) == text
        assert isinstance(error.value, TypeError)


@pytest.mark.parametrize(
    ("index", "name"),
    [(1, "absmax"), (2, "nested_codebook"), (3, "nested_absmax"), (4, "nested_offset")],
)
def test_wrong_dtype_of_a_scale(index: int, name: str) -> None:
    case = plain() if name == "absmax" else nested()
    operands, fmt, shape = replaced(case, index, lambda t: t.to(torch.int64))
    with pytest.raises(exc.WrongDtype) as error:
        ops.dequantize(operands, fmt, shape, torch.bfloat16)
    assert str(error.value) == f"{name} is torch.int64, expected {FLOATS}. Cast it with .to(...)"


@pytest.mark.parametrize(
    ("out", "kind", "text"),
    [
        (
            torch.empty(64, 48),
            exc.WrongShape,
            "out has shape (64, 48), expected (48, 64). Check which weight the operands belong to",
        ),
        (
            torch.empty(48, 64, dtype=torch.float16),
            exc.WrongDtype,
            "out is torch.float16, expected (torch.float32,). Cast it with .to(...)",
        ),
    ],
    ids=["shape", "dtype"],
)
def test_wrong_out(out: Tensor, kind: type[exc.QfuseError], text: str) -> None:
    with pytest.raises(kind) as error:
        QFUSE.dequantize.out(*plain(), torch.float32, out=out)
    assert str(error.value) == text


@pytest.mark.parametrize(("shape", "got"), [((2, 32), "(2, 32)"), ((), "()"), ((64, 2), "(64, 2)")])
def test_wrong_input(shape: tuple[int, ...], got: str) -> None:
    case = layer()
    x = torch.ones(shape)
    calls: list[Callable[[], Tensor]] = [
        lambda: ops.linear(x, *case.w.operands),
        lambda: ops.lora_linear(x, *case.w.operands, case.a, case.b, case.scaling),
    ]
    for call in calls:
        with pytest.raises(exc.WrongShape) as error:
            call()
        assert str(error.value) == (
            f"input of a quantized linear layer has shape {got}, expected ('...', 64). "
            "Check which weight the operands belong to"
        )


META = "meta, expected cpu. Move it with .to(...)"


@pytest.mark.parametrize(
    ("move", "text"),
    [
        ("x", "quantized weight is on cpu, expected meta. Move it with .to(...)"),
        ("absmax", f"quantized weight is on {META}"),
        ("A", f"adapter is on {META}"),
        ("B", f"adapter is on {META}"),
        ("bias", f"bias is on {META}"),
    ],
)
def test_wrong_device(move: str, text: str) -> None:
    """As after an offload: torch would call the fake, and memory that nobody wrote come back."""
    case = layer()
    operands, name, shape = case.w.operands
    assert case.bias is not None
    if move == "x":
        case.x = case.x.to("meta")
    elif move == "absmax":
        operands[1] = operands[1].to("meta")
    elif move == "A":
        case.a[0] = case.a[0].to("meta")
    elif move == "B":
        case.b[0] = case.b[0].to("meta")
    else:
        case.bias = case.bias.to("meta")
    weight = (operands, name, shape)
    if move not in ("A", "B"):
        with pytest.raises(exc.WrongDevice) as error:
            ops.linear(case.x, *weight, bias=case.bias)
        assert str(error.value) == text
    with pytest.raises(exc.WrongDevice) as error:
        ops.lora_linear(case.x, *weight, case.a, case.b, case.scaling, bias=case.bias)
    assert str(error.value) == text


@pytest.mark.parametrize("which", ["A", "B", "swapped"])
def test_wrong_adapter(which: str) -> None:
    case = layer(ranks=(4, 2))
    if which == "A":
        case.a[1] = torch.ones(2, 65)
    elif which == "B":
        case.b[1] = torch.ones(47, 2)
    else:
        case.b[1] = case.b[1].detach().t()
    got = (tuple(case.a[1].shape), tuple(case.b[1].shape))
    with pytest.raises(exc.WrongShape) as error:
        case()
    assert str(error.value) == (
        f"adapter 1 (A, B) of a weight (48, 64) has shape {got}, expected ((2, 64), (48, 2)). "
        "Check which weight the operands belong to"
    )


def test_unknown_format() -> None:
    operands, _, shape = plain()
    for call in (ops.dequantize, QFUSE.dequantize):
        with pytest.raises(exc.UnknownFormat, match="no quantization format 'nf4_64'; did you"):
            call(operands, "nf4_64", shape, torch.bfloat16)
