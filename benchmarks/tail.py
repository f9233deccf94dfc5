"""Run a condition as `inductor_q.tuning.trial` does, and have the machine alone in what is timed.

That is the last half of the steps, and the two before it in which memory settles.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.alone import alone
from inductor_q.tuning import trial


def main(argv: Sequence[str]) -> int:
    before = int(argv[argv.index("--steps") + 1]) // 2 - trial.SETTLED
    with contextlib.ExitStack() as measuring:
        steps = 0

        def stepped(*_: Any) -> None:  # called before trial's own hook, which marks the time
            nonlocal steps
            steps += 1
            if steps == max(before, 1):
                measuring.enter_context(alone())

        measuring.callback(register_optimizer_step_post_hook(stepped).remove)
        return trial.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
