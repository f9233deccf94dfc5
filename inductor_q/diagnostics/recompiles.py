"""Explain recompiles: the guard that failed, on what values, and how to keep it from failing."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from inductor_q.diagnostics import fixes
from inductor_q.diagnostics.explanation import Frame, Recompile

#: The function of torch that emits the event; its locals hold the frame about to be compiled.
_EMITTER = "get_and_maybe_log_recompilation_reasons"

_TENSOR = re.compile(
    r"tensor '(?P<name>.+?)' (?P<what>[\w ]+?) mismatch(?: at index (?P<dim>\d+))?\. "
    r"expected (?P<before>[^,]+)(?:, actual (?P<after>.+?))?(?=\. |$)"
)
_SHOWN = 4  # values of one guard that a record lists


@dataclass(frozen=True)
class Guard:
    """Hold a failed guard: its text, what it is about, the value compiled for, the value found.

    `name` is the tensor or expression in the user's words ("x", where the subject is "tensor 'x'
    size at index 0").
    """

    text: str
    subject: str
    before: str = ""
    after: str = ""
    name: str = ""


def first_reason(payload: str) -> str:
    """Return the reason of the newest version, the last one that a stable call would have hit."""
    try:
        reasons = json.loads(payload)
    except ValueError:
        return payload
    return str(reasons[0] if isinstance(reasons, list) and reasons else reasons)


def parse(reason: str, after: str = "") -> Guard:
    """Take apart "0/1: n == 2   # code  # file:line in f"; `after` is the value seen now."""
    text = re.sub(r"^(\[?[!\d]+/[\d/]+\]?): ", "", reason).splitlines()[0]
    text = re.split(r"\s+# ", text)[0].strip()
    tensor = _TENSOR.match(text)
    if tensor:
        dim = f" at index {tensor['dim']}" if tensor["dim"] else ""
        subject = f"tensor '{tensor['name']}' {tensor['what']}{dim}"
        found = tensor["after"] or after
        return Guard(tensor[0], subject, tensor["before"].strip(), found.strip(), tensor["name"])
    subject, before = _subject(text)
    name = re.sub(r"^type\((.+)\)$|(.+)\.size\(\)\[\d+\]$", r"\1\2", subject)
    return Guard(text, subject, before, after, name)


def value_now() -> str:
    """Return the value that the failed guard's expression has in the call being recompiled.

    This is called while torch emits `recompile_reasons`, when the frame is still there. Only names,
    attributes, subscripts and `len`, `type`, `.size()` are evaluated, which is what guards are made
    of.
    """
    torch_frame: FrameType | None = sys._getframe()
    while torch_frame is not None and torch_frame.f_code.co_name != _EMITTER:
        torch_frame = torch_frame.f_back
    if torch_frame is None or not torch_frame.f_locals.get("reasons"):
        return ""
    guard = parse(torch_frame.f_locals["reasons"][0])
    frame = torch_frame.f_locals.get("frame")
    return _evaluate(guard.subject, getattr(frame, "f_locals", {}), _globals(frame))


def distinct(
    found: Iterable[tuple[str, Frame, Guard, bool]], *, by_trainer: bool = False
) -> tuple[Recompile, ...]:
    """Make one record for each (function, subject of the guard), the most frequent first.

    Args:
        found: function, where it is defined, the guard, and whether the recompile limit refused
            the compile (such a one is not counted as a recompile).
        by_trainer: whether a Trainer makes the calls, so that nobody can mark its tensors. All
            sizes that change are then those of its batches, or follow from them.
    """
    groups: dict[tuple[str, str, str], list[tuple[Frame, Guard, bool]]] = {}
    for function, where, guard, limit in found:
        groups.setdefault((function, str(where), guard.subject), []).append((where, guard, limit))
    records = []
    for (function, _, _), group in groups.items():
        where, guard, _ = group[0]
        hit = any(limit for *_, limit in group)
        records.append(
            Recompile(
                function=function,
                where=where,
                guard=guard.text,
                before=guard.before,
                after=_listed([g.after for _, g, _ in group]),
                fix=fix_for(guard, where, by_trainer=by_trainer),
                count=sum(not limit for *_, limit in group),
                hit_limit=hit,
            )
        )
    return tuple(sorted(_by_size(records), key=lambda r: -r.count))


def _by_size(records: Sequence[Recompile]) -> Iterator[Recompile]:
    """Make one record of a size that changes for several functions, as where a graph is broken."""
    groups: dict[Any, list[Recompile]] = {}
    for index, record in enumerate(records):
        if record.fix == _FOR_A_TRAINER:
            key: Any = _FOR_A_TRAINER
        else:
            of_size = "size mismatch" in record.guard and record.after
            key = (record.before, record.after) if of_size else index
        groups.setdefault(key, []).append(record)
    for first, *others in groups.values():
        names = dict.fromkeys(r.function for r in others if r.function != first.function)
        same = f"; the same size recompiles {', '.join(list(names)[:_SHOWN])}" if names else ""
        yield replace(
            first,
            count=first.count + sum(r.count for r in others),
            hit_limit=first.hit_limit or any(r.hit_limit for r in others),
            fix=first.fix + same,
        )


_FOR_A_TRAINER = (
    "batches have different lengths: give the Trainer "
    "inductor_q.integrations.QfuseCallback(dynamic=True) as a callback instead of compiling the "
    "model, which takes one graph for all of them"
)


def fix_for(guard: Guard, where: Frame | None = None, *, by_trainer: bool = False) -> str:
    """Say what makes the guard stable: padding, where a Trainer's lengths change; what mends the
    function itself, where it is a known trouble under any guard; padding where code branches on a
    size; or else the first remedy whose pattern is in the guard's text."""
    branch = _branches(guard)
    if branch and by_trainer:
        return _EVEN_IF_DYNAMIC.format(how=_FOR_A_COLLATOR)
    changes = re.search(_SIZE, guard.text) and not re.search(
        rf"{_OF_WEIGHTS}|{_SIZE_ONE}", guard.text
    )
    if by_trainer and changes:
        return _FOR_A_TRAINER
    if where is not None and (known := fixes.fix_for("", "", (), (where,))):
        return known
    if branch:
        how = f"pad dimension {branch['dim']} of {branch['name']}"
        return _EVEN_IF_DYNAMIC.format(how=how)
    index = re.search(r"index (\d+)|size\(\)\[(\d+)\]", guard.text)
    dim = (index[1] or index[2]) if index else "0"
    words = {
        "name": guard.name,
        "how": _mark_dynamic(guard.name, dim),
        "dim": dim,
        "state": guard.subject.partition(": ")[2],
    }
    remedy = next(remedy for pattern, remedy in _REMEDIES if re.search(pattern, guard.text))
    return remedy.format(**words)


def _branches(guard: Guard) -> re.Match[str] | None:
    """Find the size that code branches on though it is symbolic already.

    A scan that halves its input does at each level (`torch._higher_order_ops.associative_scan`).
    Every symbolic size has a guard of "2 <=": a size of 1 is compiled apart.
    """
    if divided := re.search(_SIZE_DIVIDED, guard.text):
        return divided
    bounded = re.search(_SIZE_BOUNDED, guard.text)
    if bounded is None or (bounded["least"], guard.after) == ("2", "1"):
        return None
    return bounded if bounded["most"] or bounded["least"] != "2" else None


def _mark_dynamic(name: str, dim: str) -> str:
    """Say how to mark a tensor that the caller can name: an argument, by position or keyword."""
    own = re.fullmatch(r"kwargs\['(\w+)'\]|(?!(?:kwargs|args|self)$)([A-Za-z]\w*)", name)
    return f" (torch._dynamo.mark_dynamic({own[1] or own[2]}, {dim}))" if own else ""


_OF_WEIGHTS = r"_parameters\['.* size mismatch"
_SIZE = r"size mismatch|\.size\(\)"
_SIZE_ONE = r"^2 <= |!= 1$|size mismatch .* actual 1$"
_ONE_SIZE = r"(?P<name>[\w.\[\]']+)\.size\(\)\[(?P<dim>\d+)\]"
_SIZE_DIVIDED = rf"{_ONE_SIZE} (?://|%)"
_SIZE_BOUNDED = rf"^(?:(?P<least>\d+) <= )?{_ONE_SIZE}(?: <= (?P<most>\d+))?$"
_EVEN_IF_DYNAMIC = (
    "the code branches on this size (or mark_dynamic bounds it), and each branch is a graph, under "
    "dynamic=True too: {how} to a few sizes"
)
_FOR_A_COLLATOR = "pad batches (pad_to_multiple_of of the data collator)"

_REMEDIES = (
    (
        _OF_WEIGHTS,
        "modules of one class but of different sizes, compiled one by one, share the compiled "
        "versions of its forward: compile the model as a whole, or raise "
        "torch._dynamo.config.recompile_limit to the number of sizes; a weight that bitsandbytes "
        "packs on a CPU changes its size once: qfuse doctor, cpu_packing",
    ),
    (
        _SIZE_ONE,
        "size 1 is compiled apart: pad dimension {dim} of {name} to at least 2, or keep a compiled "
        "function for the calls of size 1",
    ),
    (
        _SIZE,
        "pad dimension {dim} of {name} to a few sizes, or compile with dynamic=True{how}",
    ),
    (r"stride mismatch", "give {name} one memory layout in all calls (.contiguous())"),
    (r"dtype mismatch", "give {name} one dtype in all calls"),
    (r"requires_grad mismatch", "call with {name}.requires_grad the same each time"),
    (
        r"grad_mode",
        "training and evaluation (torch.no_grad) are two graphs: one recompile is their cost; "
        "enter the same grad mode in every step",
    ),
    (
        r"GLOBAL_STATE",
        "keep {state} the same across calls (autocast, deterministic mode, default dtype)",
    ),
    (r"\.training\b", "call .train() and .eval() outside of the loop: each mode is its own graph"),
    (
        r"check_(obj|type)_id",
        "pass the same kind of object as {name} in every call, made once outside of the loop",
    ),
    (
        r"got deallocated$",
        "what was compiled for is gone by the next call: keep the object (or, of type(...), its "
        "class) alive, made once outside of the loop",
    ),
    (r"hasattr\(", "give the object the same attributes in every call: set none, delete none"),
    (r"Duplicate tensors", "pass one tensor once: aliased and distinct arguments differ"),
    (r"^len\(", "keep {name} constant: pad the list, or pass a tensor"),
    (
        r"\.\w+ == -?\d+$",
        "{name} is compiled in as a constant: keep it a tensor, or set "
        "torch._dynamo.config.allow_unspec_int_on_nn_module = True if it belongs to a module",
    ),
    (
        r"== -?\d+(\.\d+)?$",
        "{name} is compiled in as a constant: pass it as a tensor, or compile with dynamic=True",
    ),
    (r"== ['\"]", "{name} is compiled in as a constant: keep strings out of the function"),
    (r"", "make {name} the same in every call, or pass it as a tensor"),
)


def _subject(text: str) -> tuple[str, str]:
    """Return (what a guard looks at, the value it expects), by its syntax tree if it is Python."""
    state = re.match(r"GLOBAL_STATE changed: (.+)", text)
    if state:
        return f"global state: {state[1].strip()}", ""
    kind = re.match(r"___check_(?:type|obj)_id\((.+), \d+\)(?:, type=(.+))?", text)
    if kind:
        return f"type({kind[1]})" if "type_id" in text else kind[1], kind[2] or ""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return text, ""
    if not isinstance(tree, ast.Compare):
        return text, ""
    if [type(op) for op in tree.ops] == [ast.LtE, ast.LtE]:  # 8 <= x.size()[0] <= 15
        least, most = ast.unparse(tree.left), ast.unparse(tree.comparators[1])
        return ast.unparse(tree.comparators[0]), f"{least} to {most}"
    if len(tree.ops) != 1:
        return text, ""
    left, right = ast.unparse(tree.left), ast.unparse(tree.comparators[0])
    sign = {ast.Eq: "", ast.NotEq: "not ", ast.LtE: "<= ", ast.GtE: ">= ", ast.Is: ""}
    if isinstance(tree.left, ast.Constant):  # 2 <= x.size()[0]
        return right, f"at least {left}" if isinstance(tree.ops[0], ast.LtE) else left
    return left, sign.get(type(tree.ops[0]), "") + right


_SAFE_CALLS: dict[str, Callable[[Any], Any]] = {"len": len, "type": type}


def _evaluate(text: str, local: Mapping[str, Any], globals_: Mapping[str, Any]) -> str:
    try:
        value = _Evaluator(local, globals_).visit(ast.parse(text, mode="eval").body)
    except Exception:  # an attribute may be a property of the user's, and raise anything
        return ""
    if isinstance(value, (int, float, str, bool, type(None), type)):
        shown = repr(value)
        return shown if len(shown) <= 80 else shown[:77] + "..."
    return f"a {type(value).__name__}"


class _Unknown(Exception):
    """Raised for an expression that is not evaluated."""


class _Evaluator(ast.NodeVisitor):
    """Evaluate what guards are made of: names, attributes, subscripts, len, type, size."""

    def __init__(self, local: Mapping[str, Any], globals_: Mapping[str, Any]) -> None:
        self.names = {"L": local, "G": globals_}
        self.local, self.globals = local, globals_

    def generic_visit(self, node: ast.AST) -> Any:
        raise _Unknown

    def visit_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def visit_Name(self, node: ast.Name) -> Any:
        for scope in (self.names, self.local, self.globals):
            if node.id in scope:
                return scope[node.id]
        raise _Unknown

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return getattr(self.visit(node.value), node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        return self.visit(node.value)[self.visit(node.slice)]

    def visit_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "size" and not node.args:
            return self.visit(node.func.value).size()
        if isinstance(node.func, ast.Name) and node.func.id in _SAFE_CALLS and len(node.args) == 1:
            return _SAFE_CALLS[node.func.id](self.visit(node.args[0]))
        raise _Unknown


def _globals(frame: Any) -> Mapping[str, Any]:
    return getattr(frame, "f_globals", None) or {}


def _listed(values: Sequence[str]) -> str:
    known = [v for v in dict.fromkeys(values) if v]
    return ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
