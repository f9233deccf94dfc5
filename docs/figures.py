"""Read every measured figure of the documents from its file in benchmarks/results.

`docs.generate` writes what the functions of `TABLES` return between `<!-- figures NAME -->` and
`<!-- end -->`, and what those of `VALUES` return between `<!-- figure NAME -->` and `<!-- / -->`
inside a sentence. So `make docs` follows when something is measured again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import origin
from benchmarks.place import RESULTS

#: A reader has to know this about a file, for as long as the file is of that commit.
REMARKS = {
    **dict.fromkeys(
        (("linear-h200", "def9296"), ("linear-cpu", "def9296")),
        "A pass for inputs of two dimensions took part, which is gone since.",
    ),
    ("moe_providers-h200", "735648a"): "The provider `cuda` has become faster since.",
}

Row = dict[str, Any]


# --- reading ----------------------------------------------------------------------------


@functools.cache
def result(name: str) -> Row:
    """Return the result in a file; raise where the file does not say where it comes from."""
    return origin.read(RESULTS / f"{name}.json")


def exists(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def rows(name: str, peer: str | None = None, **case: Any) -> list[Row]:
    """Return the rows of a file whose case has these values."""
    return [
        row
        for row in result(name)["rows"]
        if peer in (None, row["peer"])
        and all(row["case"][key] == value for key, value in case.items())
    ]


def row(name: str, peer: str, **case: Any) -> Row:
    found = rows(name, peer, **case)
    assert len(found) == 1, f"{len(found)} rows of {peer} with {case} in {name}.json"
    return found[0]


def seconds(name: str, peer: str, **case: Any) -> float:
    value: float = row(name, peer, **case)["timing"][result(name)["settings"]["statistic"]]
    return value


def extra(name: str, peer: str, key: str, **case: Any) -> float:
    value: float = row(name, peer, **case)["extra"][key]
    return value


def cases(name: str) -> list[Row]:
    found: list[Row] = []
    for each in result(name)["rows"]:
        if each["case"] not in found:
            found.append(each["case"])
    return found


# --- writing ----------------------------------------------------------------------------


def number(value: float) -> str:
    """Write three digits, more where there are more before the point."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def ms(value: float) -> str:
    return f"{number(1e3 * value)} ms"


def us(value: float) -> str:
    return f"{number(1e6 * value)} us"


def gb(value: float) -> str:
    return f"{number(value / 1e9)} GB"


def mb(value: float) -> str:
    return f"{value / 1e6:.0f} MB"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(*names: str) -> str:
    """Write the line under a table: the file, the machine, the versions, the commit."""
    lines = []
    for name in names:
        found = result(name)
        versions, id = found["versions"], found["commit"]["id"][:7]
        triton = f", triton {versions['triton']}" if "cuda" in found["machine"] else ""
        line = (
            f"[{name}.json](../benchmarks/results/{name}.json): {found['machine']['name']}, torch "
            f"{versions['torch']}{triton}, {found['created'][:10]}, commit {id} "
            f"({origin.state(found)})."
        )
        lines.append(" ".join(filter(None, (line, REMARKS.get((name, id))))))
    return "\n\n".join(lines)


# --- steps ------------------------------------------------------------------------------

PEERS = ("eager", "inductor", "qfuse")
STEP = {
    "step-h200": "H200, 8 layers",
    "step-8b-h200": "H200, all 36 layers",
    "step-cpu": "CPU",
    "step-repeat-cpu": "CPU, over 24 rounds",
}
#: What trainers run, and what bench_step calls the bare recipe.
RECIPES = {
    "step_trainer-h200": "a trainer's defaults, 4 layers, 2 x 2048 tokens",
    "step_packed-h200": "packed documents, checkpointing, 8 layers, 1 x 8192 tokens",
}
#: Other projects' kernels, and the step of Surogate's published rates; shown once measured.
RATES = {
    "step_trainer-h200": "a trainer's defaults",
    "step_packed-h200": "packed documents, checkpointing",
    "step_surogate-h200": "Surogate's step",
    "step_surogate-checkpointed-h200": "Surogate's step, checkpointing",
}
BARE = {"step-h200": "bare, 8 layers, 2 x 2048 tokens"}


PEER_NAMES = {
    "inductor": "stock Inductor",
    "axolotl": "axolotl's kernels, eager",
    "unsloth": "unsloth's kernels, eager",
}


def readme_step() -> str:
    body: list[Sequence[str]] = []
    for name, what in {**RECIPES, **BARE}.items():
        body += [
            (what, "time per step", *(ms(seconds(name, peer)) for peer in PEERS)),
            ("", "peak memory", *(gb(extra(name, peer, "peak_bytes")) for peer in PEERS)),
        ]
    return table(("", "", "eager", "stock Inductor", "qfuse"), body)


def step() -> str:
    return _steps(STEP)


def recipes() -> str:
    return _steps(RECIPES)


def rates() -> str:
    """Draw one row of each peer of a recipe; MFU and breaks of results that have them."""
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


def families() -> str:
    """One row of each case and machine: what of it has qfuse's form, and its time over stock's."""
    files = [name for name in ("families-h200", "families-cpu") if exists(name)]
    if not files:
        return "Not measured yet (`python -m benchmarks.bench_families`)."
    body: list[Sequence[str]] = []
    for name in files:
        where = {"families-h200": "H200", "families-cpu": "CPU"}[name]
        for case in cases(name):
            ours, stock = (row(name, peer, **case)["extra"] for peer in ("qfuse", "inductor"))
            parts = (ours[key] for key in ("layers", "adapters", "attention"))
            graphs = f"{ours['graphs']}, {ours['breaks']}"
            deviations = (percent(each["loss_deviation"], 2) for each in (stock, ours))
            ratio = seconds(name, "qfuse", **case) / seconds(name, "inductor", **case)
            body.append((where, case["case"], *parts, graphs, *deviations, f"{ratio:.2f}"))
    named = ("", "", "quantized layers", "adapters", "attention", "graphs, breaks")
    header = (*named, "loss, stock", "loss, qfuse", "time, qfuse / stock")
    return f"{table(header, body)}\n\n{source(*files)}"


def memory() -> str:
    """Draw one row of each peer and budget: the step's time over what it takes."""
    name = "memory-h200"
    if not exists(name):
        return "Not measured yet (`python -m benchmarks.bench_memory`)."
    body = []
    for each in result(name)["rows"]:
        found, peer = each["extra"], each["peer"].replace("inductor", "stock Inductor")
        planned, again = (found.get(key) for key in ("planned_bytes", "recomputed_bytes"))
        sizes = (found["peak_bytes"], planned, found["transient_bytes"], again)
        shown = ("" if size is None else gb(size) for size in sizes)
        body.append((peer, ms(seconds(name, each["peer"])), *shown))
    header = ("", "step", "peak", "planned", "of it transient", "computed again")
    return f"{table(header, body)}\n\n{source(name)}"


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
        if "breaks" in row(name, "qfuse")["extra"]:
            lengths = len(result(name)["settings"]["graph_lengths"])
            counts = [row(name, peer)["extra"] for peer in PEERS[1:]]
            both = [f"{each['graphs']}, {each['breaks']}" for each in counts]
            body.append(("", f"graphs over {lengths} lengths, graph breaks", "", *both, ""))
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


# --- one weight, one linear ---------------------------------------------------------------


def linear(name: str) -> str:
    body = []
    for case in cases(name):
        alone, eager, stock, ours = (seconds(name, p, **case) for p in ("matmul", *PEERS))
        times = [number(1e6 * value) for value in (alone, eager, stock, ours)]
        ratios = [f"{ours / stock:.2f}", f"{ours / eager:.2f}"]
        what = {"fwd": "forward", "fwd+bwd": "forward and backward"}[case["pass"]]
        body.append((f"{case['N']} x {case['K']}", str(case["M"]), what, *times, *ratios))
    header = ("N x K", "rows", "", "bf16 product alone", "eager", "stock Inductor", "qfuse")
    return f"{table((*header, 'qfuse / stock', 'qfuse / eager'), body)}\n\n{source(name)}"


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


def few_rows() -> str:
    name, peers = "rows-h200", ("bitsandbytes", "decode", "dense", "qfuse")
    body = []
    for case in cases(name):
        if not rows(name, "qfuse", **case):
            continue
        times = [seconds(name, peer, **case) for peer in peers]
        ratios = [f"{times[3] / other:.2f}" for other in times[:3]]
        share = percent(row(name, "qfuse", **case)["roof_fraction"])
        shown = (case["shape"].replace("x", " x "), str(case["rows"]))
        body.append((*shown, *(number(1e6 * t) for t in times), *ratios, share))
    header = (
        "N x K",
        "rows",
        "bitsandbytes",
        "dequantize, then multiply",
        "a bf16 weight",
        "qfuse",
    )
    more = [f"qfuse / {other}" for other in ("bitsandbytes", "dequantize", "bf16")]
    return f"{table((*header, *more, 'qfuse, share of the roof'), body)}\n\n{source(name)}"


def decode() -> str:
    name, peers = "decode-h200", {"bf16": "bf16, stock", "inductor": "NF4, stock", "qfuse": "qfuse"}
    if not exists(name):
        return "Not measured yet (`python -m benchmarks.bench_decode`)."
    found = {r["peer"] for r in rows(name)}
    peers = {peer: label for peer, label in peers.items() if peer in found}
    *others, own = peers
    body = []
    for case in cases(name):
        times = {peer: seconds(name, peer, **case) for peer in peers}
        ratios = [f"{times[own] / times[peer]:.2f}" for peer in others]
        peaks = [gb(extra(name, peer, "peak_bytes", **case)) for peer in peers]
        errors = [percent(extra(name, peer, "error", **case), 1) for peer in peers]
        shown = (str(case["batch"]), case["LoRA"], *map(ms, times.values()))
        body.append((*shown, *ratios, *peaks, *errors))
    header = ("batch", "LoRA", *peers.values(), *(f"qfuse / {peers[p]}" for p in others))
    more = [f"{what}, {label}" for what in ("peak", "error") for label in peers.values()]
    return f"{table((*header, *more), body)}\n\n{source(name)}"


def sharded() -> str:
    """Show a step under FSDP2 on two GPUs, of which each peer ran by itself."""
    name, peers = "ranks-h200", {"inductor": "stock Inductor", "qfuse": "qfuse"}
    what = {"peak_bytes": ("peak memory of a rank", gb), "exposed_s": ("NCCL alone", ms)}
    body = [("step", *(ms(seconds(name, peer)) for peer in peers))]
    for key, (label, shown) in what.items():
        body.append((label, *(shown(extra(name, peer, key)) for peer in peers)))
    body += [(key, *(str(extra(name, p, key)) for p in peers)) for key in ("graphs", "breaks")]
    return f"{table(('', *peers.values()), body)}\n\n{source(name)}"


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


# --- mixtures of experts ------------------------------------------------------------------


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


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme_step,
    "step": step,
    "recipes": recipes,
    "rates": rates,
    "recipe": recipe,
    "families": families,
    "memory": memory,
    "linear-h200": lambda: linear("linear-h200"),
    "linear-cpu": lambda: linear("linear-cpu"),
    "moe-step": moe_step,
    "dequantize-h200": lambda: dequantize("dequantize-h200"),
    "dequantize-cpu": lambda: dequantize("dequantize-cpu"),
    "few-rows": few_rows,
    "decode": decode,
    "sharded": sharded,
    "kbit": kbit,
    "attention": attention,
    "launch": launch,
    "explain": explain,
    "quality-cpu": lambda: quality("cpu"),
    "quality-h200": lambda: quality("h200"),
    "moe-providers": providers,
    "moe": moe,
    "moe-ranks": ranks,
    "moe-layers": expert_layers,
    "moe-parallel": expert_parallel,
    "moe-qlora": qlora,
}

VALUES: dict[str, Callable[[], str]] = {
    "attention.mask": lambda: ms(seconds("attention-h200", "mask")),
    "attention.causal": lambda: ms(seconds("attention-h200", "causal")),
    "attention.grouped": lambda: ms(seconds("attention-h200", "grouped")),
    "launch.qfuse": lambda: us(seconds("launch-h200", "qfuse")),
    "launch.runner": lambda: us(seconds("launch-h200", "runner")),
    "launch.jit": lambda: us(seconds("launch-h200", "jit")),
    "launch.bitsandbytes": lambda: us(seconds("launch-h200", "bitsandbytes")),
    "moe.merged": merged_is_slowest,
    "accumulate.without": lambda: ms(seconds("step-repeat-cpu", "qfuse[qfuse.passes=-accumulate]")),
    "accumulate.with": lambda: ms(seconds("step-repeat-cpu", "qfuse")),
    "quality.nested": nested_over_kbit4,
    "quality.fp16": fp16_over_e4m4,
    "quality.scale.mean": lambda: scale_error("mean"),
    "quality.scale.p95": lambda: scale_error("p95"),
    "qlora.peak": lambda: f"{result('moe_qlora-qwen3-30b-a3b-busy-h200')['peak_gb']:.0f} GB",
}
