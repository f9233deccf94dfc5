"""torch's caches across processes: hit by the same model, missed by what changes the code."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import inductor_q
from inductor_q import cli, kept, testing
from inductor_q.backend import qfuse
from inductor_q.cache import cacheable_functions, report_key
from inductor_q.context import Context, new_report
from inductor_q.hooks import JointPasses
from inductor_q.options import resolve
from tests.support.processes import ROOT, environment

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

SCRIPT = """
import json, shutil, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir
import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse

train = sys.argv[2] == "train"
module = testing.lora_linear(128, 64, adapter_dtype=torch.bfloat16).train(train)
x = torch.ones(2, 48, 64, dtype=torch.bfloat16, requires_grad=train)

def compile(options):
    torch.compiler.reset()
    counters.clear()
    with torch.set_grad_enabled(train):
        y = torch.compile(module, backend=qfuse, options=options)(x)
        if train:
            y.sum().backward()
    aot, fx = counters["aot_autograd"], counters["inductor"]
    report = inductor_q.last_report()
    assert report is not None
    found = {
        name: [cache[f"{prefix}_cache_{kind}"] for kind in ("hit", "miss", "bypass")]
        for name, prefix, cache in (("aot", "autograd", aot), ("fx", "fxgraph", fx))
    }
    return {
        **found,
        "cached": report.cached,
        "sites": [(s.pass_name, s.module, s.rejected) for s in report.sites],
        "summary": report.summary(),
        "sum": float(y.float().sum()),
    }

results = []
for step in json.loads(sys.argv[1]):
    if step == "lose the reports":
        shutil.rmtree(Path(cache_dir()) / "qfuse" / "reports")
    elif step == "damage the reports":
        for path in (Path(cache_dir()) / "qfuse" / "reports").iterdir():
            path.write_bytes(path.read_bytes()[:-100])
    else:
        results.append(compile(step))
print(json.dumps(results))
"""

SMALL = {"qfuse.thresholds": {"extend_k.min_rows": 1}}
HIT, MISS = [1, 0, 0], [0, 1, 0]


def copy_of(source: Path, package: Path) -> Path:
    """The sources at another place: an edit of the checkout does not reach a test that runs."""
    for name in ("inductor_q", "passes", "lowerings", "csrc"):
        shutil.copytree(
            source / name, package / name, symlinks=True, ignore=shutil.ignore_patterns("__pyc*")
        )
    return package


LOSE, DAMAGE = "lose the reports", "damage the reports"


def run(cache: Path, *steps: dict[str, Any] | str, package: Path, train: bool = True) -> list[Any]:
    """One process that compiles under each of some options: counters as [hit, miss, bypass], and
    the report."""
    env = environment(package, TORCHINDUCTOR_CACHE_DIR=str(cache))
    merged = [step if isinstance(step, str) else {**SMALL, **step} for step in steps]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(merged), "train" if train else "infer"],
        env=env,
        cwd=package,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found: list[Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(ROOT, tmp_path_factory.mktemp("checkout") / "package")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, package: Path) -> tuple[Path, Any]:
    """A cache that one training process has filled, and what that process told."""
    cache = tmp_path_factory.mktemp("inductor")
    [first] = run(cache, {}, package=package)
    return cache, first


@pytest.fixture(scope="module")
def second(filled: tuple[Path, Any], package: Path) -> Any:
    """What a second process tells: as it is, with a report file, and when the kept one is gone."""
    path = filled[0] / "written.json"
    results = run(filled[0], {}, {"qfuse.report": str(path)}, LOSE, {}, package=package)
    return *results, path


@pytest.mark.slow
def test_the_first_process_misses_and_stores(filled: tuple[Path, Any]) -> None:
    _, first = filled
    assert first["aot"] == MISS
    assert first["fx"] == [0, 2, 0]  # forward and backward
    assert not first["cached"]
    assert {name for name, _, _ in first["sites"]} >= {"canonicalize", "extend_k", "keep_packed"}


@pytest.mark.slow
def test_a_second_process_hits_and_tells_the_first_ones_report(
    filled: tuple[Path, Any], second: Any
) -> None:
    """Also with bitsandbytes' autograd.Function in the graph, which torch bypasses by default."""
    (_, first), (same, *_) = filled, second
    assert same["aot"] == HIT
    assert same["fx"][1:] == [0, 0]
    assert same["cached"]
    assert same["sites"] == first["sites"]
    assert same["summary"] == first["summary"] + "; from the cache"
    assert same["sum"] == first["sum"]


CHANGES: list[dict[str, Any]] = [
    {"qfuse.kernels": {"dequantize": "inductor"}},
    {"qfuse.thresholds": {"extend_k.min_rows": 2}},
    {"qfuse.numerics": "strict"},
    {"qfuse.preset": "none"},
    {"qfuse.passes": {"stack_gradients": False}},
]


@pytest.mark.slow
def test_a_changed_option_misses(filled: tuple[Path, Any], package: Path) -> None:
    for options, other in zip(CHANGES, run(filled[0], *CHANGES, package=package), strict=True):
        assert other["aot"] == MISS, options
        assert not other["cached"], options


@pytest.mark.slow
def test_where_the_report_goes_changes_no_code(second: Any) -> None:
    _, again, _, path = second
    assert again["aot"] == HIT
    (written,) = json.loads(path.read_text())["compiles"]
    assert written["cached"]
    assert [s["pass_name"] for s in written["sites"]] == [name for name, _, _ in again["sites"]]


@pytest.mark.slow
def test_a_lost_report_is_told(filled: tuple[Path, Any], second: Any) -> None:
    (_, first), (_, _, lost, _) = filled, second
    assert lost["aot"] == HIT and lost["cached"] and lost["sites"] == []
    assert "what became of 1 quantized layer is not known" in lost["summary"]
    assert lost["sum"] == first["sum"]


STRICT = {"qfuse.strict": True}


@pytest.fixture(scope="module")
def inferred(tmp_path_factory: pytest.TempPathFactory, package: Path) -> tuple[Path, list[Any]]:
    """The same of a process that only infers: a graph, and a compile, of half the size."""
    cache = tmp_path_factory.mktemp("inference")
    steps: list[dict[str, Any] | str] = [STRICT, STRICT, LOSE, STRICT, {}, DAMAGE, {}, {}]
    return cache, run(cache, *steps, train=False, package=package)


def test_under_strict_a_graph_is_cached_together_with_its_report(
    inferred: tuple[Path, list[Any]],
) -> None:
    """Without the report nobody knows what was fused: it is compiled, and judged, again."""
    first, second, third, *_ = inferred[1]
    assert (first["aot"], second["aot"], third["aot"]) == (MISS, HIT, MISS)
    assert third["sites"] == second["sites"] == first["sites"] != []


def test_a_damaged_report_is_made_again(inferred: tuple[Path, list[Any]]) -> None:
    """A damaged file ended this compile, and every later one, with json's error."""
    *_, whole, healed, again = inferred[1]
    assert (healed["aot"], again["aot"]) == (MISS, HIT)
    assert again["sites"] == healed["sites"] == whole["sites"] != []


@pytest.mark.slow
def test_inference_is_cached_and_a_changed_source_misses(
    inferred: tuple[Path, list[Any]], package: Path, tmp_path: Path
) -> None:
    """Any file of the package counts: torch has lowerings and kernels in no key of its own."""
    cache, (_, _, _, first, *_) = inferred
    other = copy_of(package, tmp_path / "package")
    [unchanged] = run(cache, {}, train=False, package=other)
    assert (first["aot"], unchanged["aot"]) == (MISS, HIT)
    assert unchanged["sites"] == first["sites"] and unchanged["cached"]
    with open(other / "lowerings" / "dequantize.py", "a") as file:
        file.write("\n# changed\n")
    [changed] = run(cache, {}, train=False, package=other)
    assert changed["aot"] == MISS
    assert changed["sum"] == unchanged["sum"]


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False], ids=["a training step", "inference"])
def test_caches_that_have_travelled_compile_nothing_anew(
    train: bool,
    filled: tuple[Path, Any],
    inferred: tuple[Path, list[Any]],
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Inductor's cache, AOTAutograd's, and our reports, found in another folder."""
    file, folder = tmp_path / "caches.tar.gz", tmp_path / "other"
    cache, first = filled if train else (inferred[0], inferred[1][-1])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    assert cli.main(["cache", "pack", str(file)]) == 0
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    assert cli.main(["cache", "unpack", str(file)]) == 0
    assert "unpacked" in capsys.readouterr().out
    libraries = {path.relative_to(folder) for path in folder.rglob("*.so")}
    [found] = run(folder, {}, train=train, package=package)
    assert found["aot"] == HIT and found["fx"][1:] == [0, 0] and found["cached"]
    assert found["sum"] == first["sum"]
    if not train:  # a test loses the reports of training
        assert found["sites"] == first["sites"]
    assert {path.relative_to(folder) for path in folder.rglob("*.so")} == libraries


def test_tritons_kernels_are_found_where_they_were_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its list of a kernel's files has whole paths, of a folder that is gone."""
    manager: Any = pytest.importorskip("triton.runtime.cache").FileCacheManager
    file, cache, other = (tmp_path / name for name in ("caches.tar.gz", "cache", "other"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setenv(kept.TRITON, str(cache / "triton" / "0"))
    kernel = manager("key")
    kernel.put_group("k.json", {"k.cubin": kernel.put(b"code", "k.cubin")})
    damaged = {f"__grp__{i}.json": text for i, text in enumerate(("", "{}", "[]", '{"child'))}
    for name, text in damaged.items():
        kernel.put(text, name)
    assert cli.main(["cache", "pack", str(file)]) == 0
    assert "left out" not in capsys.readouterr().out
    shutil.rmtree(cache)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(other))
    monkeypatch.setenv(kept.TRITON, str(other / "triton" / "0"))
    assert cli.main(["cache", "unpack", str(file)]) == 0
    path = Path(manager("key").get_group("k.json")["k.cubin"])
    assert path.is_relative_to(other) and path.read_bytes() == b"code"
    assert {name: (path.parent / name).read_text() for name in damaged} == damaged
    monkeypatch.setenv(kept.TRITON, str(tmp_path / "elsewhere"))
    assert cli.main(["cache", "pack", str(file)]) == 0
    assert f"Triton's kernels, which are in {tmp_path / 'elsewhere'}" in capsys.readouterr().out
    assert cli.main(["cache", "unpack", str(file)]) == 0
    assert f"Triton looks for them in {tmp_path / 'elsewhere'}" in capsys.readouterr().out


def test_caches_of_another_machine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "caches.tar.gz", tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    assert cli.main(["cache", "pack", str(file)]) == 2  # nothing is there
    (folder / "fxgraph").mkdir(parents=True)
    (folder / "fxgraph" / "one").write_text("1")
    assert cli.main(["cache", "pack", str(file)]) == 0
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", "99.9")
        assert cli.main(["cache", "unpack", str(file)]) == 1
    assert f"CUDA: {torch.version.cuda} in the file, 99.9 here" in capsys.readouterr().out
    assert not (tmp_path / "other" / "fxgraph").exists()
    assert cli.main(["cache", "unpack", str(file)]) == 0
    assert [f.name for f in (tmp_path / "other").rglob("*") if f.is_file()] == ["one"]
    assert (tmp_path / "other" / "fxgraph" / "one").read_text() == "1"
    assert cli.main(["cache", "pack", str(tmp_path / "missing" / "caches.tar.gz")]) == 2
    assert capsys.readouterr().err.endswith(f"there is no folder {tmp_path / 'missing'}\n")
    whole = file.read_bytes()
    for damaged in (b"", b"no archive", whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        assert cli.main(["cache", "unpack", str(file)]) == 2
        assert capsys.readouterr().err.count("caches in") == 1
    for told in (b"[1]", b"3"):
        with tarfile.open(file, "w:gz") as archive:
            head = tarfile.TarInfo("fingerprint.json")
            head.size = len(told)
            archive.addfile(head, io.BytesIO(told))
        assert cli.main(["cache", "unpack", str(file)]) == 2
        assert "its fingerprint is damaged" in capsys.readouterr().err


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_an_autograd_function_in_a_checkpointed_segment_is_cacheable() -> None:
    """As bitsandbytes' layers are there: torch's cache passed over every checkpointed model."""
    from inductor_q.cache import bodies_are_cacheable

    captured: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> Any:
        captured.append(gm)
        return gm.forward

    def segment(x: torch.Tensor) -> Any:
        return checkpoint(Twice.apply, x, use_reentrant=False)

    torch.compile(segment, backend=backend, fullgraph=True)(torch.ones(2, requires_grad=True))
    assert bodies_are_cacheable(captured[0], {})


def test_a_trainers_graph_is_cached_for_batches_of_any_length() -> None:
    """The next process begins with another length, and has the report of the first one. torch 2.13
    alone caches no graph that autocasts."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    layer = testing.lora_linear(64, 64)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = checkpoint(layer, x, use_reentrant=False)
        return result

    found: list[dict[str, int]] = []
    with fresh_cache():
        for length in (40, 56):
            torch.compiler.reset()
            counters.clear()
            x = torch.ones(2, length, 64)
            torch._dynamo.maybe_mark_dynamic(x, 1)
            torch.compile(step, backend=qfuse, fullgraph=True)(x).sum().backward()
            found.append(dict(counters["aot_autograd"]))
    report = inductor_q.last_report()
    assert found[0]["autograd_cache_saved"] == found[1]["autograd_cache_hit"] == 1
    assert report is not None and report.cached and not report.lost
    assert [verdict.status for verdict in report.verdicts().values()] == ["fused"]


def test_the_default_of_autocast_is_part_of_each_key() -> None:
    """A graph that autocasts without naming a dtype is another one under another default."""

    def keys() -> tuple[object, str]:
        resolved = resolve(None, None, device=torch.device("cpu"), dynamic=False)
        context = Context(resolved, new_report(resolved, torch.device("cpu")))
        gm = torch.fx.symbolic_trace(torch.nn.Tanh())
        return JointPasses(context, None).uuid(), report_key(gm, [torch.ones(1)], context)

    before = keys()
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        after = keys()
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert all(a != b for a, b in zip(before, after, strict=True))
    with torch.autocast("cpu"):
        assert keys()[1] != before[1]
    assert keys() == before


def test_functions_that_the_user_marks_stay_marked() -> None:
    name = "unsafe_marked_cacheable_functions"
    for options, users in (({name: {"mine": "1"}}, "mine"), ({}, "global")):
        with inductor_config.patch({name: {"global": "2"}}):
            marked = cacheable_functions(options)[name]
        assert users in marked and "torch.amp.autocast_mode._enter_autocast" in marked


def test_a_segment_that_sets_data_is_not_cacheable() -> None:
    """As a layer of LLM.int8 does. The node's target is a method of C, which says no module that it
    is of, and torch's check would fail for want of one."""
    from inductor_q.cache import bodies_are_cacheable

    body = torch.fx.Graph()
    weight, codes = body.placeholder("weight"), body.placeholder("codes")
    set_: Any = torch.Tensor.set_
    body.output(body.call_function(set_, (weight, codes)))
    whole = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    whole.add_submodule("segment", torch.fx.GraphModule(torch.nn.Module(), body))
    assert not bodies_are_cacheable(whole, {})


def test_reports_are_kept_by_all_that_a_compile_depends_on() -> None:
    gm = torch.fx.symbolic_trace(torch.nn.Tanh())
    resolved = resolve(None, None, device=torch.device("cpu"), dynamic=False)
    context = Context(resolved, new_report(resolved, torch.device("cpu")), [])
    x = torch.ones(4, 4)
    inputs = [x, x.t()[:2], x.t()[:2].contiguous(), x.clone().requires_grad_(), x.double()]
    assert len({report_key(gm, [one], context) for one in inputs}) == len(inputs)
    assert report_key(gm, [x], context) == report_key(gm, [torch.zeros(4, 4)], context)
