"""Options that do not go together, here or on this GPU: an error, or a word to the log."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import compile_fx

from inductor_q.options import resolve
from tests.support.resolving import CPU, on_cpu

pytestmark = pytest.mark.usefixtures("default_options")

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(capability: tuple[int, int], memory: float = 80e9) -> None:
        properties = SimpleNamespace(total_memory=int(memory))
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return install


@pytest.mark.parametrize(
    ("mode", "given", "who"),
    [
        (None, {"triton.cudagraphs": True}, "user"),
        ("reduce-overhead", None, "mode reduce-overhead"),
    ],
)
def test_cudagraphs_with_dynamic_shapes(
    gpu: Callable[..., None],
    told: list[str],
    mode: str | None,
    given: dict[str, Any] | None,
    who: str,
) -> None:
    gpu((9, 0))
    for _ in range(3):
        resolve(mode, given, device=CUDA, dynamic=True)
    assert len(told) == 1
    assert told[0].startswith(f"triton.cudagraphs ({who}) with dynamic shapes records one graph")


def test_no_conflict_with_cudagraphs(gpu: Callable[..., None], told: list[str]) -> None:
    gpu((9, 0))
    graphs = {"triton.cudagraphs": True}
    resolve(None, graphs, device=CUDA, dynamic=False)
    resolve(None, graphs, device=CPU, dynamic=True)
    skipping = {**graphs, "triton.cudagraph_skip_dynamic_graphs": True}
    resolve(None, skipping, device=CUDA, dynamic=True)
    resolve("reduce-overhead", {"triton.cudagraphs": False}, device=CUDA, dynamic=True)
    assert told == []


def test_no_partitions_beside_cudagraphs(gpu: Callable[..., None], told: list[str]) -> None:
    """Unless somebody asks for both, and then it is said what they do together."""
    gpu((9, 0))
    graphs = {"triton.cudagraphs": True}
    for resolved in (
        resolve(None, graphs, device=CUDA),
        resolve("reduce-overhead", None, device=CUDA),
    ):
        assert resolved.inductor["graph_partition"] is False
        assert resolved.sources["graph_partition"] == "qfuse"
    for given in (None, {**graphs, "cpp_wrapper": True}):
        assert "graph_partition" not in resolve(None, given, device=CUDA).inductor
    with torch._inductor.config.patch(graphs):
        assert resolve(None, None, device=CUDA).inductor["graph_partition"] is False
    assert told == []
    both = resolve(None, {**graphs, "graph_partition": True}, device=CUDA)
    assert both.inductor["graph_partition"] is True
    (message,) = told
    assert message.startswith("graph_partition (user) with triton.cudagraphs (user) gives wrong")


def test_in_fp8_no_buffer_waits_for_another_use(gpu: Callable[..., None]) -> None:
    gpu((9, 0))
    reuse, fp8 = "allow_buffer_reuse", {"qfuse.compute": "fp8"}
    resolved = resolve(None, fp8, device=CUDA)
    assert (resolved.inductor[reuse], resolved.sources[reuse]) == (False, "qfuse")
    resolved = resolve(None, {**fp8, reuse: True}, device=CUDA)
    assert (resolved.inductor[reuse], resolved.sources[reuse]) == (True, "user")
    for given, device in (({"qfuse.compute": "int8"}, CUDA), (None, CUDA), (fp8, CPU)):
        assert reuse not in resolve(None, given, device=device).inductor


BY_CPP = {"triton.store_cubin": True, "triton.autotune_at_compile_time": True}


@pytest.fixture
def forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch set what the C++ wrapper needs for forward alone, as torch 2.11 does."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda gm, inputs: gm)


def _of_triton(given: dict[str, Any] | None, device: torch.device = CUDA) -> dict[str, Any]:
    """Return the keys of Triton that are set, and see that qfuse is named for those of its own."""
    resolved = resolve(None, given, device=device)
    found = {name: value for name, value in resolved.inductor.items() if name in BY_CPP}
    for name in found:
        assert resolved.sources[name] == ("user" if name in (given or {}) else "qfuse")
    return found


@pytest.mark.usefixtures("forward_alone")
def test_backward_under_the_cpp_wrapper(gpu: Callable[..., None]) -> None:
    gpu((9, 0))
    assert _of_triton({"cpp_wrapper": True}) == BY_CPP
    with torch._inductor.config.patch({"cpp_wrapper": True}):
        assert _of_triton(None) == BY_CPP
    for given in (None, {"cpp_wrapper": False}):
        assert _of_triton(given) == {}
    assert _of_triton({"cpp_wrapper": True}, CPU) == {}


@pytest.mark.usefixtures("forward_alone")
def test_what_the_user_sets_beside_the_cpp_wrapper(gpu: Callable[..., None]) -> None:
    gpu((9, 0))
    by_hand = {"triton.autotune_at_compile_time": False}
    assert _of_triton({"cpp_wrapper": True, **by_hand}) == {**BY_CPP, **by_hand}
    with torch._inductor.config.patch(by_hand):
        assert _of_triton({"cpp_wrapper": True}) == {**BY_CPP, **by_hand}


def test_a_torch_that_sets_up_each_graph(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0))

    def compiled(gm: Any, inputs: Any) -> Any:
        return compile_fx.get_cpp_wrapper_config()

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compiled)
    assert _of_triton({"cpp_wrapper": True}) == {}


def test_conflict_with_a_global_setting(gpu: Callable[..., None], told: list[str]) -> None:
    gpu((9, 0))
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        resolve(None, None, device=CUDA, dynamic=True)
    assert told[0].startswith("triton.cudagraphs (torch's own configuration) with dynamic shapes")


@pytest.mark.parametrize(
    ("mode", "given", "told_of"),
    [
        (None, {"max_autotune_gemm": True}, "max_autotune_gemm=True (user)"),
        ("max-autotune-no-cudagraphs", None, "max_autotune=True (mode max-autotune-no-cudagraphs)"),
        (None, dict.fromkeys(("max_autotune_gemm", "max_autotune"), True), "max_autotune_gemm"),
    ],
)
def test_autotuning_loses_on_sm_86(
    gpu: Callable[..., None],
    told: list[str],
    mode: str | None,
    given: dict[str, Any] | None,
    told_of: str,
) -> None:
    gpu((8, 6))
    for _ in range(2):
        resolved = resolve(mode, given, device=CUDA)
    assert len(told) == 1
    assert told[0].startswith(told_of)
    assert "loses on sm_86: +13 % step time" in told[0]
    assert any(resolved.inductor.get(name) for name in ("max_autotune_gemm", "max_autotune"))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0)], ids=str)
def test_no_fp8_before_sm_89(
    gpu: Callable[..., None], told: list[str], capability: tuple[int, int]
) -> None:
    """It is said once, with what there is instead; int8 is for all of them."""
    gpu(capability)
    for compute in ("fp8", "fp8", "int8", "bf16"):
        resolve(None, {"qfuse.compute": compute}, device=CUDA)
    said = (
        "qfuse.compute='fp8' (user) has no effect: sm_{}{} has no FP8 (sm_89 is the first): "
        "qfuse.compute='int8' computes in eight bits there"
    )
    assert told == ([said.format(*capability)] if capability < (8, 9) else [])


def test_eight_bits_under_strict_numerics(told: list[str]) -> None:
    on_cpu({"qfuse.compute": "int8", "qfuse.numerics": "strict"})
    assert told == [
        "qfuse.compute='int8' (user) has no effect: qfuse.numerics is 'strict', under which "
        "products stay as they are"
    ]


def test_autotuning_wants_memory_on_sm_120(gpu: Callable[..., None], told: list[str]) -> None:
    given = {"max_autotune_gemm": True}
    gpu((12, 0), memory=33.7e9)  # what a card sold as 32 GB reports
    resolve(None, given, device=CUDA)
    assert told == []
    gpu((12, 0), memory=16.6e9)
    for _ in range(2):
        resolve(None, given, device=CUDA)
    assert len(told) == 1
    assert told[0].startswith(
        "max_autotune_gemm (user) may not fit in the 16.6 GB of this device: -2.57 % step time"
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 1)], ids=str)
def test_no_evidence_no_conflict(
    gpu: Callable[..., None], told: list[str], capability: tuple[int, int]
) -> None:
    gpu(capability, memory=8e9)
    resolve("max-autotune-no-cudagraphs", None, device=CUDA)
    assert told == []


def test_canonicalize_without_keep_packed(told: list[str]) -> None:
    for _ in range(2):
        on_cpu({"qfuse.passes": "-keep_packed"})
    on_cpu({"qfuse.passes": "-keep_packed,-canonicalize"})
    assert len(told) == 1
    assert "canonicalize without keep_packed saves every dequantized weight" in told[0]


def test_exclusions_from_nothing(told: list[str]) -> None:
    on_cpu({"qfuse.compute": "fp8", "qfuse.compute.exclude": "*.down_proj"})
    assert told == []
    on_cpu({"qfuse.compute.exclude": "*.down_proj"})
    assert len(told) == 1
    assert told[0].startswith("qfuse.compute.exclude has no effect: qfuse.compute is 'bf16'")


def test_offloading_without_a_budget(told: list[str]) -> None:
    on_cpu({"qfuse.offload": True, "qfuse.memory": "1GB"})
    assert told == []
    on_cpu({"qfuse.offload": True})
    assert told == ["qfuse.offload has no effect without qfuse.memory: there is no budget to keep"]
