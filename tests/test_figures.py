"""Every measured figure of documents and code comes from a result file, or is excused here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from docs import read_results as results
from docs.generate import BLOCK, PAGES, ROOT, VALUE

#: A number with the unit of something measured.
UNIT = re.compile(
    r"(?<![\w.])[-+]?\d[\d,.]*(?: to \d[\d,.]*)?\s?"
    r"(?:us|ms|ns|[kMGT]i?B|GB/s|TFLOP/s|dB|%|x as|times|tokens/s|tokens per second)(?!\w)"
)

#: Pages that take nothing from files, and so have no figures.
OTHERS = tuple(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"))

#: Figures of documents that no result file has, and why.
IN_DOCUMENTS = {
    "README.md": {"2.5 GB": "the size of an environment"},
    "docs/benchmarks.md": {
        "100 %": "what the roof means",
        "54 %": "of llama.cpp#8278",
        "34 to 38 %": "of DeepGEMM#378",
    },
    "docs/moe.md": {"16 GB": "the limit of a run"},
    "docs/moe-measured.md": {"16 GB": "the limit of a run"},
    "CHANGELOG.md": dict.fromkeys(("22GB", "16 GB"), "an example of a budget"),
    "docs/training.md": {
        "5 %": "held by tests/test_memory.py",
        "4 MiB": "the default of Link.least in inductor_q/resolved.py",
        "1.24 GB": "computed from the sizes beside it",
        "4 %": "held by tests/ops/test_eight_bits.py",
    },
    "docs/cli.md": {
        "20 %": "the default of --noise",
        "1 %": "a rule of qfuse tune",
        "1.25 times": "a rule of qfuse tune",
        "1.5 times": "STANDS_OUT of diagnostics/render/words.py",
    },
    "docs/design.md": {"64 times": "a blocksize"},
    "docs/troubleshooting.md": {
        "13 times": "held by tests/diagnostics/test_doctor_model.py",
        "10 %": "bitsandbytes' values, held by tests/support/quantized.py",
    },
}

#: What axolotl#3692 has measured, which the presets quote.
AXOLOTL = (
    *("+13 %", "-14.25 %", "-16.55 %", "20,207 MB", "-2.57 %"),
    *("+2.2 GB", "21,836 MB", "32 GB", "-19.06 %", "19,614 MB"),
)

#: Figures of code that no result file has, and why.
IN_CODE = {
    "inductor_q/ops/linear_cross_entropy.py": dict.fromkeys(
        ("1.24 GB", "67 MB"), "computed from the sizes beside it"
    ),
    "inductor_q/options.py": {"8GB": "an example of a budget"},
    "inductor_q/own_options.py": dict.fromkeys(
        ("22GB", "20.5 GiB", "90%", "20GiB"), "an example of a budget"
    ),
    "inductor_q/kbit/tensor.py": {"1.1 %": "held by tests/benchmarks/test_formats_and_quality.py"},
    "inductor_q/kernels/dequantize_reference.py": {"32 MiB": "computed from the line itself"},
    "inductor_q/kernels/quantize_kbit_reference.py": {
        "16 MiB": "computed from the line itself",
        "0.15 to 0.2 dB": "tests/kbit/test_kbit.py",
        "0.06 dB": "tests/kbit/test_kbit.py",
    },
    "inductor_q/presets/nvidia.py": dict.fromkeys(AXOLOTL, "axolotl#3692"),
    "benchmarks/bench_explain.py": {"10 %": "an aim"},
    "benchmarks/bench_step.py": {
        "13 ms": "operations over the rate beside it",
        "790 TFLOP/s": "a rate to compute with",
    },
    "benchmarks/suite.py": {"37.1 us": "an example of a format", "71.8 ms": "likewise"},
    "examples/moe_qlora.py": {"80 GB": "the size of a GPU"},
}


def _us(name: str, peer: str, **case: object) -> str:
    return f"{1e6 * results.seconds(name, peer, **case):.0f}"


def _gemm_4bit() -> str:
    case = {"what": "gemm", "N": 12288, "K": 4096}
    name, ours = "thresholds-h200", "dequantize + mm"
    times = [_us(name, "gemm_4bit", rows=rows, **case) for rows in (1, 2, 3, 4)]
    throughout = {_us(name, ours, rows=rows, **case) for rows in (1, 2, 3, 4)}
    assert len(throughout) == 1
    return f"K=4096: {', '.join(times)} us at M=1, 2, 3, 4 against {throughout.pop()} throughout"


def _rows_h200() -> str:
    case, counts = {"shape": "12288x4096"}, (1, 16, 32)
    ours, bnb, decode = (
        ", ".join(_us("rows-h200", peer, rows=rows, **case) for rows in counts)
        for peer in ("qfuse", "bitsandbytes", "decode")
    )
    return f"{ours} us against {bnb} us of bitsandbytes and {decode} us of dequantization"


def _rows_many_h200() -> str:
    ours = _us("rows_many-h200", "qfuse", shape="12288x4096", rows=32)
    return f"a later kernel takes {ours} us with 32 rows"


def _attention_rows_h200() -> str:
    guards = "guard_filter_fn=skip_guard_on_all_nn_modules_unsafe"
    peers = (f"qfuse[{guards};qfuse.thresholds=attention_rows.min_keys=1]", f"qfuse[{guards}]")
    found = {}
    for case in results.cases("decode_guards-h200"):
        times = (results.seconds("decode_guards-h200", peer, **case) for peer in peers)
        found[case["LoRA"], case["batch"]] = " / ".join(f"{1e3 * s:.2f}" for s in times)
    plain = f"{found['no', 1]} ms at batch 1, {found['no', 16]} at batch 16"
    return f"{plain}; with adapters {found['r=16', 1]}, {found['r=16', 16]}"


def _steps(name: str, counts: tuple[int, ...], digits: Callable[[float], str]) -> list[str]:
    peers = ("qfuse[qfuse.thresholds=extend_k.min_rows=1]", "qfuse[qfuse.passes=-extend_k]")
    found = []
    for rows in counts:
        [case] = [c for c in results.cases(name) if c["what"] != "gemm" and c["rows"] == rows]
        pair = [digits(1e3 * results.seconds(name, peer, **case)) for peer in peers]
        found.append(" / ".join(pair))
    return found


def _extend_k_h200() -> str:
    a, b, c, d = _steps("thresholds-h200", (256, 512, 1024, 2048), lambda ms: f"{ms:.2f}")
    return f"{a} ms at 256 rows, {b} at 512, {c} at 1024, {d} at 2048"


def _extend_k_cpu() -> str:
    a, b, c = _steps(
        "thresholds-cpu", (64, 512, 2048), lambda ms: f"{ms:.0f}" if ms > 100 else f"{ms:.1f}"
    )
    return f"{a} ms at 64 rows, {b} at 512, {c} at 2048"


def _wide_cpu() -> str:
    name, found = "thresholds_wide-cpu", []
    for rows in (1, 4, 16, 64):
        case = {"what": "x W'", "rows": rows}
        pair = (1e3 * results.seconds(name, p, **case) for p in ("bfloat16", "float32"))
        found.append(" / ".join(f"{ms:.2f}" if ms < 9.995 else f"{ms:.1f}" for ms in pair))
    one, four, sixteen, many = found
    return f"{one} ms at 1 row, {four} at 4, {sixteen} at 16, {many} at 64"


def _masks_cpu() -> str:
    pairs = []
    for documents in (1, 8):
        peers = (
            results.seconds("attention-cpu", peer, **case)
            for case in results.cases("attention-cpu")
            if case["documents"] == documents
            for peer in ("mask", "meant")
        )
        pairs.append(" / ".join(f"{1e3 * seconds:.1f}" for seconds in peers))
    return f"{pairs[0]} ms under padding and {pairs[1]} in documents"


def _loss_cpu() -> str:
    found = []
    for dtype in ("bfloat16", "float32"):
        peers = ("whole", "512", "128")
        times = [1e3 * results.seconds("loss-cpu", peer, dtype=dtype) for peer in peers]
        found.append(f"{' / '.join(f'{ms:.0f}' for ms in times)} ms in {dtype}")
    return ", ".join(found)


def _loss_h200() -> str:
    peers = ("whole", "512", "1024", "2048")
    times = [1e3 * results.seconds("loss-h200", peer) for peer in peers]
    return f"{' / '.join(f'{ms:.1f}' for ms in times)} ms"


def _loss_float32_h200() -> str:
    found = [
        results.row("loss_float32-h200", peer, shape="4096x4096x151936")
        for peer in ("whole", "512", "1024", "2048")
    ]
    times = " / ".join(f"{1e3 * each['timing']['median']:.1f}" for each in found)
    peaks = " / ".join(f"{each['extra']['peak_bytes'] / 1e9:.2f}" for each in found)
    return f"{times} ms and {peaks} GB"


def _rows_cpu() -> str:
    ours, bnb, dense = (
        ", ".join(
            f"{1e3 * results.seconds('rows-cpu', peer, rows=rows):.1f}" for rows in (1, 8, 32)
        )
        for peer in ("qfuse", "bitsandbytes", "dense")
    )
    return f"{ours} ms against {bnb} ms of bitsandbytes and {dense} ms of a weight in bfloat16"


def _rows_small_cpu(format: str) -> str:
    ours, decode = (
        ", ".join(
            f"{1e3 * results.seconds('rows_small-cpu', peer, format=format, rows=rows):.1f}"
            for rows in (1, 8, 32)
        )
        for peer in ("qfuse", "decode")
    )
    return f"{ours} ms against {decode} ms"


def _decoded_first(file: str, model: str, way: str, *tokens: int) -> str:
    """Decoding first against the product that decodes, by tokens, in milliseconds."""
    return ", ".join(
        " / ".join(
            results.number(
                1e3 * results.seconds(f"{file}-h200", peer, model=model, T=t, **{"pass": way})
            )
            for peer in ("dequantize", "qfuse")
        )
        for t in tokens
    )


def _large_experts() -> str:
    first = _decoded_first("moe_large_first", "Qwen3-235B-A22B", "fwd", 32_768)
    second = _decoded_first("moe_large", "gpt-oss-20b", "fwd", 16_384)
    third = _decoded_first("moe_large", "Mixtral", "fwd", 8192)
    return (
        f"{first} ms in Qwen3-235B-A22B (3072 x 4096), {second} ms with the sizes of gpt-oss-20b "
        f"(5760 x 2880), {third} ms in Mixtral"
    )


def _rows_of_large() -> str:
    tokens = (8192, 16_384, 32_768)
    nf4 = _decoded_first("moe_large", "gpt-oss-20b", "fwd", *tokens)
    mxfp4 = _decoded_first("moe_mxfp4_large", "gpt-oss-20b", "fwd", *tokens)
    return f"{mxfp4} ms in gpt-oss-20b in MXFP4; in NF4, with its sizes, {nf4} ms"


def _large_transposed() -> str:
    one = _decoded_first("moe_large", "gpt-oss-20b", "dX", 32_768)
    other = _decoded_first("moe_large", "Mixtral", "dX", 16_384)
    return f"{one} ms with the sizes of gpt-oss-20b, {other} ms in Mixtral"


def _rows_of_transposed() -> str:
    return _decoded_first("moe_large", "Mixtral", "dX", 8192, 16_384, 32_768) + " ms in Mixtral"


def _few_rows(name: str, tokens: int, rows: int, **case: str) -> str:
    few, many = (
        [_us(name, peer, T=t, **case) for peer in ("triton", "dequantize")] for t in (tokens, 4096)
    )
    return f"{' us to '.join(few)} with {rows} rows, {' to '.join(many)} with 256"


FORWARD = {"pass": "fwd"}
#: Figures of code that a result file has: the words as they have to stand there.
FROM_RESULTS: dict[str, tuple[Callable[[], str], ...]] = {
    "inductor_q/presets/nvidia.py": (
        *(_gemm_4bit, _rows_h200, _rows_many_h200, _extend_k_h200, _loss_h200),
        *(_loss_float32_h200, _attention_rows_h200, _large_experts, _rows_of_large),
        *(_large_transposed, _rows_of_transposed),
    ),
    "inductor_q/presets/generic.py": (
        *(_extend_k_cpu, _wide_cpu, _masks_cpu, _loss_cpu, _rows_cpu),
        *(partial(_rows_small_cpu, name) for name in ("mxfp4", "kbit4_e4m4")),
    ),
    "inductor_q/kernels/scatter2scatter_triton.py": (
        partial(_few_rows, "moe_providers-h200", 512, 32),
        partial(_few_rows, "moe_fp8_128x128-h200", 1024, 64, model="Qwen3-30B-A3B", **FORWARD),
    ),
}


def sources() -> Iterator[tuple[str, str]]:
    """Names and texts of the code, each in one line: strings and comments joined."""
    for top in ("inductor_q", "passes", "lowerings", "csrc", "benchmarks", "examples"):
        for path in sorted((ROOT / top).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            linked = re.match(r"inductor_q/(passes|lowerings|csrc)(/|$)", name)
            if path.suffix in (".py", ".cpp", ".cu", ".cuh", ".h") and not linked:
                text = path.read_text(encoding="utf-8")
                text = re.sub(r'"\s*\n\s*f?"', "", text)
                yield name, re.sub(r"\s*\n\s*(#:?|//|\*)?\s*", " ", text)


def unexplained(text: str, known: dict[str, str]) -> list[str]:
    found = [" ".join(figure.split()) for figure in UNIT.findall(text)]
    return [figure for figure in found if figure not in known]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda path: path.parent.name + path.name)
def test_figures_of_documents_come_from_files(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    text = VALUE.sub("", BLOCK.sub("", page.read_text(encoding="utf-8")))
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not unexplained(text, IN_DOCUMENTS.get(name, {}))


def test_figures_of_code_are_those_of_files() -> None:
    texts = dict(sources())
    for name, expected in FROM_RESULTS.items():
        for words in expected:
            assert words() in texts[name], f"{name} should say: {words()}"


def test_code_has_no_other_figures() -> None:
    for name, text in sources():
        for words in FROM_RESULTS.get(name, ()):
            text = text.replace(words(), "")
        assert not unexplained(text, IN_CODE.get(name, {})), name


def test_nothing_is_listed_in_vain() -> None:
    """What is excused here stands where it is said to stand."""
    texts = {
        **dict(sources()),
        **{p.relative_to(ROOT).as_posix(): p.read_text() for p in (*PAGES, *OTHERS)},
    }
    for name, known in (IN_DOCUMENTS | IN_CODE).items():
        found = {" ".join(figure.split()) for figure in UNIT.findall(texts[name])}
        assert set(known) <= found, name


def test_a_figure_without_a_file_is_found() -> None:
    assert unexplained("It takes 12.5 us, 3 % of 2 x 2048 tokens.", {"3 %": "why"}) == ["12.5 us"]
