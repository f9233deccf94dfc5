"""Show first steps, cold and warm, and steps whose layers are compiled one by one."""

from __future__ import annotations

from docs.read_results import (
    cases,
    exists,
    extra,
    gb,
    ms,
    number,
    percent,
    row,
    seconds,
    source,
    table,
)


def start() -> str:
    """Show first steps, and the time of processors beside the clock's, on each measured device."""
    found = [name for name in ("start-h200", "start-cpu") if exists(name)]
    return "\n\n".join(_start(name) for name in found)


def _start(name: str) -> str:
    body = []
    for case in cases(name):
        stock, ours = (row(name, peer, **case)["extra"] for peer in ("inductor", "qfuse"))
        warm = [each["warm"] for each in (stock, ours)]
        clock = [seconds(name, peer, **case) for peer in ("inductor", "qfuse")]
        times = (*clock, stock["cpu_s"], ours["cpu_s"], warm[0]["cpu_s"], warm[1]["cpu_s"])
        ratio = percent(warm[1]["cpu_s"] / ours["cpu_s"])
        graphs = f"{stock['graphs']}, {ours['graphs']}"
        steps = [ms(each["step_s"]) for each in warm]
        shown = (case["regions"], str(case["layers"]), *map(number, times), ratio, graphs, *steps)
        body.append(shown)
    both = ("stock", "qfuse")
    header = ["regions", "layers"]
    for what in ("cold, s", "cold, processor s", "warm, processor s"):
        header += [f"{what}, {peer}" for peer in both]
    header += ["warm / cold, qfuse", "graphs, stock and qfuse", *(f"a step, {p}" for p in both)]
    return f"{table(header, body)}\n\n{source(name)}"


def start_over_depth(regions: str, few: int, many: int) -> str:
    """Divide the processor time of the first step of a deep model by that of a shallow one."""
    times = [
        extra("start-cpu", "qfuse", "cpu_s", regions=regions, layers=depth) for depth in (few, many)
    ]
    return f"{times[1] / times[0]:.2f} times"


def layered() -> str:
    """Show steps of models whose layers are compiled one by one, beside the whole model's."""
    names = ("layers-h200", "layers_trl-h200", "layers_packed-h200")
    peers = {
        "inductor": "stock Inductor, by layers",
        "layers": "qfuse, by layers",
        "model": "qfuse, the whole model",
    }
    body = []
    for name, case in ((each, case) for each in names for case in cases(each)):
        for peer, label in peers.items():
            found = row(name, peer, **case)
            times = (ms(found["timing"][what]) for what in ("median", "best"))
            what = f"recipe `{case['recipe']}`, {case['tokens']} tokens"
            body.append((what, label, *times, gb(found["extra"]["peak_bytes"])))
    header = ("", "", "a step", "the shortest", "peak of a step")
    return f"{table(header, body)}\n\n{source(*names)}"


def layers_over_whole(name: str) -> str:
    """Divide a step compiled by layers by the same compiled whole."""
    times = [seconds(name, peer) for peer in ("layers", "model")]
    return f"{times[0] / times[1]:.2f} times"


def started(*names: str) -> str:
    """Show first steps under qfuse: by the clock and in processor time, cold and warm."""
    body = []
    for name, case in ((each, case) for each in names for case in cases(each)):
        found = row(name, "qfuse", **case)
        cold = {**found["extra"], "first_s": found["timing"]["median"]}
        shown: list[str] = []
        for key in ("first_s", "cpu_s"):
            warm = cold["warm"][key]
            shown += [number(cold[key]), number(warm), percent(warm / cold[key])]
        body.append((case["regions"], str(case["layers"]), *shown))
    header = ["regions", "layers"]
    for what in ("s", "processor s"):
        header += [f"cold, {what}", f"warm, {what}", "warm / cold"]
    return f"{table(header, body)}\n\n{source(*names)}"
