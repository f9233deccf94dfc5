"""Show what few rows take: one linear layer, and a decoding step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from docs.read_results import (
    cases,
    extra,
    gb,
    ms,
    number,
    percent,
    row,
    rows,
    seconds,
    source,
    table,
)

#: What a linear layer of few rows is held against, and how its ratios call it.
ROWS = {
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "decode": ("dequantize, then multiply", "dequantize"),
    "dense": ("a bf16 weight", "bf16"),
}
STOCK = {"stock": ("stock Inductor", "stock")}


def few_rows(name: str = "rows-h200", others: Mapping[str, tuple[str, str]] = ROWS) -> str:
    in_graph = [peer for peer in others if peer not in STOCK]  # it has no graph of many
    body = []
    for case in cases(name):
        if not rows(name, "qfuse", **case):
            continue
        times = [seconds(name, peer, **case) for peer in (*others, "qfuse")]
        ratios = [f"{times[-1] / other:.2f}" for other in times[:-1]]
        own = row(name, "qfuse", **case)
        shares = [percent(own["roof_fraction"])]
        if graphed := own["extra"].get("graph_s"):
            theirs = (extra(name, peer, "graph_s", **case) for peer in in_graph)
            shares += [number(1e6 * t) for t in (*theirs, graphed)]
            shares.append(percent(own["roof"] / graphed))
            adapted = extra(name, "adapter", "graph_s", **case)
            shares += [number(1e6 * adapted), f"{adapted / graphed:.2f}"]
        shown = (case["shape"].replace("x", " x "), str(case["rows"]))
        body.append((*shown, *(number(1e6 * t) for t in times), *ratios, *shares))
    header = ("N x K", "rows", *(label for label, _ in others.values()), "qfuse")
    more = [*(f"qfuse / {short}" for _, short in others.values()), "qfuse, share of the roof"]
    if len(body[0]) > len(header) + len(more):
        labels = [*(others[peer][0] for peer in in_graph), "qfuse", "qfuse, share of the roof"]
        labels += ["qfuse with LoRA", "LoRA / without"]
        more += [f"in a graph: {label}" for label in labels]
    return f"{table((*header, *more), body)}\n\n{source(name)}"


def many_rows_over(others: Sequence[str], peer: str = "qfuse", graphs: bool = False) -> float:
    """Return the largest ratio of a peer's time to the shortest of others, over 32 rows or more."""

    def time(of: str, case: dict[str, Any]) -> float:
        found = row("rows_many-h200", of, **case)
        taken: float = found["extra"]["graph_s"] if graphs else found["timing"]["median"]
        return taken

    every = cases("rows_many-h200")
    return max(time(peer, case) / min(time(o, case) for o in others) for case in every)


def few_rows_cpu(name: str = "rows-cpu") -> str:
    peers = ("bitsandbytes", "stock", "decode", "dense", "qfuse")
    body = []
    for case in cases(name):
        times = [seconds(name, peer, **case) for peer in peers]
        ratios = [f"{times[4] / times[i]:.2f}" for i in (0, 3)]
        body.append((str(case["rows"]), *(number(1e3 * t) for t in times), *ratios))
    header = ("rows", "bitsandbytes", "the same under stock Inductor", "dequantize, then multiply")
    more = ("a bf16 weight", "qfuse", "qfuse / bitsandbytes", "qfuse / bf16")
    return f"{table((*header, *more), body)}\n\n{source(name)}"


def few_rows_small(name: str = "rows_small-cpu") -> str:
    peers = ("torchao", "stock", "decode", "dense", "qfuse")
    body = []
    for case in cases(name):
        times = {p: seconds(name, p, **case) for p in peers if rows(name, p, **case)}
        shown = [number(1e3 * times[peer]) if peer in times else "" for peer in peers]
        ratios = [f"{times['qfuse'] / times[peer]:.2f}" for peer in ("decode", "dense")]
        adapted = number(1e3 * seconds(name, "adapter", **case))
        body.append((f"`{case['format']}`", str(case["rows"]), *shown, adapted, *ratios))
    header = ("", "rows", "torchao", "stock Inductor", "dequantize, then multiply")
    more = ("a bf16 weight", "qfuse", "with LoRA", "qfuse / dequantize", "qfuse / bf16")
    return f"{table((*header, *more), body)}\n\n{source(name)}"


def few_rows_kbit(name: str = "rows_kbit-h100", own: str = "kernel") -> str:
    """Show calls in a graph, by format and weight, for the numbers of rows that were measured."""
    counts = list(dict.fromkeys(case["rows"] for case in cases(name)))
    body = []
    for case in cases(name):
        if case["rows"] != counts[0]:
            continue
        shown = [f"K={case['format'][len('kbit')]}", case["shape"].replace("x", " x ")]
        for count in counts:
            of = {**case, "rows": count}
            times = {p: extra(name, p, "graph_s", **of) for p in ("decode", "dense", "qfuse")}
            shown += [number(1e6 * t) for t in times.values()]
            shown.append(percent(row(name, "qfuse", **of)["roof"] / times["qfuse"]))
        body.append(tuple(shown))
    labels = ("dequantize, then multiply", "a bf16 weight", own, f"{own}, share of the roof")
    header = [f"{n} {'row' if n == 1 else 'rows'}: {label}" for n in counts for label in labels]
    return f"{table(('', 'N x K', *header), body)}\n\n{source(name)}"


def decode() -> str:
    name, peers = "decode-h100", {"bf16": "bf16, stock", "inductor": "NF4, stock", "qfuse": "qfuse"}
    peers["compile_decoding"] = "`compile_decoding`"
    *others, own = peers
    body = []
    for case in cases(name):
        times = {peer: seconds(name, peer, **case) for peer in peers}
        ratios = [f"{times[own] / times[peer]:.2f}" for peer in others]
        peaks = [gb(extra(name, peer, "peak_bytes", **case)) for peer in peers]
        errors = [percent(extra(name, peer, "error", **case), 1) for peer in peers]
        shown = (str(case["batch"]), case["LoRA"], *map(ms, times.values()))
        body.append((*shown, *ratios, *peaks, *errors))
    header = ("batch", "LoRA", *peers.values(), *(f"{peers[own]} / {peers[p]}" for p in others))
    more = [f"{what}, {label}" for what in ("peak", "error") for label in peers.values()]
    return f"{table((*header, *more), body)}\n\n{source(name)}"


def decode_whole() -> str:
    """Show a decoding step of all of Qwen3-8B; of each peer also what Dynamo guards on."""
    names = [f"decode_8b_{which}-h100" for which in ("1", "1_guards", "4", "16", "64")]
    labels = {"bf16": "bf16, stock", "inductor": "NF4, stock", "eager": "NF4, eager"}
    body = []
    for name in names:
        for each in rows(name):
            peer, _, options = each["peer"].partition("[")
            told, seconds_ = each["extra"], each["timing"]["median"]
            shown = labels.get(peer, "`compile_decoding`" if peer == "compile_decoding" else peer)
            guards = "none on modules" if options else ""
            body.append(
                (
                    str(each["case"]["batch"]),
                    shown + (f", {guards}" if guards else ""),
                    ms(seconds_),
                    number(told["throughput"]),
                    percent(each["roof_fraction"]),
                    gb(told["peak_bytes"]),
                    percent(told["error"], 1),
                )
            )
    header = ("batch", "", "a step", "tokens/s", "share of the roof", "peak", "error")
    return "\n\n".join([table(header, body), *map(source, names)])
