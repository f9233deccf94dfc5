"""Keep torch's compile caches right with our passes in them, and keep our reports beside them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from inductor_q import kept
from inductor_q.capture.example import hint
from inductor_q.context import Context
from inductor_q.graph_report import Report
from inductor_q.kernels import wide

_SOURCES = {".py", ".cpp", ".cu", ".cuh", ".h", ".json"}

#: torch's cache does not know these (2.13), so it keeps no graph of a trainer in mixed precision
#: (pytorch/pytorch#191106). What they do is in their arguments, which are in its key; where these
#: name no dtype it is in `autocast_state`.
_AUTOCAST = ("_enter_autocast", "_exit_autocast")


def cacheable_functions(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch of Inductor's configuration by which graphs that autocast are cached, beside
    what the user's options or configuration name."""
    name = "unsafe_marked_cacheable_functions"
    ours = {f"torch.amp.autocast_mode.{call}": "known by its arguments" for call in _AUTOCAST}
    return {name: {**ours, **options.get(name, getattr(inductor_config, name))}}


def autocast_state() -> str:
    """Name the dtypes of an autocast that names none, and whether the caller is in one."""
    devices = ("cpu", "cuda")
    return str([(torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices])


@functools.cache
def source_digest() -> str:
    """Hash every source file of this package, so that a changed pass, lowering or kernel misses."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for folder, _, names in sorted(os.walk(root, followlinks=True)):
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in _SOURCES:
                digest.update(f"{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def bodies_are_cacheable(gm: fx.GraphModule, patch: Mapping[str, Any]) -> bool:
    """Return whether the bodies of the graph's autograd.Functions are as cacheable as its top
    level, those inside of checkpointed segments too; `patch` is of `cacheable_functions`.

    torch checks only the top level and refuses autograd.Functions as a whole by default; their
    bodies are part of the cache key, so with the same check on them they may be cached.
    """
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.autograd_cache import check_node_safe

    bodies = [m for m in gm.modules() if m is not gm and isinstance(m, fx.GraphModule)]
    if not bodies:
        return False
    try:
        # A body may have one in it, as a checkpointed segment has.
        with (
            functorch_config.patch(autograd_cache_allow_custom_autograd_functions=True),
            inductor_config.patch(dict(patch)),
        ):
            for body in bodies:
                for node in body.graph.nodes:
                    if node.op != "call_function" or _is_grad_mode(node):
                        continue
                    if _has_no_module(node):
                        return False
                    check_node_safe(node)
    except Exception as error:
        from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

        if isinstance(error, BypassAOTAutogradCache):
            return False
        raise
    return True


def _is_grad_mode(node: fx.Node) -> bool:
    return node.target is torch._C._set_grad_enabled


def _has_no_module(node: fx.Node) -> bool:
    """Whether the target has no `__module__`, as methods written in C such as `torch.Tensor.set_`
    have none. torch's check reads it from every target and would raise."""
    return not hasattr(node.target, "__module__")


def report_key(gm: fx.GraphModule, example_inputs: Sequence[Any], context: Context) -> str:
    """Name the report of a compile by the graph's text, its inputs, our sources and the options.

    A size that varies is its symbol, as in the keys of torch's caches: the next process begins with
    a batch of another length, and finds this graph. Torch may keep several graphs under one key, of
    which the report is the latest's. Under `qfuse.strict` a report belongs to one graph, and each
    length has its own.
    """
    digest = hashlib.sha256()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            digest.update(module.code.encode())
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, example in zip(placeholders, example_inputs, strict=True):
        x = node.meta.get("example_value", example)
        digest.update((_layout(x) if isinstance(x, torch.Tensor) else str(x)).encode())
        if context.resolved.strict and isinstance(example, torch.Tensor):
            digest.update(str([hint(size) for size in example.shape]).encode())
    digest.update(f"{torch.is_grad_enabled()} {autocast_state()} {torch.__version__}".encode())
    digest.update(f"{source_digest()} {context.resolved.fingerprint()}".encode())
    digest.update(f"{wide.slow_dtypes()} {context.attention}".encode())
    digest.update(f"{context.budget and context.budget.key}".encode())
    return digest.hexdigest()


def _layout(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.stride()} {x.dtype} {x.device} {x.requires_grad}"


def store_report(key: str, report: Report) -> None:
    """Keep the report beside Inductor's cache, for the process that hits this cache."""
    kept.keep(_name(key), report.to_json().encode())


def load_report(key: str, fresh: Report) -> Report:
    """Return the report of the compile that filled the cache; where it is gone, `fresh`, marked."""
    report = stored_report(key)
    if report is None:
        report = fresh
        report.lost = True
    report.options = fresh.options
    report.graph = fresh.graph
    report.cached = True
    return report


def add_stored(key: str, report: Report, names: Collection[str]) -> None:
    """Add what the passes of these names did when Inductor's cache was filled, if it is known:
    where AOTAutograd traces a graph again, Inductor may still find what it lowered."""
    stored = stored_report(key) if names else None
    if stored is None:
        return
    for name in names:
        sites = [site for site in stored.sites if site.pass_name == name]
        records = [record for record in stored.passes if record.name == name]
        for record in records:
            report.add(record, sites if record is records[0] else ())


def report_tag(key: str, *, together: bool) -> str:
    """Return the tag that keeps a graph in torch's caches together with its report.

    Where the report is there, this is the tag that the graph was compiled with. Where it is
    damaged, or must be found `together` with the graph and is not there, this is a new tag, under
    which no cached graph is found: compiling again makes the report again.
    """
    report = stored_report(key)
    if report is not None:
        return report.tag
    return uuid.uuid4().hex if together or kept.is_there(_name(key)) else ""


def stored_report(key: str) -> Report | None:
    """Return the report that a compile has kept under `key`, if it is still there and whole."""
    data = kept.read(_name(key))
    return None if data is None else Report.from_dict(json.loads(data))


def _name(key: str) -> str:
    return f"reports/{key[:32]}.report"
