"""Two ranks of DistributedDataParallel, over gloo on a CPU and over NCCL on two GPUs: gradients as
near to float64's as eager's are, the same on both ranks."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

BATCHES = 3


def _train(rank: int, port: int, folder: str, device_type: str) -> None:
    from inductor_q import last_report, testing
    from inductor_q.backend import qfuse

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=2)
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

    def parallel(module: torch.nn.Module) -> torch.nn.Module:
        ids = [rank] if device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(module, device_ids=ids)

    def gradients(call: Any, module: torch.nn.Module) -> list[torch.Tensor]:
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


def check_two_ranks(folder: Path, device_type: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_train, args=(port, str(folder), device_type), nprocs=2)
    (first, error, limit), (second, *_) = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(first) == BATCHES * 14
    assert 0 < error <= 1.25 * limit, (error, limit)


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
