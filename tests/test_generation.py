"""Greedy decoding with a key-value cache by `generate`, through a model compiled with qfuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_q
from inductor_q import testing
from inductor_q.backend import qfuse

for extra in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

PROMPT, NEW = 12, 12

#: Float32 on a CPU: rounding is then far below what lies between a token and the next best.
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def prompt(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, PROMPT), generator=generator).to(device)


def decode(model: Any, cache: str, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens [2, PROMPT + NEW], and the logits [2, NEW, vocabulary] that they were taken by.

    `forced` tokens of the same shape are taken in place of the best ones, so that the logits of
    two runs are of the same text. `generate` compiles by itself where a cache is static and the
    device a GPU: it is told not to.
    """

    def force(seen: Tensor, scores: Tensor) -> Tensor:
        if forced is None:
            return scores
        return torch.full_like(scores, -torch.inf).scatter(1, forced[:, seen.shape[1], None], 0.0)

    ids = prompt(model.device.type)
    result = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        do_sample=False,
        use_cache=True,
        cache_implementation=cache,
        disable_compile=True,
        logits_processor=[force],
        pad_token_id=testing.ByteTokenizer.pad_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return result.sequences, torch.stack(result.logits, 1)


def adapted(device: str) -> Any:
    return testing.qlora_model(
        testing.tiny_llama_config(num_hidden_layers=1),
        compute_dtype=DTYPE[device],
        adapter_dtype=DTYPE[device],
        randomize_adapters=True,
        device=device,
    ).eval()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cache", [pytest.param("dynamic", marks=pytest.mark.slow), "static"])
def test_decoding_is_that_of_eager(cache: str, device: str) -> None:
    """In float32 the same tokens; of those, logits as near to float64's without a cache."""
    model = adapted(device)
    tokens, theirs = decode(model, cache)
    with model.disable_adapter():
        assert not torch.equal(decode(model, cache)[0], tokens)
    with torch.no_grad():
        exact = testing.reference_model(model)(input_ids=tokens).logits[:, PROMPT - 1 : -1]

    # What `generate` calls is the model inside PEFT's.
    model.base_model.model.compile(backend=qfuse, options={"fx_graph_cache": False})
    with testing.CompileTrace() as trace:
        if device == "cpu":
            assert torch.equal(decode(model, cache)[0], tokens)
        _, ours = decode(model, cache, forced=tokens)
    limit = testing.relative_error(theirs, exact)
    assert testing.relative_error(ours, exact) <= 1.25 * limit + 1e-6
    assert limit < 20 * torch.finfo(DTYPE[device]).eps

    # The prompt; one token; with a dynamic cache one more token, of a length that varies now.
    assert trace.breaks == []
    assert trace.graphs <= {"dynamic": 3, "static": 2}[cache]
    report = inductor_q.last_report()
    assert report is not None
    sites = [site for site in report.sites if site.pass_name == "canonicalize"]
    assert {s.module.rpartition(".")[2] for s in sites} == set(testing.PROJECTIONS)
    # On a GPU, bitsandbytes' kernel is preferred for a few rows.
    assert all(not s.rejected or (device == "cuda" and s.by_choice) for s in sites)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("way", ["compile_config", "forward"])
def test_ways_of_others_to_compile_a_static_cache(way: str, device: str) -> None:
    """transformers' own, and a compiled forward in CUDA graphs: two texts, of two adapters."""
    model = adapted(device)
    ids = prompt(device)
    settings: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings |= {
        "min_new_tokens": NEW,
        "max_new_tokens": NEW,
        "do_sample": False,
        "use_cache": True,
    }
    settings |= {"cache_implementation": "static", "pad_token_id": testing.ByteTokenizer.pad_id}
    eager = model.generate(**settings, disable_compile=True)
    with model.disable_adapter():
        without = model.generate(**settings, disable_compile=True)
    torch.compiler.reset()
    if way == "compile_config":
        compile_config = pytest.importorskip("transformers.generation").CompileConfig
        settings["compile_config"] = config = compile_config(backend="qfuse")
        config._compile_all_devices = True  # by itself it compiles on a GPU alone
    else:
        inner = model.get_base_model()
        inner.forward = torch.compile(inner.forward, backend="qfuse", mode="reduce-overhead")
        settings["disable_compile"] = True
    with testing.CompileTrace() as trace:
        for _ in range(2):
            tokens = model.generate(**settings)
            with model.disable_adapter():
                others = model.generate(**settings)
            if device == "cpu":
                assert torch.equal(tokens, eager) and torch.equal(others, without)
    assert trace.breaks == []
    # One token with the adapter and one without; a compiled forward serves the prompts too.
    assert trace.graphs == {"compile_config": 2, "forward": 4}[way]
    report = inductor_q.last_report()
    assert report is not None and report.applied()["canonicalize"] == len(testing.PROJECTIONS)
