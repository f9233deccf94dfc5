"""Wheel, sdist, editable install and bare checkout: one package, whole, under one name."""

import email.message
import os
import pydoc
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import inductor_q
from docs.generate import LINK
from tests.support.processes import ROOT, environment_without_checkout

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLACES = {
    "inductor_q": "inductor_q",
    "passes": "inductor_q/passes",
    "lowerings": "inductor_q/lowerings",
    "csrc": "inductor_q/csrc",
}
LINKS = ("passes", "lowerings", "csrc")
NOT_SHIPPED = {".md", ".pyc"}

checkout_only = pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an sdist has no links")

# Each runs in a fresh interpreter. argv: where the package must lie, and the packages to import
# from there. Metadata and torch's list are looked at before anything of ours is imported.
PROBE_BACKEND = """
import importlib.metadata, sys
import torch._dynamo

assert "qfuse" in torch._dynamo.list_backends(), torch._dynamo.list_backends()
assert not [name for name in sys.modules if name.partition(".")[0] == "inductor_q"]
[entry] = importlib.metadata.entry_points(group="torch_dynamo_backends", name="qfuse")
assert entry.value == "inductor_q.backend:qfuse", entry
"""
PROBE_PLACE = """
import importlib, pathlib, sys

where, *packages = sys.argv[1:]
for name in packages:
    [place] = importlib.import_module(name).__path__
    real = pathlib.Path(place).resolve()
    assert real.is_relative_to(where), f"{name} is imported from {real}, not from {where}"
"""
PROBE_INSTALLED = """
import importlib.metadata, importlib.util
import inductor_q.backend

found = torch._dynamo.lookup_backend("qfuse")
assert found is inductor_q.backend.qfuse, found
assert importlib.metadata.version("inductor-q") == inductor_q.__version__
[script] = importlib.metadata.entry_points(group="console_scripts", name="qfuse")
assert script.load() is importlib.import_module("inductor_q.cli").main
for name in ("passes", "lowerings", "csrc"):
    assert importlib.util.find_spec(name) is None, f"{name} became importable globally"
"""


def shipped(root: Path) -> set[str]:
    """Every file that a wheel must hold, by its name there. Links are not followed."""
    return {
        f"{place}/{path.relative_to(root / top).as_posix()}"
        for top, place in PLACES.items()
        for path in (root / top).rglob("*")
        if path.is_file()
        and path.suffix not in NOT_SHIPPED
        and not any(parent.is_symlink() for parent in path.parents)
    }


def config() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages() -> list[str]:
    """The packages a build goes by."""
    found: list[str] = config()["tool"]["setuptools"]["packages"]
    return found


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment_without_checkout(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*args: str | Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *args)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without what earlier builds left: setuptools would ship it."""
    skipped = shutil.ignore_patterns(
        ".?*", "build", "dist", "*.egg-info", "__pycache__", "results", "torch_compile_debug"
    )
    place = tmp_path_factory.mktemp("source") / "checkout"
    return Path(shutil.copytree(ROOT, place, symlinks=True, ignore=skipped))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, source)
    [built] = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sdist")
    build = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, place, cwd=source)
    [built] = place.glob("*.tar.gz")
    return built


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


class Environment:
    """A virtual environment with nothing in it but a path to this interpreter's packages.

    Not `--system-site-packages`: from inside a virtual environment that means the packages of the
    interpreter below it, where there is no torch.
    """

    def __init__(self, place: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", place)
        self.python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(run(self.python, "-c", purelib).strip())
        here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.site / "_host.pth").write_text("\n".join(sorted(here)) + "\n")

    def install(self, *what: str | Path) -> None:
        flags = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
        pip("--python", self.python, "install", *flags, *what)

    def check(self, where: Path, cwd: Path) -> None:
        """Every package comes from `where`; torch lists the backend before any import of ours."""
        probe = PROBE_BACKEND + PROBE_PLACE + PROBE_INSTALLED
        run(self.python, "-c", probe, where.resolve(), *packages(), cwd=cwd)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


def test_wheel_holds_the_source_tree(source: Path, wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == shipped(source)


def test_sdist_holds_the_source_tree_and_no_links(source: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not [m.name for m in members if m.issym()]
    names = {m.name.partition("/")[2] for m in members}
    real = {top for top in PLACES if top != "inductor_q"}
    for name in shipped(source):
        parts = Path(name).parts[1:]
        assert ("/".join(parts) if parts[0] in real else name) in names
    assert {"LICENSE", "README.md", "constraints.txt", "tests/test_packaging.py"} <= names
    linked = {link[2] for link in LINK.finditer((source / "README.md").read_text())}
    assert linked | {"examples/finetune.py"} <= names


def test_the_page_of_an_index_has_no_relative_link(wheel: Path) -> None:
    """Those of README.md lead nowhere there."""
    metadata = metadata_of(wheel)
    page = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# inductor-q" in page and "`docs/training.md`" in page
    assert not LINK.search(page) and "<!--" not in page
    assert "contributors" in metadata["Author"]


def test_release_notes_of_this_version() -> None:
    assert f"## [{inductor_q.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_help_lists_what_is_public() -> None:
    """Names are resolved on first use, so help() finds them by `dir` alone."""
    page = pydoc.plain(pydoc.render_doc(inductor_q))
    for name in set(inductor_q.__all__) - {"__version__"}:
        assert re.search(rf"^ +(class )?{name}\b", page, re.MULTILINE), name


def test_wheel_installs(environment: Environment, wheel: Path, tmp_path: Path) -> None:
    environment.install(wheel)
    environment.check(environment.site, tmp_path)


PROBE_FRESH = """
import torch
import inductor_q
from inductor_q import kbit

model = torch.nn.Sequential(torch.nn.Linear(256, 256, dtype=torch.bfloat16))
model = kbit.quantize_model(model, 4, progress=False)
x = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
compiled = torch.compile(model, backend="qfuse")
compiled(x).sum().backward()
assert x.grad is not None and torch.allclose(compiled(x), model(x), atol=0.05)
assert inductor_q.last_report().applied()["canonicalize"] == 2
"""


@pytest.mark.slow
def test_wheel_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Nothing but what the metadata asks for, from the index: the commands and a compile work."""
    place = tmp_path / "env"
    run(sys.executable, "-m", "venv", place)
    folder = place / ("Scripts" if os.name == "nt" else "bin")
    python = folder / "python"
    pinned = ("--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *pinned, wheel, cwd=tmp_path)
    assert run(folder / "qfuse", "-V", cwd=tmp_path).strip() == f"qfuse {inductor_q.__version__}"
    assert "extend_k" in run(folder / "qfuse", "passes", cwd=tmp_path)
    run(python, "-c", PROBE_BACKEND + PROBE_FRESH, cwd=tmp_path)


@pytest.mark.slow
def test_sdist_installs(environment: Environment, sdist: Path, tmp_path: Path) -> None:
    environment.install(sdist)
    environment.check(environment.site, tmp_path)


@pytest.mark.slow
def test_editable_installs(environment: Environment, source: Path, tmp_path: Path) -> None:
    checkout = shutil.copytree(source, tmp_path / "checkout", symlinks=True)
    environment.install("--editable", checkout)
    environment.check(checkout, tmp_path)


@checkout_only
def test_bare_checkout_imports(environment: Environment, source: Path) -> None:
    """Not installed, so there is no entry point: the backend is then named by its function."""
    run(environment.python, "-c", PROBE_PLACE, source.resolve(), *packages(), cwd=source)


@checkout_only
def test_links_point_at_the_top_level() -> None:
    for name in LINKS:
        link = ROOT / "inductor_q" / name
        assert os.readlink(link) == f"../{name}"
        assert link.resolve() == ROOT / name


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_links_are_committed_as_links() -> None:
    listed = run("git", "ls-files", "--stage", *(f"inductor_q/{n}" for n in LINKS), cwd=ROOT)
    assert [line.split()[0] for line in listed.splitlines()] == ["120000"] * len(LINKS)


def package_dirs() -> Iterator[str]:
    for top, place in PLACES.items():
        for folder in [ROOT / top, *(ROOT / top).rglob("*")]:
            if folder.is_symlink() or not folder.is_dir() or not any(folder.glob("*.py")):
                continue
            yield ".".join([*Path(place).parts, *folder.relative_to(ROOT / top).parts])


def test_packages_list_is_complete_and_sorted() -> None:
    assert packages() == sorted(package_dirs())


@pytest.mark.parametrize("name", LINKS)
def test_package_knows_its_one_name(name: str) -> None:
    """Imported as a top-level `passes`, its classes and registries would exist twice."""
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"import it as inductor_q.{name}" in done.stderr


def test_every_extra_exists_and_all_covers_the_runtime_ones() -> None:
    extras = config()["project"]["optional-dependencies"]
    libraries = {"bnb", "peft", "transformers", "torchao", "kbit", "triton", "depyf"}
    assert libraries | {"demo", "bench", "test", "dev", "all"} <= set(extras)
    assert extras["all"] == [f"inductor-q[{','.join(x for x in extras if x in libraries)}]"]


def test_every_extra_that_is_named_is_in_the_wheel(wheel: Path) -> None:
    """By documents and errors. The one for trainers brings what scripts of TRL import."""
    metadata = metadata_of(wheel)
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    files += chain(ROOT.glob("examples/*.py"), ROOT.glob("inductor_q/**/*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = re.findall(r"""inductor-q\[([\w,]+)\]|['"]\.\[([\w,]+)\]|\bextra="(\w+)\"""", text)
    extras = {extra for groups in named for extra in "".join(groups).split(",")}
    assert {"trl", "kbit", "bnb", "bench", "demo"} <= extras
    assert extras <= set(metadata.get_all("Provides-Extra", []))
    wanted = [w for w in metadata.get_all("Requires-Dist", []) if w.endswith('extra == "trl"')]
    brings = {re.split(r"[^\w-]", line)[0] for line in wanted}
    assert brings == {"inductor-q", "accelerate", "datasets", "trl"}
    assert any(line.startswith("inductor-q[bnb,peft,transformers]") for line in wanted)


def test_every_dependency_is_pinned() -> None:
    """`make setup` takes each one at a version that was tried, not at the newest of the day."""
    project = config()["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[^A-Za-z0-9._-]", line)[0] for line in wanted} - {"inductor-q", "tomli"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.split("[<=>]", line)[0] for line in lines if line[:1] not in ("", "#")}
    assert names <= pinned


def test_importing_imports_no_optional_package() -> None:
    optional = {"bitsandbytes", "depyf", "peft", "torchao", "transformers"}
    probe = f"import sys, inductor_q; print(*({optional} & set(sys.modules)))"
    assert run(sys.executable, "-c", probe, cwd=ROOT).strip() == ""
