"""Lines of source by folder, held to a budget: `python .ci/lines.py`.

A folder that outgrows its budget is an error. Raise the number in a commit that says why the lines
are worth having, or move them out.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}

#: The most lines that the source files of a folder may have together; a name with a slash counts
#: apart from the folder around it.
BUDGET = {
    "benchmarks": 8815,
    "csrc": 4620,
    "docs": 2500,
    "examples": 1190,
    "inductor_q": 5715,
    "inductor_q/capture": 2645,
    "inductor_q/commands": 1145,
    "inductor_q/decode": 720,
    "inductor_q/diagnostics": 6000,
    "inductor_q/exc": 890,
    "inductor_q/experts": 1440,
    "inductor_q/formats": 1930,
    "inductor_q/integrations": 2935,
    "inductor_q/kbit": 1000,
    "inductor_q/kernels": 8400,
    "inductor_q/loading": 2610,
    "inductor_q/ops": 3040,
    "inductor_q/presets": 740,
    "inductor_q/testing": 690,
    "inductor_q/tuning": 1150,
    "lowerings": 1135,
    "passes": 8120,
    "tests": 55400,
}


def lines_by_folder() -> Counter[str]:
    """Count the lines of every source file under the nearest folder that has a budget."""
    counts: Counter[str] = Counter()
    for top in sorted({folder.partition("/")[0] for folder in BUDGET}):
        for path in (ROOT / top).rglob("*"):
            inside = path.relative_to(ROOT)
            if path.suffix not in SUFFIXES or any((ROOT / p).is_symlink() for p in inside.parents):
                continue
            folder = next(str(p) for p in inside.parents if str(p) in BUDGET)
            counts[folder] += len(path.read_text().splitlines())
    return counts


def main() -> int:
    counts = lines_by_folder()
    width = max(map(len, BUDGET))
    over = [folder for folder, most in BUDGET.items() if counts[folder] > most]
    for folder, most in BUDGET.items():
        mark = "  over its budget" if folder in over else ""
        print(f"{folder:<{width}} {counts[folder]:>6} of {most:>6} lines{mark}")
    print(f"{'together':<{width}} {sum(counts.values()):>6} of {sum(BUDGET.values()):>6} lines")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
