"""Models on several ranks: DistributedDataParallel, FSDP2 and FSDP1.

Under DDP, over gloo on a CPU and over NCCL on two GPUs, gradients are as near to float64's as
eager's are, and the same on both ranks. What torch does to modules, graphs and weights does not
depend on how many ranks there are, so most of it is tried in a group of one.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import inductor_q
from inductor_q import last_report, report, testing
from inductor_q.backend import qfuse
from inductor_q.integrations.states import states_of
from tests.support import ranks
from tests.support.compiling import SMALL, no_codegen

BATCHES = 3
ADAPTERS = StateDictOptions(ignore_frozen_params=True, strict=False)


def _join(rank: int, port: int, device_type: str) -> torch.device:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=2)
    return device


def _train(rank: int, port: int, folder: str, device_type: str) -> None:
    device = _join(rank, port, device_type)
    config = testing.tiny_llama_config(num_hidden_layers=1)
    model = testing.qlora_model(
        config, adapter_dtype=torch.bfloat16, seed=0, randomize_adapters=True, device=device
    )
    exact = testing.reference_model(model)
    generator = torch.Generator().manual_seed(rank)
    batches = [
        torch.randint(0, config.vocab_size, (2, 32), generator=generator).to(device)
        for _ in range(BATCHES)
    ]

    def parallel(module: nn.Module) -> nn.Module:
        ids = [rank] if device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids)

    def gradients(call: Any, module: nn.Module) -> list[torch.Tensor]:
        found = []
        for ids in batches:
            call(input_ids=ids, labels=ids).loss.backward()
            parameters = testing.adapter_parameters(module)
            found += [p.grad.to(torch.float64, copy=True) for p in parameters if p.grad is not None]
            module.zero_grad(set_to_none=True)
        return found

    truth = gradients(parallel(exact), exact)
    eager = parallel(model)
    expected = gradients(eager, model)
    options: Any = {"qfuse.thresholds": {"extend_k.min_rows": 1}}
    actual = gradients(torch.compile(eager, backend=qfuse, options=options), model)
    report = last_report()
    assert report is not None and report.applied()["extend_k"] > 0

    def error(found: list[torch.Tensor]) -> float:
        """Of all parameters and batches: that of a single one is mostly chance."""
        each = [testing.relative_error(g, t) for g, t in zip(found, truth, strict=True)]
        return math.sqrt(sum(e * e for e in each) / len(each))

    result = [a.cpu() for a in actual], error(actual), error(expected)
    torch.save(result, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()
    ranks.leave()


def check_two_ranks(folder: Path, device_type: str) -> None:
    ranks.on_two_ranks(folder, _train, str(folder), device_type)
    (first, error, limit), (second, *_) = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(first) == BATCHES * 14
    assert 0 < error <= 1.25 * limit, (error, limit)


def _wait(rank: int, port: int) -> None:
    if rank:
        threading.Event().wait()


@pytest.mark.slow
def test_a_rank_that_waits_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SECONDS", 5.0)
    with pytest.raises(
        pytest.fail.Exception, match=r"not done in 5 s(?s:.*)rank 1:(?s:.*)in _wait"
    ):
        ranks.on_two_ranks(tmp_path, _wait)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_ddp_of_two_ranks(tmp_path: Path) -> None:
    check_two_ranks(tmp_path, "cpu")


@pytest.mark.gpu
def test_gpu_ddp_of_two_devices(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, there are {torch.cuda.device_count()}")
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    check_two_ranks(tmp_path, "cuda")


# --- FSDP2 ------------------------------------------------------------------------------


def _model(layers: int = 2) -> Any:
    return testing.qlora_model(
        testing.tiny_qwen3_config(num_hidden_layers=layers),
        quant_storage=torch.bfloat16,
        adapter_dtype=torch.bfloat16,
        randomize_adapters=True,
    )


def _layers(model: Any) -> list[nn.Module]:
    found: list[nn.Module] = list(model.get_base_model().model.layers)
    return found


def _packed_weight(model: Any) -> Any:
    return model.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer").weight


def _sharded(model: Any, **options: Any) -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*_layers(model), model):
        fully_shard(part, mesh=mesh, **options)
    return model


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=ADAPTERS)
    return {"model": weights, "optimizer": moments}


def _losses(call: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train, each rank on its half of a batch; return the loss of the whole batch by step."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 250, (4, 32), generator=generator).chunk(world)[rank]
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item() / world)
    return found


def _compiled_before(model: Any) -> Any:
    """As accelerate and torchtitan do: each layer is compiled, then sharded."""
    for layer in _layers(model):
        layer.compile(backend=qfuse, options=SMALL)
    return _sharded(model)


def _compiled_after(model: Any) -> Any:
    _sharded(model)
    for layer in _layers(model):
        layer.compile(backend=qfuse, options=SMALL)
    return model


def _wrapped(model: Any) -> Any:
    """The layers are replaced by compiled ones, as torch.compile returns them."""
    layers = model.get_base_model().model.layers
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer, backend=qfuse, options=SMALL)
    return _sharded(model)


def _compiled_by_us(model: Any) -> Any:
    return inductor_q.compile(_sharded(model), options=SMALL)


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _compiled_by_us(model)


def _offloaded(model: Any) -> Any:
    _sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return inductor_q.compile(model, options=SMALL)


def _kept(model: Any) -> Any:
    _sharded(model, reshard_after_forward=False)
    return inductor_q.compile(model, options=SMALL)


def _packed_alone(model: Any) -> Any:
    """Adapters and norms of the layers are whole on each rank."""
    packed = testing.bitsandbytes().nn.Params4bit
    parts = [p for layer in _layers(model) for p in layer.parameters()]
    _sharded(model, ignored_params={p for p in parts if not isinstance(p, packed)})
    return inductor_q.compile(model, options=SMALL)


@pytest.mark.usefixtures("group")
def test_sharded_layers_are_no_cuda_graphs(told: list[str]) -> None:
    model = _sharded(_model(1))
    inductor_q.compile(model, options={"triton.cudagraphs": False})
    assert told == []
    inductor_q.compile(model, mode="reduce-overhead")
    assert told[0].startswith(
        "inductor_q.compile: CUDA graphs (triton.cudagraphs: mode reduce-overhead) stay off. FSDP"
    )
    (states,) = {id(states): states for states in states_of(model)}.values()
    assert states.settings["options"] == {
        "triton.cudagraphs": False,
        "qfuse.mode": "reduce-overhead",
    }


def _fsdp1(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = ModuleWrapPolicy({type(_layers(model)[0])})
    device = torch.device("cpu")
    whole = FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    return inductor_q.compile(whole, options=SMALL)


PREPARED = (
    _compiled_before,
    _compiled_after,
    _wrapped,
    _compiled_by_us,
    _checkpointed,
    _offloaded,
    _kept,
    _packed_alone,
    _fsdp1,
)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("prepare", PREPARED)
def test_layers_that_fsdp_shards_are_whole(prepare: Callable[[Any], Any]) -> None:
    torch.compiler.reset()
    model = prepare(_model(layers=1))
    with testing.CompileTrace() as trace, no_codegen():
        _losses(model, _adamw(model), range(2))
    assert (trace.graphs, trace.breaks) == (1, [])
    assert report(model).fused == len(report(model).layers) == 7


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("prepare", (_compiled_after, _compiled_by_us, _fsdp1))
def test_no_decoded_weight_is_kept_of_sharded_layers(prepare: Callable[[Any], Any]) -> None:
    torch.compiler.reset()
    model = prepare(_model(layers=1))
    ids = torch.arange(40)[None]  # more rows than are multiplied with packed weights
    with no_codegen():
        model(input_ids=ids, labels=ids).loss.backward()
    told = last_report()
    assert told is not None
    kept = {site.module for site in told.sites if site.pass_name == "keep_packed"}
    # without checkpointing nobody asks for the gradient of what enters the layer
    assert kept >= {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


@pytest.mark.usefixtures("group")
def test_ddp_does_not_split_the_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 20_000)
    for by_hand in (True, False):
        torch.compiler.reset()
        model = _model(layers=1)
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.04)
        if by_hand:
            model.compile(backend=qfuse, options=SMALL)
        else:
            inductor_q.compile(model, options=SMALL)
        with no_codegen(), caplog.at_level(logging.WARNING, "inductor_q"):
            _losses(parallel, _adamw(model), range(2))
        assert (report(model).graphs > 1, "DDP splits" in caplog.text) == (by_hand, by_hand)
        caplog.clear()


def _shard_and_resume(rank: int, port: int, folder: str) -> None:
    _join(rank, port, "cpu")
    model = _model()
    expected = _losses(DistributedDataParallel(model), _adamw(model), range(4))
    packed = _packed_weight(model)
    model = _sharded(_model())
    assert _losses(model, _adamw(model), range(2)) == pytest.approx(expected[:2], abs=1e-3)
    with no_codegen():
        model = _compiled_by_us(_model())
        weight = _packed_weight(model)
        assert isinstance(weight, DTensor)
        own = packed.data.chunk(2)[rank].view(torch.uint8)  # as bfloat16 some bytes are NaN
        assert torch.equal(weight.to_local().view(torch.uint8), own)
        optimizer = _adamw(model)
        found = _losses(model, optimizer, range(2))
        save(_states(model, optimizer), checkpoint_id=folder)
        whole = StateDictOptions(ignore_frozen_params=True, full_state_dict=True)
        assert len(get_model_state_dict(model, options=whole)) == 2 * 7 * 2
        found += _losses(model, optimizer, range(2, 4))
        assert found == pytest.approx(expected, abs=5e-3)
        told = report(model)
        assert (told.graphs, told.breaks, told.fused, len(told.layers)) == (1, 0, 14, 14)
        resumed = _compiled_by_us(_model())
        optimizer = _adamw(resumed)
        states = _states(resumed, optimizer)
        load(states, checkpoint_id=folder)
        set_state_dict(
            resumed,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=ADAPTERS,
        )
        assert _losses(resumed, optimizer, range(2, 4)) == found[2:]
        for parameter in resumed.parameters():
            assert parameter.requires_grad or parameter.grad is None
    dist.destroy_process_group()


@pytest.mark.slow
def test_fsdp2_of_two_ranks(tmp_path: Path) -> None:
    """Losses are DDP's; a rank holds half of the packed bytes; a saved run goes on as it would."""
    saved = tmp_path / "saved"
    ranks.on_two_ranks(tmp_path, _shard_and_resume, str(saved))
    assert any(saved.iterdir())  # what rank 0 has saved; each rank asserts, and fails the join


#: FSDP2 shards these as their libraries, and our packed layers, keep them.
SHARDED_FORMATS: tuple[Any, ...] = (
    {"torchao": {"format": "nf4"}},
    "mxfp4",
    "kbit4",
    "fp8_128x128",
)


def _packed_model(format: Any) -> Any:
    """Make a QLoRA model of one layer in another format, with adapters in bfloat16."""
    import peft
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    config = testing.tiny_qwen3_config(num_hidden_layers=1, **sizes)
    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    inductor_q.quantize(base, format, progress=False)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model: Any = peft.get_peft_model(base, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.usefixtures("group")
def test_a_sharded_scale_is_no_layer() -> None:
    torch.compiler.reset()
    model = _compiled_by_us(_packed_model("mxfp4"))
    with no_codegen():
        _losses(model, _adamw(model), range(1))
    assert report(model).fused == len(report(model).layers) == 7


def _shard_other_formats(rank: int, port: int) -> None:
    _join(rank, port, "cpu")
    for format in SHARDED_FORMATS:
        with no_codegen():
            torch.compiler.reset()
            model = inductor_q.compile(_packed_model(format), options=SMALL)
            expected = _losses(DistributedDataParallel(model), _adamw(model), range(3))
            torch.compiler.reset()
            model = _compiled_by_us(_packed_model(format))
            found = _losses(model, _adamw(model), range(3))
        assert found == pytest.approx(expected, abs=1e-2), format
        told = report(model)
        assert (told.graphs, told.fused, len(told.layers)) == (1, 7, 7), format
    ranks.leave()


@pytest.mark.slow
def test_fsdp2_of_other_formats(tmp_path: Path) -> None:
    """Losses are about DDP's, and every layer is fused.

    torch 2.13 gathers no NF4Tensor of torchao's in a group of one rank, in eager mode either.
    """
    ranks.on_two_ranks(tmp_path, _shard_other_formats)


def _shard_by_fsdp1(rank: int, port: int) -> None:
    _join(rank, port, "cpu")
    model = _model()
    whole = sum(parameter.numel() for parameter in model.parameters())
    expected = _losses(DistributedDataParallel(model), _adamw(model), range(4))
    with no_codegen():
        model = _fsdp1(_model())
        assert sum(parameter.numel() for parameter in model.parameters()) < 0.6 * whole
        found = _losses(model, _adamw(model), range(4))
    assert found == pytest.approx(expected, abs=5e-3)
    told = report(model)
    assert (told.graphs, told.breaks, told.fused, len(told.layers)) == (1, 0, 14, 14)
    ranks.leave()


@pytest.mark.slow
def test_fsdp1_of_two_ranks(tmp_path: Path) -> None:
    """Losses are DDP's, and a rank holds half of each flat parameter; each rank asserts."""
    ranks.on_two_ranks(tmp_path, _shard_by_fsdp1)
