"""A dequantization is launched again as it was prepared, past Triton, wherever that is safe."""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import inductor_q
from inductor_q import exc, ops
from inductor_q.csrc import driver
from inductor_q.formats import FORMATS, QuantFormat
from inductor_q.formats.codec import Codebook
from inductor_q.kernels import (
    dequantize,
    dequantize_reference,
    dequantize_triton,
    triton_launch,
)
from inductor_q.kernels.calls import Dequantize
from inductor_q.kernels.dequantize import DEQUANTIZE, write
from inductor_q.lowerings.calls import qfuse_dequantize
from tests.support.compile_triton import compiled
from tests.support.fake_driver import FakeDriver
from tests.support.quantized import assert_same_bits, forget_kernels, sample, two_devices

_FMT = FORMATS["nf4_b64"]
needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="Triton is not installed"
)


class Jit:
    """A kernel of Triton that keeps what it is called with, and the code that it would return."""

    def __init__(self, pointers: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        types = ["u64"] * pointers + ["u32"] * 5 + [*triton_launch.SCRATCH]
        ptx = ".entry k(" + ",".join(f" .param .{t} k_{i}" for i, t in enumerate(types)) + ")"
        metadata = SimpleNamespace(num_ctas=1, num_warps=1, shared=0)
        self.compiled = SimpleNamespace(metadata=metadata, asm={"ptx": ptx}, function=0)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self

    def __call__(self, *given: Any, **constants: Any) -> Any:
        self.calls.append(given)
        return self.compiled


def served_by_triton(monkeypatch: pytest.MonkeyPatch, fmt: QuantFormat) -> tuple[Jit, FakeDriver]:
    """CPU tensors go to the Triton kernel, whose compiled code and driver are not there."""
    printed = dequantize_triton._kernel(fmt, 8)
    jit = Jit(3 + len(printed.pointers))
    kernel = replace(printed, function=jit)
    monkeypatch.setattr(dequantize_triton, "_kernel", lambda *_: kernel)
    monkeypatch.setitem(DEQUANTIZE, "cpu", (dequantize_triton.KERNEL, dequantize_reference.KERNEL))
    return jit, FakeDriver(monkeypatch)


@needs_triton
@pytest.mark.parametrize("name", ["nf4_b64_nested", "nf4_b64", "kbit4_e4m4"])
def test_later_launches_go_through_the_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls, compiled code or eager, with the pointers of that call."""
    fmt, launches = FORMATS[name], forget_kernels(monkeypatch)
    jit, cuda = served_by_triton(monkeypatch, fmt)
    book = dequantize_triton.codebook_on(fmt, torch.device("cpu"))
    seen = []
    for seed in range(4):
        operands, _ = sample(fmt, (48, 256), seed=seed)
        if seed % 2:
            out = ops.dequantize(operands, name, (48, 256), torch.bfloat16)
        else:
            out = torch.empty(48, 256, dtype=torch.bfloat16)
            qfuse_dequantize(operands, name, "auto", out=out)
        named = dict(zip(fmt.operands, operands, strict=True))
        given = [out, named["qweight"], named.get("codebook", book)]
        given += [named[n] for n in fmt.operands if n not in ("qweight", "codebook")]
        seen.append([t.data_ptr() for t in given])
    units = 48 * 256 // 8
    (first,) = jit.calls
    assert [t.data_ptr() for t in first[:-5]] == seen[0]
    sizes = (units, 48 * 256, 48, 256, 256)
    assert first[-5:] == sizes
    assert cuda.launched == [(*pointers, *sizes, 0, 0) for pointers in seen[1:]]
    [plan] = launches.values()
    plan.launch.by_jit(plan.tensors(operands, out))  # what bench_launch compares with
    assert [t.data_ptr() for t in jit.calls[1][:-5]] == seen[-1]
    assert len(cuda.launched) == 3


@needs_triton
def test_a_prepared_launch_serves_only_what_is_like_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan keeps the kernel that was compiled for its first call: for float32 scales, say."""
    fmt, launches = FORMATS["nf4_b64"], forget_kernels(monkeypatch)
    jit, cuda = served_by_triton(monkeypatch, fmt)
    packed, absmax = (torch.cat([t, t, t]) for t in sample(fmt, (4, 64))[0])
    numels = (128, 4)
    memory = torch.empty(8 * 72)

    def call(*, start: int = 0, at: int = 0, dtype: torch.dtype = torch.float32, **to: Any) -> None:
        scales = absmax.to(dtype)[at :: to.get("step", 1)][: numels[1]]
        operands = [packed[start:][: numels[0]], scales]
        out = memory.view(to.get("as_dtype", torch.float32))[to.get("offset", 0) :]
        out = out.as_strided(to.get("shape", (4, 64)), (to.get("stride", 64), 1))
        write(operands, fmt, out, to.get("provider", "auto"))

    others: list[dict[str, Any]] = [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"start": 4},
        {"at": 1},
        {"offset": 1},
        {"stride": 72},
        {"stride": 72, "shape": (8, 32)},
        {"as_dtype": torch.bfloat16},
        {"provider": "triton"},
    ]
    for _ in range(2):
        for other in others:
            call(**other)
    assert len(jit.calls) == len(cuda.launched) == len(launches) == len(others)
    call(step=2)  # scales that are not contiguous are the reference's
    assert len(jit.calls) == len(cuda.launched) == len(launches) - 1 == len(others)


@needs_triton
def test_a_kind_of_generated_code_has_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tensors that are aligned: others are told apart as in any call."""
    fmt, launches = FORMATS["nf4_b64"], forget_kernels(monkeypatch)
    jit, cuda = served_by_triton(monkeypatch, fmt)
    operands, _ = sample(fmt, (4, 64))
    memory = torch.empty(4 * 64 + 4)
    for start in (0, 0, 4, 1, 1):
        out = memory[start:][: 4 * 64].view(4, 64)
        qfuse_dequantize(operands, fmt.name, "auto", kind="kind", out=out)
    assert len(jit.calls) == len(launches) == 2
    assert ("kind", out.get_device()) in launches
    starts = [memory.data_ptr() + start * 4 for start in (0, 4, 1)]
    assert [given[0] for given in cuda.launched] == starts
    write([operands[0], operands[1].bfloat16()], fmt, memory[: 4 * 64].view(4, 64))
    assert len(jit.calls) == len(launches) == 3, "what is not known is asked"


def test_no_more_kinds_of_calls_are_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, fmt = forget_kernels(monkeypatch), FORMATS["nf4_b64"]
    monkeypatch.setattr(dequantize, "KEPT", 3)
    for rows in (*range(1, 9), *range(1, 9)):
        operands, values = sample(fmt, (rows, 64))
        out = ops.dequantize(operands, "nf4_b64", (rows, 64), torch.float32)
        assert_same_bits(out, values)
        assert 1 <= len(launches) <= 3


def test_operands_of_another_dtype_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passed once says nothing of a state that was corrupted since."""
    forget_kernels(monkeypatch)
    operands, _ = sample(FORMATS["nf4_b64_nested"], (48, 256))
    for _ in range(2):
        ops.dequantize(operands, "nf4_b64_nested", (48, 256), torch.bfloat16)
        for i in range(1, len(operands)):
            wrong = list(operands)
            wrong[i] = wrong[i].to(torch.int16)
            with pytest.raises((exc.WrongDtype, exc.CorruptQuantState)):
                ops.dequantize(wrong, "nf4_b64_nested", (48, 256), torch.bfloat16)


def test_a_format_of_the_same_name_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels(monkeypatch)
    fmt = FORMATS["nf4_b64"]
    assert isinstance(fmt.codec, Codebook)
    other = replace(fmt, codec=Codebook(tuple(-v for v in fmt.codec.values)))
    operands, values = sample(fmt, (4, 64))
    out = torch.empty(4, 64)
    write(operands, fmt, out)
    assert_same_bits(out, values)
    write(operands, other, out)
    assert torch.equal(out, -values)


def test_a_kernel_is_asked_once_for_calls_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels(monkeypatch)
    asked: list[QuantFormat] = []

    class Counting(dequantize_reference.Reference):
        def refuses(self, call: Dequantize) -> str:
            asked.append(call.fmt)
            return ""

    monkeypatch.setitem(DEQUANTIZE, "cpu", (Counting(),))
    for seed in range(3):
        operands, values = sample(_FMT, (5, 64), seed=seed)
        assert_same_bits(ops.dequantize(operands, _FMT.name, (5, 64), torch.float32), values)
    assert asked == [_FMT]
    with pytest.raises(inductor_q.exc.CorruptQuantState):  # what has passed once is no excuse
        ops.dequantize(operands, _FMT.name, (5, 128), torch.float32)
    with pytest.raises(inductor_q.exc.CorruptQuantState):
        ops.dequantize([operands[0][:32], operands[1]], _FMT.name, (5, 64), torch.float32)
    assert ops.dequantize(operands, _FMT.name, (5, 64), torch.float32).shape == (5, 64)


@pytest.mark.parametrize("name", ["nf4_b64_nested", "fp4_b32", "kbit3_e4m4"])
def test_parameters_of_a_compiled_kernel(name: str) -> None:
    """Those that a launch through the driver fills in: pointers, integers, and Triton's own."""
    kernel = dequantize_triton._kernel(FORMATS[name], 8)
    pointers = ["out", "qweight", "codebook", *kernel.pointers]
    constants = {"BLOCK": 128, "FLAT": True, "WHOLE": True, "ALIGN": 8, "WIDE": False}
    types = {**dict.fromkeys(pointers, "*fp32"), "qweight": "*u8", "out": "*bf16", "absmax": "*u8"}
    found = triton_launch.parameters(compiled(kernel.function, constants, types).asm["ptx"])
    assert found == ["u64"] * len(pointers) + ["u32"] * 5 + [*triton_launch.SCRATCH]


@pytest.mark.parametrize(
    ("change", "pointers", "numbers"),
    [
        ({}, 2, (1, 7)),  # Triton leaves out an integer of 1
        ({}, 3, (64, 64)),
        ({}, 2, (2**31, 64)),
        ({"num_ctas": 2}, 2, (64, 64)),
        ({"global_scratch_size": 16}, 2, (64, 64)),
        ({"launch_pdl": True}, 2, (64, 64)),
    ],
    ids=str,
)
def test_what_is_left_to_triton(
    change: dict[str, Any], pointers: int, numbers: tuple[int, ...]
) -> None:
    numbered = enumerate(["u64"] * 2 + ["u32"] * (2 - numbers.count(1)) + [*triton_launch.SCRATCH])
    ptx = ".visible .entry k(" + ",".join(f" .param .{t} k_param_{i}" for i, t in numbered) + ")"
    metadata = SimpleNamespace(**{"num_ctas": 1, "num_warps": 1, "shared": 0, **change})
    kernel = SimpleNamespace(metadata=metadata, asm={"ptx": ptx}, function=0)
    assert triton_launch.prepared(kernel, 0, (1, 1, 1), pointers, numbers) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nf4_b64", "nf4_b64_nested", "kbit4_e4m4"])
@pytest.mark.parametrize("pad", [0, 64])
def test_gpu_later_launches_go_through_the_driver(
    name: str, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With operands and outputs at other addresses, and bit for bit the same."""
    launches = forget_kernels(monkeypatch)
    for seed in range(3):
        operands, _ = sample(FORMATS[name], (48, 256), seed=seed)
        expected = torch.empty(48, 256, dtype=torch.bfloat16)
        dequantize_reference.KERNEL.run(Dequantize(operands, FORMATS[name], expected))
        there = [operand.cuda() for operand in operands]
        out = torch.full((48, 256 + pad), 7.0, dtype=torch.bfloat16, device="cuda")
        inside = out[:, :256]
        write(there, FORMATS[name], inside, "triton")
        assert_same_bits(inside.cpu(), expected)
        assert (out[:, 256:] == 7).all()
    [plan] = launches.values()
    assert isinstance(plan.launch._again, driver.Launch)


@pytest.mark.gpu
@two_devices
def test_gpu_launch_on_a_device_that_is_not_current() -> None:
    """Also the later launches, which go past Triton."""
    operands, values = sample(FORMATS["nf4_b64_nested"], (64, 256))
    for _ in range(3):
        for index in (1, 0):
            with torch.cuda.device(1 - index):
                there = [t.to(f"cuda:{index}") for t in operands]
                out = torch.empty(64, 256, device=f"cuda:{index}")
                write(there, FORMATS["nf4_b64_nested"], out, "triton")
                assert torch.cuda.current_device() == 1 - index
            assert_same_bits(out.cpu(), values)


@pytest.mark.gpu
def test_gpu_launches_from_threads_of_their_own() -> None:
    """One prepared launch, filled in by several threads at a time, some new to CUDA."""
    name = "nf4_b64_nested"
    cases = [sample(FORMATS[name], (64, 256), seed=seed) for seed in range(4)]
    there = [[t.cuda() for t in operands] for operands, _ in cases]
    write(there[0], FORMATS[name], torch.empty(64, 256, device="cuda"))
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run(i: int) -> None:
        outs = [torch.empty(64, 256, device="cuda") for _ in range(200)]
        for out in outs:
            write(there[i], FORMATS[name], out)
        torch.cuda.synchronize()
        wrong.extend(i for out in outs if not torch.equal(out.cpu(), cases[i][1]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
