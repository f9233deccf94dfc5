"""Run the Triton kernels on CPU tensors under Triton's interpreter, with TRITON_INTERPRET=1.

This is a program of its own, because Triton decides at import whether it interprets. It prints how
many cases of dequantize, of quantize_kbit and of requantize to int8 were equal to the reference bit
for bit (the interpreter truncates to e4m3), and how many of softmax_loss, add_product and
adapter_grads up to the rounding of sums; the first case that is not raises. Names on the command
line choose formats.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from inductor_q.formats import FORMATS
from inductor_q.kernels import (
    adapter_grads_reference,
    adapter_grads_triton,
    add_product_reference,
    add_product_triton,
    dequantize_reference,
    dequantize_triton,
    quantize_kbit_triton,
    requantize_reference,
    requantize_triton,
    softmax_loss_reference,
    softmax_loss_triton,
)
from inductor_q.kernels.calls import (
    AdapterGrads,
    AddProduct,
    Dequantize,
    QuantizeKbit,
    Requantize,
    SoftmaxLoss,
)
from inductor_q.kernels.quantize_kbit_reference import reference
from tests.kbit.test_kbit import CASES, KINDS, codebook, weight
from tests.support.processes import asked_for
from tests.support.quantized import assert_same_bits, sample

#: The interpreter truncates to bfloat16 where a GPU rounds; the gpu tests have that dtype too.
DTYPES = (torch.float32, torch.float16)

#: (rows, cols, extra columns of the output): words and bytes, in rows of any length.
LAYOUTS = {
    "words, flat": (4, 64, 0),
    "words, strided": (4, 64, 8),
    "bytes, flat": (3, 6, 0),
    "bytes, whole units in strided rows": (4, 20, 3),
    "bytes straddling strided rows": (5, 7, 2),
    "words aligned, rows not": (4, 64, 3),
    "one element": (1, 1, 0),
    "several programs": (8, 160, 0),
}


def dequantize() -> int:
    cases = 0
    config = dequantize_triton.Config(block=16)
    for name, (rows, cols, extra) in itertools.product(asked_for(FORMATS), LAYOUTS.values()):
        fmt = FORMATS[name]
        if dequantize_triton.KERNEL.unknown(fmt):
            continue
        operands, _ = sample(fmt, (rows, cols))
        dtype = DTYPES[(cases + cases // len(LAYOUTS)) % 2]  # each layout in both
        wide = torch.full((rows, cols + extra), 7.0, dtype=dtype)
        out = wide[:, :cols]
        assert not dequantize_triton.KERNEL.refuses(Dequantize(operands, fmt, out))
        dequantize_triton.KERNEL.prepare(Dequantize(operands, fmt, out), config)(operands, out)
        expected = torch.empty(rows, cols, dtype=dtype)
        dequantize_reference.KERNEL.run(Dequantize(operands, fmt, expected))
        assert_same_bits(out, expected)
        assert (wide[:, cols:] == 7.0).all(), "wrote beside its columns"
        cases += 1
    return cases


def quantize() -> int:
    cases = 0
    config = quantize_kbit_triton.Config(blocks=8)
    for (k, absmax), kind, numel in itertools.product(CASES, KINDS, (1, 33, 1000)):
        if not asked_for([f"kbit{k}_{absmax}"]):
            continue
        x = weight(numel, DTYPES[cases % 2], seed=cases) * 10.0 ** (cases % 6 - 4)
        x[: numel // 8] = 0
        actual = quantize_kbit_triton.KERNEL.run(
            QuantizeKbit(x, codebook(k, kind), k, absmax), config
        )
        expected = reference(x, codebook(k, kind), k, absmax)
        for mine, right in zip(actual, expected, strict=True):
            assert mine.dtype == right.dtype
            assert torch.equal(mine, right), f"{k=} {absmax=} {kind=} {numel=} {x.dtype=}"
        cases += 1
    return cases


def requantize() -> int:
    cases = 0
    config = requantize_triton.Config(rows=16, columns=64, num_warps=4)
    for name, (rows, columns) in itertools.product(asked_for(FORMATS), ((16, 64), (20, 160))):
        operands, values = sample(FORMATS[name], (rows, columns))
        scale = values.nan_to_num(0, 0, 0).abs().amax(1).clamp_min(1e-30) / 127
        transposed = cases % 3 > 0
        out = torch.empty((rows, columns), dtype=torch.int8)
        if transposed:  # columns of a wider matrix
            out = torch.empty((columns, rows + 16), dtype=torch.int8)[:, 8 : 8 + rows]
        call = Requantize(operands, FORMATS[name], scale, out, transposed)
        assert not requantize_triton.KERNEL.refuses(call)
        requantize_triton.Plan(call, config)(call)
        expected = torch.empty_like(out)
        requantize_reference.KERNEL.run(replace(call, out=expected))
        finite = (values.t() if transposed else values).isfinite()
        assert torch.equal(out[finite], expected[finite]), f"{name} {transposed=}"
        cases += 1
    return cases


def softmax_loss() -> int:
    cases = 0
    for columns, gradient in itertools.product((5, softmax_loss_triton.BLOCK + 3), (False, True)):
        generator = torch.Generator().manual_seed(columns)
        logits = torch.randn(7, columns + 2, generator=generator) * 4
        labels = torch.tensor([0, columns - 1, -100, 3, columns, -1, 2])
        results = []
        for kernel in (softmax_loss_triton.KERNEL, softmax_loss_reference.KERNEL):
            call = SoftmaxLoss(
                logits=logits.clone()[:, :columns],
                labels=labels,
                losses=torch.full((7,), 9.0),
                scale=torch.tensor(512.0) if gradient else None,
                ignore_index=-100,
            )
            assert not kernel.refuses(call)
            kernel.run(call)
            results.append((call.losses, call.logits[[0, 1, 2, 3, 6]]))
        for mine, right in zip(*results, strict=True):
            torch.testing.assert_close(mine, right, equal_nan=True, rtol=1e-5, atol=1e-5)
        assert gradient != bool((results[0][1][0] == logits[0, :columns]).all())
        cases += 1
    return cases


def add_product() -> int:
    cases = 0
    for (rows, columns), (inner, alpha), transposed in itertools.product(
        ((1, 1), (65, 144)), ((1, 1.0), (16, 0.3), (48, 1.0)), (False, True)
    ):
        generator = torch.Generator().manual_seed(cases)
        base = torch.randn(rows, columns, generator=generator).half()
        a = torch.randn(rows, inner + 8, generator=generator).half()[:, 8:]  # of a wider matrix
        b = torch.randn(inner, columns, generator=generator).half()
        b = b.t().contiguous().t() if transposed else b
        results = []
        for kernel in (add_product_triton.KERNEL, add_product_reference.KERNEL):
            call = AddProduct(base.clone(), a, b, alpha)
            assert not kernel.refuses(call)
            kernel.run(call)
            results.append(call.base)
        torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)
        cases += 1
    return cases


def adapter_grads() -> int:
    cases = 0
    for (rows, columns), rank in itertools.product(((1, 64), (65, 144), (300, 320)), (4, 16, 24)):
        generator = torch.Generator().manual_seed(cases)
        grad = torch.randn(rows, columns + 8, generator=generator).half()[:, 8:]
        p = torch.randn(rows, rank + 8, generator=generator).half()[:, 8:]  # of a wider matrix
        b = torch.randn(columns, rank, generator=generator).half()
        results = []
        for kernel in (adapter_grads_triton, adapter_grads_reference):
            behind = (0, 0, 13)[cases % 3]  # columns of zeros
            wide = torch.full((rows, rank + behind + 2), 7.0).half()
            of_b = torch.full_like(b, torch.nan)
            call = AdapterGrads(grad, p, b, 2.0, 0.7, wide[:, 1:-1], of_b)
            if kernel is adapter_grads_triton:
                config = (adapter_grads_triton.WIDE, adapter_grads_triton.NARROW)[cases % 2]
                adapter_grads_triton.plan(call, config)(call)
            else:
                adapter_grads_reference.KERNEL.run(call)
            assert (wide[:, [0, -1]] == 7.0).all(), "wrote beside its columns"
            assert not wide[:, 1 + rank : -1].any(), "left what was behind"
            results.append((wide, of_b))
        for mine, right in zip(*results, strict=True):
            torch.testing.assert_close(mine, right, rtol=2e-3, atol=2e-2)
        cases += 1
    return cases


if __name__ == "__main__":
    exact = (dequantize(), quantize())
    print(*exact, softmax_loss(), requantize(), add_product(), adapter_grads())
