"""Compile Triton kernels for a GPU that this machine does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compiled(
    kernel: Any,
    constants: Mapping[str, Any],
    pointers: Mapping[str, str],
    *,
    arch: int = 90,
    **options: Any,
) -> Any:
    """Return what Triton makes of `kernel`, checked to be a cubin.

    Arguments that are neither constants nor pointers are int32; these and pointers are multiples of
    16, for which a launch specializes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**pointers, **dict.fromkeys(constants, "constexpr")}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants
    }
    source = ASTSource(kernel, signature, constexprs=dict(constants), attrs=attributes)
    options = {"enable_fp_fusion": False, **options}
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert result.asm["cubin"][:4] == b"\x7fELF"
    return result
