"""The backend from outside: how it is called, what it leaves alone, what it tells."""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse
from inductor_q.capture.bnb_graph import CPU_PACKED, overload, packs_anew
from inductor_q.capture.library import Refused
from inductor_q.diagnostics.observation import observe
from inductor_q.exc import NotFused, UnwritableOutput
from inductor_q.graph_report import Report
from tests.support.compiling import (
    ON_ANY_CPU,
    SMALL,
    Between,
    Recorder,
    compile_step,
    gradients,
    op_name,
    step,
)
from tests.support.processes import ROOT, environment
from tests.support.quantized import packs_on_cpu

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

BF16 = torch.bfloat16
N, K = 128, 64


def lora(adapter_dtype: torch.dtype = BF16) -> nn.Module:
    return Between(testing.lora_linear(N, K, adapter_dtype=adapter_dtype))


def x_MK(rows: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, rows, K, generator=generator).to(BF16).requires_grad_()


def report() -> Report:
    found = inductor_q.last_report()
    assert found is not None
    return found


# --- calling it ---------------------------------------------------------------------------------


def test_triton_is_told_of_its_folder_where_something_is_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr("inductor_q.backend.keep_triton_kernels", devices.append)
    for layer in (nn.Linear(K, N), testing.lora_linear(N, K)):
        with torch.no_grad():
            torch.compile(layer, backend=qfuse, options=SMALL)(torch.randn(4, K))
    assert devices == [torch.device("cpu")]


def test_by_name() -> None:
    if "qfuse" not in torch._dynamo.list_backends():
        pytest.skip("the package is not installed: a bare checkout has no entry points")
    torch._dynamo.reset()
    compiled: Any = torch.compile(lora(), backend="qfuse", options=SMALL)
    compiled(x_MK())
    assert report().applied()["canonicalize"] == 2


def test_mode_as_an_argument() -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(lora(), backend=qfuse, mode="reduce-overhead")
    compiled(x_MK())
    assert report().options["triton.cudagraphs"]["source"] == "mode reduce-overhead"


def test_mode_and_options_together() -> None:
    options = {"qfuse.mode": "reduce-overhead", "max_autotune": False}
    result = compile_step(lora(), x_MK(), options=options)
    told = result.report.options
    assert told["triton.cudagraphs"] == {"value": "True", "source": "mode reduce-overhead"}
    assert told["max_autotune"] == {"value": "False", "source": "user"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qfuse.numeric": "strict"}, "unknown option 'qfuse.numeric'; did you mean 'qfuse.numer"),
        ({"epilogue_fusoin": True}, "did you mean 'epilogue_fusion'"),
        ({"qfuse.passes": {"extend": False}}, "unknown pass 'extend'"),
        ({"max_autotune": "yes"}, "option 'max_autotune': 'yes' is not"),
    ],
)
def test_a_wrong_option_says_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as checked:
        inductor_q.check_options(options)
    assert message in str(checked.value)
    with pytest.raises(BackendCompilerFailed) as raised:
        compile_step(lora(), x_MK(), options=options)
    inner = raised.value.inner_exception
    assert type(inner) is type(checked.value) and str(inner) == str(checked.value)
    # After torch's own words, which backend it was, ours come first.
    head, said = str(raised.value).split("\n", 1)
    assert head == "backend='qfuse' raised:"
    assert said.startswith(f"{type(inner).__name__}: {inner}")


def test_dynamic_shapes() -> None:
    module = lora()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=qfuse, options=SMALL, dynamic=True)
    with testing.CompileTrace() as trace:
        for rows in (24, 40, 17):
            x = x_MK(rows)
            expected = step(module, x, module=module)
            output, grads = step(compiled, x, module=module)
            assert testing.relative_error(output, expected[0]) < 0.01
            for name, grad in expected[1].items():
                assert testing.relative_error(grads[name], grad) < 0.01, (rows, name)
    assert trace.graphs == 1 and not trace.breaks
    assert report().applied()["extend_k"] == 2  # as with static shapes


def test_fullgraph() -> None:
    result = compile_step(lora(), x_MK(), fullgraph=True)
    assert result.applied["extend_k"] == 2


def test_a_decoder_layer_alone() -> None:
    """Regional compilation: every layer of a kind shares one graph."""
    pytest.importorskip("transformers")
    config = testing.tiny_llama_config()
    model = testing.qlora_model(config, adapter_dtype=BF16, randomize_adapters=True)
    model.enable_input_require_grads()  # else the first layer is a graph of its own
    batches = [
        torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(seed))
        for seed in range(24)
    ]

    def steps(module: Any) -> list[Tensor]:
        """The gradients of each batch as one vector."""
        found = []
        for ids in batches:
            module(input_ids=ids, labels=ids).loss.backward()
            of_batch = gradients({}, module)
            assert len(of_batch) == 2 * 7 * 2
            found.append(torch.cat([of_batch[n].double().flatten() for n in sorted(of_batch)]))
        return found

    def error(of: list[Tensor]) -> float:
        """The middle one of the batches': a few, whose gradients nearly cancel, are off by much
        in eager, Inductor and qfuse, each time others."""
        pairs = zip(of, exact, strict=True)
        return statistics.median(testing.relative_error(a, b) for a, b in pairs)

    eager, exact = steps(model), steps(testing.reference_model(model))
    torch._dynamo.reset()
    for layer in model.base_model.model.model.layers:
        layer.compile(backend=qfuse, options=SMALL)
    with testing.CompileTrace() as trace:
        got = steps(model)
    assert trace.breaks == []
    assert trace.graphs == 1
    assert error(got) <= 1.25 * error(eager)
    modules = {s.module for s in report().sites if s.pass_name == "canonicalize"}
    assert {m.rpartition(".")[2] for m in modules} == set(testing.PROJECTIONS)


def test_reset() -> None:
    compile_step(lora(), x_MK())
    assert inductor_q.last_report() is not None
    torch.compiler.reset()
    assert inductor_q.last_report() is None


def test_without_quantized_weights_it_is_inductor() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K), nn.LayerNorm(K))
    x = torch.randn(8, K, requires_grad=True)
    kernels = []
    with inductor_config.patch(fx_graph_cache=False):
        for backend in ("inductor", qfuse):
            torch._dynamo.reset()
            metrics.reset()
            output, grads = step(torch.compile(module, backend=backend), x, module=module)
            kernels.append((metrics.generated_kernel_count, output, grads))
    stock, ours = kernels
    assert ours[0] == stock[0] > 0
    assert torch.equal(ours[1], stock[1])
    assert all(torch.equal(ours[2][name], stock[2][name]) for name in stock[2])
    assert report().passes == [] and report().sites == []


# --- what it leaves alone -----------------------------------------------------------------------


def configurations() -> list[dict[str, Any]]:
    modules = (inductor_config, functorch_config, dynamo_config)
    return [module.get_config_copy() for module in modules]


NOISY: dict[str, Any] = {
    "qfuse.mode": "max-autotune-no-cudagraphs",
    "max_autotune": False,
    "epilogue_fusion": False,
    "realize_reads_threshold": 7,
}


def test_configuration_is_what_it_was_after_a_compile() -> None:
    before = configurations()
    result = compile_step(lora(), x_MK(), options=NOISY)
    assert result.report.options["realize_reads_threshold"]["value"] == "7"
    assert configurations() == before


class Broken(Recorder):
    def __call__(self, graph: fx.Graph) -> None:
        raise ZeroDivisionError("broken on purpose")


@pytest.mark.parametrize("hook", ["joint_custom_pre_pass", "post_grad_custom_post_pass"])
def test_configuration_is_what_it_was_after_an_exception(hook: str) -> None:
    torch._dynamo.reset()
    with inductor_config.patch({hook: Broken()}):
        before = configurations()
        compiled: Any = torch.compile(lora(), backend=qfuse, options={**SMALL, **NOISY})
        with pytest.raises(Exception, match="broken on purpose"):
            compiled(x_MK())
        assert configurations() == before


def test_a_wrong_option_leaves_the_configuration_alone() -> None:
    before = configurations()
    with pytest.raises(Exception, match="unknown option"):
        compile_step(lora(), x_MK(), options={"nonsense": 1})
    assert configurations() == before


class CountingPartitioner(CustomPartitionerFn):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        self.calls += 1
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "counting"

    def __deepcopy__(self, memo: dict[int, Any]) -> CountingPartitioner:
        return self


HOOKS = {
    "joint_custom_pre_pass": 1,
    "joint_custom_post_pass": 1,
    "post_grad_custom_pre_pass": 2,
    "post_grad_custom_post_pass": 2,
}


@pytest.mark.parametrize("given", ["configuration", "options"])
def test_the_users_own_passes_keep_running(given: str) -> None:
    """Given to torch or among the options; in the joint stage after ours."""
    hooks: dict[str, Any] = {name: Recorder() for name in HOOKS}
    hooks["custom_partitioner_fn"] = partitioner = CountingPartitioner()
    torch._dynamo.reset()
    patch = hooks if given == "configuration" else {}
    options = hooks if given == "options" else {}
    with inductor_config.patch(patch):
        compiled: Any = torch.compile(lora(), backend=qfuse, options={**SMALL, **options})
        compiled(x_MK()).sum().backward()
    assert {name: len(hooks[name].graphs) for name in HOOKS} == HOOKS
    assert partitioner.calls == 1
    (joint,) = hooks["joint_custom_pre_pass"].graphs
    assert "qfuse.dequantize" in {op_name(node) for node in joint.nodes}
    assert report().applied()["keep_packed"] == 1


def test_a_list_of_passes() -> None:
    if torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 takes one pass a hook")
    recorders = [Recorder(), Recorder()]
    torch._dynamo.reset()
    with inductor_config.patch(joint_custom_pre_pass=recorders):
        compiled: Any = torch.compile(lora(), backend=qfuse, options=SMALL)
        compiled(x_MK())
    assert [len(r.graphs) for r in recorders] == [1, 1]


@packs_on_cpu
@pytest.mark.parametrize("nested", [True, False])
def test_weights_that_bitsandbytes_packs_in_the_first_inference_call(
    nested: bool, tmp_path: Path
) -> None:
    """The flag that a user finds on: packed in the first call, then in a second graph. Stock
    Inductor fails before torch 2.15; without those the branch of the backend is not needed."""

    def layer(packing: bool) -> Any:
        torch.manual_seed(0)
        weight = (torch.randn(N, K) * K**-0.5).to(BF16)
        return testing.quantized_linear(weight, nested=nested, cpu_packing=packing).eval()

    x = x_MK().detach()
    torch._dynamo.reset()
    stock: Any = torch.compile(layer(True), backend="inductor")
    old = torch.__version__ < "2.15"
    fails = pytest.raises(AssertionError, match="expected size") if old else nullcontext()
    with fails, torch.no_grad():
        stock(x)
    path = tmp_path / "report.json"
    with torch.no_grad():
        packed = layer(True)(x)  # absmax rounded to bf16
        torch._dynamo.reset()
        options = {**SMALL, "qfuse.report": str(path)}
        compiled: Any = torch.compile(layer(True), backend=qfuse, options=options)
        with testing.CompileTrace() as trace, observe() as observation:
            for _ in range(3):
                assert torch.equal(compiled(x), packed)
    assert (trace.graphs, trace.breaks) == (2, [])
    assert not any("cannot be seen" in told for told in observation.explanation().warnings)
    told = [compile_["sites"] for compile_ in json.loads(path.read_text())["compiles"]]
    assert [[site["rejected"] for site in sites] for sites in told] == [[CPU_PACKED], [CPU_PACKED]]
    with torch.no_grad():
        unpacked = compile_step(layer(False), x)
    assert unpacked.applied == {"canonicalize": 1} and unpacked.reasons == {}
    assert testing.relative_error(unpacked.output, packed) < 0.01


@pytest.mark.parametrize("sets", [True, False])
def test_packing_in_the_graph_is_an_input_that_is_given_other_memory(sets: bool) -> None:
    """On any CPU: what Dynamo traces of bitsandbytes' repacking, by hand."""
    graph = torch.fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    if sets:
        graph.call_function(torch.Tensor.set_, (weight, graph.placeholder("packed")))
    gemv = graph.call_function(overload("gemv_4bit"), (x, weight))
    graph.call_function(overload("gemv_4bit"), (x, graph.placeholder("another")))
    graph.output(gemv)
    assert packs_anew(graph) == ([Refused(gemv, weight, CPU_PACKED)] if sets else [])


@packs_on_cpu
def test_weights_packed_on_a_cpu_are_an_error_under_strict() -> None:
    module = testing.lora_linear(N, K, adapter_dtype=BF16, cpu_packing=True).eval()
    for _ in ("packed in the graph", "packed before"):
        with pytest.raises(Exception) as raised, torch.no_grad():
            compile_step(module, x_MK().detach(), options={"qfuse.strict": True})
        inner = getattr(raised.value, "inner_exception", raised.value)
        assert isinstance(inner, NotFused)
        assert inner.sites == (("proj", CPU_PACKED),)
        with torch.no_grad():
            module(x_MK().detach())


# --- what it tells ------------------------------------------------------------------------------


def test_strict_names_what_is_not_fused_and_why() -> None:
    with pytest.raises(Exception) as raised:
        compile_step(lora(torch.float32), x_MK(), options={"qfuse.strict": True})
    inner = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(inner, NotFused)
    assert "not fused" in str(raised.value)
    assert "layer.proj: float32 adapter on a 16-bit activation" in str(raised.value)
    assert "set options={'qfuse.strict': False}" in str(raised.value)


def test_strict_passes_where_everything_fused() -> None:
    result = compile_step(lora(), x_MK(), options={"qfuse.strict": True})
    assert result.applied["extend_k"] == 2


def test_report_file_is_the_last_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = compile_step(lora(), x_MK(), options={"qfuse.report": str(path), **ON_ANY_CPU})
    document = json.loads(path.read_text())
    assert document["schema_version"] >= 1
    (written,) = document["compiles"]
    assert written["preset"] == "cpu" and written["preset_reason"]
    assert written["bytes_saved"] == result.report.bytes_saved == N * K * 2
    fused = {site["pass_name"]: site for site in written["sites"]}
    passes = {"canonicalize", "fold_lora", "extend_k", "keep_packed", "read_gradients"}
    assert fused.keys() == passes
    for name in ("canonicalize", "extend_k", "keep_packed"):
        assert fused[name]["module"] == "layer.proj"
        assert fused[name]["source"].rpartition(":")[0].endswith(".py")
        assert fused[name]["rejected"] == ""
    assert sum(written["providers"]["dequantize"].values()) >= 1  # backward is lowered later
    assert {p["name"] for p in written["passes"]} > {"canonicalize", "keep_packed"}
    assert all(p["seconds"] >= 0 for p in written["passes"])


def test_report_file_without_a_quantized_weight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Inductor's graph, bit for bit: packed dtypes may be an image's."""

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(64, 64)
            self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            x = image.float() / 255
            return torch.tanh(self.w(x) + self.b(self.a(x)) * 0.3)

    image = torch.randint(0, 255, (32, 64), dtype=torch.uint8)
    model, path = Image(), tmp_path / "new" / "report.json"
    ours = torch.compile(model, backend=qfuse, options={"qfuse.report": str(path)})
    with caplog.at_level(logging.INFO, logger="inductor_q"):
        torch.testing.assert_close(
            ours(image), torch.compile(model, backend="inductor")(image), rtol=0, atol=0
        )
    (written,) = json.loads(path.read_text())["compiles"]
    assert written["passes"] == written["sites"] == []
    assert sum(r.getMessage().startswith("qfuse: graph") for r in caplog.records) == 1


def test_report_that_cannot_be_written_is_told_before_compiling(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "report.json")
    before = counters["aot_autograd"]["total"]
    with pytest.raises(
        BackendCompilerFailed, match=r"qfuse\.report .* cannot be written: "
    ) as told:
        compile_step(lora(), x_MK(), options={"qfuse.report": path})
    assert isinstance(told.value.inner_exception, UnwritableOutput)
    assert counters["aot_autograd"]["total"] == before


def test_one_line_at_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="inductor_q"):
        result = compile_step(lora(), x_MK(), options=ON_ANY_CPU)
    lines = [r.getMessage() for r in caplog.records if r.name == "inductor_q"]
    assert lines.count(result.report.summary()) == 1
    (line,) = [x for x in lines if x.startswith("qfuse: graph")]
    assert "preset cpu (" in line and "extend_k 2" in line and "\n" not in line


class _Artifacts(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        name = (getattr(record, "metadata", {}).get("artifact") or {}).get("name")
        if name == "qfuse_report":
            self.found.append(json.loads(record.payload))  # type: ignore[attr-defined]


def test_the_report_is_an_artifact_of_torchs_trace() -> None:
    from torch._logging._internal import trace_log

    handler, level = _Artifacts(), trace_log.level
    trace_log.addHandler(handler)
    trace_log.setLevel(logging.DEBUG)
    try:
        result = compile_step(lora(), x_MK(), options=ON_ANY_CPU)
    finally:
        trace_log.removeHandler(handler)
        trace_log.setLevel(level)
    (artifact,) = handler.found
    # What happens when the (lazy) backward is lowered comes after this was written.
    assert artifact["sites"] == json.loads(result.report.to_json())["sites"]


@pytest.mark.slow
def test_torch_logs_takes_our_logger() -> None:
    code = (
        "import torch\n"
        "from inductor_q import testing\n"
        "from inductor_q.backend import qfuse\n"
        "linear = testing.quantized_linear(torch.randn(64, 64).bfloat16())\n"
        "torch.compile(linear, backend=qfuse)(torch.randn(4, 64).bfloat16())\n"
    )
    quiet = environment()
    quiet.pop("TORCH_LOGS", None)
    for env, told in (({**quiet, "TORCH_LOGS": "+inductor_q"}, True), (quiet, False)):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert ("; preset cpu" in result.stderr) == told, result.stderr
