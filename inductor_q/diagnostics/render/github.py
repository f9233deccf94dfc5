"""Write workflow commands: GitHub shows breaks, rejected layers, missed budgets beside the code.

https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inductor_q.diagnostics.explanation import Explanation, Frame, Layer
from inductor_q.diagnostics.render import words

_SOURCE = re.compile(r"(.+):(\d+)")


def annotate(run: Explanation, missed: Sequence[str] = ()) -> list[str]:
    """Write one line for each missed budget and for each cause.

    Missed budgets are errors; what may have caused them are errors where a budget was missed, else
    warnings. A file outside of the checkout cannot be annotated; its place then stands in the
    message.
    """
    level = "error" if missed else "warning"
    lines = [_command("error", "budget missed", line) for line in missed]
    for item in run.breaks:
        title = f"graph break {item.gb_id}".rstrip()
        cause = f"{item.reason} (x{item.count}, {item.library})" if item.library else item.reason
        lines.append(_command(level, title, "\n".join(filter(None, (cause, item.fix))), item.user))
    for again in run.recompiles:
        said = "\n".join(filter(None, (words.failed_guard(again), again.fix)))
        lines.append(_command(level, f"recompiled x{again.count}", said, again.where))
    for hidden in run.suppressed:
        title = f"error suppressed x{hidden.count}"
        lines.append(_command(level, title, f"{hidden.error}\n{words.UNSUPPRESS}", hidden.where))
    lines += [
        _command(level, f"CUDA graph skipped x{skip.count}", skip.reason)
        for skip in run.cudagraph_skips
    ]
    for reason, layers in _not_fused(run, left=bool(missed)).items():
        modules = ", ".join(layer.module for layer in layers)
        said = f"{reason}\n{modules}"
        title = f"{words.plural(len(layers), 'quantized layer')} not fused"
        lines.append(_command(level, title, said, _frame(layers[0].source)))
    return lines


def _not_fused(run: Explanation, *, left: bool) -> dict[str, list[Layer]]:
    """Yield layers that could be fused and were not, by reason.

    Those that a threshold left to their library are among them only where that may be why a budget
    was missed.
    """
    found: dict[str, list[Layer]] = {}
    for layer in run.layers:
        if layer.status not in ("fused", *(() if left else ("left",))):
            found.setdefault(words.outcome(layer), []).append(layer)
    return found


def _frame(source: str) -> Frame:
    found = _SOURCE.fullmatch(source)
    return Frame(found[1], int(found[2])) if found else Frame()


def _command(level: str, title: str, message: str, frame: Frame | None = None) -> str:
    properties = {"title": title}
    if frame is not None and frame.file:
        if path := words.repository_path(frame.file):
            properties = {"file": path, "line": str(frame.line), **properties}
        else:
            message = f"{message}\n{words.place(frame)}"
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{level} {listed}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
