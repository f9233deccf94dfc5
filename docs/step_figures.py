"""Tables of whole training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from docs.read_results import (
    Row,
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

PEERS = ("eager", "inductor", "qfuse")
STEP = {
    "step-h200": "H200, 8 layers",
    "step-8b-h200": "H200, all 36 layers",
    "step-cpu": "CPU",
    "step-repeat-cpu": "CPU, over 24 rounds",
}
#: What trainers run, and what bench_step calls the bare recipe.
RECIPES = {
    "step_trl-h200": "TRL's defaults with checkpointing, 4 layers, 2 x 2048 tokens",
    "step_trainer-h200": "a trainer's defaults, 4 layers, 2 x 2048 tokens",
    "step_checkpointed-h200": "the same with gradient checkpointing",
    "step_packed-h200": "packed documents, checkpointing, 8 layers, 1 x 8192 tokens",
}
#: Further recipes, shown once measured.
MORE_RECIPES = {
    "step_trainer_again-h200": "a trainer's defaults, newer",
    "step_surogate-h200": "Surogate's step: packed, accumulated over 4 batches, 8 layers",
    "step_trainer-cpu": "CPU, a trainer's defaults, a small model, 2 x 256 tokens",
    "step_checkpointed-cpu": "CPU, the same with gradient checkpointing",
    "step_packed-cpu": "CPU, packed documents, checkpointing, 1 x 256 tokens",
}
#: The peer whose casts of adapters are a launch each.
CASTS_APART = "qfuse[qfuse.thresholds=cast_together.bytes=0]"
#: The option of the products in eight bits, and the steps that have it, shown once measured.
FP8 = "qfuse[qfuse.compute=fp8]"
FP8_GRAPHS = "qfuse[qfuse.compute=fp8;triton.cudagraphs=True]"
INT8 = "qfuse[qfuse.compute=int8]"
EIGHT_BITS = {
    "step_fp8-h100": "H100: bare, 8 layers",
    "step_8b_fp8-h200": "H200: bare, all 36 layers",
    "step_trainer_fp8-h200": "H200: a trainer's defaults, 4 layers",
    "step_trainer_fp8_host-h200": "H200, in another machine: the same",
    "step_trainer_fp8_peak-h200": "H200, in a third machine: the same, newer",
    "step_trainer_in_place-h200": "H200, in a fourth machine: the same, the newest",
    "step_trainer_fp8-h100": "H100: the same",
    "step_trl_fp8-h200": "H200: TRL's defaults with checkpointing, 4 layers",
    "step_trl_fp8-h100": "H100: the same",
    "step_trl_fp8_host-h100": "H100, in another machine: the same",
    "step_fp8-h200": "H200, older: bare, 8 layers",
}
#: Other projects' kernels, and the step of Surogate's published rates; shown once measured.
RATES = {
    "step_trainer-h200": "a trainer's defaults",
    "step_checkpointed-h200": "with checkpointing",
    "step_packed-h200": "packed documents, checkpointing",
    "step_trl-h200": "TRL's defaults",
    "step_surogate-h200": "Surogate's step",
    "step_surogate-checkpointed-h200": "Surogate's step, checkpointing",
}
#: What README has of the scripts in examples/: the file, the script, and who stands in the columns.
SHOWN_SCRIPTS = {
    "`examples/sft.py` as it is (TRL), 8 layers, two paragraphs of a book a batch": (
        ("trainers_options-h200", "SFT"),
        ("eager[no cuDNN]", "inductor[no cuDNN]", "qfuse"),
    ),
    "the same with `--packing`": (
        ("trainers_packing-h200", "SFT, packing"),
        ("eager", "inductor", "qfuse"),
    ),
    "`examples/trainer.py` as it is (Trainer), 8 layers": (
        ("trainers_casts_trainer-h200", "Trainer"),
        ("eager[no cuDNN]", "inductor[no cuDNN]", "qfuse"),
    ),
    "`examples/dpo.py` as it is, 8 layers": (
        ("trainers_dpo-h200", "DPO"),
        ("eager[no cuDNN]", "inductor[no cuDNN]", "qfuse"),
    ),
    "`examples/trainer.py`, 8 layers, lengths padded to multiples of 256; both compilers in CUDA "
    "graphs": (
        ("trainers_padded-h200", "Trainer"),
        ("eager", "inductor[CUDA graphs]", "qfuse[CUDA graphs]"),
    ),
}


PEER_NAMES = {
    "inductor": "stock Inductor",
    FP8: "qfuse, fp8",
    "axolotl": "axolotl's kernels, eager",
    "unsloth": "unsloth's kernels, eager",
}


def readme_step() -> str:
    body: list[Sequence[str]] = []
    shown = {what: ((name, ""), PEERS) for name, what in RECIPES.items()} | SHOWN_SCRIPTS
    for what, ((name, script), peers) in shown.items():
        case = {"script": script} if script else {}
        found = [row(name, peer, **case) for peer in peers]
        body += [
            (what, "time per step", *(ms(each["timing"]["median"]) for each in found)),
            ("", "peak memory", *(gb(each["extra"]["peak_bytes"]) for each in found)),
        ]
    return table(("", "", "eager", "stock Inductor", "qfuse"), body)


def step() -> str:
    return _steps(STEP)


def recipes() -> str:
    return _steps(RECIPES | {name: MORE_RECIPES[name] for name in filter(exists, MORE_RECIPES)})


def rates() -> str:
    """Write one row for each peer of a recipe, with MFU and breaks where a result has them."""
    body = []
    files = list(filter(exists, RATES))
    for name in files:
        for each in result(name)["rows"]:
            found, sizes = each["extra"], each["case"]["tokens"].split(" x ")
            tokens = math.prod(map(int, sizes)) / seconds(name, each["peer"])
            use = percent(found["mfu"]) if "mfu" in found else ""
            what = f"{RATES[name]}, {each['case']['layers']} layers, {each['case']['tokens']}"
            peer = PEER_NAMES.get(each["peer"], each["peer"])
            shown = (f"{tokens:,.0f}", use, gb(found["peak_bytes"]), str(found.get("breaks", "")))
            body.append((what if each is result(name)["rows"][0] else "", peer, *shown))
    header = ("", "", "tokens/s", "MFU", "peak memory", "breaks")
    return f"{table(header, body)}\n\n{source(*files)}"


#: A step on a CPU whose products in 16 bits are slow, and this backend without the pass for them.
WIDE = "step_trainer_avx2-cpu"
NARROW = "qfuse[qfuse.passes=-widen_products]"


def wide() -> str:
    """Show a trainer's step on a CPU without AVX-512."""
    peers = {
        "eager": "eager",
        "inductor": "stock Inductor",
        NARROW: "qfuse without `widen_products`",
        "qfuse": "qfuse",
    }
    (case,) = cases(WIDE)
    times = [seconds(WIDE, peer) for peer in peers]
    steps = result(WIDE)["settings"]["loss_steps"]
    body = [
        [f"step, {case['layers']} layer, {case['tokens']} tokens", *map(ms, times)],
        ["over qfuse", *(f"{time / times[-1]:.1f}" for time in times[:-1]), ""],
        [f"loss, largest deviation in {steps} steps", ""]
        + [_deviation(WIDE, row(WIDE, peer)) for peer in list(peers)[1:]],
    ]
    return "\n\n".join((table(("", *peers.values()), body), source(WIDE)))


def wide_products() -> str:
    """Show products in 16 bits beside those in float32 on a CPU without AVX-512."""
    name = "thresholds_wide-cpu"
    body = []
    for case in cases(name):
        times = [seconds(name, peer, **case) for peer in ("bfloat16", "float32")]
        ratio = f"{times[1] / times[0]:.3f}"
        body.append([case["what"], str(case["rows"]), *map(ms, times), ratio])
    body.sort(key=lambda shown: shown[0])
    header = ("product", "rows", "in bfloat16", "in float32, with casts", "float32 / bfloat16")
    return "\n\n".join((table(header, body), source(name)))


def eight_bits() -> str:
    """Write steps whose products are in FP8 beside the same steps in bfloat16."""
    return _eight_bits({name: (step, FP8) for name, step in EIGHT_BITS.items()}, "fp8")


def int8() -> str:
    """Write a step whose products are in int8 beside the same step in bfloat16."""
    label = "H100: TRL's defaults with checkpointing, 4 layers"
    return _eight_bits({"step_trl_int8-h100": (label, INT8)}, "int8")


def eight_bits_graphs() -> str:
    """Write steps in FP8 with CUDA graphs, whose memory torch's peaks leave out."""
    files = {
        "step_trainer_fp8_graphs-h200": "a trainer's defaults, 4 layers",
        "step_trl_fp8_graphs-h200": "TRL's defaults with checkpointing, 4 layers",
    }
    peers = ("inductor", "qfuse", FP8, FP8_GRAPHS)
    body = []
    for name, step in files.items():
        found = [next(iter(rows(name, peer)), None) for peer in peers]
        for label, statistic in ((step, "median"), ("the shortest", "best")):
            times = ["" if r is None else ms(r["timing"][statistic]) for r in found]
            bf16, ours = (row(name, peer)["timing"][statistic] for peer in ("qfuse", FP8_GRAPHS))
            body.append((label, *times, f"{ours / bf16:.2f}"))
        off = ["" if r is None else _deviation(name, r) for r in found]
        body.append(("loss, largest deviation from qfuse in 20 steps", *off, ""))
    header = ("", "stock Inductor", "qfuse", "qfuse, fp8", "with CUDA graphs", "that / qfuse")
    return f"{table(header, body)}\n\n{source(*files)}"


def _eight_bits(files: Mapping[str, tuple[str, str]], compute: str) -> str:
    body = []
    for name, (step, peer) in files.items():
        found = [next(iter(rows(name, each)), None) for each in ("inductor", "qfuse", peer)]
        deviations = ["" if r is None else _deviation(name, r) for r in found]
        of = "" if rows(name, "eager") else " from qfuse"
        label = f"loss, largest deviation{of} in {result(name)['settings']['loss_steps']} steps"
        body += [
            (step, "step", *_beside_bf16(found, ms, lambda r: r["timing"]["median"])),
            ("", "the shortest", *_beside_bf16(found, ms, lambda r: r["timing"]["best"])),
            ("", "peak memory", *_beside_bf16(found, gb, lambda r: r["extra"]["peak_bytes"])),
            ("", label, *deviations, ""),
        ]
    header = ("", "", "stock Inductor", "qfuse", f"qfuse, {compute}", f"{compute} / bf16")
    return f"{table(header, body)}\n\n{source(*files)}"


def _beside_bf16(
    found: Sequence[Row | None], shown: Callable[[float], str], of: Callable[[Row], float]
) -> list[str]:
    """Write a measure of each peer, and the last one's over that of the one before it."""
    *_, bf16, ours = values = [None if r is None else of(r) for r in found]
    assert bf16 is not None and ours is not None
    return [*("" if v is None else shown(v) for v in values), f"{ours / bf16:.2f}"]


def _deviation(name: str, found: Row) -> str:
    """Write how far losses are from eager mode's or, where that did not run, from qfuse's."""
    if "loss_deviation" in found["extra"]:
        return percent(found["extra"]["loss_deviation"], 2)
    qfuse = row(name, "qfuse")["extra"]["losses"]
    pairs = zip(found["extra"]["losses"], qfuse, strict=True)
    off = max(abs(loss / other - 1) for loss, other in pairs)
    return percent(off, 2) if off else ""


QUALITY = (
    "compute_quality_tiny-cpu",
    "compute_quality-cpu",
    "compute_quality-h200",
    "compute_quality_medium-h100",
    "compute_quality_large-h100",
)


def eight_bits_quality() -> str:
    """Write the held-out loss and the cosine of adapters' gradients for each way to compute."""
    body = []
    for name in QUALITY:
        found = result(name)
        steps = found["settings"]["steps"]
        for model in found["models"]:
            millions = model["shape"]["parameters"] / 1e6
            for variant, held_out in model["held_out"].items():
                cosines = model["cosines"].get(variant)
                least = f"{min(cosines['by_layer'].values()):.4f}" if cosines else ""
                what = f"{millions:.1f} M parameters, {steps} steps" if not cosines else ""
                is_eight = variant in ("fp8", "int8")
                farthest = percent(held_out["farthest"], 3) if is_eight else ""
                body.append((what, variant, f"{held_out['mean']:.4f}", farthest, least))
    header = ("", "", "held-out loss", "from bf16, farthest seed", "cosine, least layer")
    return f"{table(header, body)}\n\n{source(*QUALITY)}"


def eight_bits_products() -> str:
    """Write the cosine of adapters' gradients by product, in the largest model of each result."""
    names = QUALITY[1:]
    models = [result(name)["models"][-1] for name in names]
    cosines = [model["cosines"]["fp8"]["by_product"] for model in models]
    header = ("", *(f"{model['shape']['parameters'] / 1e6:.1f} M parameters" for model in models))
    body = [(f"`{p}`", *(f"{found[p]:.4f}" for found in cosines)) for p in cosines[-1]]
    return f"{table(header, body)}\n\n{source(*names)}"


def eight_bits_outliers() -> str:
    """Write what a cast loses of the other features beside an outlier, for each way to cast."""
    names = ("compute_outliers-cpu", "compute_outliers-h200")
    files = [name for name in names if exists(name)]
    body = []
    for name in files:
        for found in result(name)["rows"]:
            size = f"{found['outlier'] or found['largest']:,.0f} means"
            what = size if found["outlier"] else f"{size}, the model's own"
            errors = (percent(error, 2) for error in found["errors"].values())
            body.append((f"`{found['product']}`", what, *errors))
    header = ("", "largest of a token", *result(files[-1])["rows"][0]["errors"])
    return f"{table(header, body)}\n\n{source(*files)}"


def families() -> str:
    """One row of each case and machine: what of it has qfuse's form, and its time over stock's."""
    places = {"families-h200": "H200", "families_more-h200": "H200", "families-cpu": "CPU"}
    files = [name for name in places if exists(name)]
    if not files:
        return "Not measured yet (`python -m benchmarks.bench_families`)."
    body: list[Sequence[str]] = []
    for name in files:
        for case in cases(name):
            ours, stock = (row(name, peer, **case)["extra"] for peer in ("qfuse", "inductor"))
            parts = (ours[key] for key in ("layers", "adapters", "attention"))
            graphs = f"{ours['graphs']}, {ours['breaks']}"
            is_known = "eager" in result(name)["settings"]["backends"]  # to deviate from
            deviations = (
                percent(each["loss_deviation"], 2) if is_known else "" for each in (stock, ours)
            )
            ratio = seconds(name, "qfuse", **case) / seconds(name, "inductor", **case)
            body.append((places[name], case["case"], *parts, graphs, *deviations, f"{ratio:.2f}"))
    named = ("", "", "quantized layers", "adapters", "attention", "graphs, breaks")
    header = (*named, "loss, stock", "loss, qfuse", "time, qfuse / stock")
    return f"{table(header, body)}\n\n{source(*files)}"


def memory() -> str:
    """Write one row for each peer and budget: the time of its step and the memory it takes."""
    name = "memory-h200"
    if not exists(name):
        return "Not measured yet (`python -m benchmarks.bench_memory`)."
    columns = {
        "peak": "peak_bytes",
        "planned": "planned_bytes",
        "of it transient": "transient_bytes",
        "computed again": "recomputed_bytes",
        "offloaded": "offloaded_bytes",
    }
    rows = result(name)["rows"]
    if not any("offloaded_bytes" in each["extra"] for each in rows):
        del columns["offloaded"]
    body = []
    for each in rows:
        sizes = (each["extra"].get(key) for key in columns.values())
        shown = ("" if size is None else gb(size) for size in sizes)
        peer = each["peer"].replace("inductor", "stock Inductor")
        body.append((peer, ms(seconds(name, each["peer"])), *shown))
    header = ("", "step", *columns)
    return f"{table(header, body)}\n\n{source(name)}"


def memory_over_plan() -> str:
    """Say by how much measured peaks exceed the planned ones at most."""
    found = [each["extra"] for each in result("memory-h200")["rows"]]
    planned = [each for each in found if "planned_bytes" in each]
    return percent(max(e["peak_bytes"] / e["planned_bytes"] for e in planned) - 1)


def _steps(files: dict[str, str]) -> str:
    body: list[Sequence[str]] = []
    for name, what in files.items():
        times = [seconds(name, peer) for peer in PEERS]
        body.append((what, "step", *map(ms, times), f"{times[2] / times[1]:.2f}"))
        for key, label, shown in (
            ("peak_bytes", "peak memory", gb),
            ("compile_s", "cold compile", lambda value: f"{number(value)} s"),
        ):
            values = [row(name, peer)["extra"].get(key) for peer in PEERS]
            if values[2] is not None:
                ratio = f"{values[2] / values[1]:.2f}"
                body.append(("", label, *(shown(v) if v else "" for v in values), ratio))
        deviations = [percent(extra(name, peer, "loss_deviation"), 2) for peer in PEERS[1:]]
        steps = result(name)["settings"]["loss_steps"]
        body.append(("", f"loss, largest deviation in {steps} steps", "", *deviations, ""))
        if "graph_lengths" in result(name)["settings"]:
            lengths = len(result(name)["settings"]["graph_lengths"])
            counts = [row(name, peer)["extra"] for peer in PEERS[1:]]
            both = [f"{each['graphs']}, {each['breaks']}" for each in counts]
            body.append(("", f"graphs over {lengths} lengths, graph breaks", "", *both, ""))
        elif "breaks" in row(name, "qfuse")["extra"]:
            breaks = (str(row(name, peer)["extra"]["breaks"]) for peer in PEERS[1:])
            body.append(("", "graph breaks", "", *breaks, ""))
        share = [percent(row(name, peer)["roof_fraction"]) for peer in PEERS]
        body.append(("", "share of the roof", *share, ""))
    header = ("", "", "eager", "stock Inductor", "qfuse", "qfuse / stock")
    return f"{table(header, body)}\n\n{source(*files)}"


def recipe() -> str:
    name = "recipe-300-h200"
    peers = ("inductor", "qfuse", "broken")
    rates = {peer: row(name, peer)["extra"]["steps_per_s"] for peer in peers}
    body = []
    for turn, order in enumerate(("stock, qfuse, `broken`", "`broken`, qfuse, stock")):
        stock, ours, broken = (rates[peer][turn] for peer in peers)
        shown = [f"{value:.2f}" for value in (stock, ours, broken, ours / stock, ours / broken)]
        body.append((order, *shown))
    deviations = (percent(extra(name, peer, "loss_deviation"), 2) for peer in peers[1:])
    body.append(("loss, largest deviation from stock", "", *deviations, "", ""))
    shares = (percent(row(name, peer)["roof_fraction"]) for peer in peers)
    body.append(("share of the roof", *shares, "", ""))
    header = ("steps per second, in the order", "stock Inductor", "qfuse", "`broken`")
    return f"{table((*header, 'qfuse / stock', 'qfuse / `broken`'), body)}\n\n{source(name)}"


def recipe_graphs() -> str:
    """Show a sixth of the same model in one graph, with and without CUDA graphs."""
    name = "recipe_graphs-h100"
    peers = {"inductor": "stock Inductor", "qfuse": "qfuse", GRAPHS: "qfuse, CUDA graphs"}
    body = [
        (
            label,
            ms(seconds(name, peer)),
            f"{seconds(name, peer) / seconds(name, 'inductor'):.2f}",
            f"{extra(name, peer, 'compile_s'):.1f} s",
            percent(row(name, peer)["roof_fraction"]),
            percent(extra(name, peer, "loss_deviation"), 2),
        )
        for peer, label in peers.items()
    ]
    header = ("", "a step", "of stock Inductor's", "first step", "share of the roof")
    return f"{table((*header, 'loss, deviation from stock'), body)}\n\n{source(name)}"


#: The peer in CUDA graphs.
GRAPHS = "qfuse[triton.cudagraphs=True]"


def scripts(*names: str) -> str:
    """Show the scripts in examples/, each a process: steps, memory, loss, and what compiling takes
    unless they compiled side by side."""
    called = {
        "eager": "eager",
        "eager[no cuDNN]": "eager, without cuDNN",
        "inductor": "stock Inductor",
        "inductor[no cuDNN]": "stock Inductor, without cuDNN",
        "inductor[CUDA graphs]": "stock Inductor, CUDA graphs",
        "qfuse": "qfuse",
        "qfuse[CUDA graphs]": "qfuse, CUDA graphs",
        "qfuse[qfuse.thresholds=recompute_products.max_kept=0]": "qfuse, no product kept",
        "qfuse[cpp_wrapper=True]": "qfuse, `cpp_wrapper`",
        CASTS_APART: "qfuse, without `cast_together`",
    }
    body = []
    for name in names:
        beside = result(name)["settings"].get("together")
        for case in cases(name):
            for peer in called:
                if not rows(name, peer, **case):
                    continue
                found = row(name, peer, **case)
                told = found["extra"]
                off = told.get("loss_deviation")
                if case["script"] == "DPO":  # relative to a loss that falls to nothing
                    off = None
                start = "" if told.get("cold", True) else ", caches"
                tensors = told.get("allocated_bytes")
                body.append(
                    (
                        case["script"],
                        called[peer],
                        ms(found["timing"]["median"]),
                        ms(found["timing"]["best"]),
                        "" if beside else f"{told['compile_s']:.0f} s{start}",
                        gb(told["peak_bytes"]),
                        gb(tensors) if tensors else "",
                        "" if off is None else f"{off:.2%}".replace("%", " %"),
                    )
                )
    header = ("script", "", "a step", "the shortest", "compiling", "memory", "of it tensors")
    columns = zip((*header, "loss, largest deviation"), *body, strict=True)
    head, *lines = zip(*[column for column in columns if any(column[1:])], strict=True)
    return f"{table(head, lines)}\n\n{source(*names)}"


def walks() -> str:
    """Show what trainers call between forwards, by the number of layers."""
    name = "walks-cpu"
    calls = {
        "train": "`model.train()`",
        "num_parameters": "`model.num_parameters()`",
        "parameters": "`list(model.parameters())`",
        "zero_grad": "`model.zero_grad()`",
        "reference pass": "around a reference pass",
    }
    peers = ("trainer", "qfuse")

    def shown(value: float) -> str:
        return ms(value) if value > 1e-4 else us(value)

    body = [
        (
            f"{case['layers']} layers",
            calls[case["call"]],
            *(shown(seconds(name, peer, **case)) for peer in peers),
        )
        for case in cases(name)
    ]
    return f"{table(('', '', 'as it is', 'under `QfuseCallback`'), body)}\n\n{source(name)}"


def small() -> str:
    """Show a step that the host limits, with and without CUDA graphs, of two processes."""
    peers = {
        "eager": "eager",
        "inductor": "stock Inductor",
        "qfuse": "qfuse",
        "inductor[triton.cudagraphs=True]": "stock Inductor, CUDA graphs",
        GRAPHS: "qfuse, CUDA graphs",
    }
    names = ("step_small-h100", "step_small_graphs-h100")
    body = []
    for number_, name in enumerate(names, 1):
        stock = seconds(name, "inductor")
        for peer, label in peers.items():
            for found in rows(name, peer):
                taken, told = found["timing"]["median"], found["extra"]
                off = percent(told["loss_deviation"], 2) if "loss_deviation" in told else ""
                rate, share = f"{told['tokens_per_second']:,.0f}", percent(told["mfu"], 1)
                shown = (str(number_), label, ms(taken), f"{taken / stock:.2f}")
                body.append((*shown, rate, share, off))
    header = ("process", "", "a step", "of stock Inductor's", "tokens/s")
    more = ("share of a large product's rate", "loss, largest deviation from eager")
    shown_table = table((*header, *more), body)
    return "\n\n".join([shown_table, *map(source, names)])


def moe_step() -> str:
    name = "moe_model-h200"
    peers = ("eager", "inductor", "qfuse", "packed")
    measures: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("step", lambda r: ms(r["timing"]["median"])),
        ("peak memory", lambda r: gb(r["extra"]["peak_bytes"])),
        ("loss, largest deviation", lambda r: percent(r["extra"]["loss_deviation"], 2)),
        ("graph breaks", lambda r: str(r["extra"]["breaks"])),
        ("share of the roof", lambda r: percent(r["roof_fraction"])),
    )
    body = []
    for adapted in ("attention", "attention + experts"):
        found = [next(iter(rows(name, peer, **{"LoRA on": adapted})), None) for peer in peers]
        for index, (label, shown) in enumerate(measures):
            cells = ["" if r is None else shown(r) for r in found]
            if label.startswith("loss"):
                cells[0] = ""
            body.append((adapted if not index else "", label, *cells))
    header = ("LoRA on", "", "eager", "stock Inductor", "qfuse, model untouched")
    return f"{table((*header, 'qfuse, `experts.quantize`'), body)}\n\n{source(name)}"
