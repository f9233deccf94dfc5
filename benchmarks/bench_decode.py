"""Time one decoding step of a whole model: one token for each sequence, over a static cache.

The model has eight layers of Qwen3-8B's shapes; 512 tokens are in a cache of 1024, and the peers
run in CUDA graphs, ``eager`` (NF4, not compiled) aside. ``bf16`` is not quantized and stock
Inductor compiles it, as it does NF4 for ``inductor``; ``compile_decoding`` is what
`inductor_q.integrations` has for generation: it looks at the model once a text. LoRA adapters
(r = 16, seven projections, bf16) are not merged. Quantized peers share one model's weights and have
caches of their own. Steps are queued one behind another, as generation without a stop does, so the
time is the larger of what the host and the GPU take. ``error`` is that of the logits, against the
same model in eager with sdpa's math kernel. The roof is the time of reading weights and cache once.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import harness
from inductor_q import testing
from inductor_q.integrations import compile_decoding
from inductor_q.integrations.regions import base_model
from inductor_q.integrations.states import named_function

#: What each is on a GPU: with CUDA graphs, but for eager mode.
PEERS = {
    "eager": "eager",
    "bf16": "inductor[triton.cudagraphs=True]",
    "inductor": "inductor[triton.cudagraphs=True]",
    "qfuse": "qfuse[qfuse.mode=reduce-overhead]",
    "compile_decoding": "compile_decoding",
}
PROMPT, CACHE = 512, 1024
QUICK = {"vocab_size": 256, "max_position_embeddings": CACHE}


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=tuple(PEERS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 16")
    parser.add_argument("--adapted", nargs="+", choices=("no", "r=16"), default=("no", "r=16"))
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_decode", arguments)
    suite.settings |= {"layers": arguments.layers, "vocab_size": arguments.vocab_size}
    for adapted in arguments.adapted:
        for batch in arguments.batches or ((1,) if arguments.quick else (1, 16)):
            _measure(suite, arguments, batch, adapted)
    harness.finish(suite, arguments, extras=("throughput", "peak_bytes", "error", "first_s"))
    return suite


def _measure(suite: harness.Suite, arguments: Any, batch: int, adapted: str) -> None:
    steps: dict[str, Callable[[], Tensor]] = {}
    extra: dict[str, dict[str, Any]] = {}
    roofs: dict[str, float] = {}
    torch.compiler.reset()
    config = _config(arguments)
    models: dict[bool, Any] = {}  # by whether it is quantized
    model_bytes: dict[bool, int] = {}
    for peer in arguments.backends:
        gc.collect()
        quantized = not peer.startswith("bf16")
        if quantized not in models:
            empty = harness.held_bytes(suite.device)
            models[quantized] = _model(
                config, suite.device, quantized=quantized, adapted=adapted != "no"
            )
            gc.collect()
            model_bytes[quantized] = (harness.held_bytes(suite.device) or 0) - (empty or 0)
        before = harness.held_bytes(suite.device)
        decoder = _Decoder(models[quantized], config, suite.device, batch, arguments.seed)
        expected = decoder.exact()
        decoder.compile(_with_graphs(peer) if suite.device.type == "cuda" else peer)
        with testing.CompileTrace() as trace:
            first = harness.first_call(decoder.step, suite.device)
        for _ in range(2):  # what records the graph, and what replays it
            decoder.step()
        decoder.rewind()
        logits = decoder.step().float()
        error = float((logits - expected).norm() / expected.norm())
        peak = harness.peak_bytes(decoder.step, suite.device)
        extra[peer] = {"error": error, "first_s": first, "graphs": trace.graphs}
        extra[peer] |= {"breaks": len(trace.breaks), "held_bytes": decoder.held}
        if peak is not None and before is not None:
            extra[peer]["peak_bytes"] = peak - before + model_bytes[quantized]
        roofs[peer] = suite.ceilings.roof(bytes=decoder.held)
        steps[peer] = decoder.step
        decoder.rewind()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    block = 2 if arguments.quick else min(60, (CACHE - PROMPT - 4) // rounds - 1)
    timings = harness.time_steps(steps, suite.device, rounds=rounds, per_round=block)
    for peer, timing in timings.items():
        extra[peer]["throughput"] = batch / timing.median
        case = {"batch": batch, "LoRA": adapted}
        suite.add(case, {peer: timing}, roof=roofs[peer], extra=extra)


def _with_graphs(peer: str) -> str:
    """Return what a peer is on a GPU; one with options of its own keeps them."""
    name, _, options = peer.partition("[")
    return f"{PEERS[name].removesuffix(']')};{options}" if options else PEERS[name]


def _config(arguments: Any) -> Any:
    if arguments.quick:
        return testing.tiny_qwen3_config(num_hidden_layers=2, **QUICK)
    return testing.qwen3_8b_config(arguments.layers, vocab_size=arguments.vocab_size)


class _Decoder:
    """A model with a filled cache of its own, and the model's next step."""

    def __init__(
        self, model: Any, config: Any, device: torch.device, batch: int, seed: int
    ) -> None:
        from transformers import StaticCache

        self.model = model
        self.cache: Any = StaticCache(config=config, max_cache_len=CACHE)
        named = inspect.signature(base_model(self.model).forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"  # before 5.24
        generator = torch.Generator().manual_seed(seed)
        made = torch.randint(0, config.vocab_size, (batch, PROMPT + 1), generator=generator)
        self.ids = made.to(device)
        self.call: Any = self.model
        self.rewind()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        held = sum(t.nbytes for t in tensors) - self.model.get_input_embeddings().weight.nbytes
        layers: Any = self.cache.layers
        for layer in layers:
            held += layer.keys.nbytes + layer.values.nbytes
        self.held = held + sum(_state_bytes(p) for p in self.model.parameters())

    def rewind(self) -> None:
        """Let the cache hold the prompt alone."""
        self.cache.reset()
        self._run(self.model, self.ids[:, :-1], logits_to_keep=1)

    def exact(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            logits = self._run(self.model, self.ids[:, -1:]).float()
        self.rewind()
        return logits

    def compile(self, peer: str) -> None:
        if peer == "compile_decoding":
            inner = base_model(compile_decoding(self.model))
            # Not left in the model, which other peers have too.
            self.call, inner._compiled_call_impl = inner._compiled_call_impl, None
            return
        # With code of its own, lest a peer without guards on modules takes another one's graph.
        step = harness.compile_as(peer.replace("bf16", "inductor"), named_function("step"))
        self.call = functools.partial(step, self.model)

    def step(self) -> Tensor:
        return self._run(self.call, self.ids[:, -1:])

    def _run(self, call: Any, ids: Tensor, **options: Any) -> Tensor:
        with torch.no_grad():
            cache = {self.cache_name: self.cache}
            out = call(input_ids=ids, use_cache=True, **cache, **options)
        logits: Tensor = out.logits
        return logits


def _model(config: Any, device: torch.device, *, quantized: bool, adapted: bool) -> Any:
    if quantized:
        model = testing.qlora_model(
            config, adapter_dtype=torch.bfloat16, randomize_adapters=True, device=device
        )
        return (model if adapted else model.unload()).eval()
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        make: Any = AutoModelForCausalLM.from_config
        plain = make(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    plain.requires_grad_(False)
    if not adapted:
        return plain.eval()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=list(testing.PROJECTIONS))
    return get_peft_model(plain, lora).to(torch.bfloat16).eval()


def _state_bytes(parameter: Any) -> int:
    """Count what a 4-bit weight has beside its codes."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return 0
    nested = [state.state2.absmax] if state.nested else []
    return sum(t.nbytes for t in (state.absmax, *nested))


if __name__ == "__main__":
    main()
