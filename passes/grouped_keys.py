"""Find keys and values as they were before a graph repeated them for the groups of its queries.

Fused kernels read grouped keys as they are: nothing is copied, kept for backward, or summed in it.
The math kernel would repeat them again and write the scores out, so where no fused kernel takes
them they stay repeated, and the reason is given.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from inductor_q.passes.dynamo_graph import same_size, written_by

#: The most features per head that flash attention takes, and that it takes in backward on GPUs with
#: little shared memory: can_use_flash_attention of ATen/native/transformers/cuda/sdp_utils.cpp.
HEAD_DIM = 256
SMALL_HEAD_DIM = 192

#: Why no fused kernel takes grouped keys, and why FlashAttention is not taken for cuDNN.
OFF = "flash attention is turned off"
_RESHAPES = ("reshape", "view", "flatten", torch.reshape, torch.flatten)
_FULL = slice(None)
#: What tells only the sizes of its argument: Dynamo writes them down in the bodies of checkpoints.
_SIZES = ("size", "dim", torch.ops.aten.sym_size.int)


def before_repeat(
    attention: fx.Node, arguments: Mapping[str, Any], graphs: Iterable[fx.Graph]
) -> tuple[fx.Node, fx.Node] | str:
    """Return the key and value for a call of `attention` with `enable_gqa` and without a mask; else
    the reason why they stay repeated, which is empty where they are not repeated.

    Args:
        attention: a call in Dynamo's graph.
        arguments: those of that call, by name.
        graphs: Dynamo's graph and its subgraphs.
    """
    found = unrepeated(attention, arguments)
    if isinstance(found, str):
        return found
    query, *wide = (arguments[name] for name in ("query", "key", "value"))
    if not _same_sizes(query, *wide):
        return "queries, keys and values differ in size"
    if any(not same_size(node.meta["example_value"].stride(-1), 1) for node in (query, *found)):
        return "features do not lie side by side"
    if chosen := _chosen(graphs):
        return chosen
    # Autocast casts inside the call, which computes in the dtype of its result, not of its inputs.
    result = attention.meta["example_value"]
    refused = no_kernel(result.device, result.dtype, result.shape[-1], arguments["dropout_p"])
    return refused or found


def keeps_kernels(gm: fx.GraphModule) -> str:
    """Return why attention stays with the kernels that torch takes: it is turned off, or chosen
    inside of Dynamo's graph or its subgraphs. Empty if it need not."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return OFF
    return _chosen(m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))


def _chosen(graphs: Iterable[fx.Graph]) -> str:
    choose: Any = torch.nn.attention._sdpa_kernel
    chooses = any(graph.find_nodes(op="call_function", target=choose) for graph in graphs)
    return "the program chooses the kernel" if chooses else ""


def unrepeated(attention: fx.Node, arguments: Mapping[str, Any]) -> tuple[fx.Node, fx.Node] | str:
    """Return the key and value before they were repeated, if nothing else reads them since; else
    the reason why not, which is empty where they are not repeated."""
    wide = [arguments[name] for name in ("key", "value")]
    key, value = map(repeated, wide)
    if arguments["enable_gqa"] or (key is None and value is None):
        return ""
    if key is None or value is None or not same_size(_shape(key)[1], _shape(value)[1]):
        return "keys and values are not repeated alike"
    if any(user is not attention and user.target not in _SIZES for n in wide for user in n.users):
        return "repeated keys are used elsewhere"
    if written_since(wide, attention):
        return "something is written to once keys are repeated"
    return key, value


def no_kernel(device: torch.device, dtype: torch.dtype, head_dim: Any, dropout: Any) -> str:
    """Return why no fused kernel of a device takes grouped keys; empty if one does."""
    if not torch.backends.cuda.flash_sdp_enabled():  # a CPU's, too
        return OFF
    if device.type == "cpu":
        return "" if dropout == 0 else "no fused kernel of a CPU drops out"
    if device.type != "cuda":
        return f"fused kernels of {device.type} are not known"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"no fused kernel takes grouped keys in {dtype}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "no fused kernel takes grouped keys below compute capability 8.0"
    small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    most = SMALL_HEAD_DIM if small else HEAD_DIM
    if not isinstance(head_dim, int) or head_dim > most:
        return f"no fused kernel is known to take grouped keys of {head_dim} features"
    return ""


def repeated(node: Any) -> fx.Node | None:
    """`x` [B, G, S, D] if `node` is `x[:, :, None].expand(B, G, n, S, D).reshape(B, G n, S, D)`."""
    wide = _argument(node, *_RESHAPES)
    one = _argument(wide, "expand")
    source = _argument(one, "unsqueeze", torch.unsqueeze, operator.getitem)
    if source is None or wide is None or one is None or not _adds_third(one):
        return None
    shapes = [_shape(found) for found in (source, wide, node)]
    if [len(shape) for shape in shapes] != [4, 5, 4]:
        return None
    (b, g, s, d), copied, result = shapes
    n = copied[2]
    expected = (b, g, n, s, d, b, g * n, s, d)
    pairs = zip((*copied, *result), expected, strict=True)
    return source if all(same_size(*pair) for pair in pairs) else None


def _argument(node: Any, *targets: Any) -> fx.Node | None:
    """Return the first argument of a node, if it is a node and `targets` has what it calls."""
    if not isinstance(node, fx.Node) or node.target not in targets or not node.args:
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _adds_third(node: fx.Node) -> bool:
    """Whether a node is `x.unsqueeze(2)`, or `x[:, :, None]`, of four dimensions."""
    where = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
    if node.target is not operator.getitem:
        return where in (2, -3)
    if not isinstance(where, tuple) or where[:3] != (_FULL, _FULL, None):
        return False
    return all(index in (_FULL, Ellipsis) for index in where[3:])


def written_since(wide: Iterable[fx.Node], attention: fx.Node) -> bool:
    """Whether anything is written to from where keys and values are repeated to where they are
    used: it could be what was repeated. Earlier and later writes do not matter."""
    ahead = set(wide)
    node = attention.prev
    while ahead:
        if written_by(node) or isinstance(node.target, HigherOrderOperator):
            return True
        ahead.discard(node)
        node = node.prev
    return False


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(getattr(node.meta.get("example_value"), "shape", ()))


def _same_sizes(*nodes: fx.Node) -> bool:
    first, *others = map(_shape, nodes)
    return all(len(first) == len(shape) and all(map(same_size, first, shape)) for shape in others)
