"""A process that a test starts finds what this one finds, and this checkout first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment, environment_without_checkout


def imported(env: dict[str, str], cwd: Path) -> str:
    code = "import beside; print(beside.__file__)\ntry:\n    import inductor_q as q; "
    code += "print(q.__path__[0])\nexcept ImportError:\n    print('none')"
    command = [sys.executable, "-S", "-c", code]
    return subprocess.check_output(command, env=env, cwd=cwd, text=True)


def test_pythonpath_is_prepended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "beside.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(site))))
    there = f"{site / 'beside.py'}\n"
    assert imported(environment(), tmp_path) == f"{there}{ROOT / 'inductor_q'}\n"
    assert imported(environment_without_checkout(), tmp_path) == f"{there}none\n"
    assert environment(site, TORCH_LOGS="x")["PYTHONPATH"].startswith(str(site))
