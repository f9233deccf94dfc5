"""Show what was measured on several GPUs."""

from __future__ import annotations

from docs.read_results import (
    cases,
    extra,
    gb,
    ms,
    result,
    rows,
    seconds,
    source,
    table,
)


def sharded() -> str:
    """Show steps on two to four GPUs, of which each peer ran by itself."""
    peers = {"eager": "eager", "inductor": "stock Inductor", "qfuse": "qfuse"}
    wraps = {"ddp": "DDP", "fsdp2": "FSDP2", "fsdp2-packed-kept": "FSDP2, packed, kept"}
    h100 = ("ranks-h100", "ranks_2-h100", "ranks_4-h100")
    names = [*h100, "ranks_3-h200", "ranks_trl_2-h200", "ranks_trl_4-h200"]
    body = []
    for name, case in ((each, case) for each in names for case in cases(each)):
        settings, wrap = result(name)["settings"], case["wrap"]
        timed = {p: seconds(name, p, **case) for p in peers if rows(name, p, **case)}
        parts = [ms(extra(name, "qfuse", key, **case)) for key in ("host_s", "exposed_s")]
        peaks = [gb(extra(name, peer, "peak_bytes", **case)) for peer in ("inductor", "qfuse")]
        step = f"{'TRL' if settings.get('recipe') == 'trl' else 'bare'}, {case['layers']} layers"
        gpus = f"{settings['ranks']} {result(name)['machine']['name'].split()[1]}"
        times = (ms(timed[peer]) if peer in timed else "" for peer in peers)
        ratio = f"{timed['qfuse'] / timed['inductor']:.2f}"
        body.append((step, gpus, wraps[wrap], *times, ratio, *parts, *peaks))
    header = ("step", "GPUs", "", *peers.values(), "qfuse / stock Inductor")
    more = ("qfuse: until the host has issued it", "qfuse: NCCL alone")
    peak = (f"peak of a rank, {peers[peer]}" for peer in ("inductor", "qfuse"))
    return f"{table((*header, *more, *peak), body)}\n\n{source(*names)}"


def ways() -> str:
    """Show ways to shard a model of four layers on two GPUs."""
    graphs = "qfuse[qfuse.mode=reduce-overhead]"
    by_cpp = "qfuse[cpp_wrapper=True]"
    peers = {"inductor": "stock Inductor", "qfuse": "qfuse", by_cpp: "qfuse, C++ wrapper"}
    peers[graphs] = "qfuse, CUDA graphs"
    lean = "qfuse[qfuse.passes=-extend_k]"
    lean_by_cpp = "qfuse[cpp_wrapper=True;qfuse.passes=-extend_k;size_asserts=False]"
    kinds = {
        ("ranks_ways-h100", "fsdp2"): "FSDP2",
        ("ranks_ways_more-h100", "fsdp2-kept"): "weights gathered once a step",
        ("ranks_ways_more-h100", "fsdp2-packed"): "packed weights alone are sharded",
        ("ranks_ways-h100", "fsdp2-packed-kept"): "packed weights alone, gathered once",
        ("ranks_cpp-h100", "fsdp2"): "FSDP2, on another machine",
        ("ranks_cpp-h100", "fsdp2-packed-kept"): "packed weights alone, gathered once, there",
        ("ranks_parts-h200", "fsdp2-packed-kept-parts"): (
            "the same on H200s, and embeddings and head sharded by themselves"
        ),
        ("ranks_lean-h200", "fsdp2-packed-kept-parts"): (
            "that without `extend_k`, on another machine of H200s"
        ),
        ("ranks_third-h200", "fsdp2-packed-kept-parts"): "with `extend_k`, a third pair of H200s",
        (
            "ranks_host-h200",
            "fsdp2-packed-kept-parts",
        ): "with `extend_k`, a fourth pair, transformers 5.23",
    }
    body = []
    for (name, wrap), label in kinds.items():
        stands_for = {"qfuse": lean, by_cpp: lean_by_cpp} if "lean" in name else {}
        there = {p: q for p in peers if rows(name, q := stands_for.get(p, p), wrap=wrap)}
        times = {p: ms(seconds(name, q, wrap=wrap)) for p, q in there.items()}
        ours = there["qfuse"]
        told = [extra(name, ours, key, wrap=wrap) for key in ("host_s", "exposed_s")]
        peak = gb(extra(name, ours, "peak_bytes", wrap=wrap))
        late = str(extra(name, graphs, "late", wrap=wrap)) if graphs in there else ""
        body.append((label, *(times.get(p, "") for p in peers), *map(ms, told), peak, late))
    header = (
        "",
        *peers.values(),
        "qfuse: until the host has issued it",
        "NCCL alone",
        "peak of a rank",
    )
    files = dict.fromkeys(name for name, _ in kinds)
    return f"{table((*header, 'graphs recorded in 12 steps'), body)}\n\n{source(*files)}"


def experts_over_ranks() -> str:
    """Show TRL's step with all layers of Qwen3-30B-A3B on one GPU, and over two and four."""
    peers = {"eager": "eager", "inductor": "stock Inductor", "qfuse": "qfuse"}
    names = [f"ranks_30b_{ranks}-h200" for ranks in (1, 2, 4)]
    body = []
    for name in names:
        ranks = result(name)["settings"]["ranks"]
        times = {peer: seconds(name, peer) for peer in peers}
        rate = sum(case["tokens"] for case in cases(name)) * ranks / times["qfuse"]
        exposed = (ms(extra(name, peer, "exposed_s")) for peer in ("inductor", "qfuse"))
        peaks = (gb(extra(name, peer, "peak_bytes")) for peer in peers)
        body.append(
            (
                str(ranks),
                *map(ms, times.values()),
                f"{times['qfuse'] / times['inductor']:.2f}",
                f"{rate:,.0f}",
                *exposed,
                f"{extra(name, 'qfuse', 'first_s'):.1f} s",
                *peaks,
            )
        )
    header = ("GPUs", *peers.values(), "qfuse / stock Inductor", "qfuse: tokens/s, all ranks")
    alone = ("NCCL alone, stock Inductor", "NCCL alone, qfuse", "first step, qfuse")
    peak = (f"peak of a rank, {label}" for label in peers.values())
    return f"{table((*header, *alone, *peak), body)}\n\n{source(*names)}"


def large() -> str:
    """Show a model of 70B parameters on two GPUs."""
    name = "ranks_large-h100"
    built, first = (f"{extra(name, 'qfuse', key):.1f} s" for key in ("build_s", "first_s"))
    what = {"built_bytes": "a rank, built", "peak_bytes": "peak of a rank"}
    body = [
        ("building the model", built),
        ("first step", first),
        ("step", f"{seconds(name, 'qfuse'):.2f} s"),
        ("NCCL alone, a step", ms(extra(name, "qfuse", "exposed_s"))),
        *((label, gb(extra(name, "qfuse", key))) for key, label in what.items()),
        ("layers fused", str(extra(name, "qfuse", "fused"))),
    ]
    return f"{table(('', 'qfuse'), body)}\n\n{source(name)}"
