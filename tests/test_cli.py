"""The command line as a process: what it prints, on which stream, and its exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inductor_q import cli
from inductor_q.commands import COMMANDS
from tests.support.processes import environment

ROOT = Path(__file__).resolve().parents[1]
LISTINGS = ("passes", "presets", "formats", "options")


def qfuse(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inductor_q", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())


def test_help_names_every_command_and_loads_no_torch() -> None:
    probe = (
        "import sys, inductor_q.cli as cli\n"
        "try:\n    cli.main(['--help'])\n"
        "except SystemExit as done:\n    assert done.code == 0\n"
        "assert not {'torch', 'rich', 'jinja2'} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        assert re.search(rf"^ +{name} ", done.stdout, re.MULTILINE), name


@pytest.mark.parametrize("name", LISTINGS)
def test_a_listing_on_a_pipe_is_plain_and_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 80
    assert out.isascii(), "no box characters"
    assert "\x1b" not in out
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize("name", LISTINGS)
def test_a_listing_as_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and all(isinstance(v, str) for row in rows for v in row.values())


def test_a_mistake_is_one_line_on_stderr_and_exit_status_2() -> None:
    done = qfuse("presets", "sm_91")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("qfuse: unknown preset 'sm_91'; did you mean 'sm_90'")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m inductor_q options --all | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_run_puts_qfuse_under_a_script_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = ["tests/targets/plain_trainer.py", str(tmp_path)]
    alone = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    assert "'QFUSE' is not a valid DynamoBackend" in alone.stderr
    done = qfuse("run", *script)
    assert done.returncode == 0, done.stderr
    assert "qfuse: 7 of 7 quantized layers fused; 1 graph, 0 breaks" in done.stdout
    assert done.stderr.endswith("quantized layers fused; 2 graphs, 0 breaks\n")
    assert "torch_compile_backend='qfuse'" not in done.stderr  # nothing to warn of


def test_run_forces_every_compile(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))\n"
        "sys.exit(3)\n"
    )
    done = qfuse("run", str(script))
    assert done.returncode == 3
    assert "qfuse: no quantized layer; 1 graph, 0 breaks" in done.stderr
    missing = qfuse("run", str(tmp_path / "none.py"))
    assert (missing.returncode, len(missing.stderr.splitlines())) == (2, 1)
