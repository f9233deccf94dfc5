"""HQQ along axis 1, as transformers and `hqq` write it: `(code - zero) * scale`, group by group.

`W_q` has a row for each group of elements of the weight, which run on from row to row, and packs
codes of groups that lie far apart: byte or word i of a column has those of groups i, i + n, i + 2n
and so on, the first highest, where n is the number of its rows. `scale` and `zero` are [groups, 1]
in the dtype that HQQ computes in, which `compute_dtype` names, a character an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inductor_q.exc import CorruptQuantState
from inductor_q.formats.hqq import HQQ_GROUPS
from inductor_q.kernels.quantize_kbit_reference import pack
from inductor_q.loading.found import (
    Find,
    Found,
    Read,
    Shapes,
    misshapen,
    not_a_matrix,
    pack_nibbles,
)

#: How many codes lie in a byte of `W_q`, or in an int32 where codes have 3 bits.
_PACKED = {2: 4, 3: 10, 4: 2, 8: 1}
#: The dtypes that are read, by the length of their names, which is all that the header of a file
#: says. float32's is as long as float16's; what is read shows which it is.
_DTYPES = {len(str(dtype)): dtype for dtype in (torch.float16, torch.bfloat16)}


def reader(config: Mapping[str, Any]) -> Find | str:
    said = config.get("quant_config") or {}
    by_tag = {"": said} if "weight_quant_params" in said else said
    if not by_tag or any("weight_quant_params" not in (of or ()) for of in by_tag.values()):
        return f"HQQ with quant_config {said or None!r}, which has no weight_quant_params"
    for of in by_tag.values():
        if problem := _unread(of["weight_quant_params"]):
            return problem
    return partial(_find, by_tag={tag: of["weight_quant_params"] for tag, of in by_tag.items()})


def _unread(params: Mapping[str, Any]) -> str:
    """Return why weights of such parameters are not read; empty where they are."""
    if params["nbits"] not in _PACKED:
        return f"HQQ in {params['nbits']} bits; what is read is {', '.join(map(str, _PACKED))}"
    if params["axis"] != 1:
        return f"HQQ along axis {params['axis']}; what is read is axis 1, transformers' default"
    if params.get("view_as_float"):
        return "HQQ's codes viewed as numbers (view_as_float); what is read is integers"
    return ""


def _find(shapes: Shapes, name: str, *, by_tag: Mapping[str, Any]) -> Found | str | None:
    base = name.removesuffix("weight")
    packed = shapes.get(f"{base}W_q")
    if packed is None:
        return None
    if problem := not_a_matrix(shapes, f"{base}W_q"):
        return problem
    params = by_tag.get("") or by_tag.get(_tag(base))
    if params is None:
        return f"{name} is packed, and the quantization_config has nothing on {_tag(base)!r}"
    bits, group = params["nbits"], packed[-1]
    unit = next((u for u in reversed(HQQ_GROUPS[bits]) if group % u == 0), None)
    if unit is None:
        sizes = " and ".join(map(str, HQQ_GROUPS[bits]))
        return f"groups of {group} of {name}; what is read in {bits} bits is multiples of {sizes}"
    groups = (shapes.get(f"{base}scale") or (0,))[0]
    wanted = {
        f"{base}W_q": (-(-groups // _PACKED[bits]), group),
        **{f"{base}{of}": (groups, 1) for of in ("scale", "zero")},
    }
    if problem := misshapen(shapes, wanted):
        return problem
    dtype = _DTYPES.get((shapes.get(f"{base}compute_dtype") or (0,))[0])
    if dtype is None:
        return f"{name} is computed in another dtype; what is read is torch.float16 and bfloat16"

    def read(tensor: Read) -> dict[str, Tensor]:
        codes = _codes(tensor(f"{base}W_q"), bits, groups).reshape(-1)
        shared = {"scale": tensor(f"{base}scale"), "zero_point": tensor(f"{base}zero")}
        for of in shared.values():
            _check_dtype(of, dtype)
        spread = {of: t.reshape(-1).repeat_interleave(group // unit) for of, t in shared.items()}
        return {"qweight": _pack(codes, bits), **spread}

    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return Found(f"hqq{bits}_g{unit}_{short}", (groups * group,), read)


def _tag(base: str) -> str:
    """Return what a configuration by layer calls it: its name without numbers of layers."""
    parts = base.strip(".").split(".")
    return ".".join(p for p in parts if p not in ("model", "layers") and not p.isnumeric())


def _codes(packed: Tensor, bits: int, groups: int) -> Tensor:
    """Unpack codes to uint8 [groups, group]."""
    lanes = reversed(range(_PACKED[bits]))
    return torch.cat([(packed >> bits * lane & 2**bits - 1).to(torch.uint8) for lane in lanes])[
        :groups
    ]


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    if bits == 4:
        return pack_nibbles(codes)
    missing = -codes.numel() % 32
    return pack(torch.nn.functional.pad(codes, (0, missing)).reshape(-1, 32), bits)


def _check_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise CorruptQuantState(
            what="dtype of HQQ's scales and zero points",
            expected=str(dtype),
            got=str(tensor.dtype),
            remedy="What is read is weights that HQQ computes in torch.float16 or torch.bfloat16. "
            "Quantize the model anew with one of them as compute_dtype.",
        )
