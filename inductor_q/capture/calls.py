"""Read the calls of an FX graph with `match` statements."""

from __future__ import annotations

from torch import fx


def call(node: object) -> tuple[object, ...]:
    """Return what a node calls and its arguments, with a dictionary of keywords, if any, behind.

    So `case aten.div.Tensor_mode, x, y, {"rounding_mode": "floor"}` is a division that rounds down,
    and `case aten.sort.default, x` is a sort without further arguments. Anything else is empty.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ()
    keywords = [dict(node.kwargs)] if node.kwargs else []
    return node.target, *node.args, *keywords
