"""Check that a DoRA layer is one graph, whose values are eager mode's."""

from __future__ import annotations

from torch import Tensor, fx, nn

from inductor_q import testing
from inductor_q.integrations import prepare_dora
from tests.support.compiling import (
    Compiled,
    compile_step,
    count_ops,
    no_codegen,
    partition,
    step,
)


def assert_one_graph(model: nn.Module, x: Tensor) -> tuple[Compiled, list[fx.Graph]]:
    """Prepare a model, and assert that it is fused in one graph that decodes its weight once in
    forward and once in backward; return the step, and both graphs."""
    theirs, their_grads = step(model, x, module=model)
    prepare_dora(model)
    with testing.CompileTrace() as trace:
        compiled = compile_step(model, x, context=no_codegen(), fullgraph=True)
    assert (trace.graphs, trace.breaks) == (1, [])
    assert testing.relative_error(compiled.output, theirs) < 0.02
    for name, gradient in their_grads.items():
        assert testing.relative_error(compiled.gradients[name], gradient) < 0.02, name
    assert [v.is_accepted for v in compiled.report.verdicts().values()] == [True]
    graphs = partition(lambda run: run(x).sum().backward(), model)
    assert [count_ops(graph)["qfuse.dequantize"] for graph in graphs] == [1, 1]
    return compiled, graphs
