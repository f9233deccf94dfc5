"""Experts that are shared among ranks: exchanged tokens, gradients, adapters' files, refusals."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft as peft_package
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import inductor_q
from inductor_q import exc, experts
from inductor_q.experts.model import stacks
from inductor_q.experts.modules import expert_layers
from inductor_q.integrations import QfuseCallback
from inductor_q.ops import exchange as exchange_ops
from inductor_q.ops.exchange import is_gathered, plan_exchange, to_experts, to_tokens
from inductor_q.testing import CompileTrace, relative_error
from tests.support import ranks
from tests.support.compiling import SMALL, no_codegen
from tests.support.moe_models import EXPERTS, awaken, model

peft: Any = peft_package  # as shipped, it is typed in parts

#: Of a gradient, by its norm: sums in another order, in float32, through two layers.
CLOSE = 1e-5


def _make(format: str = "nf4_b64", family: str = "qwen3_moe") -> Any:
    net = model(family).requires_grad_(False)
    if format != "dense":
        experts.quantize(net, format)
    awaken(experts.add_lora(net, r=4, alpha=8))
    return net


def _ids(rank: int) -> Tensor:
    """Batches of two ranks, of which the second one is longer."""
    return torch.randint(1, 96, (2, 7 + 4 * rank), generator=torch.Generator().manual_seed(rank))


def _loss(net: Any, rank: int) -> Tensor:
    loss: Tensor = net(input_ids=_ids(rank), labels=_ids(rank), use_cache=False).loss
    return loss


def _gradients(net: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


# --- two ranks ----------------------------------------------------------------------------------


def _join(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)


def _chosen_by_hand(rank: int) -> None:
    """Two ranks are more than one choice, so that a token goes to the rank that has its expert."""
    x = torch.tensor([[1.0], [2.0]] if rank == 0 else [[3.0]], requires_grad=True)
    exchange = plan_exchange(torch.tensor([[3], [1]] if rank == 0 else [[2]]), 2, 2)
    assert exchange.ids.tolist() == ([[1]] if rank == 0 else [[1], [0]])
    there = to_experts(x, exchange)
    assert there.flatten().tolist() == ([2] if rank == 0 else [1, 3])
    here = to_tokens(there * (rank + 1), exchange, len(x))
    assert here.flatten().tolist() == ([2, 2] if rank == 0 else [6])
    here.sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == ([2, 1] if rank == 0 else [2])
    # Nobody chooses rank 1, which gets one row that is nobody's.
    alone = plan_exchange(torch.zeros(2, 1, dtype=torch.int64), 2, 2)
    assert len(alone.ids) == (4 if rank == 0 else 1)
    assert rank == 0 or int(alone.ids) < 0
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert torch.equal(to_tokens(to_experts(x, alone), alone, 2), x)


def _gathered_by_hand(rank: int) -> None:
    """Two ranks are no more than two choices, so that all tokens go to both."""
    x = torch.tensor([[1.0], [2.0]] if rank == 0 else [[3.0]], requires_grad=True)
    ids = torch.tensor([[0, 3], [1, 0]] if rank == 0 else [[2, 1]])
    exchange = plan_exchange(ids, 2, 2)
    expected = torch.tensor([[0, 3], [1, 0], [2, 1]]) - 2 * rank
    assert torch.equal(exchange.ids, expected) and len(exchange.rows) == 0
    there = to_experts(x, exchange)
    assert there.flatten().tolist() == [1, 2, 3]
    here = to_tokens(there * (rank + 1), exchange, len(x))
    assert here.flatten().tolist() == ([3, 6] if rank == 0 else [9])
    here.sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [3] * len(x)
    # As many tokens on each rank, tokens on one alone, and none.
    for count in (2, 2 * rank, 0):
        mine = torch.full((count, 3), 1.5 + rank, dtype=torch.bfloat16)
        plan = plan_exchange(torch.zeros(count, 2, dtype=torch.int64), 2, 2)
        there = to_experts(mine, plan)
        assert len(there) == len(plan.ids) == max(sum(plan.splits[1].tolist()), 1)
        assert torch.equal(to_tokens(there, plan, count), 2 * mine)


def _shared_step(rank: int, prepare: Any) -> Any:
    """Losses are those of the whole model; gradients are those of the mean over ranks."""
    whole = _make()
    losses = [_loss(whole, other) for other in range(2)]
    (torch.stack(losses).sum() / 2).backward()
    expected = _gradients(whole)
    net = prepare(experts.shard(_make()))
    loss = _loss(net, rank)
    loss.backward()
    assert loss.item() == pytest.approx(losses[rank].item(), abs=1e-5)
    found = _gradients(net)
    assert len(found) == len(expected) == 8
    mine = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    for name, grad in found.items():
        assert relative_error(grad, expected[name][mine]) < CLOSE, name
    return net


def _count_questions(patch: pytest.MonkeyPatch) -> list[int]:
    """Note with how many tokens ranks are asked for theirs."""
    asked: list[int] = []
    ask = exchange_ops._tokens_of_ranks

    def noted(tokens: int, ranks: int) -> list[int]:
        asked.append(tokens)
        return ask(tokens, ranks)

    patch.setattr(exchange_ops, "_tokens_of_ranks", noted)
    return asked


def _checkpointed(net: Any) -> Any:
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return inductor_q.compile(net.train(), options=SMALL)


def _as_it_is(net: Any) -> Any:
    return net


def _by_layers(net: Any) -> Any:
    return inductor_q.compile(net, regions="layers", options=SMALL)


def _compiled(net: Any) -> Any:
    return inductor_q.compile(net, options=SMALL)


def _save_and_load(rank: int, net: Any, folder: Path) -> None:
    experts.save_adapter(net, folder)
    dist.barrier()
    plain = experts.quantize(model("qwen3_moe").requires_grad_(False), "nf4_b64")
    experts.load_adapter(plain, folder)
    again = experts.shard(experts.quantize(model("qwen3_moe").requires_grad_(False), "nf4_b64"))
    experts.load_adapter(again, folder)
    for (name, stack), (_, whole), (_, mine) in zip(
        stacks(again), stacks(plain), stacks(net), strict=True
    ):
        for side in ("lora_A", "lora_B"):
            part = getattr(whole, side).chunk(2)[rank]
            assert torch.equal(getattr(stack, side), part), name
            assert torch.equal(getattr(stack, side), getattr(mine, side)), name


def _clipped(rank: int) -> None:
    """With a norm that trains on all ranks, under DDP and FSDP2."""

    def make() -> Any:
        net = _make()
        net.model.norm.weight.requires_grad_(True)
        return net

    whole = make()
    ((_loss(whole, 0) + _loss(whole, 1)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)
    expected = _gradients(whole)
    for wrap in ("ddp", "fsdp2"):
        net: Any = experts.shard(make())
        before = copy.deepcopy(net.state_dict())
        alone = set(experts.parameters_of_rank(net))
        if wrap == "fsdp2":
            for layer in net.model.layers:
                fully_shard(layer, ignored_params=alone)
            fully_shard(net, ignored_params=alone)
        call = DistributedDataParallel(net) if wrap == "ddp" else net
        for _ in range(2):  # DDP broadcasts buffers before the second
            net.zero_grad()
            _loss(call, rank).backward()
        assert len(alone) == 8
        for name, stack in stacks(net):
            for key, operand in stack.state_dict().items():
                assert torch.equal(operand, before[f"{name}.{key}"])
        torch.testing.assert_close(experts.clip_grad_norm_(net, 1e-3), norm)
        for name, grad in _gradients(net).items():
            right = expected[name]
            if grad.shape != right.shape:
                right = right.chunk(2)[rank]
            found: Any = grad
            found = found.full_tensor() if hasattr(grad, "full_tensor") else found
            assert relative_error(found, right) < CLOSE, (wrap, name)


def _all_of_it(rank: int, port: int, folder: str) -> None:
    _join(rank, port)
    _chosen_by_hand(rank)
    _gathered_by_hand(rank)
    net = _shared_step(rank, _as_it_is)
    _save_and_load(rank, net, Path(folder))
    with no_codegen(), CompileTrace() as trace:
        for prepare in (_compiled, _checkpointed, _by_layers):
            torch.compiler.reset()
            with pytest.MonkeyPatch.context() as patch:
                asked = _count_questions(patch)
                _shared_step(rank, prepare)
            # Backward under checkpointing does not ask again.
            assert asked == [_ids(rank).numel()] * 2  # layers
    assert (trace.graphs, trace.breaks) == (3, [])
    with pytest.MonkeyPatch.context() as patch, no_codegen():
        _choose(patch)  # as with more ranks than choices
        for prepare in (_as_it_is, _compiled, _checkpointed):
            torch.compiler.reset()
            _shared_step(rank, prepare)
    _clipped(rank)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Each rank asserts, and fails the join."""
    ranks.on_two_ranks(tmp_path, _all_of_it, str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


# --- one process --------------------------------------------------------------------------------


def _choose(patch: pytest.MonkeyPatch) -> None:
    """Send tokens only to ranks that have their experts, however few the ranks are."""
    patch.setattr(exchange_ops, "is_gathered", lambda top_k, ranks: False)


@pytest.fixture(params=["gathered", "chosen"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "chosen":
        _choose(monkeypatch)
    name: str = request.param
    return name


@pytest.mark.usefixtures("group")
def test_ops(way: str) -> None:
    ids = torch.tensor([[0, 3], [1, 0], [-1, 4]])  # nobody has an expert of the last token
    torch.library.opcheck(torch.ops.qfuse.plan_exchange, (ids, 4, 1))
    exchange = plan_exchange(ids, 4, 1)
    travel = 3 if way == "gathered" else 2
    assert exchange.rows.tolist() == ([] if way == "gathered" else [0, 1])
    assert exchange.splits.tolist() == [[travel], [travel]]
    x = torch.randn(3, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.qfuse.to_experts, (x, *exchange))
    y = torch.randn(travel, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.qfuse.to_tokens, (y, *exchange, 3))
    back = to_tokens(to_experts(x, exchange), exchange, 3)
    assert torch.equal(back, torch.cat([x[:travel], torch.zeros(3 - travel, 5)]))


def test_tokens_are_gathered_by_as_many_ranks_as_choices() -> None:
    assert is_gathered(8, 2) and is_gathered(8, 8) and is_gathered(1, 1)
    assert not is_gathered(4, 8) and not is_gathered(1, 2)


def _there_and_back(x: Tensor, ids: Tensor) -> Tensor:
    exchange = plan_exchange(ids, 4, 1)
    ours = (exchange.ids < 4).to(x.dtype)  # what experts that are elsewhere return is zero
    return to_tokens(to_experts(x, exchange).sin() * ours, exchange, x.shape[0])


@pytest.mark.usefixtures("group", "way")
def test_one_graph_however_many_rows_travel() -> None:
    torch.compiler.reset()
    call = torch.compile(_there_and_back, backend="aot_eager", fullgraph=True)
    with dynamo_config.patch(capture_dynamic_output_shape_ops=True), CompileTrace() as trace:
        for ids in ([[0], [4], [2]], [[4], [4], [4]], [[0], [1], [2]]):
            x = torch.randn(3, 5, requires_grad=True)
            expected = torch.where(torch.tensor(ids) < 4, x.detach().sin(), 0)
            found = call(x, torch.tensor(ids))
            torch.testing.assert_close(found, expected)
            found.sum().backward()
            torch.testing.assert_close(x.grad, torch.where(torch.tensor(ids) < 4, x.cos(), 0))
    assert (trace.graphs, trace.breaks) == (1, [])


def _share(net: Any, rank: int, count: int = 2) -> Any:
    """What `shard` leaves rank `rank` of a group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: count)
        patch.setattr(dist, "get_rank", lambda: rank)
        patch.setattr(exchange_ops, "meet", lambda: None)
        return experts.shard(net)


@pytest.mark.parametrize(
    "format",
    [
        *("nf4_b64", "fp4_b32_nested", "kbit3_e4m4", "dense"),
        *("mxfp4", "mxfp8_e4m3", "nvfp4_rows", "fp8_e4m3_row"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_shares_are_the_whole(family: str, format: str) -> None:
    whole = _make(format, family)
    for rank in range(2):
        mine = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
        net = _share(_make(format, family), rank)
        for (name, part), (_, stack) in zip(stacks(net), stacks(whole), strict=True):
            expected = stack.dequantize(torch.float32)[mine]
            assert torch.equal(part.dequantize(torch.float32), expected), name
            assert part.format == format
            assert part.lora_B is not None and stack.lora_B is not None
            assert torch.equal(part.lora_B, stack.lora_B[mine]) and part.lora_B.requires_grad
        biases = [name for name, _ in whole.named_parameters() if name.endswith("proj_bias")]
        for name in biases:
            assert torch.equal(net.get_parameter(name), whole.get_parameter(name)[mine])
        assert len(biases) == (4 if family == "gpt_oss" else 0)
        held = {p for n, p in net.named_parameters() if ".experts." in n}
        assert set(experts.parameters_of_rank(net)) == held


def test_ddp_leaves_them_alone_inside_of_peft_too() -> None:
    net: Any = _share(_make(), 1)
    wrapped: Any = peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj"]))
    for whole in (net, wrapped):
        names = {n for n, _ in (*whole.named_parameters(), *whole.named_buffers())}
        mine = {name for name in names if ".experts." in name}
        assert len(mine) == 2 * 2 * 4 and mine == names & {*whole._ddp_params_and_buffers_to_ignore}


def test_what_cannot_be_shared() -> None:
    with pytest.raises(exc.CannotShard, match="no process group"):
        experts.shard(model("qwen3_moe"))
    with pytest.raises(exc.CannotShard, match="4 experts are no multiple of 3 ranks"):
        _share(model("qwen3_moe"), 0, 3)
    net = _share(model("qwen3_moe"), 1)
    with pytest.raises(exc.CannotShard, match="sharded over 2 ranks already"):
        _share(net, 1)
    net = experts.quantize(model("qwen3_moe"), "nf4_b64_nested")  # 64 x 128 in blocks of 64 x 256
    with pytest.raises(exc.CannotShard, match="a block of nf4_b64_nested spans two experts"):
        _share(net, 0)
    assert not experts.parameters_of_rank(net)
    net = model("qwen3_moe")
    layer = expert_layers(net)["model.layers.1.mlp.experts"]
    layer.has_post_expert_norm, layer.post_expert_norm = True, nn.RMSNorm(64)
    with pytest.raises(exc.CannotShard, match="its norm after experts trains"):
        _share(net, 0)


def test_hosts_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are told when they share the experts out, and nothing is changed."""

    def fail(**how: Any) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(dist, "new_group", fail)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    net = model("qwen3_moe")
    with pytest.raises(exc.CannotShard, match=r"no route to host.*GLOO_SOCKET_IFNAME"):
        experts.shard(net)
    assert not experts.parameters_of_rank(net)


def test_a_trainer_that_clips_is_refused() -> None:
    net = _share(model("qwen3_moe"), 0)
    with pytest.raises(exc.NormOfOneRank, match="max_grad_norm=1"):
        QfuseCallback().on_train_begin(SimpleNamespace(max_grad_norm=1.0), None, None, model=net)
