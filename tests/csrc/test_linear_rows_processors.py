"""The CPU kernel of few rows as other processors run it: of another architecture by an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inductor_q.csrc.build import FLAGS
from tests.support.emulated import COMPILER, ROOT

#: Architecture -> its compiler, what runs its programs, flags, and the lanes of its vectors.
PROCESSORS = {
    "this": (COMPILER, [], ["-march=native"], None),
    "aarch64": (shutil.which("aarch64-linux-gnu-g++"), ["qemu-aarch64-static"], ["-static"], 4),
}
#: By the dtype of x: of an error relative to the largest result.
LIMITS = {0: 1e-5, 1: 8e-3, 2: 1e-3}
CASES = 3 * 3 * 4 * 2 * 2 + 2 + 3 * 4 * 2 * (4 + 3)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("name", PROCESSORS)
def test_results_are_near_to_sums_in_double(name: str, tmp_path: Path) -> None:
    compiler, emulator, flags, lanes = PROCESSORS[name]
    if compiler is None or any(shutil.which(program) is None for program in emulator):
        pytest.skip(f"needs a C++ compiler for {name} and what runs its programs")
    general = [f for f in FLAGS if f not in ("-shared", "-fPIC", "-march=native", "-fopenmp")]
    support = ROOT / "tests" / "support"
    folders = [f"-I{support / 'serial'}", f"-I{ROOT / 'csrc'}"]
    program = tmp_path / "main"
    source = str(support / "linear_rows_main.cpp")
    command = [compiler, *general, *flags, *folders, source, "-o", str(program)]
    # The linker that tests choose (conftest.py) is for this architecture.
    others = {name: value for name, value in os.environ.items() if name != "COMPILER_PATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=others)
    assert done.returncode == 0, done.stderr[-3000:]
    run = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    *lines, last = run.stdout.splitlines()
    assert lanes in (None, int(last.split()[0]))
    assert len(lines) == CASES
    for line in lines:
        dtype, error = line.split()
        assert float(error) <= LIMITS[int(dtype)], line
