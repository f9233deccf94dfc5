"""gpt-oss's experts as transformers holds them in memory under an `Mxfp4Config`.

`Mxfp4GptOssExperts` stands in the place of `GptOssExperts`. Before it is swizzled it has blocks [E,
N, K / 32, 16] and scales [E, N, K / 32] as they lie on disk, which are our mxfp4 byte for byte;
some versions call the blocks `gate_up_proj` and declare them [E, N, K / 2]. Swizzling replaces them
by objects of triton_kernels, in an order that depends on the GPU; `save_pretrained` undoes it. The
block around the experts calls those kernels itself, so it is replaced as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from inductor_q.capture.library import Block, Packed, Stored

EXPERTS = "Mxfp4GptOssExperts"
PROJECTIONS = ("gate_up_proj", "down_proj")
_PLAIN = "transformers.models.gpt_oss.modeling_gpt_oss"


def packed(module: Any, name: str) -> Packed:
    """Describe a projection of such a layer, as far as its sizes and what it holds tell."""
    inside, hidden = module.intermediate_size, module.hidden_size
    rows, columns = (2 * inside, hidden) if name == "gate_up_proj" else (hidden, inside)
    shape = (module.num_experts, rows, columns)
    held = {**vars(module), **module._buffers, **module._parameters}
    blocks: Any = held.get(f"{name}_blocks", held.get(name))
    scales: Any = held.get(f"{name}_scales")
    if reason := _unreadable(blocks, scales, shape):
        return Packed("mxfp4", shape, reason=reason)
    read = partial(_read, blocks, scales, shape)
    return Packed("mxfp4", shape, read, layout="mxfp4", parts=(blocks, scales))


def _unreadable(blocks: object, scales: object, shape: tuple[int, ...]) -> str:
    """Say why these are not the bytes of a checkpoint; "" where they are."""
    if not isinstance(blocks, Tensor):
        kind = f"{type(blocks).__module__}.{type(blocks).__name__}"
        return (
            f"it is swizzled, in the order of a kernel ({kind}), as from_pretrained does where it "
            "does not dequantize; save_pretrained writes it as it was on disk"
        )
    if not isinstance(scales, Tensor):
        return "its blocks have no scales beside them: no checkpoint has been loaded into it"
    if blocks.is_meta or scales.is_meta:
        return "it is on the meta device: no checkpoint has been loaded into it"
    *rows, columns = shape
    fit = (*rows, columns // 32, 16), (*rows, columns // 2)
    fits = tuple(blocks.shape) in fit and tuple(scales.shape) == (*rows, columns // 32)
    if fits and blocks.itemsize == scales.itemsize == 1:
        return ""
    return (
        f"its blocks are {blocks.dtype} {tuple(blocks.shape)}, its scales {scales.dtype} "
        f"{tuple(scales.shape)}, for values of {shape}"
    )


def _read(blocks: Tensor, scales: Tensor, shape: tuple[int, ...]) -> Stored:
    """Return the same bytes in one dimension: views, but of tensors that are not contiguous."""
    operands = [part.detach().view(torch.uint8).reshape(-1) for part in (blocks, scales)]
    return Stored(operands, "mxfp4", [*shape])


def blocks(model: nn.Module) -> Iterator[Block]:
    """Find the blocks of a model around such layers, but for one that is the model itself, or is in
    no model that has a configuration."""
    for path, block in model.named_modules():
        experts = block._modules.get("experts")
        if path and type(experts).__name__ == EXPERTS and (config := _config(model, path)):
            weights = {name: packed(experts, name) for name in PROJECTIONS}
            yield Block(path, "experts", EXPERTS, weights, partial(_plain, block, config))


def _plain(block: Any, config: Any) -> nn.Module:
    """Make the block as it is over experts in 16 bits, with the router and biases that it has."""
    with torch.device("meta"):
        new: Any = importlib.import_module(_PLAIN).GptOssMLP(config)
    new.router, old = block.router, block.experts
    sizes = ("num_experts", "intermediate_size", "hidden_size")
    for name in (*sizes, "alpha", "limit", "gate_up_proj_bias", "down_proj_bias"):
        setattr(new.experts, name, getattr(old, name))
    new.train(block.training)
    return cast(nn.Module, new)


def _config(model: nn.Module, path: str) -> Any:
    """Return the configuration of the smallest part of the model around a module that has one."""
    while path:
        path = path.rpartition(".")[0]
        for module in model.get_submodule(path).modules():
            config = getattr(module, "config", None)
            if hasattr(config, "num_local_experts"):
                return config
    return None
