"""Tables of formats as their libraries ship them, and of experts packed in some of them."""

from __future__ import annotations

from typing import Any

from docs.read_results import (
    cases,
    exists,
    extra,
    gb,
    number,
    percent,
    row,
    rows,
    seconds,
    source,
    table,
)

ONE = "formats-h200"
#: Decodes and linear layers of some formats, measured on another device.
MORE = "formats_more-h100"
#: Of a format that is in both, the second file's row is the newer one.
LINEAR = ("formats_linear-h100", MORE)
STEPS = (
    "formats_step_intx4-h100",
    "formats_step_fp8_row-h100",
    "formats_step-h100",
    "formats_step_int8-h100",
)
#: A format that no other peer can train, or decode in a compiled graph.
ALONE = "formats_step_int4-h200"
CPU = "formats-cpu"
EXPERTS = ("moe_mxfp4-h200", "moe_nvfp4-h200", "moe_fp8_128x128-h200")


def decodes() -> str:
    """Write how long a decode takes, and which share of the roof it and a copy reach."""
    body = []
    names = (ONE, ALONE, MORE)
    for name, case in ((n, c) for n in names for c in cases(n) if c["part"] == "dequantize"):
        shares = (percent(row(name, peer, **case)["roof_fraction"]) for peer in ("qfuse", "copy"))
        shown = (_time(name, peer, case, 1e6) for peer in ("eager", "inductor", "qfuse"))
        format = case["format"] + ", on an H100" * name.endswith("h100")
        body.append((format, case["size"].replace("x", " x "), *shown, *shares))
    header = ("format", "N x K", "its library", "the same under stock Inductor", "qfuse")
    more = ("qfuse, share of the roof", "a copy, share of the roof")
    return f"{table((*header, *more), body)}\n\n{source(*names)}"


def _time(name: str, peer: str, case: dict[str, Any], scale: float) -> str:
    return number(scale * seconds(name, peer, **case)) if rows(name, peer, **case) else "none"


def training() -> str:
    """Write a linear layer's and a step's time and peak memory beside stock Inductor's."""
    found = {
        (part, case["format"]): (name, case)
        for part, files in (("linear", (*LINEAR, ALONE)), ("step", (*STEPS, ALONE)))
        for name in files
        for case in cases(name)
        if case["part"] == part
    }
    body = []
    for (part, format), (name, case) in found.items():
        shown = [_time(name, peer, case, 1e3) for peer in ("eager", "inductor", "qfuse")]
        if shown[0] == "none" and shown[1] != "none":  # what stock can train, eager mode can too
            shown[0] = "not measured"
        peers = [peer for peer in ("inductor", "qfuse") if rows(name, peer, **case)]
        peaks = [gb(extra(name, peer, "peak_bytes", **case)) for peer in peers]
        what = "linear" if part == "linear" else case["size"]
        what += ", on an H200" * name.endswith("h200")
        share = percent(row(name, "qfuse", **case)["roof_fraction"])
        sizes = (_ratio(name, case), share, *["none"] * (2 - len(peaks)), *peaks)
        body.append((format, what, *shown, *sizes))
    header = ("format", "", "eager", "stock Inductor", "qfuse", "qfuse / stock")
    more = ("qfuse, share of the roof", "peak, stock", "peak, qfuse")
    return f"{table((*header, *more), body)}\n\n{source(*LINEAR, *STEPS, ALONE)}"


def on_cpu() -> str:
    """Write decodes, and qfuse over stock Inductor in a linear layer and a step, by rows."""
    found = cases(CPU)
    sizes = dict.fromkeys((c["part"], c["size"]) for c in found if c["part"] != "dequantize")
    body = []
    for format in dict.fromkeys(case["format"] for case in found):
        own = {(c["part"], c["size"]): c for c in found if c["format"] == format}
        decode = next(case for (part, _), case in own.items() if part == "dequantize")
        times = (_time(CPU, peer, decode, 1e6) for peer in ("eager", "inductor", "qfuse"))
        body.append((format, *times, *(_ratio(CPU, own[s]) if s in own else "" for s in sizes)))
    decoded = ("its library", "the same under stock Inductor", "qfuse")
    header = ("format", *decoded, *(" ".join(size) for size in sizes))
    return f"{table(header, body)}\n\n{source(CPU)}"


def _ratio(name: str, case: dict[str, Any]) -> str:
    """Write the time of qfuse over that of stock Inductor, where that has one."""
    if not rows(name, "inductor", **case):
        return "none"
    return f"{seconds(name, 'qfuse', **case) / seconds(name, 'inductor', **case):.2f}"


def experts() -> str:
    """Write the time of one projection of packed experts beside experts held in bfloat16."""
    found = [name for name in EXPERTS if exists(name)]
    body = []
    for name in found:
        for case in cases(name):
            if case["pass"] != "fwd":
                continue
            cells = []
            for passes in ("fwd", "fwd+bwd"):
                of = {**case, "pass": passes}
                bf16, decoded, ours = (
                    seconds(name, peer, **of) for peer in ("grouped_mm", "dequantize", "qfuse")
                )
                cells += [number(1e6 * t) for t in (bf16, decoded, ours)] + [f"{ours / bf16:.2f}"]
            format = name.removeprefix("moe_").removesuffix("-h200")
            body.append((format, case["model"], str(case["T"]), *cells))
    parts = ("bf16", "`dequantize`", "qfuse", "qfuse / bf16")
    header = ("format", "model", "tokens", *(f"forward: {p}" for p in parts))
    return f"{table((*header, *(f'both: {p}' for p in parts)), body)}\n\n{source(*found)}"
