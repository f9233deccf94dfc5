"""Tables of formats as their libraries ship them, and of experts packed in some of them."""

from __future__ import annotations

from docs.read_results import cases, exists, extra, gb, number, percent, row, seconds, source, table

ONE = "formats-h200"
STEPS = ("formats_step_intx4-h200", "formats_step_fp8_128x128-h200", "formats_step-h200")
EXPERTS = ("moe_mxfp4-h200", "moe_nvfp4-h200")


def decodes() -> str:
    """Write how long a decode takes, and which share of the roof it and a copy reach."""
    body = []
    for case in (c for c in cases(ONE) if c["part"] == "dequantize"):
        times = (seconds(ONE, peer, **case) for peer in ("eager", "inductor", "qfuse"))
        shares = (percent(row(ONE, peer, **case)["roof_fraction"]) for peer in ("qfuse", "copy"))
        shown = (number(1e6 * time) for time in times)
        body.append((case["format"], case["size"].replace("x", " x "), *shown, *shares))
    header = ("format", "N x K", "its library", "the same under stock Inductor", "qfuse")
    more = ("qfuse, share of the roof", "a copy, share of the roof")
    return f"{table((*header, *more), body)}\n\n{source(ONE)}"


def training() -> str:
    """Write a linear layer's and a step's time and peak memory beside stock Inductor's."""
    body = []
    files = [(ONE, "linear"), *((name, "step") for name in STEPS)]
    for name, part in files:
        for case in (c for c in cases(name) if c["part"] == part):
            times = [seconds(name, peer, **case) for peer in ("eager", "inductor", "qfuse")]
            peaks = [extra(name, p, "peak_bytes", **case) for p in ("inductor", "qfuse")]
            what = "linear" if part == "linear" else case["size"]
            shown = (number(1e3 * time) for time in times)
            share = percent(row(name, "qfuse", **case)["roof_fraction"])
            sizes = (f"{times[2] / times[1]:.2f}", share, *map(gb, peaks))
            body.append((case["format"], what, *shown, *sizes))
    header = ("format", "", "eager", "stock Inductor", "qfuse", "qfuse / stock")
    more = ("qfuse, share of the roof", "peak, stock", "peak, qfuse")
    return f"{table((*header, *more), body)}\n\n{source(ONE, *STEPS)}"


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
