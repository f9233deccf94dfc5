"""Tables of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.bench_moe import MODELS
from docs.read_results import (
    Row,
    cases,
    exists,
    extra,
    gb,
    mb,
    ms,
    number,
    percent,
    result,
    row,
    rows,
    seconds,
    source,
    table,
    us,
)


def providers() -> str:
    name = "moe_providers-h200"
    body = []
    for tokens in (4096, 512):
        cells = [
            f"{us(seconds(name, peer, T=tokens))}, {mb(extra(name, peer, 'peak_bytes', T=tokens))}"
            for peer in ("bitsandbytes", "dequantize", "triton", "qfuse")
        ]
        body.append((str(tokens), str(tokens * 8 // 128), *cells))
    header = ("tokens", "rows per expert", "bitsandbytes and `grouped_mm`", "`dequantize`")
    return f"{table((*header, '`triton`', '`cuda`'), body)}\n\n{source(name)}"


def moe() -> str:
    name = "moe-h200"
    peers = ("bitsandbytes", "grouped_mm", "dequantize", "qfuse")
    body = []
    for case in cases(name):
        if case["pass"] != "fwd":
            continue
        both = {**case, "pass": "fwd+bwd"}
        last = row(name, "qfuse", **both)
        body.append(
            (
                case["model"],
                str(case["T"]),
                *(number(1e6 * seconds(name, peer, **case)) for peer in peers),
                *(number(1e6 * seconds(name, peer, **both)) for peer in peers),
                *(mb(extra(name, p, "peak_bytes", **both)) for p in ("bitsandbytes", "qfuse")),
                percent(last["roof_fraction"]),
            )
        )
    short = ("bnb", "bf16", "`dequantize`", "qfuse")
    header = ("model", "tokens", *(f"forward: {p}" for p in short))
    more = (*(f"both: {p}" for p in short), "memory: bnb", "qfuse", "share of the roof")
    return f"{table((*header, *more), body)}\n\n{source(name)}"


def few_tokens(name: str = "moe_few-h100") -> str:
    """Show forward of few tokens by peer, with an adapter and without."""
    called = {"bitsandbytes": "bnb", "torchao": "torchao", "transformers": "transformers"}
    called["dequantize"] = "`dequantize`"
    called |= {"grouped_mm": "bf16", "qfuse": "qfuse"}
    peers = [peer for peer in called if rows(name, peer)]
    body = []
    for case in cases(name):
        times = {peer: 1e6 * seconds(name, peer, **case) for peer in peers}
        body.append(
            (
                case["model"],
                str(case["T"]),
                str(case["r"]),
                *(number(times[peer]) for peer in peers),
                *(number(1e6 * extra(name, peer, "graph_s", **case)) for peer in peers[-2:]),
                percent(row(name, "qfuse", **case)["roof_fraction"]),
            )
        )
    shown = (called[peer] for peer in peers)
    header = ("model", "tokens", "rank", *shown, "in a graph: bf16", "qfuse", "share of the roof")
    return f"{table(header, body)}\n\n{source(name)}"


def few_over_bf16(taken: Callable[[Row], float]) -> str:
    """Say which part of bf16's time MXFP4 takes with few tokens, at least and at most."""
    name = "moe_few_mxfp4-h200"
    ratios = [
        taken(row(name, "qfuse", **case)) / taken(row(name, "grouped_mm", **case))
        for case in cases(name)
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def merged_is_slowest() -> str:
    """Say in how many cases the provider that is gone was the slowest."""
    name = "moe-h200"
    peers = list(dict.fromkeys(each["peer"] for each in result(name)["rows"]))
    slowest = [max(peers, key=lambda peer: seconds(name, peer, **case)) for case in cases(name)]
    return f"the slowest of {len(peers)} in {slowest.count('merged')} of {len(slowest)} cases"


def ranks() -> str:
    name = "moe_ranks-h200"
    body = []
    for case in cases(name):
        if case["r"] not in (0, 16, 64):
            continue
        theirs, ours = (row(name, peer, **case) for peer in ("bitsandbytes", "qfuse"))
        times = [r["timing"]["median"] for r in (theirs, ours)]
        over = [
            percent(r["extra"]["overhead"]) if "overhead" in r["extra"] else ""
            for r in (theirs, ours)
        ]
        body.append(
            (
                case["model"],
                str(case["r"]),
                case["pass"].replace("fwd", "forward").replace("bwd", "backward"),
                *map(us, times),
                f"{times[1] / times[0]:.2f}",
                *over,
            )
        )
    header = ("model", "rank", "", "bitsandbytes", "qfuse", "ratio")
    more = ("adapter adds: bitsandbytes", "qfuse")
    return f"{table((*header, *more), body)}\n\n{source(name)}"


FIRST = "moe_large_first-h200"
LARGE = ("moe_large-h200", FIRST, "moe_mxfp4_large-h200")


def same_kernels() -> str:
    """Say how far compiled code is at most from the time of the same kernel in another column."""
    name = "moe_large-h200"
    apart = []
    for case in cases(name):
        if case["pass"] == "fwd+bwd":  # of two kernels
            continue
        compiled, *others = (
            seconds(name, peer, **case) for peer in ("compiled", "dequantize", "qfuse")
        )
        apart.append(min(abs(compiled / other - 1) for other in others))
    return percent(max(apart))


def large() -> str:
    """Show large experts that are decoded first or in the product, and what compiled code does."""
    body = []
    for name in LARGE:
        for case in cases(name):
            if name == FIRST and case["model"] != "Qwen3-235B-A22B":
                continue  # compiled code follows other limits since
            experts, *_, top_k = MODELS[case["model"]]
            peers = ("grouped_mm", "dequantize", "qfuse", "compiled")
            times = [seconds(name, peer, **case) for peer in peers]
            peaks = [mb(extra(name, peer, "peak_bytes", **case)) for peer in peers[2:]]
            body.append(
                (
                    case["model"] + (", MXFP4" if "mxfp4" in name else ", NF4"),
                    case["pass"].replace("fwd", "forward").replace("bwd", "backward"),
                    str(case["T"] * top_k // experts),
                    *(number(1e3 * time) for time in times),
                    f"{times[1] / times[2]:.2f}",
                    f"{times[3] / times[0]:.2f}",
                    *peaks,
                )
            )
    peers = ("bf16", "decoded first", "decoded in the product", "compiled")
    ratios = ("first / in the product", "compiled / bf16")
    header = ("experts", "", "rows per expert", *(f"{p}, ms" for p in peers), *ratios)
    shown = table((*header, "memory: in the product", "compiled"), body)
    return f"{shown}\n\n{source(*LARGE)}"


def in_fp8() -> str:
    """Show products in FP8 beside the op's in 16 bits, with an adapter and without."""
    name, body = "moe_fp8-h100", []
    for case in cases(name):
        if case["pass"] != "fwd" or not case["r"]:
            continue
        experts, *_, top_k = MODELS[case["model"]]
        shown: list[str] = []
        for kind in ("fwd", "fwd+bwd"):
            found = {**case, "pass": kind}
            shown += (us(seconds(name, p, **found)) for p in ("dequantize", "qfuse", "fp8"))
            for rank in (case["r"], 0):
                times = [seconds(name, p, **{**found, "r": rank}) for p in ("fp8", "qfuse")]
                shown.append(f"{times[0] / times[1]:.2f}")
        peaks = [mb(extra(name, p, "peak_bytes", **case)) for p in ("qfuse", "fp8")]
        each = str(case["T"] * top_k // experts)
        body.append((case["model"], str(case["T"]), each, *shown, *peaks))
    peers = ("`dequantize`", "qfuse", "FP8", "FP8 / qfuse", "without adapter")
    header = ("model", "tokens", "rows per expert", *(f"forward: {p}" for p in peers))
    more = (*(f"both: {p}" for p in peers), "memory, forward: qfuse", "FP8")
    return f"{table((*header, *more), body)}\n\n{source(name)}"


def expert_layers() -> str:
    name = "experts-h200"
    body = []
    for case in cases(name):
        peers = ("eager", "grouped_mm", "qfuse")
        found = [row(name, peer, **case) for peer in peers]
        body.append(
            (
                case["model"],
                str(case["tokens"]),
                case["LoRA on"],
                *(f"{ms(r['timing']['median'])}, {gb(r['extra']['peak_bytes'])}" for r in found),
                *(gb(r["extra"]["static_bytes"]) for r in found[1:]),
                f"{found[2]['extra']['error_to_eager']:.1f}",
            )
        )
    header = ("layer of", "tokens", "LoRA on", "eager", "`grouped_mm`", "qfuse")
    more = ("the module in bf16", "packed", "error, packed / bf16")
    return f"{table((*header, *more), body)}\n\n{source(name)}"


def expert_memory() -> str:
    name = "experts_mxfp4-h100"
    peers = ("eager", "grouped_mm", "qfuse")
    kinds = {"weights": "weight_bytes", "with adapters": "static_bytes", "transient": "peak_bytes"}
    body = [
        (
            case["model"],
            str(case["tokens"]),
            label,
            *(mb(extra(name, peer, kind, **case)) for peer in peers),
        )
        for case in cases(name)
        for label, kind in kinds.items()
    ]
    header = ("experts", "tokens", "", "eager, bf16", "grouped_mm, bf16", "qfuse, MXFP4")
    return f"{table(header, body)}\n\n{source(name)}"


def expert_parallel() -> str:
    name = "moe_ep-h200"
    body = []
    for case in cases(name):
        if case["pass"] != "fwd+bwd":
            continue
        found = [row(name, peer, **case) for peer in ("bitsandbytes", "masked", "qfuse")]
        times = [r["timing"]["median"] for r in found]
        body.append(
            (
                case["model"],
                str(case["ep"]),
                *(f"{us(r['timing']['median'])}, {mb(r['extra']['peak_bytes'])}" for r in found),
                f"{times[2] / times[0]:.2f}",
                f"{times[2] / times[1]:.2f}",
            )
        )
    header = ("model", "devices", "bitsandbytes, masked", "masked", "skipped")
    return (
        f"{table((*header, 'skipped / bitsandbytes', 'skipped / masked'), body)}\n\n{source(name)}"
    )


QLORA = {
    "moe_qlora-qwen3-30b-a3b-busy-h200": "Qwen3-30B-A3B, 48 layers",
    "moe_qlora-gpt-oss-20b-h200": "gpt-oss-20b shapes, 24 layers",
}


def qlora() -> str:
    body = []
    for name, label in QLORA.items():
        found = result(name)
        body.append(
            (
                label,
                f"{found['trained_parameters'] / 1e6:.0f} M",
                f"{number(found['step_ms'])} ms",
                f"{found['tokens_per_s']:,.0f}",
                f"{number(found['peak_gb'])} GB",
                f"{found['first_step_s']:.0f} s",
            )
        )
    header = ("", "trained parameters", "step", "tokens per second", "peak memory", "first step")
    return f"{table(header, body)}\n\n{source(*QLORA)}"


#: The same model within a budget, from its own packing and requantized.
BUDGET = {
    "moe_qlora-gpt-oss-20b-16gb-mxfp4-h100": "MXFP4, as shipped",
    "moe_qlora-gpt-oss-20b-16gb-nf4-h100": "NF4, from the same values",
}


def budget() -> str:
    body = []
    for name in BUDGET:
        found = result(name)
        gigabytes = (f"{found[f'{kind}_gb']:.2f} GB" for kind in ("static", "peak", "reserved"))
        body.append(
            (
                BUDGET[name],
                f"{found['batch']} x {found['length']}",
                f"{number(found['step_ms'])} ms",
                f"{found['tokens_per_s']:,.0f}",
                *gigabytes,
                f"{found['loss'][0]:.2f}, {found['loss'][-1]:.2f}",
                f"{found['first_step_s']:.0f} s",
            )
        )
    memory = ("memory: model and adapters", "memory: peak", "memory: reserved")
    header = ("experts", "tokens", "step", "tokens per second", *memory)
    return f"{table((*header, 'loss: first, last', 'first step'), body)}\n\n{source(*BUDGET)}"


#: What trainers run, as `bench_moe_model --recipe` names it; shown once measured.
RECIPES = {
    "moe_model_trainer-h200": "a trainer's defaults",
    "moe_model_checkpointed-h200": "with gradient checkpointing",
}


def recipes() -> str:
    files = list(filter(exists, RECIPES))
    if not files:
        command = "python -m benchmarks.bench_moe_model --recipe checkpointed --adapt attention"
        return f"Not measured yet (`{command}`)."
    peers = ("eager", "inductor", "qfuse")
    body = []
    for name in files:
        found = [row(name, peer) for peer in peers]
        times = [seconds(name, peer) for peer in peers]
        peaks = [r["extra"]["peak_bytes"] for r in found]
        steps = result(name)["settings"]["loss_steps"]
        deviations = [percent(r["extra"]["loss_deviation"], 2) for r in found[1:]]
        body += [
            (RECIPES[name], "step", *map(ms, times), f"{times[2] / times[1]:.2f}"),
            ("", "peak memory", *map(gb, peaks), f"{peaks[2] / peaks[1]:.2f}"),
            ("", f"loss, largest deviation in {steps} steps", "", *deviations, ""),
            ("", "graph breaks", "", *(str(r["extra"]["breaks"]) for r in found[1:]), ""),
            ("", "share of the roof", *(percent(r["roof_fraction"]) for r in found), ""),
        ]
    header = ("", "", "eager", "stock Inductor", "qfuse", "qfuse / stock")
    return f"{table(header, body)}\n\n{source(*files)}"


#: Steps in which PEFT adapts experts.
ADAPTED = {
    "moe_adapted-h200": "bare",
    "moe_adapted_again-h200": "bare, in another run",
    "moe_adapted_checkpointed-h200": "with gradient checkpointing",
}


def _adapted(name: str) -> list[Row]:
    """Return eager mode, stock Inductor, and qfuse with adapted weights, without them, packed."""
    products = "dense" if rows(name, "dense") else "compiled"  # which chose these by itself once
    peers = ("eager", "inductor", "prepared", products, "packed")
    return [row(name, peer) for peer in peers]


def adapted() -> str:
    """Show steps in which PEFT adapts experts in 16 bits, in each way that there is."""
    body = []
    for name, label in ADAPTED.items():
        found = _adapted(name)
        steps = result(name)["settings"]["loss_steps"]
        body += [
            (label, "step", *(ms(r["timing"]["median"]) for r in found)),
            ("", "peak memory", *(gb(r["extra"]["peak_bytes"]) for r in found)),
            (
                *("", f"loss, largest deviation in {steps} steps", ""),
                *(percent(r["extra"]["loss_deviation"], 2) for r in found[1:]),
            ),
            ("", "graph breaks", *(str(r["extra"]["breaks"]) for r in found)),
        ]
    ours = ("qfuse, adapted weights", "qfuse, `use_qfuse`", "qfuse, `experts.quantize`: NF4")
    return f"{table(('', '', 'eager', 'stock Inductor', *ours), body)}\n\n{source(*ADAPTED)}"


def without_adapted_weights(taken: Callable[[Row], float]) -> str:
    """Say which part a step takes without adapted weights of one with them, over its runs."""
    ratios = [
        taken(products) / taken(weights) for _, _, weights, products, _ in map(_adapted, ADAPTED)
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def step_in_fp8() -> str:
    """Show a step of a mixture whose experts multiply in FP8 beside the same step in bfloat16."""
    name, fp8 = "moe_model_fp8-h200", "qfuse[qfuse.compute=fp8]"
    peers = {"eager": "eager", "inductor": "stock Inductor", "qfuse": "qfuse", fp8: "qfuse, fp8"}
    found = [row(name, peer) for peer in peers]
    timings = [each["timing"] for each in found]
    peaks = [each["extra"]["peak_bytes"] for each in found]
    off = [percent(each["extra"]["loss_deviation"], 2) for each in found[1:]]
    steps = result(name)["settings"]["loss_steps"]
    time = f"{timings[-1]['median'] / timings[-2]['median']:.2f}"
    peak = f"{peaks[-1] / peaks[-2]:.2f}"
    body = [
        ("step", *(ms(t["median"]) for t in timings), time),
        ("peak memory", *map(gb, peaks), peak),
        (f"loss, largest deviation in {steps} steps", "", *off, ""),
    ]
    return f"{table(('', *peers.values(), 'fp8 / bf16'), body)}\n\n{source(name)}"
