"""The command line as a process: what it prints, on which stream, and its exit status."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inductor_q import cli
from inductor_q.commands import COMMANDS, passes
from inductor_q.passes import PIPELINE
from tests.support.processes import environment

ROOT = Path(__file__).resolve().parents[1]
LISTINGS = ("passes", "presets", "formats", "options")
NAMES = [command.__name__.rpartition(".")[2] for command in COMMANDS]


def qfuse(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inductor_q", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())


@pytest.mark.parametrize(
    "args",
    [
        *("--help", "-V", "--version", "help", "help explain", "completion bash", "nosuch"),
        *(*LISTINGS, "options qfuse.memory", "options qfuse.nosuch"),
    ],
)
def test_what_needs_no_torch_loads_none(args: str) -> None:
    """torch takes seconds to import; rich is imported for tables alone."""
    heavy = {"torch"} | (set() if args.split()[0] in LISTINGS else {"rich", "jinja2"})
    probe = (
        "import sys, inductor_q.cli as cli\n"
        f"try:\n    cli.main({args.split()})\nexcept SystemExit:\n    pass\n"
        f"assert not {heavy} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("args", [["--help"], ["help"]])
def test_help_names_every_command(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        cli.main(args)
    out = capsys.readouterr().out
    for name in NAMES:
        assert re.search(rf"^ +{name} ", out, re.MULTILINE), name


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["help", name]) == 0
    out = capsys.readouterr().out
    assert f"qfuse {name}" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("args", [["explan", "x.py"], ["help", "explan"]])
def test_a_command_that_is_almost_one(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    assert capsys.readouterr().err.startswith(
        "qfuse: unknown command 'explan'; did you mean 'explain'? Known: doctor, "
    )


@pytest.mark.parametrize(
    ("args", "usage"), [(["formats", "nf4"], "qfuse formats [-h]"), (["--foo"], "qfuse [-h] [-V]")]
)
def test_what_a_command_does_not_take_is_said_with_its_usage(
    args: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(args)
    assert left.value.code == 2
    assert usage in capsys.readouterr().err


def test_an_option_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """It printed an empty table, exit status 0."""
    assert cli.main(["options", "qfuse.passes", "nosuch"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qfuse: no option's name contains 'nosuch'")


def test_paths_in_evidence_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "cpu"]) == 0
    assert "benchmarks/results/thresholds-cpu.json" in capsys.readouterr().out


def completed(script: str, *line: str) -> set[str]:
    """What bash offers for the last word of a command line."""
    words = " ".join(f"'{word}'" for word in line)
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _qfuse; printf '%s\\n' "
    command = f'{script}\n{asked} "${{COMPREPLY[@]}}"'
    return set(subprocess.check_output(["bash", "-c", command], text=True).split())


def test_completion_in_bash(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "qfuse", "") == {*NAMES, "help"}
    assert completed(script, "qfuse", "do") == {"doctor"}
    assert completed(script, "qfuse", "explain", "--max-") == {
        "--max-breaks",
        "--max-recompiles",
        "--max-saved-mb",
    }
    assert completed(script, "qfuse", "help", "pas") == {"passes"}
    assert completed(script, "qfuse", "completion", "z") == {"zsh"}
    assert {"pack", "unpack"} < completed(script, "qfuse", "cache", "")
    assert completed(script, "qfuse", "cache", "pack", "") == set()
    assert completed(script, "qfuse", "explain", "train") == set()  # files, by bash itself


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_in_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES) and "max-breaks" in out


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


def test_the_listed_passes_are_those_of_the_pipeline() -> None:
    """The listing reads them from their source."""
    files = [(step, sys.modules[type(step).__module__].__doc__ or "") for step in PIPELINE]
    (table,) = passes.tables()
    assert table.rows == [(s.name, s.stage, text.partition("\n")[0]) for s, text in files]


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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("options > /dev/full", "[Errno 28] No space left on device"),
        ("options --json > /dev/full", "[Errno 28] No space left on device"),
        ("options >&-", "standard output is closed"),
    ],
)
def test_an_output_that_cannot_be_written(command: str, said: str) -> None:
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    line = ["bash", "-c", f"{sys.executable} -m inductor_q {command}"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 2
    assert done.stderr.startswith(f"qfuse: {said}") and len(done.stderr.splitlines()) == 1


def test_an_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("inductor_q.commands.options.tables", interrupted)
    assert cli.main(["options"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.slow
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
    assert done.stderr.endswith("quantized layers fused; 1 graph, 0 breaks\n")
    assert "torch_compile_backend='qfuse'" not in done.stderr  # nothing to warn of


@pytest.mark.slow
def test_run_of_accelerate_takes_the_name_of_the_backend(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.compile(lambda x: x + 1)(torch.ones(2))\n")
    launch = ["accelerate", "launch", "--cpu", "--dynamo_backend", "qfuse", str(script)]
    done = qfuse("run", *launch)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("qfuse: no quantized layer; 1 graph, 0 breaks") == 1


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
