"""Generate text with a 4-bit model and an adapter that is not merged, eager and compiled.

With a static cache every step has the same shapes, so one graph serves all, on a GPU in CUDA
graphs: `compile_decoding` makes it. transformers would compile it by itself, but not for a model in
bitsandbytes' 4 bits, so the stock compiler is asked by hand. The prompt runs in eager, as there:
what makes the cache cannot be part of a CUDA graph.

python -m examples.generate                                      # a toy model, on a CPU too
python -m examples.generate --model Qwen/Qwen3-8B --adapter FOLDER --tokens 200
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import TextStreamer

from examples.common import load
from inductor_q import testing
from inductor_q.integrations import compile_decoding, keep_unpacked

BACKENDS = ("eager", "inductor", "qfuse")


@dataclass(frozen=True)
class Run:
    """What one backend generated, and how fast."""

    backend: str
    tokens: list[int]
    per_second: float
    first_s: float
    graphs: int
    breaks: int


class _Watch(TextStreamer):
    """Write the text as it comes, and know when tokens came."""

    def __init__(self, tokenizer: Any, write: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.write:
            super().on_finalized_text(text, stream_end)


def main(argv: Sequence[str] | None = None) -> list[Run]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="toy", help="toy, 8b, or a name or folder of a model")
    parser.add_argument("--adapter", help="a folder of PEFT; without one, a random adapter")
    parser.add_argument("--prompt", default="The harbour master said")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    args = parser.parse_args(argv)
    if args.tokens < 2:
        parser.error(
            f"--tokens={args.tokens}: give 2 or more, since the time between tokens counts"
        )
    model, tokenizer = load(args.model)
    model = _adapted(model, args.adapter).eval()
    keep_unpacked(model)  # on a CPU: bitsandbytes would pack weights in a layout of its own
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    runs = [_run(model, tokenizer, inputs, backend, args.tokens) for backend in args.backends]
    for run in runs:
        print(
            f"{run.backend:9s} {run.per_second:8.1f} tokens/s, first {run.first_s:.1f} s, "
            f"{run.graphs} graphs, {run.breaks} breaks"
        )
    return runs


def _adapted(model: Any, folder: str | None) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if folder is not None:
        return PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def _stock_steps(forward: Any) -> Any:
    """Let the steps of one token run compiled, and the prompt in eager."""
    step = torch.compile(forward, mode="reduce-overhead", dynamic=False)

    @functools.wraps(forward)
    def either(*args: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        chosen = step if input_ids.shape[1] == 1 else forward
        return chosen(*args, input_ids=input_ids, **given)

    return either


def _run(model: Any, tokenizer: Any, inputs: Any, backend: str, count: int) -> Run:
    """Generate twice: the first time compiles, the second one streams the text and is timed."""
    torch.compiler.reset()
    inner = model.get_base_model()
    eager = inner.forward
    if backend == "inductor":
        inner.forward = _stock_steps(eager)
    elif backend == "qfuse":
        compile_decoding(model)
    options = {
        "min_new_tokens": count,
        "max_new_tokens": count,
        "do_sample": False,
        "use_cache": True,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    start = time.perf_counter()
    with testing.CompileTrace() as trace:
        model.generate(**inputs, **options, streamer=_Watch(tokenizer, write=False))
        first = time.perf_counter() - start
        print(f"[{backend}] ", end="", flush=True)
        watch = _Watch(tokenizer, write=True)
        made = model.generate(**inputs, **options, streamer=watch)
    inner.forward, inner._compiled_call_impl = eager, None
    times = watch.times[1:]  # the first is the prompt's
    speed = (len(times) - 1) / (times[-1] - times[0])
    tokens = made[0, inputs["input_ids"].shape[1] :].tolist()
    return Run(backend, tokens, speed, first, trace.graphs, len(trace.breaks))


if __name__ == "__main__":
    main()
