"""Read the files in benchmarks/results, and write their numbers as a document shows them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import origin
from benchmarks.place import RESULTS

#: A reader has to know this about a file, for as long as the file is of that commit.
REMARKS = {
    **dict.fromkeys(
        (("linear-h200", "def9296"), ("linear-cpu", "def9296")),
        "A pass for inputs of two dimensions took part, which is gone since.",
    ),
    ("rows-h200", "d493df9"): "The kernel was written anew since.",
    ("decode_8b_16-h100", "7b1a29d"): (
        "Since then the kernel reads x earlier where there are 9 rows or more."
    ),
    **dict.fromkeys(
        (("step_small-h100", "ea880fc"), ("step_small_graphs-h100", "ea880fc")),
        "Since then torch divides no graph for CUDA graphs.",
    ),
    ("step_fp8-h200", "6ee44c9"): (
        "Since then FP8 has a CUDA kernel that writes weights, writes the input of a product once "
        "for its cast and its adapter, adds an adapter's product in place, makes gradients of one "
        "input one product, and has `allow_buffer_reuse` off."
    ),
    ("ranks_2-h100", "bcb2ad1"): (
        "Another program compiled on the same machine of four GPUs. Since then gradients are "
        "cleared without a walk through the modules."
    ),
    ("ranks_4-h100", "bcb2ad1"): (
        "Since then gradients are cleared without a walk through the modules."
    ),
    ("ranks_trl_2-h200", "66f70cb"): "Another benchmark used the machine's other two GPUs.",
    ("ranks_30b_2-h200", "66f70cb"): "Another benchmark used the machine's other two GPUs.",
    ("ranks_30b_1-h200", "3be112b"): "Other benchmarks used the machine's other three GPUs.",
    ("layers_packed-h200", "3be112b"): "Other benchmarks used the machine's other three GPUs.",
    ("ranks_large-h100", "171cae7"): "Another program compiled on the machine's other cores.",
    ("layers-h200", "b78c2bd"): "The run was stopped behind the first of its recipes.",
    **dict.fromkeys(
        (("moe_mxfp4-h200", "7929691"), ("moe_nvfp4-h200", "7929691")),
        "Since then decoding first copies no decoded weight, which it did with backward.",
    ),
    ("moe_providers-h200", "735648a"): "The provider `cuda` has become faster since.",
    ("moe_few_fp8_128x128-h200", "a3f5c26"): "Since then the decode takes fewer instructions.",
    **dict.fromkeys(
        (("moe_adapted-h200", "e129cbb"), ("moe_adapted_checkpointed-h200", "e129cbb")),
        "At that commit `inductor_q.compile` called `use_qfuse` by itself, as it no longer does.",
    ),
}

Row = dict[str, Any]


# --- reading ----------------------------------------------------------------------------


@functools.cache
def result(name: str) -> Row:
    """Return the result in a file; raise where the file does not say where it comes from."""
    return origin.read(RESULTS / f"{name}.json")


def exists(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def rows(name: str, peer: str | None = None, **case: Any) -> list[Row]:
    """Return the rows of a file whose case has these values."""
    return [
        row
        for row in result(name)["rows"]
        if peer in (None, row["peer"])
        and all(row["case"][key] == value for key, value in case.items())
    ]


def row(name: str, peer: str, **case: Any) -> Row:
    found = rows(name, peer, **case)
    assert len(found) == 1, f"{len(found)} rows of {peer} with {case} in {name}.json"
    return found[0]


def seconds(name: str, peer: str, **case: Any) -> float:
    value: float = row(name, peer, **case)["timing"][result(name)["settings"]["statistic"]]
    return value


def extra(name: str, peer: str, key: str, **case: Any) -> float:
    value: float = row(name, peer, **case)["extra"][key]
    return value


def cases(name: str) -> list[Row]:
    found: list[Row] = []
    for each in result(name)["rows"]:
        if each["case"] not in found:
            found.append(each["case"])
    return found


# --- writing ----------------------------------------------------------------------------


def number(value: float) -> str:
    """Write three digits, more where there are more before the point."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def ms(value: float) -> str:
    return f"{number(1e3 * value)} ms"


def us(value: float) -> str:
    return f"{number(1e6 * value)} us"


def gb(value: float) -> str:
    return f"{number(value / 1e9)} GB"


def mb(value: float) -> str:
    return f"{value / 1e6:.0f} MB"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(*names: str) -> str:
    """Write the line under a table: the file, the machine, the versions, the commit."""
    lines = []
    for name in names:
        found = result(name)
        versions, id = found["versions"], found["commit"]["id"][:7]
        triton = f", triton {versions['triton']}" if "cuda" in found["machine"] else ""
        line = (
            f"[{name}.json](../benchmarks/results/{name}.json): {found['machine']['name']}, torch "
            f"{versions['torch']}{triton}, {found['created'][:10]}, commit {id} "
            f"({origin.state(found)})."
        )
        lines.append(" ".join(filter(None, (line, REMARKS.get((name, id))))))
    return "\n\n".join(lines)
