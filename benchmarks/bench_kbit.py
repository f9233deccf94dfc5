"""Quantize one bf16 weight to K bits and back: the op, its Triton twin, a copy.

The copy moves as many bytes as either direction must (codes and scales on one side, bf16 on the
other). bitsandbytes dequantizes as many elements from NF4 with fp32 scales, which is more bytes.
Results are checked bitwise against the eager reference first.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from inductor_q import ops, testing
from inductor_q.formats import FORMATS
from inductor_q.formats.kbit import KBIT_SCALES, KBITS, kbit_format_name, normal_float
from inductor_q.kernels import PROVIDERS, dequantize_reference
from inductor_q.kernels.calls import Dequantize, QuantizeKbit
from inductor_q.kernels.quantize_kbit_reference import reference

SHAPES = {"cuda": (8192, 8192), "cpu": (1024, 1024)}
QUICK = {"cuda": (2048, 2048), "cpu": (64, 256)}
PEERS = ("copy", "bitsandbytes", "op", "triton")
#: How a launch is timed, and over how many sets of buffers.
RUNS = {"cuda": {"single": 1, "sustained": 8}, "cpu": {"single": 1}}

Calls = dict[str, list[Callable[[], Any]]]


@dataclass(frozen=True)
class Weight:
    """Hold what both directions read or write; `operands` are the reference's."""

    x: Tensor
    operands: list[Tensor]

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + sum(t.nbytes for t in self.operands)


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--bits", nargs="+", type=int, choices=KBITS, default=list(KBITS))
    parser.add_argument("--absmax", nargs="+", choices=list(KBIT_SCALES), default=list(KBIT_SCALES))
    parser.add_argument("--verbs", nargs="+", choices=list(VERBS), default=list(VERBS))
    parser.add_argument("--shape", metavar="NxK")
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_kbit", arguments)
    shape = (QUICK if arguments.quick else SHAPES)[suite.device.type]
    if arguments.shape:
        rows, cols = map(int, arguments.shape.split("x"))
        shape = (rows, cols)
    suite.settings |= {"shape": shape, "dtype": "bf16"}
    sets = max(RUNS[suite.device.type].values())
    matrices = [torch.randn(shape, device=suite.device).bfloat16() * 0.02 for _ in range(sets)]
    nf4 = _nf4(matrices) if "bitsandbytes" in arguments.backends else []
    for k in arguments.bits:
        for absmax in arguments.absmax:
            codebook = torch.tensor(normal_float(k), device=suite.device)
            weights = [Weight(x, [*reference(x, codebook, k, absmax), codebook]) for x in matrices]
            copies = _copies(weights[0].nbytes // 2, sets, suite.device)
            for verb in arguments.verbs:
                calls = VERBS[verb](weights, k, absmax) | {"copy": copies}
                if verb == "dequantize" and nf4:
                    calls["bitsandbytes"] = nf4
                wanted = {peer: calls[peer] for peer in arguments.backends if peer in calls}
                case = {"verb": verb, "K": k, "absmax": absmax}
                _time(suite, arguments, case, wanted, weights[0].nbytes)
    harness.finish(suite, arguments)
    return suite


def _time(
    suite: harness.Suite,
    arguments: argparse.Namespace,
    case: Mapping[str, Any],
    calls: Calls,
    nbytes: int,
) -> None:
    roof = suite.ceilings.roof(bytes=nbytes)
    for run, count in RUNS[suite.device.type].items():
        candidates = {
            peer: of[0] if count == 1 else harness.in_sequence(of, suite.device)
            for peer, of in calls.items()
        }
        samples = harness.time_kernels(
            candidates, suite.device, rounds=arguments.rounds or 3, budget=0.06
        )
        timings = {peer: timing.per(count) for peer, timing in samples.items()}
        extra = {peer: {"gbps": nbytes / t.median / 1e9} for peer, t in timings.items()}
        named = {**case, "run": run}
        suite.add(named, timings, roof=roof, extra=extra)
        if "op" not in timings:
            continue
        said = [f"{100 * roof / timings['op'].median:.1f} % of the roof"]
        if copied := suite.ratio(named, "copy", "op"):
            said.append(f"{100 * copied:.1f} % of a copy")
        if faster := suite.ratio(named, "bitsandbytes", "op"):
            said.append(f"{faster:.2f}x as fast as bitsandbytes' NF4")
        suite.notes.append(f"{' '.join(map(str, named.values()))}: {', '.join(said)}")


def _dequantize(weights: Sequence[Weight], k: int, absmax: str) -> Calls:
    fmt = FORMATS[kbit_format_name(k, absmax)]
    first = weights[0]
    calls: Calls = {
        "op": [
            functools.partial(ops.dequantize, w.operands, fmt.name, w.x.shape, w.x.dtype)
            for w in weights
        ]
    }
    twin = _twin("dequantize", first)
    if twin is not None:

        def launch(w: Weight) -> Tensor:
            out = torch.empty_like(w.x)
            twin.run(Dequantize(w.operands, fmt, out))
            return out

        calls["triton"] = [functools.partial(launch, w) for w in weights]
    right = torch.empty_like(first.x)
    dequantize_reference.KERNEL.run(Dequantize(first.operands, fmt, right))
    for peer, of in calls.items():
        _check(f"{peer} at {fmt.name}", [of[0]()], [right])
    return calls


def _quantize(weights: Sequence[Weight], k: int, absmax: str) -> Calls:
    first = weights[0]
    codebook = first.operands[2]
    calls: Calls = {
        "op": [functools.partial(ops.quantize_kbit, w.x, codebook, k, absmax) for w in weights]
    }
    twin = _twin("quantize_kbit", first)
    if twin is not None:
        calls["triton"] = [
            functools.partial(twin.run, QuantizeKbit(w.x, codebook, k, absmax)) for w in weights
        ]
    for peer, of in calls.items():
        _check(f"{peer} to {k} bits, {absmax}", of[0](), first.operands[:2])
    return calls


VERBS = {"dequantize": _dequantize, "quantize": _quantize}


def _twin(op: str, of: Weight) -> Any:
    listed = PROVIDERS[op].get(of.x.device.type, ())
    return next((provider for provider in listed if provider.name == "triton"), None)


def _check(what: str, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, right in zip(actual, expected, strict=True):
        if not torch.equal(mine.view(torch.uint8), right.view(torch.uint8)):
            sys.exit(f"{what} differs from the reference: not timed")


def _copies(count: int, sets: int, device: torch.device) -> list[Callable[[], Any]]:
    def copy(target: Tensor, source: Tensor) -> Tensor:
        return target.copy_(source)

    make = functools.partial(torch.zeros, count, dtype=torch.uint8, device=device)
    return [functools.partial(copy, make(), make()) for _ in range(sets)]


def _nf4(matrices: Sequence[Tensor]) -> list[Callable[[], Any]]:
    functional = testing.bitsandbytes().functional
    calls: list[Callable[[], Any]] = []
    for x in matrices:
        packed, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
        calls.append(functools.partial(functional.dequantize_4bit, packed, state))
    return calls


if __name__ == "__main__":
    main()
