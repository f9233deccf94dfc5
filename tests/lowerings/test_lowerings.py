"""What the lowerings generate: one kernel where one is meant, no copies, no weight beyond the
operand of the product."""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code

import inductor_q
from inductor_q import lowerings, ops, testing
from inductor_q.backend import qfuse
from inductor_q.capture.bnb_state import bnb_operands
from inductor_q.kernels.dequantize import compiled_by, kernels_of
from inductor_q.log import warn_once
from tests.support.compiling import ON_ANY_CPU, SMALL, Between
from tests.support.quantized import assert_same_as_native, assert_same_bits, replace_dtype

bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
N, K, R, PAD = 256, 128, 16, 64
INDUCTOR = {"qfuse.kernels": {"dequantize": "inductor"}}
CPP = {"qfuse.kernels": {"dequantize": "cpp"}}
TRITON = {"qfuse.kernels": {"dequantize": "triton"}}

needs_cpp = pytest.mark.skipif(
    "cpp" not in kernels_of("cpu"), reason="no C++ compiler for the CPU kernel"
)
#: The decode as a kernel of its own, told where to write.
EXTERN = [
    pytest.param("cpu", CPP, marks=needs_cpp, id="cpp"),
    pytest.param("cuda", TRITON, marks=pytest.mark.gpu, id="triton"),
]
#: And as loops of Inductor's.
EITHER = [
    pytest.param("cpu", INDUCTOR, id="inductor"),
    pytest.param("cuda", INDUCTOR, marks=pytest.mark.gpu, id="inductor on a GPU"),
    *EXTERN,
]


def x_MK(device: str = "cpu", rows: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, K, generator=generator).to(device, BF16)


def adapted(device: str = "cpu") -> nn.Module:
    """A layer under an adapter, its input and its result those of other kernels."""
    return Between(testing.lora_linear(N, K, r=R, adapter_dtype=BF16, device=device))


class Decode(nn.Module):
    """A weight's values, and what is done with them."""

    def __init__(
        self, then: Any, dtype: torch.dtype, device: str = "cpu", **quantization: Any
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(N, K, generator=generator).to(device, BF16)
        self.linear = testing.quantized_linear(weight, **quantization)
        packed = self.linear.weight
        self.operands, self.format, self.shape = bnb_operands(packed, packed.quant_state)
        self.then, self.dtype = then, dtype

    def forward(self) -> Tensor:
        values = ops.dequantize(self.operands, self.format, self.shape, self.dtype)
        result: Tensor = self.then(values)
        return result


def code_of(fn: Any, *args: Any, options: dict[str, Any], backward: bool = False) -> Any:
    """The result and the generated code, forward and backward joined."""
    torch._dynamo.reset()
    compiled: Any = torch.compile(fn, backend=qfuse, options={**SMALL, **ON_ANY_CPU, **options})
    if backward:
        result, codes = run_fw_bw_and_get_code(lambda: compiled(*args))
    else:
        with torch.no_grad():
            result, codes = run_and_get_code(compiled, *args)
    return result, codes


def kernels(code: str) -> list[str]:
    """The body of every generated C++ or Triton kernel."""
    return re.findall(r"async_compile\.(?:cpp_pybinding|triton)\(.*?'''(.*?)'''", code, re.S)


def allocations(code: str) -> list[tuple[int, ...]]:
    """Shapes of the buffers that the generated code allocates, constants and all."""
    found = re.findall(r"empty_strided_\w+\(\(([^)]*)\)", code)
    return [tuple(int(size) for size in shape.split(",") if size.strip()) for shape in found]


def copies(code: str) -> bool:
    """Whether a call concatenates or copies; a comment names what its kernel does otherwise."""
    calls = re.sub(r"^\s*#.*$", "", code, flags=re.M)
    return "aten.cat" in calls or ".copy_(" in calls


def decodes(kernel: str) -> bool:
    """The NF4 codebook's smallest value but one is in no kernel by chance."""
    return "0.6961928" in kernel


# --- the values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("nested", [True, False])
def test_pointwise_lowering_is_bitwise_eager(dtype: torch.dtype, nested: bool) -> None:
    for quant_type in ("nf4", "fp4"):
        module = Decode(lambda values: values, dtype, nested=nested, quant_type=quant_type)
        got, codes = code_of(module, options=INDUCTOR)
        assert "qfuse.dequantize" not in codes[0]
        weight = module.linear.weight
        assert_same_as_native(got, weight.data, replace_dtype(weight.quant_state, dtype))
        assert torch.equal(got, module())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_gpu_pointwise_lowering_is_bitwise_bitsandbytes(
    quant_type: str, nested: bool, dtype: torch.dtype
) -> None:
    """Its CUDA kernel's values in every bit, but for the sign of the zero that a code of fp4 is."""
    module = Decode(lambda values: values, dtype, "cuda", nested=nested, quant_type=quant_type)
    got, codes = code_of(module, options=INDUCTOR)
    assert "qfuse_dequantize" not in codes[0] and "triton" in codes[0]
    weight = module.linear.weight
    state = replace_dtype(weight.quant_state, dtype)
    expected = bnb.functional.dequantize_4bit(weight.data, state)
    assert_same_bits(got + 0.0, expected + 0.0)


def _halved(values: Tensor) -> Tensor:
    return (values * 0.5).to(BF16)


def _transposed(values: Tensor) -> Tensor:
    return values.t().contiguous()


def _all(values: Tensor) -> Tensor:
    return (values.t() + 1).to(FP16).contiguous()


@pytest.mark.parametrize("then", [_halved, _transposed, _all])
def test_casts_and_transposes_join_the_decode(then: Any, device: str) -> None:
    module = Decode(then, FP32, device)  # from 16 bits, Inductor would skip the rounding in between
    got, (code,) = code_of(module, options=INDUCTOR)
    assert torch.equal(got, module())
    (kernel,) = kernels(code)
    assert decodes(kernel)
    assert len(allocations(code)) == 1  # the result


def slices(code: str, shape: tuple[int, int], *, start: int) -> list[tuple[str, str]]:
    """Buffers that are a slice of the columns of a wide one: `(slice, wide)`."""
    geometry = rf"\({shape[0]}, {shape[1]}\), \({K + PAD}, 1\), {start}"
    return re.findall(rf"(\w+) = reinterpret_tensor\((\w+), {geometry}\)", code)


# --- extend_k -----------------------------------------------------------------------------------


def test_decode_and_concatenation_are_one_kernel() -> None:
    """The weight is decoded into its columns of the wide operand, beside the adapter's: no weight
    of its own, no copy."""
    module, x = adapted().eval(), x_MK()
    got, (code,) = code_of(module, x, options=INDUCTOR)
    with torch.no_grad():
        assert testing.relative_error(got, module(x)) < 0.01
    assert allocations(code).count((N, K + PAD)) == 1
    assert (N, K) not in allocations(code)
    assert (K, N) not in allocations(code)
    assert [decodes(k) for k in kernels(code)].count(True) == 1
    # It is called with both parts of the wide buffer, the weight's and the adapter's.
    ((weight, wide),) = slices(code, (N, K), start=0)
    ((adapter, same),) = slices(code, (N, PAD), start=K)
    assert wide == same
    (call,) = [c for c in re.findall(r"cpp_fused_\w*\((.*)\)", code) if weight in c.split(", ")]
    assert adapter in call.split(", ")
    assert re.search(rf"mm\(\w+, reinterpret_tensor\({wide}, \({K + PAD}, {N}\)", code)
    # Neither x nor the projection is copied: tanh writes into the wide input, mm beside it.
    assert allocations(code).count((96, K + PAD)) == 1
    assert (96, K) not in allocations(code)
    assert (96, PAD) not in allocations(code) and (96, R) not in allocations(code)
    assert not copies(code)


@pytest.mark.gpu
def test_gpu_decode_writes_the_wide_operand() -> None:
    """In one kernel with the adapter's columns or in one beside theirs: in no buffer of its own."""
    module, x = adapted("cuda").eval(), x_MK("cuda")
    got, (code,) = code_of(module, x, options=INDUCTOR)
    with torch.no_grad():
        assert testing.relative_error(got, module(x)) < 0.01
    assert [decodes(k) for k in kernels(code)].count(True) == 1
    assert allocations(code).count((N, K + PAD)) == 1
    assert allocations(code).count((96, K + PAD)) == 1
    assert not {(N, K), (K, N), (96, K), (96, PAD), (96, R)} & {*allocations(code)}
    assert re.search(rf"mm\(\w+, reinterpret_tensor\(\w+, \({K + PAD}, {N}\)", code)
    assert not copies(code)


@pytest.mark.parametrize("device, options", EXTERN)
def test_the_extern_kernel_writes_into_a_slice_of_the_wide_operand(
    device: str, options: dict[str, Any]
) -> None:
    module, x = adapted(device).eval(), x_MK(device)
    got, (code,) = code_of(module, x, options=options)
    with torch.no_grad():
        assert testing.relative_error(got, module(x)) < 0.01
    ((part, wide),) = slices(code, (N, K), start=0)
    assert re.search(rf"dequantize\(.*out={part}\)", code)
    assert re.search(rf"mm\(\w+, reinterpret_tensor\({wide}, \({K + PAD}, {N}\)", code)
    assert allocations(code).count((N, K + PAD)) == 1
    assert allocations(code).count((96, K + PAD)) == 1
    assert not {(N, K), (K, N), (96, K)} & {*allocations(code)}
    assert kernels(code) and not decodes(code)
    assert not copies(code)


@pytest.mark.parametrize("device, options", EITHER)
def test_backward_decodes_into_its_wide_operand_too(device: str, options: dict[str, Any]) -> None:
    """`[dY | dY s B] @ [W ; A]`: the weight in its rows, the adapter below."""
    x = x_MK(device).requires_grad_()
    _, codes = code_of(adapted(device), x, options=options, backward=True)
    forward, backward = codes
    assert (N + PAD, K) in allocations(backward)
    for code in (forward, backward):
        assert (N, K) not in allocations(code)
        assert (K, N) not in allocations(code)


@pytest.mark.parametrize("device, options", EXTERN)
def test_without_extend_k_the_weight_is_the_operand_of_the_product(
    device: str, options: dict[str, Any]
) -> None:
    """The converse, so that the tests above can fail."""
    options = {**options, "qfuse.passes": {"extend_k": False}}
    _, (code,) = code_of(adapted(device).eval(), x_MK(device), options=options)
    assert allocations(code).count((N, K)) == 1
    assert (N, K + PAD) not in allocations(code)


# --- choosing -----------------------------------------------------------------------------------


def test_the_provider_is_reported(device: str) -> None:
    for options, name in ((INDUCTOR, "inductor"), ({"qfuse.kernels": {}}, None)):
        code_of(Decode(lambda values: values, BF16, device), options=options)
        report = inductor_q.last_report()
        assert report is not None
        first = next(iter(kernels_of("cpu")), "inductor")
        expected = name or {"cpu": first, "cuda": "triton"}[device]
        assert report.providers == {"dequantize": {expected: 1}}


def test_a_named_kernel_that_the_device_lacks_is_not_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "inductor_q"):
        module = Decode(lambda values: values, BF16)
        code_of(module, options={"qfuse.kernels": {"dequantize": "triton"}})
    report = inductor_q.last_report()
    assert report is not None
    assert report.providers == {"dequantize": {compiled_by("cpu"): 1}}
    assert caplog.messages == [
        "dequantize: provider 'triton' is not used: there is none of that name for cpu tensors"
    ]


@pytest.mark.parametrize(("shape", "cpp_wrapper", "reason"), [
    ((4, 16, 64), False, "the weight has 3 dimensions"),
    ((64, 64), True, "C++ wrapper code"),
])  # fmt: skip
def test_where_a_kernel_cannot_be_called_loops_serve_and_it_is_told(
    shape: tuple[int, ...], cpp_wrapper: bool, reason: str, told: list[str]
) -> None:
    """A site of the pass names the provider that the lowering then counts."""
    warn_once.cache_clear()
    first, *_ = [*kernels_of("cpu"), "reference"]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16)
    # Of fp4, bitsandbytes decodes one code to -0.0 on a CPU without AVX-512, and to 0.0 with it.
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
    expected = bnb.functional.dequantize_4bit(packed, state)
    for options, warnings in (({}, 0), ({"qfuse.kernels": {"dequantize": first}}, 1)):
        values, _ = code_of(
            lambda: bnb.functional.dequantize_4bit(packed, state),
            options={**options, "cpp_wrapper": cpp_wrapper},
        )
        assert_same_bits(values, expected)
        report = inductor_q.last_report()
        assert report is not None
        assert report.providers == {"dequantize": {"inductor": 1}}
        assert [s.provider for s in report.sites if not s.rejected] == ["inductor"]
        assert len([text for text in told if reason in text]) == warnings


def test_registering_twice_is_registering_once() -> None:
    """Also where the module is imported anew, which forgets that it has registered."""
    from torch._inductor.lowering import lowerings as registered

    lowerings.register()
    first: Any = registered[torch.ops.qfuse.dequantize.default]
    lowerings.register()
    importlib.reload(lowerings).register()
    again: Any = registered[torch.ops.qfuse.dequantize.default]
    assert again.__wrapped__ is first.__wrapped__


def test_registration_leaves_other_backends_as_they_were() -> None:
    """Under backend="inductor" our ops still lower, and bitsandbytes' stay calls."""
    linear = Decode(lambda values: values, BF16).linear
    x = x_MK()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(linear, backend="inductor")
        got, (code,) = run_and_get_code(compiled, x)
        assert torch.equal(got, linear(x))
    assert "torch.ops.bitsandbytes." in code
    module = Decode(lambda values: values, BF16)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(module, backend="inductor")(), module())
