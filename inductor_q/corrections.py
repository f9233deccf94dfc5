"""Plan the memory of a graph anew where its first step took other than was planned.

A simulation knows nothing of what kernels need beside their results, of libraries' workspaces, or
of what the program allocates around the graph. So the first step is measured, and where the plan
missed by more than `TOLERANCE` to the program's harm (over the budget, or computing again what
would have fitted), the difference is kept, and Dynamo is told to forget the code of the step. Its
next call compiles it again, and that plan takes the difference into account.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from inductor_q.log import log
from inductor_q.records import MemoryRecord

#: A measured peak that is further than this from the planned one is a miss.
TOLERANCE = 0.05

#: A graph is planned anew so many times at most: one that gains room may then take too much.
_MOST = 2

_differences: dict[str, list[int]] = {}  # of each graph, by its key without the budget
_calls = itertools.count()  # of all graphs that are measured


def is_measured(device: torch.device) -> bool:
    """Whether torch counts what the device has allocated."""
    return device.type == "cuda"


def difference(key: str) -> int:
    """Return by how many bytes the graph's steps took more than was planned; 0 if they did not."""
    return _differences.get(key, [0])[-1]


def forget() -> None:
    _differences.clear()


def misses(memory: MemoryRecord) -> bool:
    """Whether the first step was measured, and far from its plan."""
    return memory.exact and abs(memory.measured / memory.peak - 1) > TOLERANCE


def correct(key: str, memory: MemoryRecord, code: CodeType | None) -> bool:
    """Have a graph planned anew that missed to the program's harm; return whether it will be."""
    over = memory.measured > memory.budget and memory.fits
    under = memory.measured < memory.peak and memory.transient < memory.unplanned
    done = _differences.get(key, [])
    if not misses(memory) or not (over or (under and not done)) or len(done) == _MOST:
        return False
    if why := _prevented(code):
        log.warning("qfuse.memory: the plan is not corrected: %s", why)
        return False
    from torch._dynamo.eval_frame import remove_from_cache

    added = memory.measured - memory.peak + memory.difference
    _differences.setdefault(key, []).append(added)
    remove_from_cache(code)
    return True


def _prevented(code: CodeType | None) -> str:
    from torch._dynamo import eval_frame

    if code is None:
        return "the graph was not called by code of Dynamo's, which could compile it again"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "all ranks would have to run the same plan"
    stance: str = eval_frame._stance.stance
    return "" if stance == "default" else f'torch.compiler.set_stance("{stance}") is in force'


def measuring(
    compiled: Any, device: torch.device, tell: Callable[[int, bool, CodeType | None], None]
) -> Callable[..., Any]:
    """Return `compiled`, which tells once, at the start of the first call behind a backward pass,
    how much memory the process has needed until then, whether that was for this graph's one step,
    and whose code called it. Nothing waits for the device, and torch's counters stay as they are.
    """
    start: list[tuple[int, int]] = []
    backward: list[bool] = []
    done: list[bool] = []

    def run(*args: Any) -> Any:
        call = next(_calls)
        if done:
            return compiled(*args)
        if not start:
            start.append((torch.cuda.max_memory_allocated(device), call))
            return _tell_backward(compiled(*args), backward, start)
        if backward:
            [(earlier, first)] = start
            most = torch.cuda.max_memory_allocated(device)
            done.append(True)
            tell(most, most > earlier and call == first + 1, _caller())
        return compiled(*args)

    return run


def _tell_backward(outputs: Any, seen: list[bool], start: list[tuple[int, int]]) -> Any:
    """Return the outputs of a graph; `seen` will hold something when its backward pass begins.

    Where that never comes, as of a forward pass to try a model out, `start` is emptied.
    """

    def hook(_: torch.Tensor) -> None:
        seen.append(True)

    def end() -> None:
        if not seen:
            start.clear()

    weakref.finalize(hook, end)  # the hook lives as long as the tape of the outputs
    for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            output.register_hook(hook)
    return outputs


def _caller() -> CodeType | None:
    """Return the code of the program that Dynamo compiled, whose compiled form is being run."""
    from torch._dynamo.utils import orig_code_map

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in orig_code_map:
            code: CodeType = orig_code_map[frame.f_code]
            return code
        frame = frame.f_back
    return None
