"""csrc/requantize.cu: what it refuses, what it is launched with, and on a GPU its results."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.virtualized import V

from inductor_q.csrc import driver
from inductor_q.formats import FORMATS
from inductor_q.kernels import (
    PROVIDERS,
    requantize_cuda,
    requantize_reference,
    requantize_triton,
)
from inductor_q.kernels.calls import Requantize
from inductor_q.kernels.requantize_cuda import KERNEL, TYPES, Config, Plan
from inductor_q.lowerings import requantize
from inductor_q.lowerings.calls import qfuse_requantize
from tests.support.fake_driver import FakeDriver
from tests.support.quantized import quantize, sample

FP8 = torch.float8_e4m3fn
NESTED = "nf4_b64_nested"


def made(
    name: str,
    shape: tuple[int, int],
    *,
    dtype: torch.dtype = FP8,
    transposed: bool = False,
    device: str = "cpu",
) -> Requantize:
    """Make a call whose weight fills the range of the dtype."""
    operands, values = sample(FORMATS[name], shape)
    scale = values.abs().amax(1).clamp_min(2.0**-100) / (448.0 if dtype is FP8 else 127.0)
    out = torch.empty(shape[::-1] if transposed else shape, dtype=dtype, device=device)
    given = [operand.to(device) for operand in operands]
    return Requantize(given, FORMATS[name], scale.to(device), out, transposed)


def test_what_the_kernel_refuses() -> None:
    call = made(NESTED, (8, 128))
    assert KERNEL.refuses(call) == "the CUDA kernel runs on a GPU, not on cpu"
    assert "not one scale for each 64" in KERNEL.unknown(FORMATS["nf4_b32"])
    assert "not packed as nibbles" in KERNEL.unknown(FORMATS["int8_row"])
    assert KERNEL.unknown(None)
    refuses = requantize_cuda._refuses_tensors
    assert not refuses(call)
    assert refuses(made(NESTED, (8, 96))) == "96 columns, which are no multiple of 64"
    assert refuses(replace(call, out=call.out[:0])) == "there is nothing to write"
    assert refuses(replace(call, out=call.out.float())) == (
        "the output is torch.float32, not e4m3 or int8"
    )
    half = replace(call, scale=call.scale.half())
    assert refuses(half) == "scale is torch.float16, not torch.float32"
    coded = replace(call, scale=call.scale.to(torch.uint8))
    assert refuses(coded) == "scale is torch.uint8, not torch.float32"
    place = call.fmt.operands.index("absmax")
    operands = [x.float() if i == place else x for i, x in enumerate(call.operands)]
    assert refuses(replace(call, operands=operands)) == "absmax is torch.float32, not torch.uint8"
    strided = replace(call, scale=call.scale.repeat(2)[::2])
    assert refuses(strided) == "a tensor is not contiguous"
    beside = torch.empty(8 * 128 + 1, dtype=FP8)[1:].view(8, 128)
    assert refuses(replace(call, out=beside)) == "codes or output are not aligned to 16 bytes"
    operands, name, shape = quantize((8, 128), storage=torch.bfloat16).operands
    stored = replace(call, operands=operands, fmt=FORMATS[name])
    assert shape == [8, 128] and not refuses(stored)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_it_is_launched_with(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid that covers the weight; operands in the kernel's order, zeros for those it lacks."""
    cuda, grids = FakeDriver(monkeypatch, device=0), []
    once = driver.Launch

    def launch(*given: Any, **named: Any) -> driver.Launch:
        grids.append((named["grid"], named["threads"]))
        return once(given[0], 0, **named)

    monkeypatch.setattr(driver, "Launch", launch)
    monkeypatch.setattr(driver, "function", lambda *_: ctypes.c_void_p(1))
    for name, missing in ((NESTED, 0), ("fp4_b256", 3)):
        call = made(name, (130, 320), transposed=transposed)
        Plan(call)(call)
        by_name = dict(zip(call.fmt.operands, call.operands, strict=True))
        order = ["qweight", "absmax", "nested_codebook", "nested_absmax", "nested_offset"]
        ends = [call.scale.data_ptr(), call.out.data_ptr()]
        expected = [by_name[n].data_ptr() for n in order[: 5 - missing]] + [0] * missing + ends
        pointers, numbers = cuda.launched[-1][:7], cuda.launched[-1][7:]
        assert list(pointers) == expected
        pitch = 130 if transposed else 320
        assert numbers[:4] == (130, 320, 0 if name == NESTED else 2, pitch)
        assert grids[-1] == ((2 * 3, 256) if transposed else (3, 256))
        assert call.fmt.lut16 is not None
        values = torch.tensor(numbers[4:]).view(torch.float32)
        assert torch.equal(values, torch.tensor(call.fmt.lut16))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["kind", ""])
def test_several_weights_are_launched_where_they_lie(
    kind: str, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tensors of each call, as the parts by themselves would be; planned once for a kind."""
    cuda, rows = FakeDriver(monkeypatch), [48, 16]
    monkeypatch.setattr(driver, "function", lambda *_: ctypes.c_void_p(1))
    splits, asked, parts = list[Any](), list[Requantize](), Requantize.parts

    def refuses(call: Requantize) -> str:
        asked.append(call)
        return ""

    def counted(*given: Any) -> Any:
        splits.append(given)
        return parts(*given)

    listed = (KERNEL, requantize_reference.KERNEL)
    monkeypatch.setitem(PROVIDERS["requantize"], "cpu", listed)
    monkeypatch.setattr(KERNEL, "missing", str)
    monkeypatch.setattr(KERNEL, "refuses", refuses)
    monkeypatch.setattr(Requantize, "parts", counted)
    calls = []
    for _ in range(3):
        whole = made(NESTED, (sum(rows), 128), transposed=transposed)
        operands = [t for n in rows for t in sample(FORMATS[NESTED], (n, 128))[0]]
        calls.append(replace(whole, operands=operands))
    for call in calls:
        given = (call.operands, call.scale, NESTED, transposed, rows, "cuda")
        qfuse_requantize(*given, kind=kind, out=call.out)
    assert len(splits) == (1 if kind else 3)
    launched = list(cuda.launched)
    for call in calls:
        for part in parts(call, rows):
            Plan(part)(part)
    assert launched == cuda.launched[len(launched) :]
    assert len(launched) == 6 and len(asked) == 2
    # A scale that lies elsewhere is another kind of call, whose second part has other neighbours.
    scale = torch.ones(sum(rows) + 1)[1:]
    call = replace(calls[0], scale=scale)
    qfuse_requantize(
        call.operands, scale, NESTED, transposed, rows, "cuda", kind=kind, out=call.out
    )
    assert len(asked) == 4


def test_compiled_code_names_a_kernel_that_knows_the_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each compile would warn that the CUDA kernel is passed over."""
    for provider in PROVIDERS["requantize"]["cuda"]:
        monkeypatch.setattr(provider, "missing", str)
    graph: Any = SimpleNamespace(cpp_wrapper=False)
    with V.set_graph_handler(graph):
        found = {n: requantize._provider("cuda", FORMATS[n]) for n in (NESTED, "kbit4_e4m4")}
    assert found == {NESTED: "cuda", "kbit4_e4m4": "triton"}


def test_compiled_code_tells_why_a_kernel_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    for provider in PROVIDERS["requantize"]["cuda"]:
        monkeypatch.setattr(provider, "missing", str)
    wanted: Any = SimpleNamespace(kernel=lambda op: "cuda")
    monkeypatch.setattr(requantize, "in_force", lambda: wanted)
    graph: Any = SimpleNamespace(cpp_wrapper=False)
    with V.set_graph_handler(graph):
        assert requantize._provider("cuda", FORMATS["kbit4_e4m4"]) == "triton"
        assert requantize._provider("cuda", FORMATS[NESTED]) == "cuda"
    (warning,) = told
    assert warning.startswith("requantize: provider 'cuda' is not used: ")


# --- on a GPU -----------------------------------------------------------------------------------

SHAPES = [(1, 64), (37, 320), (144, 192), (2048, 4096), (1000, 11008)]


def bytes_of(call: Requantize, run: Any) -> Tensor:
    """Return what is written over other bytes, which a kernel that forgets some leaves."""
    out = call.out.view(torch.uint8).fill_(77).view(call.out.dtype)
    run(replace(call, out=out))
    return out.view(torch.uint8).clone()


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.values())
@pytest.mark.parametrize("name", [n for n, fmt in FORMATS.items() if not KERNEL.unknown(fmt)])
def test_gpu_kernel_equals_the_reference(name: str, dtype: torch.dtype, transposed: bool) -> None:
    if dtype is FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("sm_89 is the first with FP8")
    for shape in SHAPES:
        call = made(name, shape, dtype=dtype, transposed=transposed, device="cuda")
        assert not KERNEL.refuses(call)
        expected = bytes_of(call, requantize_reference.KERNEL.run)
        assert torch.equal(bytes_of(call, KERNEL.run), expected), shape


@pytest.mark.gpu
@pytest.mark.parametrize("config", [Config(columns=64), Config(rows=256), Config(columns=256)])
def test_gpu_tiles_of_other_sizes(config: Config) -> None:
    for shape in SHAPES:
        call = made(NESTED, shape, dtype=torch.int8, transposed=True, device="cuda")
        expected = bytes_of(call, requantize_reference.KERNEL.run)
        assert torch.equal(bytes_of(call, Plan(call, config)), expected), shape


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_gpu_kernels_write_the_same(transposed: bool) -> None:
    """Triton's kernel, for a device with FP8, and in int8."""
    for dtype in TYPES:
        if dtype is FP8 and torch.cuda.get_device_capability() < (8, 9):
            continue
        call = made(NESTED, (2048, 4096), dtype=dtype, transposed=transposed, device="cuda")
        expected = bytes_of(call, requantize_triton.KERNEL.run)
        differ = bytes_of(call, KERNEL.run) != expected
        assert differ.float().mean() < 1e-4  # Triton's reciprocal is an ulp off


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [KERNEL, requantize_triton.KERNEL], ids=["cuda", "triton"])
@pytest.mark.parametrize("rows", [(4096, 1024, 1024), (37, 1000)])
def test_gpu_weights_side_by_side(rows: tuple[int, ...], kernel: Any) -> None:
    calls = [made(NESTED, (n, 512), dtype=torch.int8, device="cuda") for n in rows]
    operands = [operand for call in calls for operand in call.operands]
    scale = torch.cat([call.scale for call in calls])
    out = torch.empty((512, sum(rows)), dtype=torch.int8, device="cuda")
    whole = Requantize(operands, calls[0].fmt, scale, out, True)

    def run(provider: Any) -> Tensor:
        out.fill_(77)
        for call in whole.parts(rows):
            assert not provider.refuses(call) or call.out.data_ptr() % 16
            provider.run(call)
        return out.clone()

    if kernel is KERNEL and any(call.out.data_ptr() % 16 for call in whole.parts(rows)):
        assert "not aligned" in KERNEL.refuses(list(whole.parts(rows))[-1])
    else:
        differ = run(kernel) != run(requantize_reference.KERNEL)
        assert differ.float().mean() < 1e-4  # Triton's reciprocal is an ulp off


@pytest.mark.gpu
def test_gpu_of_more_elements_than_an_int32_counts() -> None:
    """The last rows of a weight that has the codes and scales of a small one again and again."""
    rows, columns, times = 1 << 14, 1 << 12, 33
    call = made("nf4_b64", (rows, columns), dtype=torch.int8, device="cuda")
    small = bytes_of(call, KERNEL.run)
    by_name = dict(zip(call.fmt.operands, call.operands, strict=True))
    operands = [by_name[n].flatten().repeat(times) for n in call.fmt.operands]
    for transposed in (False, True):
        shape = (columns, rows * times) if transposed else (rows * times, columns)
        out = torch.empty(shape, dtype=torch.int8, device="cuda")
        KERNEL.run(Requantize(operands, call.fmt, call.scale.repeat(times), out, transposed))
        last = out[:, -rows:].t() if transposed else out[-rows:]
        assert torch.equal(last.contiguous().view(torch.uint8), small)


@pytest.mark.gpu
def test_gpu_serves_what_it_plans_again() -> None:
    """A plan serves other tensors of the same kind, also within a CUDA graph."""
    first, second = (made(NESTED, (256, 512), dtype=torch.int8, device="cuda") for _ in range(2))
    second.operands[0].bitwise_xor_(0x5A)
    plan = KERNEL.plan(first)
    expected = bytes_of(second, requantize_reference.KERNEL.run)
    second.out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(second)
    graph.replay()
    assert torch.equal(second.out.view(torch.uint8), expected)
