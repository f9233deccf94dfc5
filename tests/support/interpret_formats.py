"""Run printed decodes under Triton's interpreter, with TRITON_INTERPRET=1.

This is a program of its own, because Triton decides at import whether it interprets. It prints how
many cases were equal bit for bit: the whole decode of a format, element by element, to the eager
reference; the dequantize kernel to a formula in float64. The first case that is not equal raises.
Names on the command line choose formats.
"""

from __future__ import annotations

from unittest import mock

import torch

from inductor_q.formats import FORMATS
from inductor_q.kernels import dequantize_triton
from inductor_q.kernels.calls import Dequantize
from tests.support import formulas
from tests.support.processes import asked_for
from tests.support.quantized import assert_same_bits, sample


def by_element() -> int:
    """Decode rows whose groups are whole, and rows whose are not."""
    cases = 0
    for fmt, (rows, cols) in [
        (FORMATS[name], shape) for name in asked_for(FORMATS) for shape in ((2, 64), (3, 35))
    ]:
        operands, values = sample(fmt, (rows, cols))
        out = torch.full((rows, cols), 7.0)
        with mock.patch.object(dequantize_triton, "codes_of_a_lane", return_value=1):
            dequantize_triton.KERNEL.run(Dequantize(operands, fmt, out))
        assert_same_bits(out, values)
        cases += 1
    return cases


def by_kernel() -> int:
    """Decode every code under every scale, contiguous and in longer rows."""
    cases = 0
    for name in asked_for(formulas.FORMULAS):
        for operands, (rows, cols) in formulas.cases(name):
            expected = formulas.values(name, operands, (rows, cols))
            for extra in (0, 3):
                out = torch.full((rows, cols + extra), 7.0)[:, :cols]
                fmt = FORMATS[name]
                assert not dequantize_triton.KERNEL.refuses(Dequantize(operands, fmt, out))
                dequantize_triton.KERNEL.run(Dequantize(operands, fmt, out))
                assert_same_bits(out, expected)
                cases += 1
    return cases


if __name__ == "__main__":
    print(by_element(), by_kernel())
