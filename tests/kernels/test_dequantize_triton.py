"""The Triton kernel: interpreted here, and the source that is printed for it."""

from __future__ import annotations

import pytest

from inductor_q.formats import FORMATS
from inductor_q.kernels import dequantize_triton
from tests.kbit.test_kbit import CASES as KBIT_CASES
from tests.kbit.test_kbit import KINDS
from tests.support.dequantize_kernels import decoded_by
from tests.support.processes import FEW_OR_ALL, interpreted
from tests.support.quantized import needs_0_50


@needs_0_50
@pytest.mark.parametrize("few", FEW_OR_ALL)
def test_triton_in_the_interpreter(few: tuple[str, ...]) -> None:
    """The real kernel, on CPU tensors."""
    decoded, encoded, losses, narrowed, added, read = interpreted("interpret_triton", *few)
    assert losses == 4
    assert added == 12
    assert read == 9
    names = few or tuple(FORMATS)
    assert decoded == 8 * len({*names} & {*decoded_by(dequantize_triton.KERNEL)})
    written = {f"kbit{k}_{absmax}" for k, absmax in KBIT_CASES} & {*names}
    assert encoded == 3 * len(written) * len(KINDS)
    assert narrowed == 2 * len(names)


def test_printed_source() -> None:
    """What the device functions of a nested format look like: each operation once, no format
    name, scales found once for all the codes of a lane."""
    from inductor_q.decode.triton import device_functions

    printed = device_functions(FORMATS["nf4_b64_nested"])
    assert printed.scale_operands == (
        "absmax",
        "nested_codebook",
        "nested_absmax",
        "nested_offset",
    )
    assert printed.codebook == FORMATS["nf4_b64"].lut16
    assert printed.source == (
        "@triton.jit\n"
        "def scale_fn(i, mask, absmax, nested_codebook, nested_absmax, nested_offset):\n"
        "    i = i.to(tl.uint64 if i.dtype == tl.int64 else tl.uint32)\n"
        "    t0 = i // 64\n"
        "    t1 = tl.load(absmax + t0, mask=mask, other=0)\n"
        "    t2 = tl.load(nested_codebook + t1.to(tl.int32), mask=mask, other=0)\n"
        "    t3 = t0 // 256\n"
        "    t4 = tl.load(nested_absmax + t3, mask=mask, other=0)\n"
        "    t5 = t4.to(tl.float32)\n"
        "    t6 = t2 * t5\n"
        "    t7 = t0 * 0\n"
        "    t8 = tl.load(nested_offset + t7, mask=mask, other=0)\n"
        "    t9 = t6 + t8\n"
        "    return t9\n"
        "\n\n"
        "@triton.jit\n"
        "def value_fn(code, scale, codebook):\n"
        "    t0 = tl.load(codebook + code)\n"
        "    t1 = t0 * scale\n"
        "    return t1\n"
    )
