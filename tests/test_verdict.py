"""The verdict on each quantized layer: `qfuse.strict`, the summary and `explain` say the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inductor_q
from inductor_q import testing
from inductor_q.diagnostics import observe
from inductor_q.diagnostics.explanation import Explanation, Layer
from inductor_q.exc import NotFused
from inductor_q.graph_report import PassRecord, Report, SiteRecord
from inductor_q.passes import PIPELINE
from inductor_q.passes.runner import CAPTURED
from inductor_q.verdict import (
    ALL_OFF,
    CAPTURED_PASSES,
    LOST,
    SOME_OFF,
    UNKNOWN,
    UNREWRITTEN,
    UNWRAP,
)
from tests.support.packed import BF16, Fp8, Gptq, bnb_4bit, bnb_8bit, torchao_int8


class Net(nn.Module):
    """A quantized layer that a graph multiplies with, and a parameter that trains."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(64, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x * self.scale)
        return y.relu()


def x_MK(rows: int = 16) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).to(BF16)


def strict(
    layer: nn.Module, *, train: bool = False, rows: int = 16, **options: Any
) -> tuple[NotFused | None, Explanation]:
    """What strict says of a compile, and what explain says of it."""
    torch._dynamo.reset()
    gc.collect()  # else explain sees the layers of errors that were raised before
    given = {f"qfuse.{name}": value for name, value in options.items()}
    net: Any = torch.compile(
        Net(layer),
        backend=testing.qfuse_backend(),
        options={"qfuse.strict": True, "fx_graph_cache": False, **given},
    )
    error = None
    with observe() as observation, torch.set_grad_enabled(train):
        try:
            net(x_MK(rows))
        except torch._dynamo.exc.BackendCompilerFailed as failed:
            assert isinstance(failed.inner_exception, NotFused)
            error = failed.inner_exception
    return error, observation.explanation()


def the_layer(run: Explanation) -> Layer:
    (layer,) = (one for one in run.layers if one.module == "layer")
    return layer


STRANGE: dict[str, Callable[[], nn.Module]] = {
    "gptq": Gptq,
    "fp8": Fp8,
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_strict_refuses_what_no_pass_knows(make: Callable[[], nn.Module]) -> None:
    error, run = strict(make())
    assert error is not None and error.sites == (("layer", UNKNOWN),)
    report = inductor_q.last_report()
    assert report is not None
    assert "0 of 1 quantized layer fused" in report.summary()
    assert (the_layer(run).status, the_layer(run).reason) == ("rejected", UNKNOWN)


def test_strict_refuses_what_is_only_not_saved() -> None:
    """In training keep_packed applies to every library; nothing is fused by that."""
    error, run = strict(Fp8().requires_grad_(False), train=True)
    assert error is not None and error.sites == (("layer", UNREWRITTEN),)
    assert the_layer(run).status == "canonical"


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        ("none", ALL_OFF),
        ({"canonicalize": False}, SOME_OFF.format("canonicalize")),
    ],
)
def test_strict_refuses_what_passes_that_are_off_would_fuse(passes: Any, reason: str) -> None:
    error, run = strict(bnb_4bit(), passes=passes)
    assert error is not None and error.sites == (("layer", reason),)
    assert "NF4" not in str(error)
    assert (the_layer(run).status, the_layer(run).format) == ("rejected", "nf4")


@pytest.mark.parametrize("make", [bnb_4bit, bnb_8bit, torchao_int8])
def test_strict_takes_what_is_fused(make: Callable[[], nn.Module]) -> None:
    error, run = strict(make())
    assert error is None
    assert the_layer(run).status == "fused"


#: Neither a kernel of few rows nor a decode serves 2 rows.
LEFT = {"canonicalize.min_rows": 4, "linear_rows.max_rows": 0}


def test_a_layer_that_a_threshold_leaves_to_its_library() -> None:
    """It is nothing that could not be fused, and it is not fused."""
    error, run = strict(bnb_4bit(), rows=2, thresholds=LEFT)
    assert error is None
    assert the_layer(run).status == "left"
    assert the_layer(run).reason.startswith("2 rows, fewer than canonicalize.min_rows=4")
    assert run.fused_share == 0
    report = inductor_q.last_report()
    assert report is not None
    assert "0 of 1 quantized layer fused, 1 left to its library" in report.summary()


# --- of a report --------------------------------------------------------------------------------

APPLIED = SiteRecord("canonicalize", "gemm_4bit", module="a.q_proj")
ADAPTER = SiteRecord("extend_k", "mm", module="a.q_proj.lora_A.default", rejected="float32")


def test_an_adapter_is_part_of_its_layer() -> None:
    report = Report(sites=[APPLIED, ADAPTER], weights=["a.q_proj", "a.k_proj"])
    found = report.verdicts()
    assert {name: (v.status, v.reason) for name, v in found.items()} == {
        "a.q_proj": ("canonical", "float32"),
        "a.k_proj": ("rejected", UNKNOWN),
    }


def test_weights_of_one_module_may_share_its_sites() -> None:
    site = SiteRecord("fuse_scatter2scatter", "bmm", module="a.experts")
    weights = ["a.experts.up_proj", "a.experts.down_proj"]
    found = Report(sites=[site], weights=weights).verdicts()
    assert [(name, v.status) for name, v in found.items()] == [("a.experts", "fused")]


def test_a_lost_report_judges_nothing() -> None:
    report = Report(weights=["a.q_proj"], cached=True, lost=True)
    assert report.verdicts()["a.q_proj"].reason == LOST
    assert "what became of 1 quantized layer is not known" in report.summary()


def test_a_pass_over_attention_counts_for_no_layer() -> None:
    captured = {step.name for step in PIPELINE if step.stage == CAPTURED}
    assert captured == {*CAPTURED_PASSES, UNWRAP}
    site = SiteRecord("causal_attention", "sdpa", module="a")
    ran = [PassRecord("causal_attention", 1, 0.0)]
    off = [step.name for step in PIPELINE if step.stage != CAPTURED]
    report = Report(sites=[site], passes=ran, weights=["a.q_proj"], off=off)
    assert {name: v.reason for name, v in report.verdicts().items()} == {"a.q_proj": ALL_OFF}
