"""Launch through the driver what Triton has compiled.

Triton's own launch queries the device, the stream, hooks and metadata each time;
`csrc.driver.Launch` fills in pointers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from inductor_q.csrc import driver
from inductor_q.kernels.gpu import on

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


class Repeated:
    """Launches of one kernel whose arguments differ in their pointers alone.

    The first goes through Triton's JIT, which specializes on sizes and alignments; the others
    launch what it compiled. Tensors come first among the kernel's parameters, then integers, then
    constants.

    Args:
        function: a `triton.jit` function.
        grid: programs along x, y and z.
        numbers: the integers. Give those that are 1 at times to `do_not_specialize`.
        constants: by name, in the order of the parameters.
        options: of the launch, as `num_warps`.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, int, int],
        numbers: Sequence[int],
        constants: Mapping[str, Any],
        **options: Any,
    ) -> None:
        self._function, self._grid = function, grid
        self._numbers, self._constants, self._options = tuple(numbers), constants, options
        self._again: driver.Launch | None = None
        self._compiled: Any = None

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        if self._again is not None:
            self._again(*[tensor.data_ptr() for tensor in tensors])
        elif self._compiled is not None:
            self.by_triton(tensors)
        else:
            self._keep(self.by_jit(tensors), tensors)

    def by_jit(self, tensors: Sequence[Tensor]) -> Any:
        """Launch through Triton's JIT; return what it has compiled."""
        with on(tensors[0].device):
            return self._function[self._grid](
                *tensors, *self._numbers, **self._constants, **self._options
            )

    def by_triton(self, tensors: Sequence[Tensor]) -> None:
        """Let Triton launch what it has compiled."""
        with on(tensors[0].device):
            self._compiled[self._grid](*tensors, *self._numbers, *self._constants.values())

    def _keep(self, compiled: Any, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device.index
        self._again = prepared(compiled, device, self._grid, len(tensors), self._numbers)
        # This owns what is launched again. The interpreter returns nothing to call.
        self._compiled = compiled if hasattr(compiled, "__getitem__") else None


def parameters(ptx: str) -> list[str]:
    """Read the types of the kernel's parameters."""
    _, _, entry = ptx.partition(".entry")
    return re.findall(r"\.param\s+\.(\w+)", entry.partition(")")[0])
