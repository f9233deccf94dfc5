"""Tables of formats as their libraries ship them, and of experts packed in some of them."""

from __future__ import annotations

import re
from typing import Any

from docs.read_results import (
    cases,
    extra,
    gb,
    ms,
    number,
    percent,
    result,
    row,
    rows,
    seconds,
    source,
    table,
)

ONE = "formats-h200"
#: Decodes of some formats, measured on another device.
MORE = "formats_more-h100"
LINEAR = "formats_linear-h200"
STEPS = (
    "formats_step_intx4-h100",
    "formats_step_fp8_row-h100",
    "formats_step-h100",
    "formats_step_int8-h100",
)
#: A format that no other peer can train, or decode in a compiled graph.
ALONE = "formats_step_int4-h200"
CPU = "formats-cpu"
EXPERTS = {
    "moe_mxfp4-h200": "qfuse",
    "moe_mxfp4_large-h200": "compiled",
    "moe_nvfp4-h200": "qfuse",
    "moe_nvfp4_many-h200": "compiled",
    "moe_fp8_128x128-h200": "qfuse",
}
EIGHT_BITS = "formats_eight_bits-h200"


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
        for part, files in (("linear", (LINEAR,)), ("step", (*STEPS, ALONE)))
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
        what += ", on an H100" * name.endswith("h100")
        share = percent(row(name, "qfuse", **case)["roof_fraction"])
        sizes = (_ratio(name, case), share, *["none"] * (2 - len(peaks)), *peaks)
        body.append((format, what, *shown, *sizes))
    header = ("format", "", "eager", "stock Inductor", "qfuse", "qfuse / stock")
    more = ("qfuse, share of the roof", "peak, stock", "peak, qfuse")
    return f"{table((*header, *more), body)}\n\n{source(LINEAR, *STEPS, ALONE)}"


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
    body = []
    for name, peer in EXPERTS.items():
        for case in cases(name):
            if case["pass"] != "fwd":
                continue
            cells = []
            for passes in ("fwd", "fwd+bwd"):
                of = {**case, "pass": passes}
                bf16, decoded, ours = (
                    seconds(name, each, **of) for each in ("grouped_mm", "dequantize", peer)
                )
                cells += [number(1e6 * t) for t in (bf16, decoded, ours)] + [f"{ours / bf16:.2f}"]
            format = re.sub("^moe_|_large|_many|-h200$", "", name)
            body.append((format, case["model"], str(case["T"]), *cells))
    parts = ("bf16", "`dequantize`", "qfuse", "qfuse / bf16")
    header = ("format", "model", "tokens", *(f"forward: {p}" for p in parts))
    return f"{table((*header, *(f'both: {p}' for p in parts)), body)}\n\n{source(*EXPERTS)}"


def eight_bits() -> str:
    """Write a step's time and peak with products in FP8, of weights that are not in NF4."""
    called = {"bf16": "bfloat16, not quantized", "fp8_row": "`fp8_row`: e4m3, a scale for each row"}
    peers = ("inductor", "qfuse", "qfuse[qfuse.compute=fp8]")
    body = []
    for case in cases(EIGHT_BITS):
        times = [seconds(EIGHT_BITS, peer, **case) for peer in peers]
        peaks = [gb(extra(EIGHT_BITS, peer, "peak_bytes", **case)) for peer in peers]
        ratios = [f"{times[2] / time:.2f}" for time in times[:2]]
        stock, ours = (
            row(EIGHT_BITS, peer, **case)["extra"]["losses"] for peer in (peers[0], peers[2])
        )
        off = max(abs(one - other) / abs(other) for one, other in zip(ours, stock, strict=True))
        body.append((called[case["format"]], *map(ms, times), *ratios, *peaks, percent(off, 2)))
    short = ("stock Inductor", "qfuse", "qfuse, fp8")
    header = ("weights", *short, "fp8 / stock", "fp8 / qfuse", *(f"peak, {p}" for p in short))
    shown = table((*header, "loss, largest deviation from stock in 5 steps"), body)
    return f"{shown}\n\n{source(EIGHT_BITS)}"


def linear_floor(format: str) -> str:
    """Divide the least that a linear layer's parts take by themselves by stock Inductor's time.

    Those are its products at the rate of a large one, and at the rate of a copy two decodes, and
    what the adapter's products read: x twice and the gradient of the result once.
    """
    (case,) = (each for each in cases(LINEAR) if each["format"] == format)
    n, k, m = map(int, case["size"].split("x"))
    stock = row(LINEAR, "inductor", **case)
    moved = 2 * (n * k + 2 * n * k) + 2 * (m * n + 2 * m * k)
    least = stock["roof"] + moved / (1e9 * result(LINEAR)["ceilings"]["copy_gbps"])
    return f"{least / stock['timing']['median']:.2f}"
