"""List the private names of torch that the package stands on, found in its source.

Names that are looked up by attribute (node metadata, buffers of Inductor's IR) are no imports; the
page lists them by hand.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("inductor_q", "passes", "lowerings")

#: The use of each name, by the start of the name; the longest that fits counts.
PURPOSES = {
    "torch._C": "whether a call is traced or transformed; switches of gradients; logits' metadata",
    "torch._C._autograd": "whether hooks read what is saved for backward",
    "torch._C._dynamo": "pinned memory that is not filled",
    "torch._C._has_storage": "what a graph holds in memory",
    "torch._C._nn": "a product, as Dynamo traces `torch.nn.functional.linear`",
    "torch._dynamo": "the list of backends; Dynamo's settings, in checks and advice",
    "torch._dynamo.convert_frame": "the functions that Dynamo makes, for `--dump`",
    "torch._dynamo.eval_frame": "compiled modules and their guards, for `qfuse doctor`; compiling "
    "a step again whose plan of memory missed",
    "torch._dynamo.exc": "what sends Dynamo back to trace a frame anew: its report is dropped",
    "torch._dynamo.output_graph": "observing each call of a backend (`call_user_compiler`)",
    "torch._dynamo.utils": "counters of graph breaks; the code of a step that is compiled again",
    "torch._functorch._aot_autograd": "whether bodies of autograd.Functions may be cached",
    "torch._functorch": "caching the bodies of autograd.Functions; what may be computed again",
    "torch._functorch.partitioners": "the partitioning after our tags; the operations it knows",
    "torch._grouped_mm": "a grouped product",
    "torch._guards": "the identity of a compile; the fake mode of a graph",
    "torch._higher_order_ops": "what a nested region saves",
    "torch._int_mm": "a product in int8",
    "torch._inductor": "configuration and its keys; IR and lowerings of `qfuse::` ops",
    "torch._inductor.codegen.common": "whether one kernel may make several tensors",
    "torch._inductor.compile_fx": "compiling, with the configuration of one compile",
    "torch._inductor.cudagraph_trees": "`torch.compiler.reset()`",
    "torch._inductor.custom_graph_pass": "the hooks, and their `uuid()` in the cache keys",
    "torch._inductor.decomposition": "tracing a function into the operators of a graph",
    "torch._inductor.fx_utils": "what a graph holds in memory",
    "torch._inductor.pattern_matcher": "the order of nodes after a pass",
    "torch._inductor.runtime.cache_dir_utils": "where reports and compiled kernels lie",
    "torch._inductor.utils": "empty caches, for tests and benchmarks",
    "torch._inductor.virtualized": "the graph being lowered, loop operations, fake mode",
    "torch._logging": "the structured trace: read by `qfuse explain`, and given our report",
    "torch._ops": "types of ops",
    "torch._scaled_grouped_mm": "a grouped product in FP8",
    "torch._scaled_mm": "a product in FP8",
    "torch.ops.aten": "FlashAttention, where the lengths of batches vary",
    "torch.ops.mkldnn": "whether the CPU multiplies slowly in 16 bits",
    "torch._subclasses": "whether a tensor is fake or functional",
    "torch.cuda.memory": "a snapshot of what is allocated, for `QfuseCallback(profile=...)`",
    "torch.nn.attention._sdpa_kernel": "whether the program chooses attention's kernels",
    "torch.utils._ordered_set": "sets that Inductor takes",
    "torch.utils._python_dispatch": "measuring the link to the host while a graph is traced",
    "torch.utils._pytree": "walking outputs",
    "torch.utils._sympy": "index arithmetic",
}


def is_private(name: str) -> bool:
    parts = name.split(".")
    hidden = [part for part in parts[1:] if part.startswith("_") and not part.startswith("__")]
    return parts[0] == "torch" and bool(hidden)


def names(tree: ast.AST) -> Iterator[str]:
    """Return full names of what a file imports or takes by attribute from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def used() -> set[str]:
    """Return every private name that the source imports or takes by attribute."""
    found: set[str] = set()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found |= {
                n for n in names(ast.parse(path.read_text(encoding="utf-8"))) if is_private(n)
            }
    # `a.b` beside `a.b.c` is what an attribute chain is made of, not a use of its own.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def purpose(name: str) -> str:
    fitting = [start for start in PURPOSES if f"{name}.".startswith(f"{start}.")]
    assert fitting, f"{name}: say in docs/private.py what it is for"
    return PURPOSES[max(fitting, key=len)]


def table() -> str:
    """Make one row per module: its names, and what for."""
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(used()):
        module, _, last = name.rpartition(".")
        grouped[module, purpose(name)].append(f"`{last}`")
    lines = ["| module | names | for |", "| --- | --- | --- |"]
    lines += [
        f"| `{m}` | {', '.join(found)} | {what} |" for (m, what), found in sorted(grouped.items())
    ]
    return "\n".join(lines)
