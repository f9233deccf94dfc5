"""Launch through the driver what Triton has compiled.

Triton's own launch queries the device, the stream, hooks and metadata each time;
`csrc.driver.Launch` fills in pointers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

from inductor_q.csrc import driver

#: The parameters behind a kernel's own, which point to Triton's scratch memory.
SCRATCH = ("u64", "u64")
#: Metadata of kernels that need more than a plain launch.
SPECIAL = (
    *("global_scratch_size", "profile_scratch_size", "tensordesc_meta"),
    *("launch_pdl", "launch_cooperative_grid"),
)


def prepared(
    compiled: Any, device: int, grid: tuple[int, int, int], pointers: int, numbers: Sequence[int]
) -> driver.Launch | None:
    """Prepare a launch of `compiled` with the same grid and numbers and other pointers.

    Return None where that is not a kernel of `pointers` pointers and these integers, in that order
    (an integer of 1 is no parameter, for example), or needs more than a plain launch gives it.

    Args:
        compiled: what a call of a `triton.jit` function has returned on this device. Keep it as
            long as the launch.
        numbers: the integers that it was called with.
    """
    metadata = getattr(compiled, "metadata", None)
    if metadata is None or "ptx" not in compiled.asm:  # the interpreter's, AMD's
        return None
    if metadata.num_ctas != 1 or any(getattr(metadata, name, None) for name in SPECIAL):
        return None
    types = parameters(compiled.asm["ptx"])
    expected = ["u64"] * pointers + ["u64" if n >= 2**31 else "u32" for n in numbers]
    if types != [*expected, *SCRATCH] or min(numbers, default=0) < 0:
        return None
    return driver.Launch(
        ctypes.c_void_p(compiled.function),
        device,
        grid=grid,
        threads=32 * metadata.num_warps,
        pointers=pointers,
        numbers=(*numbers, *[0] * len(SCRATCH)),
        shared=metadata.shared,
    )


def parameters(ptx: str) -> list[str]:
    """Read the types of the kernel's parameters."""
    _, _, entry = ptx.partition(".entry")
    return re.findall(r"\.param\s+\.(\w+)", entry.partition(")")[0])
