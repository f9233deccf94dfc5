"""The plan of `qfuse tune`: one change at a time, and none that would do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config

from inductor_q import inductor_config
from inductor_q.presets import PRESETS, THRESHOLDS
from inductor_q.tuning import plan
from inductor_q.tuning.plan import Condition
from inductor_q.tuning.runs import Run

SIZES = {"rows": 128, "positions": 64, "logits": 128 * 264}


def base(sites: dict[str, tuple[int, int]] | None = None, sizes: Any = SIZES) -> Run:
    return Run(condition="base", sites=sites or {}, sizes=sizes)


def changes(device: str, preset: str, run: Run, **more: Any) -> dict[str, dict[str, Any]]:
    tried, _ = plan.singles(device, PRESETS[preset], run, **more)
    return {condition.name: dict(condition.changes) for condition in tried}


def test_a_gpu_gets_what_is_off_by_default() -> None:
    # Inductor's configuration is the process's, and another test may have left a knob on.
    names = ("coordinate_descent_tuning", "coordinate_descent_check_all_directions")
    with torch._inductor.config.patch(dict.fromkeys((*names, "triton.cudagraphs"), False)):
        tried = changes("cuda", "sm_90", base())
        for changed in tried.values():
            assert all(inductor_config.current(name) is not True for name in changed)
    assert tried["triton.cudagraphs"] == {
        "triton.cudagraph_skip_dynamic_graphs": True,  # one graph a length would take all memory
        "triton.cudagraphs": True,
    }
    assert tried["cpp_wrapper"] == {"cpp_wrapper": True}
    assert tried["coordinate_descent_check_all_directions"] == {
        "coordinate_descent_tuning": True,
        "coordinate_descent_check_all_directions": True,
    }


def test_a_cpu_gets_what_does_something_there() -> None:
    tried, left = plan.singles("cpu", PRESETS["cpu"], base())
    assert [c.name for c in tried] == ["max_autotune_gemm"]
    assert left["triton.cudagraphs"] == "is not tried on a device of type cpu"
    assert left["epilogue_fusion"] == "is on by default"
    assert left["extend_k.min_rows"] == "extend_k finds nothing to do in this step"
    assert {c.name for c in tried} | set(left) == {k.option for k in plan.KNOBS} | set(plan.SIZES)


def test_what_a_preset_knows_to_lose_is_left_out() -> None:
    _, left = plan.singles("cuda", PRESETS["sm_86"], base())
    assert left["max_autotune_gemm"].startswith("loses on sm_86: +13 %")


def test_knobs_and_thresholds_exist() -> None:
    schema = inductor_config.schema()
    assert {name for k in plan.KNOBS for name in (k.option, *k.needs)} <= set(schema)
    assert set(plan.SIZES) <= set(THRESHOLDS)


@pytest.mark.parametrize(
    ("preset", "sites", "sizes", "value"),
    [
        ("cpu", (0, 14), SIZES, 96),  # refused for few rows: from a little below what is measured
        ("cpu", (0, 14), {}, plan.ALWAYS),
        ("sm_90", (14, 0), {"rows": 2048}, 2049),  # done: just not for as many
        ("sm_90", (14, 0), {}, plan.NEVER),
        ("sm_90", (0, 14), {"rows": 2048}, None),  # refused for another reason
        ("cpu", (14, 0), SIZES, None),  # done whatever the threshold
    ],
)
def test_a_threshold_moves_to_the_size_at_hand(
    preset: str, sites: tuple[int, int], sizes: dict[str, int], value: int | None
) -> None:
    tried = changes("cpu", preset, base({"extend_k": sites}, sizes))
    assert tried.get("extend_k.min_rows", {}).get("extend_k.min_rows") == value


def test_eight_bits_only_where_asked_for() -> None:
    assert "qfuse.compute=fp8" not in changes("cuda", "sm_90", base())
    tried = changes("cuda", "sm_90", base(), compute=["fp8"])
    assert tried["qfuse.compute=fp8"] == {"qfuse.compute": "fp8"}
    assert not plan.may_last(Condition("x", {"qfuse.compute": "fp8"}))
    assert plan.may_last(Condition("x", {"kernels.dequantize": "triton", "extend_k.min_rows": 1}))


def test_providers_that_could_serve_and_did_not() -> None:
    run = Run(condition="base", providers={"dequantize": {"cpp": 3}, "extend": {"x": 1}})
    assert changes("cpu", "cpu", run)["kernels.dequantize=inductor"] == {
        "kernels.dequantize": "inductor"
    }
    by_both = Run(condition="base", providers={"dequantize": {"cpp": 3, "inductor": 1}})
    assert not [name for name in changes("cpu", "cpu", by_both) if name.startswith("kernels.")]


def test_winners_together_have_all_changes_and_the_last_one_decides() -> None:
    both = plan.together([Condition("a", {"x": 1, "y": 1}), Condition("b", {"y": 2})])
    assert dict(both.changes) == {"x": 1, "y": 2}
