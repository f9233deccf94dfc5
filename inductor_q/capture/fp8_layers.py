"""transformers' layers of FP8 checkpoints, in memory: `FP8Linear`, and `FP8Experts`.

They hold codes in E4M3 and `weight_scale_inv` as these lie on disk, which is our format byte for
byte. Their own products quantize the input as well, by groups of 128 columns of a row, and multiply
codes with codes, in kernels for GPUs; the gradient of the input is that of the decoded weight. The
experts of DeepSeek-V4 have two numbers of 4 bits in a byte and E8M0 for 32 of them, our mxfp4.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from inductor_q.capture.library import Packed, Refused, Stored

_TILE = (128, 128)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CODES = (torch.float8_e4m3fn, torch.int8)

BOTH_SIDES = "transformers quantizes its input as well, and multiplies codes with codes"
GROUPED = "it has a weight for each part of its input"
_TAKEN = f"{BOTH_SIDES}; inductor_q.compile and inductor_q.integrations.prepare_fp8(model) have it"

#: The classes, by name, and why a graph that was made without us has products of transformers' own.
LEFT = {
    "FP8Linear": f"{_TAKEN} multiply with its decoded weight",
    "FP8Experts": f"{_TAKEN} multiply with decoded weights, and so has experts.use_qfuse(model)",
    "FP8GroupedLinear": f"{BOTH_SIDES}; {GROUPED}",
}


def packed(module: Any, name: str) -> Packed | None:
    """Describe the weight of such a layer, or a projection of its experts; None for what is none,
    as weights in 16 bits."""
    codes: Tensor | None = module._parameters.get(name)
    scale: Tensor | None = module._parameters.get(f"{name}_scale_inv")
    if codes is None or scale is None or codes.itemsize > 1:
        return None
    *rows, columns = codes.shape
    shape = (*rows, columns * (2 if codes.dtype is torch.int8 else 1))
    found = partial(Packed, "fp8", shape, beside=(f"{name}_scale_inv",), quantizes_input=True)
    if type(module).__name__ == "FP8GroupedLinear":
        return found(reason=GROUPED)
    block = module.block_size
    format = "mxfp4" if codes.dtype is torch.int8 else "fp8_e4m3_128x128"
    if block is None and len(shape) == 2 and format != "mxfp4":
        format = "fp8_e4m3_tensor"
    if (codes.is_meta or scale.is_meta) and not _is_offloaded(module):
        return found(reason="it is on the meta device: no checkpoint has been loaded into it")
    if reason := _unreadable(codes, scale, format, shape, block):
        return found(reason=reason)
    read = partial(_read, codes, scale, format, shape)
    return found(read=read, layout=format, parts=(codes, scale))


def _is_offloaded(module: nn.Module) -> bool:
    """Whether a hook of accelerate loads the module's tensors before each call."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(one, "offload", False) for one in getattr(hook, "hooks", [hook]))


def _unreadable(
    codes: Tensor, scale: Tensor, format: str, shape: tuple[int, ...], block: Any
) -> str:
    """Say why codes and scales are not in the format; "" where they are."""
    *stack, rows, columns = shape
    if not (codes.is_contiguous() and scale.is_contiguous()):
        return "its codes or scales do not lie row by row"
    dtypes: tuple[torch.dtype, ...] = (*_FLOATS, torch.float8_e8m0fnu)
    expected: tuple[int, ...] = (*stack, -(-rows // 128), -(-columns // 128))
    if format == "mxfp4":
        dtypes, expected = (torch.float8_e8m0fnu,), (*stack, rows, columns // 32)
    elif format == "fp8_e4m3_tensor":
        dtypes, expected = _FLOATS, (1,) * scale.dim()
    elif block is None or tuple(block) != _TILE:
        found = "one scale for a weight" if block is None else f"blocks of {tuple(block)}"
        return f"it has {found}; what is read is blocks of {_TILE}"
    elif stack and rows % 128:
        return f"blocks of 128 rows are cut at the {rows} rows of each expert"
    if codes.dtype in _CODES and scale.dtype in dtypes and tuple(scale.shape) == expected:
        return ""
    return (
        f"its codes are {codes.dtype} {tuple(codes.shape)}, its scales {scale.dtype} "
        f"{tuple(scale.shape)}, for values of {shape}"
    )


def _read(codes: Tensor, scale: Tensor, format: str, shape: tuple[int, ...]) -> Stored:
    """Return codes and scales where they are; but of tiles the few that are E8M0, as float32."""
    if scale.dtype is torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8) if format == "mxfp4" else scale.float()
    return Stored([codes, scale], format, [*shape])


def match(node: fx.Node) -> Refused | None:
    """Find what reads the codes of such a layer for a product of transformers' own."""
    stack: Any = node.meta.get("nn_module_stack")
    if not stack or getattr(node.target, "namespace", "") == "qfuse":
        return None
    kind = next(reversed(stack.values()))[1]
    reason = LEFT.get(getattr(kind, "__name__", ""))
    for source in node.all_input_nodes if reason else ():
        held = source.meta.get("val") if source.op == "placeholder" else None
        if reason and held is not None and held.dtype in _CODES and held.dim() > 1:
            return Refused(node, source, reason)
    return None
