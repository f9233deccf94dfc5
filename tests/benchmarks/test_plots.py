"""Plots of committed results show what is in them."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from benchmarks import origin, plots  # noqa: E402
from benchmarks.place import RESULTS  # noqa: E402


def drawn_without_pyplot(name: str) -> Any:
    """Draw a committed result, and leave matplotlib's windows as they are."""
    matplotlib = pytest.importorskip("matplotlib.figure")
    result = origin.read(RESULTS / f"{name}.json")

    class Pyplot:
        @staticmethod
        def subplots(*args: Any, figsize: Any, **settings: Any) -> Any:
            figure = matplotlib.Figure(figsize=figsize)
            return figure, figure.subplots(*args, **settings)

    return plots.KINDS[result["benchmark"]](Pyplot, result)


def test_plot_of_products_in_eight_bits() -> None:
    [model] = origin.read(RESULTS / "compute_quality_large-h100.json")["models"]
    losses, apart, cosines = drawn_without_pyplot("compute_quality_large-h100").axes

    def drawn(axes: Any) -> dict[str, Any]:
        return {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}

    assert [*drawn(losses)] == ["eager", "bf16", "fp8"]
    assert [*drawn(apart)] == [*drawn(cosines)] == ["bf16", "fp8"]
    last = {(run["variant"], run["seed"]): run["curve"][-1] for run in model["runs"]}
    assert drawn(losses)["fp8"].get_xdata()[-1] == 495  # the middle of the last ten steps
    mean = statistics.fmean(last["fp8", seed] for seed in range(3))
    assert drawn(losses)["fp8"].get_ydata()[-1] == pytest.approx(mean)
    ratios = statistics.fmean(last["fp8", seed] / last["eager", seed] for seed in range(3))
    assert drawn(apart)["fp8"].get_ydata()[-1] == pytest.approx(100 * (ratios - 1))
    by_layer = model["cosines"]["fp8"]["by_layer"]
    assert [*drawn(cosines)["fp8"].get_ydata()] == [*by_layer.values()]


def test_plot_of_rows_has_each_format() -> None:
    figure = drawn_without_pyplot("rows_kbit_cuda-h100")
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 16
    assert titles[0] == "kbit2_e4m4 12288x4096" and titles[-1] == "kbit5_e4m4 1024x4096"
    lines = {line.get_label(): line for line in figure.axes[-1].lines}
    name, case = "rows_kbit_cuda-h100", {"format": "kbit5_e4m4", "shape": "1024x4096", "rows": 32}
    [row] = [
        row
        for row in origin.read(RESULTS / f"{name}.json")["rows"]
        if row["peer"] == "qfuse" and row["case"] == case
    ]
    assert [*lines["qfuse"].get_xdata()] == [1, 4, 8, 16, 32]
    assert lines["qfuse"].get_ydata()[-1] == pytest.approx(1e6 * row["extra"]["graph_s"])
