"""Expert parallelism: each rank keeps its share of every layer's experts (`ops/exchange.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inductor_q.exc import CannotShard
from inductor_q.experts.model import use_qfuse
from inductor_q.experts.modules import (
    as_stack,
    check_not_merged,
    check_not_wrapped,
    expert_layers,
    projections,
    put_stack,
)
from inductor_q.experts.packing import operand_names
from inductor_q.experts.stack import ExpertStack, note_ranks, ranks_of
from inductor_q.formats import get_format
from inductor_q.kernels.calls import DENSE
from inductor_q.kernels.expert_weights import ExpertWeights
from inductor_q.ops import exchange

#: What DDP looks for on a module: names of what it leaves alone.
_NOT_DDPS = "_ddp_params_and_buffers_to_ignore"


def shard(model: nn.Module) -> nn.Module:
    """Leave this rank its share of each layer's experts, adapters included, and switch to "qfuse".

    Of E experts rank r of W keeps r E / W to (r + 1) E / W. In each forward and backward pass,
    tokens go to ranks that have experts of theirs, and come back. So all ranks of the default
    process group call the model equally often, with any number of tokens. What a rank's experts
    get as gradients is the mean over all ranks' losses. DDP leaves them alone; FSDP2 needs
    `ignored_params=set(experts.parameters_of_rank(model))`.

    Call it after `quantize` and before an optimizer is made.

    Raises:
        NoExperts.
        CannotShard: there is no process group, the ranks' hosts do not reach each other, W does
            not divide the number of experts, they are sharded already, or one's blocks reach into
            another. Nothing is changed then.
        StillMerged: PEFT's `merge_adapter` has merged adapters of experts. Nor is anything then.
        AdaptedByPeft: PEFT has adapters over experts (`target_parameters`). Nor is anything then.
    """
    layers = expert_layers(model)
    check_not_merged(model, "shard")
    check_not_wrapped(model, "shard")
    if not dist.is_initialized():
        raise CannotShard(what=type(model).__name__, problem="there is no process group")
    ranks = dist.get_world_size()
    for name, layer in layers.items():
        _check(name, layer, ranks)
    _meet(type(model).__name__)
    for layer in layers.values():
        count = layer.num_experts // ranks
        mine = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
        for name in projections(layer):
            _cut(layer, name, mine)
        layer.num_experts = count
        note_ranks(layer, ranks)
    alone = {id(tensor) for tensor in _of_rank(model)}
    everything = (*model.named_parameters(), *model.named_buffers())
    names = [name for name, tensor in everything if id(tensor) in alone]
    # Also as they are called when PEFT wraps the model afterwards.
    setattr(model, _NOT_DDPS, [*names, *(f"base_model.model.{name}" for name in names)])
    return use_qfuse(model)


def _meet(what: str) -> None:
    try:
        exchange.meet()
    except RuntimeError as error:
        problem = (
            f"the ranks' hosts do not reach each other over gloo ({error}); set GLOO_SOCKET_IFNAME "
            "to the network interface that connects them"
        )
        raise CannotShard(what=what, problem=problem) from error


def parameters_of_rank(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are this rank's alone: its experts', adapters included."""
    return [tensor for tensor in _of_rank(model) if isinstance(tensor, nn.Parameter)]


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip gradients to a norm over all ranks' experts and what the ranks have in common.

    torch's function sees the experts of one rank, so that each rank would scale what they have in
    common by another factor. All ranks call this one; they return the norm before.
    """
    alone = {id(parameter) for parameter in parameters_of_rank(model)}
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    own = [parameter for parameter in trained if id(parameter) in alone]
    common = [parameter for parameter in trained if id(parameter) not in alone]
    squares = _norm(own).square().to(trained[0].device)
    dist.all_reduce(squares)
    norm = (squares + _norm(common).square().to(squares.device)).sqrt()
    for parameters in (own, common):  # apart, since FSDP's are of another class
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _of_rank(model: nn.Module) -> Iterator[Tensor]:
    """Yield what the projections of sharded layers hold."""
    for layer in model.modules():
        if ranks_of(layer) > 1:
            for name in projections(layer):
                stack = layer.get_submodule(name)
                yield from (*stack.parameters(), *stack.buffers())
                if (bias := layer._parameters.get(f"{name}_bias")) is not None:
                    yield bias


def _check(name: str, layer: Any, ranks: int) -> None:
    """Raise where the experts of a layer cannot be cut."""
    problem = ""
    if (before := ranks_of(layer)) > 1:
        problem = f"its experts are sharded over {before} ranks already"
    elif layer.num_experts % ranks:
        problem = f"{layer.num_experts} experts are no multiple of {ranks} ranks; take fewer ranks"
    elif getattr(layer, "has_post_expert_norm", False) and any(
        parameter.requires_grad for parameter in layer.post_expert_norm.parameters()
    ):
        problem = "its norm after experts trains, on all ranks apart; freeze it"
    for projection in projections(layer):
        stack = as_stack(layer, projection)
        if not problem and _weights(stack).share(slice(0, 0)) is None:
            problem = f"a block of {stack.format} spans two experts; take a format of smaller ones"
    if problem:
        raise CannotShard(what=name, problem=problem)


def _cut(layer: Any, name: str, mine: slice) -> None:
    stack = as_stack(layer, name)
    tensors = _weights(stack).share(mine)
    assert tensors is not None, name
    operands = {
        operand: _like(tensor, stack.operands[0])
        for operand, tensor in zip(operand_names(stack.format), tensors, strict=True)
    }
    shape = (mine.stop - mine.start, *stack.shape[1:])
    new = put_stack(layer, name, operands, stack.format, shape, transposed=stack.transposed)
    for adapter in ("lora_A", "lora_B"):
        _cut_parameter(new, adapter, mine)
    _cut_parameter(layer, f"{name}_bias", mine)


def _cut_parameter(module: nn.Module, name: str, mine: slice) -> None:
    whole = module._parameters.get(name)
    if whole is not None:
        module._parameters[name] = _like(whole.detach()[mine].clone(), whole)


def _like(tensor: Tensor, whole: Tensor) -> Any:
    """Return a part of a parameter as a parameter."""
    if not isinstance(whole, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=whole.requires_grad)


def _weights(stack: ExpertStack) -> ExpertWeights:
    fmt = None if stack.format == DENSE else get_format(stack.format)
    return ExpertWeights(stack.operands, fmt, stack.shape, torch.float32)
