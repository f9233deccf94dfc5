"""Serve several weights in eight bits, whose tensors are parts of one call's.

In all calls of a kind they lie at the same places in the tensors of the whole call. A kernel that
takes addresses is launched with those: views of the parts take the host longer than the launches.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_q.kernels.calls import Requantize
from inductor_q.kernels.dispatch import planned
from inductor_q.kernels.requantize_cuda import Plan


class Parts:
    """What serves a call of weights of so many `rows` each, and all calls of its kind."""

    def __init__(self, rows: Sequence[int], op: str, whole: Requantize, wanted: str) -> None:
        parts = list(whole.parts(rows))
        self._rows = rows
        self._plans = [planned(op, part, wanted) for part in parts]
        places: list[tuple[Plan, slice, int, int]] = []
        first = 0
        for plan, part in zip(self._plans, parts, strict=True):
            last = first + len(part.operands)
            if isinstance(plan, Plan):
                of_scale = part.scale.data_ptr() - whole.scale.data_ptr()
                of_out = part.out.data_ptr() - whole.out.data_ptr()
                places.append((plan, slice(first, last), of_scale, of_out))
            first = last
        self._places = places if len(places) == len(parts) else []

    def __call__(self, whole: Requantize) -> None:
        if not self._places:
            for plan, part in zip(self._plans, whole.parts(self._rows), strict=True):
                plan(part)
            return
        operands = [operand.data_ptr() for operand in whole.operands]
        scale, out = whole.scale.data_ptr(), whole.out.data_ptr()
        for plan, of_part, of_scale, of_out in self._places:
            plan.at(operands[of_part], scale + of_scale, out + of_out)
