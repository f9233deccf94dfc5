"""Read every measured figure of the documents from its file in benchmarks/results.

`docs.generate` writes what the functions of `TABLES` return between `<!-- figures NAME -->` and
`<!-- end -->`, and what those of `VALUES` return between `<!-- figure NAME -->` and `<!-- / -->`
inside a sentence. So `make docs` follows when something is measured again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from docs import (
    format_figures,
    moe_figures,
    rank_figures,
    row_figures,
    start_figures,
    step_figures,
    tune_figures,
)
from docs.read_results import (
    cases,
    exists,
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
    us,
)

# --- one weight, one linear ---------------------------------------------------------------


LINEAR = {
    "matmul": "bf16 product alone",
    "eager": "eager",
    "inductor": "stock Inductor",
    "qfuse": "qfuse",
}
EIGHT_BITS = {
    "inductor": "stock Inductor",
    "qfuse": "qfuse",
    step_figures.FP8: "qfuse, fp8",
}


def linear(name: str, peers: Mapping[str, str] = LINEAR) -> str:
    """Write the times of one linear layer, and the last peer's over those of the other layers."""
    *_, ours = peers
    body = []
    for case in cases(name):
        times = {peer: seconds(name, peer, **case) for peer in peers}
        ratios = [f"{times[ours] / times[peer]:.2f}" for peer in _compared(peers)]
        what = {"fwd": "forward", "fwd+bwd": "forward and backward"}[case["pass"]]
        shown = (f"{case['N']} x {case['K']}", str(case["M"]), what)
        body.append((*shown, *(number(1e6 * t) for t in times.values()), *ratios))
    labels = (f"{peers[ours]} / {peers[peer]}" for peer in _compared(peers))
    return f"{table(('N x K', 'rows', '', *peers.values(), *labels), body)}\n\n{source(name)}"


def _compared(peers: Mapping[str, str]) -> list[str]:
    """List the peers that the last one is held against; a product alone is no layer."""
    *others, _ = peers
    return [peer for peer in others if peer != "matmul"]


def dequantize(name: str) -> str:
    body = []
    for case in cases(name):
        peers = ("bitsandbytes", "op", "inductor", "qfuse", "copy")
        times = {peer: seconds(name, peer, **case) for peer in peers}
        share = percent(row(name, "op", **case)["roof_fraction"])
        body.append(
            (
                f"{case['N']} x {case['K']}",
                *(number(1e6 * value) for value in times.values()),
                f"{times['op'] / times['bitsandbytes']:.2f}",
                share,
                percent(row(name, "copy", **case)["roof_fraction"]),
            )
        )
    header = ("N x K", "bitsandbytes", "op", "stock graph", "qfuse graph", "a copy")
    more = ("op / bitsandbytes", "op, share of the roof", "copy, share of the roof")
    return f"{table((*header, *more), body)}\n\n{source(name)}"


def losses(*names: str) -> str:
    """Show the loss of a frozen head, whole and in chunks of so many rows: time and memory."""
    body, peers = [], ("whole", "128", "512", "1024", "2048")
    for name in names:
        for case in cases(name):
            found = [row(name, peer, **case) for peer in peers]
            what = (case.get("head", case["dtype"]), case["shape"].partition("x")[0])
            body += [
                (*what, "time", *(ms(each["timing"]["median"]) for each in found)),
                ("", "", "memory", *(gb(each["extra"]["peak_bytes"]) for each in found)),
            ]
    header = ("the head", "rows", "", "whole", *(f"chunks of {peer}" for peer in peers[1:]))
    return f"{table(header, body)}\n\n{source(*names)}"


def adapter(op: str, name: str = "adapter-h100") -> str:
    """Show the kernel of an adapter's product beside torch's, by ranks side by side. Where it
    refuses a call, its columns are empty, and the reason stands below."""
    if not exists(name):
        return "No result is committed at present."
    found = [case for case in cases(name) if case["op"] == op]
    ranks = list(dict.fromkeys(case["rank"] for case in found))
    reasons: dict[str, None] = {}
    body = []
    for case in found:
        if case["rank"] != ranks[0]:
            continue
        shown = [str(case["N"]), str(case["M"])]
        for rank in ranks:
            of = {**case, "rank": rank}
            ours, theirs = row(name, "qfuse", **of), seconds(name, "torch", **of)
            shown.append(number(1e6 * theirs))
            if reason := ours["extra"].get("refused"):
                reasons[reason] = None
                shown += ["", "", ""]
                continue
            taken = seconds(name, "qfuse", **of)
            shown += [number(1e6 * taken), f"{taken / theirs:.2f}"]
            shown.append(f"{number(ours['extra']['gbps'])} ({percent(ours['roof_fraction'])})")
        body.append(shown)
    labels = ("torch", "kernel", "kernel / torch", "kernel, GB/s (share of the roof)")
    header = [f"r = {rank}: {label}" for rank in ranks for label in labels]
    left = [f"Where the kernel's columns are empty, cuBLAS serves the op: {r}." for r in reasons]
    return "\n\n".join((table(("N", "M", *header), body), *left, source(name)))


def kbit() -> str:
    name = "kbit-h200"
    if not exists(name):
        return "No result is committed at present."
    body = []
    for case in cases(name):
        peers = [r["peer"] for r in rows(name, **case)]
        times = [
            number(1e6 * seconds(name, peer, **case)) if peer in peers else ""
            for peer in ("op", "triton", "copy", "bitsandbytes")
        ]
        share = percent(row(name, "op", **case)["roof_fraction"])
        kind = f"K = {case['K']}, {case['absmax']} scales"
        body.append((case["verb"], kind, case["run"], *times, share))
    header = ("", "", "", "CUDA", "Triton", "a copy", "bitsandbytes NF4, fp32 scales")
    return f"{table((*header, 'CUDA, share of the roof'), body)}\n\n{source(name)}"


def attention() -> str:
    name = "attention-h200"
    labels = {"mask": "mask", "causal": "no mask", "grouped": "no mask, grouped keys"}
    body = [(ms(seconds(name, "mask")), *(ms(seconds(name, p)) for p in ("causal", "grouped")))]
    return f"{table(tuple(labels.values()), body)}\n\n{source(name)}"


def launch() -> str:
    name = "launch-h200"
    labels = {
        "qfuse": "compiled code, through the driver",
        "runner": "compiled code, Triton launches its kernel",
        "jit": "compiled code, through Triton's JIT",
        "op": "`inductor_q.dequantize`, eager",
        "bitsandbytes": "bitsandbytes, eager",
    }
    body = [(label, us(seconds(name, peer))) for peer, label in labels.items()]
    return f"{table(('one dequantization', 'time of the host'), body)}\n\n{source(name)}"


def explain() -> str:
    name = "explain-cpu"
    body = []
    for backend in ("inductor", "qfuse"):
        values = [row(name, peer, backend=backend) for peer in ("plain", "observed")]
        walls = [value["timing"]["median"] for value in values]
        cpus = [value["extra"]["cpu"] for value in values]
        body.append(
            (backend, "wall clock", *(f"{v:.1f} s" for v in walls), f"{walls[1] / walls[0]:.2f}")
        )
        body.append(
            ("", "time of the process", *(f"{v:.1f} s" for v in cpus), f"{cpus[1] / cpus[0]:.2f}")
        )
    header = ("", "", "as it is", "under `qfuse explain`", "ratio")
    return f"{table(header, body)}\n\n{source(name)}"


# --- k-bit quality ------------------------------------------------------------------------

FORMATS = {
    "kbit2_e4m4": "`kbit2_e4m4`",
    "kbit3_e4m4": "`kbit3_e4m4`",
    "nf4_b64_nested": "bitsandbytes `nf4`, double quantization",
    "kbit4_e4m4": "`kbit4_e4m4`",
    "nf4_b64": "bitsandbytes `nf4`",
    "kbit5_e4m4": "`kbit5_e4m4`",
}


def quality(device: str) -> str:
    name = f"kbit-quality-{device}"
    numbers = {each["format"]: each for each in result(name)["numbers"]}
    losses = {each["format"]: each for each in result(name)["model"]["rows"]}

    def loss(of: str, key: str) -> str:
        return f"{losses[of][key]:.3f}" if of in losses else "not measured"

    body = [
        (
            label,
            f"{numbers[of]['bits_per_element']:.2f}",
            f"{numbers[of]['smaller_than_bf16']:.1f}x",
            f"{numbers[of]['sqnr_db']:.1f} dB",
            loss(of, "before"),
            loss(of, "after"),
        )
        for of, label in FORMATS.items()
    ]
    mixed = losses["3.5 bits"]["bits_per_element"]
    for of, label, bits in (
        ("3.5 bits", "K by layer, a budget of 3.5 bits", f"{mixed:.2f}"),
        ("bf16", "bf16", "16"),
    ):
        body.append((label, bits, "", "", loss(of, "before"), loss(of, "after")))
    header = ("format", "bits per element", "smaller than bf16", "SQNR", "loss, quantized")
    return f"{table((*header, 'after LoRA'), body)}\n\n{source(name)}"


def nested_over_kbit4() -> str:
    """Say how many bits fewer nested NF4 has than kbit4, and how many dB."""
    numbers = {each["format"]: each for each in result("kbit-quality-cpu")["numbers"]}
    nested, ours = numbers["nf4_b64_nested"], numbers["kbit4_e4m4"]
    bits = ours["bits_per_element"] - nested["bits_per_element"]
    return f"{bits:.2f} bits smaller and {ours['sqnr_db'] - nested['sqnr_db']:.1f} dB noisier"


def fp16_over_e4m4() -> str:
    numbers = {each["format"]: each for each in result("kbit-quality-cpu")["numbers"]}
    gains = [
        numbers[f"kbit{k}_fp16"]["sqnr_db"] - numbers[f"kbit{k}_e4m4"]["sqnr_db"]
        for k in (2, 3, 4, 5)
    ]
    return f"{max(gains):.2f} dB"


def scale_error(key: str) -> str:
    return percent(result("kbit-quality-cpu")["scales"][key], 1)


TABLES: dict[str, Callable[[], str]] = {
    "readme": step_figures.readme_step,
    "step": step_figures.step,
    "recipes": step_figures.recipes,
    "rates": step_figures.rates,
    "recipe": step_figures.recipe,
    "recipe-graphs": step_figures.recipe_graphs,
    "scripts": lambda: step_figures.scripts(
        "trainers_options-h200", "trainers_more-h200", "trainers_stock-h200"
    ),
    "scripts-casts": lambda: step_figures.scripts(
        "trainers_casts-h200", "trainers_casts_trainer-h200", "trainers_dpo-h200"
    ),
    "scripts-cudnn": lambda: step_figures.scripts(
        "trainers_packing-h200", "trainers_dpo_stock-h200"
    ),
    "scripts-elsewhere": lambda: step_figures.scripts("trainers_together-h200"),
    "losses": lambda: losses("loss-h200", "loss_float32-h200"),
    "scripts-padded": lambda: step_figures.scripts("trainers_padded-h200"),
    "scripts-before": lambda: step_figures.scripts("trainers-h200", "trainers_sft-h200"),
    "small": step_figures.small,
    "eight-bits": step_figures.eight_bits,
    "eight-bits-graphs": step_figures.eight_bits_graphs,
    "eight-bits-int8": step_figures.int8,
    "eight-bits-linear": lambda: linear("linear_eight_bits-h200", EIGHT_BITS),
    "eight-bits-linear-h100": lambda: linear("linear_eight_bits-h100", EIGHT_BITS),
    "eight-bits-quality": step_figures.eight_bits_quality,
    "eight-bits-products": step_figures.eight_bits_products,
    "eight-bits-outliers": step_figures.eight_bits_outliers,
    "families": step_figures.families,
    "memory": step_figures.memory,
    "linear-h200": lambda: linear("linear-h200"),
    "linear-cpu": lambda: linear("linear-cpu"),
    "moe-step": step_figures.moe_step,
    "dequantize-h200": lambda: dequantize("dequantize-h200"),
    "dequantize-cpu": lambda: dequantize("dequantize-cpu"),
    "few-rows": row_figures.few_rows,
    "few-rows-h100": functools.partial(row_figures.few_rows, "rows-h100"),
    "many-rows": functools.partial(
        row_figures.few_rows, "rows_many-h200", row_figures.ROWS | row_figures.STOCK
    ),
    "few-rows-kbit": functools.partial(row_figures.few_rows_kbit, "rows_kbit_cuda-h100"),
    "few-rows-kbit-triton": row_figures.few_rows_kbit,
    "few-rows-kbit-many": functools.partial(
        row_figures.few_rows_kbit, "rows_kbit_many-h100", "qfuse"
    ),
    "few-rows-cpu": row_figures.few_rows_cpu,
    "few-rows-small": row_figures.few_rows_small,
    "few-rows-avx512": functools.partial(row_figures.few_rows_cpu, "rows_avx512-cpu"),
    "decode": row_figures.decode,
    "decode-whole": row_figures.decode_whole,
    "sharded": rank_figures.sharded,
    "sharded-ways": rank_figures.ways,
    "sharded-experts": rank_figures.experts_over_ranks,
    "large": rank_figures.large,
    "kbit": kbit,
    "step-wide": step_figures.wide,
    "wide-products": step_figures.wide_products,
    "adapter-grads": lambda: adapter("adapter_grads"),
    "add-product": lambda: adapter("add_product"),
    "attention": attention,
    "launch": launch,
    "walks": step_figures.walks,
    "explain": explain,
    "start": start_figures.start,
    "start-newer": lambda: start_figures.started(
        "start_layers4-h200", "start_layers36-h200", "start_model-h200"
    ),
    "layers": start_figures.layered,
    "tune-cpu": lambda: tune_figures.tune("tune-cpu"),
    "tune-h100": lambda: tune_figures.tune("tune-h100"),
    "tune-h200": lambda: tune_figures.tune("tune-h200"),
    "tune-0.8b": lambda: tune_figures.tune("tune_0_8b-h100"),
    "quality-cpu": lambda: quality("cpu"),
    "quality-h200": lambda: quality("h200"),
    "format-decodes": format_figures.decodes,
    "format-training": format_figures.training,
    "format-cpu": format_figures.on_cpu,
    "moe-formats": format_figures.experts,
    "eight-bits-formats": format_figures.eight_bits,
    "moe-large": moe_figures.large,
    "moe-fp8": moe_figures.in_fp8,
    "moe-recipes": moe_figures.recipes,
    "moe-step-fp8": moe_figures.step_in_fp8,
    "moe-adapted": moe_figures.adapted,
    "moe-providers": moe_figures.providers,
    "moe": moe_figures.moe,
    "moe-few": moe_figures.few_tokens,
    "moe-few-mxfp4": functools.partial(moe_figures.few_tokens, "moe_few_mxfp4-h200"),
    "moe-few-fp8": functools.partial(moe_figures.few_tokens, "moe_few_fp8_128x128-h200"),
    "moe-ranks": moe_figures.ranks,
    "moe-layers": moe_figures.expert_layers,
    "moe-memory": moe_figures.expert_memory,
    "moe-parallel": moe_figures.expert_parallel,
    "moe-qlora": moe_figures.qlora,
    "moe-budget": moe_figures.budget,
}


def _in_place(name: str, peer: str) -> str:
    return f"{extra(name, peer, 'peak_bytes') / 1e9:.3f} GB"


def packed_transient() -> str:
    """Return the share of stock Inductor's memory, beside weights and states, that a step takes."""
    name = "step_packed_memory-h200"
    own, stock = (
        extra(name, peer, "peak_bytes") - extra(name, peer, "static_bytes")
        for peer in ("qfuse", "inductor")
    )
    return f"{own / stock:.3f}"


VALUES: dict[str, Callable[[], str]] = {
    "decode.ours": lambda: ms(seconds("decode_8b_1_guards-h100", "compile_decoding")),
    "decode.stock": lambda: ms(seconds("decode_8b_1-h100", "inductor")),
    "decode.bf16": lambda: ms(seconds("decode_8b_1-h100", "bf16")),
    "fp8.8b.stock": lambda: ms(seconds("step-8b-h200", "inductor")),
    "fp8.ours": lambda: ms(seconds("step_trl_fp8_graphs-h200", step_figures.FP8)),
    "fp8.bf16": lambda: ms(seconds("step_trl_fp8_graphs-h200", "qfuse")),
    "fp8.stock": lambda: ms(seconds("step_trl_fp8_graphs-h200", "inductor")),
    "fp8.graphs": lambda: ms(seconds("step_trl_fp8_graphs-h200", step_figures.FP8_GRAPHS)),
    "wide.stock": lambda: ms(seconds(step_figures.WIDE, "inductor")),
    "wide.ours": lambda: ms(seconds(step_figures.WIDE, "qfuse")),
    "ranks.extended": lambda: ms(seconds("ranks_extend_k-h100", "qfuse")),
    "ranks.lean": lambda: ms(seconds("ranks_extend_k-h100", "qfuse[qfuse.passes=-extend_k]")),
    "ranks.stock": lambda: ms(seconds("ranks_extend_k-h100", "inductor")),
    "scripts.dpo": lambda: percent(extra("trainers_dpo_stock-h200", "qfuse", "loss_deviation")),
    "scripts.dpo_stock": lambda: percent(
        extra("trainers_dpo_stock-h200", "inductor", "loss_deviation")
    ),
    "scripts.graphs": lambda: ms(seconds("trainers_padded-h200", "qfuse[CUDA graphs]")),
    "scripts.stock_graphs": lambda: ms(seconds("trainers_padded-h200", "inductor[CUDA graphs]")),
    "scripts.plans": lambda: ms(seconds("trainers_options-h200", "eager", script="SFT")),
    "scripts.kept": lambda: gb(extra("trainers_options-h200", "qfuse", "peak_bytes", script="SFT")),
    "scripts.none_kept": lambda: gb(
        extra(
            "trainers_options-h200",
            "qfuse[qfuse.thresholds=recompute_products.max_kept=0]",
            "peak_bytes",
            script="SFT",
        )
    ),
    "scripts.no_graphs": lambda: ms(seconds("trainers_padded-h200", "qfuse")),
    "small.graphs": lambda: ms(seconds("step_small-h100", step_figures.GRAPHS)),
    "small.qfuse": lambda: ms(seconds("step_small-h100", "qfuse")),
    "small.stock": lambda: ms(seconds("step_small-h100", "inductor")),
    "packed.transient": packed_transient,
    "rows.alone": lambda: percent(
        row_figures.many_rows_over(("bitsandbytes", "decode", "stock")) - 1, 1
    ),
    "rows.graph": lambda: percent(
        row_figures.many_rows_over(("bitsandbytes", "decode"), graphs=True) - 1, 1
    ),
    "rows.bf16": lambda: f"{row_figures.many_rows_over(('dense',), graphs=True):.2f} times",
    "rows.lora": lambda: (
        f"{row_figures.many_rows_over(('qfuse',), 'adapter', graphs=True):.2f} times"
    ),
    "moe.few.alone": lambda: moe_figures.few_over_bf16(lambda r: r["timing"]["median"]),
    "moe.few.graph": lambda: moe_figures.few_over_bf16(lambda r: r["extra"]["graph_s"]),
    "attention.mask": lambda: ms(seconds("attention-h200", "mask")),
    "attention.causal": lambda: ms(seconds("attention-h200", "causal")),
    "attention.grouped": lambda: ms(seconds("attention-h200", "grouped")),
    "launch.qfuse": lambda: us(seconds("launch-h200", "qfuse")),
    "launch.runner": lambda: us(seconds("launch-h200", "runner")),
    "launch.jit": lambda: us(seconds("launch-h200", "jit")),
    "launch.bitsandbytes": lambda: us(seconds("launch-h200", "bitsandbytes")),
    "casts.together": lambda: ms(seconds("step_trainer_fp8_peak-h200", "qfuse")),
    "in_place.bf16": lambda: _in_place("step_trainer_in_place-h200", "qfuse"),
    "in_place.bf16_without": lambda: _in_place(
        "step_trainer_in_place-h200", "qfuse[qfuse.passes=-add_gradients]"
    ),
    "in_place.fp8": lambda: _in_place("step_trainer_in_place-h200", step_figures.FP8),
    "in_place.fp8_without": lambda: _in_place(
        "step_trainer_fp8_in_place-h200", "qfuse[qfuse.compute=fp8;qfuse.passes=-add_gradients]"
    ),
    "exchange.gathered": lambda: ms(seconds("ranks_experts-h200", "qfuse", wrap="experts")),
    "exchange.chosen": lambda: ms(seconds("ranks_experts-h200", "qfuse", wrap="experts-chosen")),
    "exchange.gathered_nccl": lambda: ms(
        extra("ranks_experts-h200", "qfuse", "exposed_s", wrap="experts")
    ),
    "exchange.chosen_nccl": lambda: ms(
        extra("ranks_experts-h200", "qfuse", "exposed_s", wrap="experts-chosen")
    ),
    "casts.apart": lambda: ms(seconds("step_trainer_fp8_peak-h200", step_figures.CASTS_APART)),
    "layers.trainer": lambda: start_figures.layers_over_whole("layers-h200"),
    "layers.trl": lambda: start_figures.layers_over_whole("layers_trl-h200"),
    "layers.packed": lambda: start_figures.layers_over_whole("layers_packed-h200"),
    "formats.floor": lambda: format_figures.linear_floor("fp8_row"),
    "start.layers": lambda: start_figures.start_over_depth("layers", 4, 36),
    "start.model": lambda: start_figures.start_over_depth("model", 4, 12),
    "memory.over": step_figures.memory_over_plan,
    "moe.same": moe_figures.same_kernels,
    "moe.adapted.time": lambda: moe_figures.without_adapted_weights(
        lambda r: r["timing"]["median"]
    ),
    "moe.adapted.peak": lambda: moe_figures.without_adapted_weights(
        lambda r: r["extra"]["peak_bytes"]
    ),
    "moe.merged": moe_figures.merged_is_slowest,
    "accumulate.without": lambda: ms(seconds("step-repeat-cpu", "qfuse[qfuse.passes=-accumulate]")),
    "accumulate.with": lambda: ms(seconds("step-repeat-cpu", "qfuse")),
    "quality.nested": nested_over_kbit4,
    "quality.fp16": fp16_over_e4m4,
    "quality.scale.mean": lambda: scale_error("mean"),
    "quality.scale.p95": lambda: scale_error("p95"),
    "budget.peak": lambda: f"{result(min(moe_figures.BUDGET))['peak_gb']:.1f} GB",
    "qlora.peak": lambda: f"{result('moe_qlora-qwen3-30b-a3b-busy-h200')['peak_gb']:.0f} GB",
}
