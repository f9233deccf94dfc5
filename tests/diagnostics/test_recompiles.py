"""What a report says of recompiles: the guard, its values, how often, and a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_q.diagnostics import recompiles
from inductor_q.diagnostics.explanation import Frame
from tests.support.observing import observed

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def add(x: torch.Tensor, n: Any) -> torch.Tensor:
    return x + len(n) if isinstance(n, str) else x + n


def test_recompiles_until_the_limit() -> None:
    def call() -> None:
        compiled = torch.compile(add, backend="eager")
        for i in range(12):
            compiled(torch.ones(4), "a" * i)

    run = observed(call)
    (only,) = run.recompiles
    assert only.count == torch._dynamo.config.recompile_limit - 1 == len(run.compiles) - 1
    assert only.hit_limit
    assert (only.function, only.guard) == ("add", "n == ''")
    assert (only.before, only.after) == ("''", "'a', 'aa', 'aaa', 'aaaa', ...")
    assert {f.reason for f in run.fallbacks} == {"the recompile limit was reached"}


def test_one_size_that_recompiles_many_functions_is_one_record() -> None:
    """A broken graph has many frames; a batch of another length recompiles each of them."""
    where = Frame("model.py", 1, "forward")
    text = "tensor '{}' size mismatch at index 1. expected {}, actual {}"
    seen = [("forward", "ids", 79, 68), ("mask", "ids", 79, 68), ("head", "y", 79, 68)]
    seen += [("other", "z", 4, 5)]
    found = recompiles.distinct(
        (name, where, recompiles.parse(f"0/0: {text.format(tensor, before, after)}"), False)
        for name, tensor, before, after in seen
    )
    assert [(r.function, r.count) for r in found] == [("forward", 3), ("other", 1)]
    assert found[0].fix.endswith("; the same size recompiles mask, head")


def test_lengths_under_a_trainer_are_one_record_with_advice_for_it() -> None:
    """A shift by one, two rows in one, another function: all follow from the batch. What a hook
    recompiles has the hook's own way out; a batch of one row stays apart."""
    text = "tensor '{}' {} mismatch at index {}. expected {}, actual {}"
    library = Frame("/site-packages/transformers/modeling_utils.py", 2143)
    hook = Frame(library.file, 2143, "make_inputs_require_grads")
    seen = [
        ("forward", library, text.format("kwargs['input_ids']", "size", 1, 38, 82)),
        ("head", library, text.format("mask", "size", 1, 37, 81)),
        ("__init__", library, text.format("tile", "size", 0, 74, 162)),
        ("forward", library, text.format("kwargs['input_ids']", "size", 0, 2, 1)),
        ("make_inputs_require_grads", hook, "tensor 'output' requires_grad mismatch. expected 0"),
    ]
    found = recompiles.distinct(
        ((name, where, recompiles.parse(f"0/0: {reason}"), False) for name, where, reason in seen),
        by_trainer=True,
    )
    lengths, row, of_hook = found
    assert lengths.count == 3 and lengths.fix.endswith("recompiles head, __init__")
    assert "QfuseCallback(dynamic=True)" in lengths.fix and "mark_dynamic" not in lengths.fix
    assert row.fix.startswith("size 1 is compiled apart")
    assert "enable_input_require_grads() cannot be compiled" in of_hook.fix


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("kwargs['input_ids']", " (torch._dynamo.mark_dynamic(input_ids, 1))"),
        ("x", " (torch._dynamo.mark_dynamic(x, 1))"),
        ("___stack0", ""),
        ("loss['log_probs']", ""),
        ("self.cache", ""),
        ("kwargs", ""),
        ("args", ""),
        ("args[0]", ""),
    ],
)
def test_only_what_a_caller_can_name_is_to_be_marked(name: str, advice: str) -> None:
    guard = recompiles.parse(f"0/0: tensor '{name}' size mismatch at index 1. expected 4, actual 5")
    assert recompiles.fix_for(guard).endswith(f"or compile with dynamic=True{advice}")


@pytest.mark.parametrize(
    ("calls", "guard", "before", "after", "fix"),
    [
        (
            [torch.ones(4, 2), torch.ones(5, 2)],
            "tensor 'x' size mismatch at index 0. expected 4, actual 5",
            "4",
            "5",
            "mark_dynamic(x, 0)",
        ),
        ([torch.ones(4), torch.ones(4).double()], "dtype", "Float", "Double", "one dtype"),
        ([torch.ones(4), torch.ones(4, requires_grad=True)], "requires_grad", "", "", "same"),
    ],
)
def test_recompiles_by_tensor(
    calls: list[torch.Tensor], guard: str, before: str, after: str, fix: str
) -> None:
    def call() -> None:
        compiled = torch.compile(add, backend="eager")
        for x in calls:
            compiled(x, 1)

    (only,) = observed(call).recompiles
    assert only.count == 1
    assert guard in only.guard
    assert before in only.before
    assert after in only.after
    assert fix in only.fix


def test_recompiles_by_a_constant() -> None:
    def call() -> None:
        compiled = torch.compile(add, backend="eager", dynamic=False)
        for n in (1, 2, 3):
            compiled(torch.ones(4), n)

    (only,) = observed(call).recompiles
    assert (only.guard, only.before, only.after, only.count) == ("n == 1", "1", "2, 3", 2)
    assert "dynamic=True" in only.fix


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        (
            "4/0: Cache line invalidated because type(L['self']) got deallocated",
            "what was compiled for is gone",
        ),
        (
            "5/0: not hasattr(L['self']._modules['base_layer'], 'base_layer')",
            "give the object the same attributes in every call",
        ),
    ],
)
def test_what_keeps_a_guard_from_failing(reason: str, fix: str) -> None:
    """Guards of PEFT's target_parameters: neither is a value that could be passed as a tensor."""
    assert recompiles.fix_for(recompiles.parse(reason)).startswith(fix)


def halve(x: torch.Tensor) -> torch.Tensor:
    """Add neighbours until one is left, as a scan does: the size says in how many steps."""
    while x.shape[0] > 1:
        x = x[0 : x.shape[0] // 2 * 2 : 2] + x[1::2]
    return x


def test_a_size_that_code_branches_on_is_one_graph_under_no_option() -> None:
    def call() -> None:
        compiled = torch.compile(halve, backend="eager", dynamic=True)
        for length in (8, 16, 64):
            compiled(torch.ones(length))

    (only,) = observed(call).recompiles
    assert (only.guard, only.before) == ("8 <= x.size()[0] <= 15", "8 to 15")
    assert (only.after, only.count) == ("16, 64", 2)
    assert only.fix.endswith("under dynamic=True too: pad dimension 0 of x to a few sizes")


@pytest.mark.parametrize(
    ("guard", "after", "fix"),
    [
        ("2 <= x.size()[0]", "1", "size 1 is compiled apart"),
        ("2 <= x.size()[0] <= 127", "1", "size 1 is compiled apart"),
        ("2 <= x.size()[0] <= 127", "200", "the code branches on this size"),
        ("128 <= x.size()[0]", "90", "the code branches on this size"),
        ("128 <= x.size()[0]", "1", "the code branches on this size"),
        ("x.size()[0] == y.size()[0] == 5", "", "pad dimension 0 of x.size()[0] == y.size()"),
        ("x.size()[0] <= 127", "200", "the code branches on this size"),
        ("(x.size()[0] % 8) == 0", "", "the code branches on this size"),
        ("x.size()[0] == 8", "9", "pad dimension 0 of x to a few sizes, or compile with dynamic"),
    ],
)
def test_bounds_of_a_size(guard: str, after: str, fix: str) -> None:
    assert recompiles.fix_for(recompiles.parse(f"0/0: {guard}", after)).startswith(fix)


def test_a_trainer_pads_where_the_code_divides_the_length() -> None:
    """As Jamba's scan does (transformers 5.23, torch 2.13)."""
    size = "kwargs['input_ids'].size()"
    reason = f"((-256)*{size}[0]) + 256*{size}[0]*({size}[1] // 8) < 2"
    guard = recompiles.parse(f"0/0: {reason}  # return a_left * a_right  # modeling_jamba.py:393")
    assert "dimension 1 of kwargs['input_ids']" in recompiles.fix_for(guard)
    fix = recompiles.fix_for(guard, by_trainer=True)
    assert fix.endswith("pad batches (pad_to_multiple_of of the data collator) to a few sizes")
