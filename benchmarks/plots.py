"""Draw pictures of results from their files: ``python -m benchmarks plot FILE...``.

A picture carries a fingerprint of the figures that it shows, so that a test can find one that was
drawn from figures of another day.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import origin

KEYWORD = "Figures"  # of the text chunk that holds the fingerprint


def fingerprint(result: Mapping[str, Any]) -> str:
    """Digest everything in a result but its commit, of which more may be known later."""
    figures = {key: value for key, value in result.items() if key != "commit"}
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()


def shown_in(picture: bytes) -> str | None:
    """Return the fingerprint that a PNG carries."""
    place = 8
    while place < len(picture):
        length = int.from_bytes(picture[place : place + 4], "big")
        kind, data = picture[place + 4 : place + 8], picture[place + 8 : place + 8 + length]
        key, _, value = data.partition(b"\0")
        if kind == b"tEXt" and key.decode() == KEYWORD:
            return value.decode()
        place += length + 12
    return None


def draw(result: Mapping[str, Any], path: Path) -> Path | None:
    """Draw a result that was read or has just been measured; None where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = KINDS.get(result["benchmark"], _bars)(pyplot, result)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={KEYWORD: fingerprint(result)})
    pyplot.close(figure)
    return path


def _bars(pyplot: Any, result: Mapping[str, Any]) -> Any:
    """Draw bars of time relative to the first peer."""
    statistic = result["settings"]["statistic"]
    rows: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        label = "\n".join(f"{key} {value}" for key, value in row["case"].items())
        rows.setdefault(label, {})[row["peer"]] = row
    peers = list(dict.fromkeys(row["peer"] for row in result["rows"]))
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 * len(rows) + 2), 4))
    width = 0.8 / len(peers)

    def seconds(row: Mapping[str, Any]) -> float:
        value: float = row["timing"][statistic]
        return value

    for index, peer in enumerate(peers):
        ratios = [
            seconds(of[peer]) / seconds(of[peers[0]])
            if peer in of and peers[0] in of
            else float("nan")
            for of in rows.values()
        ]
        places = [
            position + (index - (len(peers) - 1) / 2) * width for position in range(len(rows))
        ]
        axes.bar(places, ratios, width=width, label=peer)
    for position, of in enumerate(rows.values()):
        first = of.get(peers[0])
        if first is not None and first["roof"]:
            roof = first["roof"] / seconds(first)
            axes.hlines(roof, position - 0.45, position + 0.45, color="black", linestyle=":")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(rows)), list(rows), fontsize=7)
    axes.set_ylabel(f"time relative to {peers[0]} (dotted: roof)")
    axes.set_title(f"{result['benchmark']}, {result['machine']['name']}", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def _over_rows(pyplot: Any, result: Mapping[str, Any]) -> Any:
    """Draw time over rows of x by peer, one shape beside the other; dotted is the roof. Several
    formats stand one below the other.

    The time is that of a call in a graph, where such were measured, and otherwise of one alone.
    """
    statistic, rows = result["settings"]["statistic"], result["rows"]
    graphed = [row for row in rows if "graph_s" in row["extra"]]
    rows = graphed or rows
    formats = list(dict.fromkeys(row["case"].get("format", "") for row in rows))
    shapes = list(dict.fromkeys(row["case"]["shape"] for row in rows))
    sizes = (4.2 * len(shapes), 4 * len(formats))
    figure, grid = pyplot.subplots(len(formats), len(shapes), figsize=sizes, squeeze=False)
    peers = dict.fromkeys(row["peer"] for row in rows)
    colors = {peer: f"C{i}" for i, peer in enumerate(peers)}
    for axes, (format, shape) in zip(grid.flat, itertools.product(formats, shapes), strict=True):
        where = (format, shape)
        here = [r for r in rows if (r["case"].get("format", ""), r["case"]["shape"]) == where]
        for peer in dict.fromkeys(row["peer"] for row in here):
            of = [row for row in here if row["peer"] == peer]
            times = [row["extra"].get("graph_s", row["timing"][statistic]) for row in of]
            counts = [row["case"]["rows"] for row in of]
            color = colors[peer]
            axes.loglog(counts, [1e6 * t for t in times], "o-", c=color, markersize=3, label=peer)
        for roof in {row["roof"] for row in here}:
            axes.axhline(1e6 * roof, color="black", linestyle=":")
        axes.set_title(f"{format} {shape}".strip(), fontsize=9)
        axes.set_xlabel("rows")
    for axes in grid[:, 0]:
        axes.set_ylabel("microseconds (dotted: roof)")
    for axes in grid[:, -1]:
        axes.legend(fontsize=8)
    figure.suptitle(f"{result['benchmark']}, {result['machine']['name']}", fontsize=10)
    return figure


def _curves(pyplot: Any, result: Mapping[str, Any]) -> Any:
    """Draw held-out loss of bench_kbit_quality over bits per element, before and after training."""
    rows = {row["format"]: row for row in result["model"]["rows"]}
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for key, color, label in (
        ("before", "tab:red", "quantized"),
        ("after", "tab:blue", "after LoRA fine-tuning"),
    ):
        for name, row in rows.items():
            if name == "bf16":
                axes.axhline(row[key], color=color, linestyle=":", label=f"bf16, {label}")
            elif not name.startswith("kbit"):
                place = (row["bits_per_element"], row[key])
                axes.plot(*place, "s", color=color, fillstyle="none")
                axes.annotate(
                    name,
                    place,
                    xytext=(0, 7),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
        curve = [row for name, row in rows.items() if name.startswith("kbit")]
        bits = [row["bits_per_element"] for row in curve]
        axes.plot(bits, [row[key] for row in curve], "o-", color=color, label=f"k-bit, {label}")
    axes.set_xlabel("bits per element, scales included")
    axes.set_ylabel("loss on held-out text")
    axes.set_title(f"k-bit quality, {result['machine']['name']}", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def _eight_bits(pyplot: Any, result: Mapping[str, Any]) -> Any:
    """Draw bench_compute_quality, a row of three for each model: the loss over steps, how far it is
    from eager mode's under the same seed, and the cosine of adapters' gradients by layer.

    A curve is the mean over seeds, in the band of all of them.
    """
    models, steps = result["models"], result["settings"]["steps"]
    figure, grid = pyplot.subplots(
        len(models), 3, figsize=(13, 3.8 * len(models)), squeeze=False, width_ratios=(3, 3, 2)
    )
    for (losses, apart, cosines), model in zip(grid, models, strict=True):
        curves = {(run["variant"], run["seed"]): run["curve"] for run in model["runs"]}
        variants = list(dict.fromkeys(variant for variant, _ in curves))
        for color, variant in enumerate(variants):
            seeds = [seed for each, seed in curves if each == variant]
            of = [curves[variant, seed] for seed in seeds]
            _band(losses, of, steps, f"C{color}", variant)
            if variant != "eager":
                pairs = [zip(curves[variant, s], curves["eager", s], strict=True) for s in seeds]
                percents = [[100 * (loss / eager - 1) for loss, eager in pair] for pair in pairs]
                _band(apart, percents, steps, f"C{color}", variant)
                layers = model["cosines"][variant]["by_layer"]
                cosines.plot([*layers], [*layers.values()], "o-", color=f"C{color}", label=variant)
        apart.axhline(0.0, color="grey", linewidth=0.8)
        millions = model["shape"]["parameters"] / 1e6
        losses.set_ylabel(f"training loss, {millions:.1f} M parameters")
        apart.set_ylabel("% from eager mode, same seed")
        cosines.set_ylabel("gradients of adapters, cosine")
        for axes, below in ((losses, "step"), (apart, "step"), (cosines, "layer")):
            axes.set_xlabel(below)
            axes.legend(fontsize=8)
    seeds, name = result["settings"]["seeds"], result["machine"]["name"]
    figure.suptitle(f"products in eight bits, {seeds} seeds, {name}", fontsize=10)
    return figure


def _band(axes: Any, curves: Sequence[Sequence[float]], steps: int, color: str, label: str) -> None:
    """Draw the mean of curves whose points are each the mean of as many steps, and their range."""
    points = list(zip(*curves, strict=True))
    width = steps / len(points)
    places = [width * (i + 0.5) for i in range(len(points))]
    axes.fill_between(places, [*map(min, points)], [*map(max, points)], color=color, alpha=0.15)
    axes.plot(places, [*map(statistics.fmean, points)], color=color, linewidth=1, label=label)


#: The benchmarks that are not drawn as bars.
KINDS = {
    "bench_rows": _over_rows,
    "bench_kbit_quality": _curves,
    "bench_compute_quality": _eight_bits,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks plot", description=draw.__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    try:
        for path in parser.parse_args(argv).files:
            if picture := draw(origin.read(path), path.with_suffix(".png")):
                print(f"wrote {picture}")
    except origin.MissingOrigin as error:
        print(error)
        return 1
    return 0
