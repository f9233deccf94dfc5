"""Measure what outliers in the input of a product cost in eight bits, and what would help.

A small Qwen3 learns a book byte by byte. The inputs of its products on held-out text are then cast,
as they are and with outliers put into down_proj's, where published models have theirs: one feature
of some tokens is up to OUTLIERS times a token's mean magnitude ("Massive Activations in Large
Language Models", arXiv:2402.17762, has up to 10,000 and more of the median). A cast is ``token``,
a scale a token, which `qfuse.compute` makes; ``groups``, a scale for 128 features of a token;
``hadamard``, a scale a token behind a rotation of blocks of features. In bfloat16 nothing is lost.

What counts is what the other features lose: with the weight in float64, the error of their share of
the product, in the tokens that have an outlier, by the norm of that share.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks import harness, origin
from benchmarks.byte_models import SIZES, Texts, draw_batches, loss_of, train_base, windows
from inductor_q.kernels import rounding

NAME = "bench_compute_outliers"
#: The size of an outlier, in means of a token's magnitudes; 0: as the model has it.
OUTLIERS = (0, 30, 1_000, 10_000, 100_000)
SHARE = 0.02  # of the tokens that get one
GROUP = 128
WINDOWS = 8  # of held-out text
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda (default: what is there)")
    parser.add_argument("--size", choices=SIZES, help="default: cpu, and medium on a GPU")
    parser.add_argument("--base-steps", type=int, default=300, help="steps to train the model")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/)")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    name = arguments.size or ("cpu" if device.type == "cpu" else "medium")
    path = arguments.out or harness.RESULTS / f"compute_outliers-{harness.device_slug(device)}.json"
    commit = origin.commit()
    origin.require(commit, path.name)
    texts, size = Texts.read(), SIZES[name]
    data = draw_batches(texts.book, arguments.base_steps, seed=1, size=size, device=device)
    model, losses = train_base(size, data, name)
    inputs = _inputs(model, windows(texts.held_out_book, size, device)[:WINDOWS])
    rows = [row for product in PRODUCTS for row in _measure(product, inputs[product])]
    result: dict[str, Any] = {
        **harness.heading(NAME, device, commit),
        "settings": {"size": name, "base_steps": arguments.base_steps, "loss": losses[-1]},
        "texts": texts.as_dict(),
        "rows": rows,
    }
    harness.console.print(_table(rows))
    harness.console.print(f"wrote {origin.write(result, path)}")
    return result


@torch.no_grad()
def _inputs(model: nn.Module, ids: Tensor) -> Mapping[str, list[tuple[Tensor, Tensor]]]:
    """Return the input [M, K], in bfloat16, and the weight [N, K] of each product in each layer."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    hooks = []
    for name, module in model.named_modules():
        if (product := name.rpartition(".")[2]) in PRODUCTS:

            def keep(module: Any, given: tuple[Tensor], _: Any, product: str = product) -> None:
                found[product].append((given[0].flatten(0, -2).bfloat16(), module.weight))

            hooks.append(module.register_forward_hook(keep))
    loss_of(model)(ids)
    for hook in hooks:
        hook.remove()
    return found


def _measure(product: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[dict[str, Any]]:
    outliers = OUTLIERS if product == "down_proj" else OUTLIERS[:1]
    rows = []
    for outlier in outliers:
        errors: dict[str, list[float]] = defaultdict(list)
        for layer, (x, weight) in enumerate(pairs):
            given, others = _with_outliers(x, outlier, seed=layer)
            share = others @ weight.double().t()
            for name, dtype in rounding.DTYPES.items():
                for how, cast in CASTS.items():
                    lost = cast(given, dtype) - given.double()
                    if outlier:
                        lost = torch.where(others == 0, 0, lost)
                    error = (lost @ weight.double().t()).norm() / share.norm()
                    errors[f"{name} {how}"].append(float(error))
        largest = max(_largest(x) for x, _ in pairs)
        rows.append(
            {
                "product": product,
                "outlier": outlier,
                "largest": largest,
                "errors": {key: max(values) for key, values in errors.items()},
            }
        )
    return rows


def _largest(x: Tensor) -> float:
    """Return the largest magnitude in a token, by the token's mean of magnitudes."""
    magnitude = x.double().abs()
    return float((magnitude.amax(-1) / magnitude.mean(-1).clamp_min(1e-30)).max())


def _with_outliers(x: Tensor, outlier: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that get an outlier, with it, and in float64 with zero in its place; all
    tokens as they are where `outlier` is 0."""
    if not outlier:
        return x, x.double()
    generator = torch.Generator().manual_seed(seed)
    count = max(1, int(SHARE * len(x)))
    x = x[torch.randperm(len(x), generator=generator)[:count].to(x.device)].clone()
    feature = int(torch.randint(x.shape[1], (), generator=generator))
    x[:, feature] = outlier * x.abs().float().mean(-1).to(x.dtype)
    others = x.double()
    others[:, feature] = 0
    return x, others


def _token(x: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scale = rounding.cast_rows(x, dtype)
    return codes.double() * scale


def _groups(x: Tensor, dtype: torch.dtype) -> Tensor:
    return _token(x.view(-1, min(GROUP, x.shape[1])), dtype).view(x.shape)


def _hadamard(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast behind a rotation, and rotate back: what a rotated weight would multiply."""
    size = x.shape[1] & -x.shape[1]  # the largest power of 2 that divides the features
    rotation = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    while len(rotation) < size:
        rotation = torch.cat(
            [torch.cat([rotation, rotation], 1), torch.cat([rotation, -rotation], 1)]
        )
    rotation = rotation / size**0.5
    rotated = (x.double().view(-1, size) @ rotation).view(x.shape)
    cast: Tensor = _token(rotated, dtype).view(-1, size) @ rotation.t()
    return cast.view(x.shape)


CASTS = {"token": _token, "groups": _groups, "hadamard": _hadamard}


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="lost of the other features' share", title_justify="left")
    for header in ("product", "outlier", *rows[0]["errors"]):
        table.add_column(header, justify="right")
    for row in rows:
        outlier = f"{row['outlier'] or row['largest']:,.0f} means"
        table.add_row(row["product"], outlier, *(f"{e:.2%}" for e in row["errors"].values()))
    return table


if __name__ == "__main__":
    main()
