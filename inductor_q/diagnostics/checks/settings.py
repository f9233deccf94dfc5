"""Check settings of torch that hide what goes wrong, give up early, or switch a part off."""

from __future__ import annotations

from collections.abc import Iterator

from inductor_q.diagnostics.checks.finding import Finding

DEFAULT_LIMIT = 8  # torch's own, 2.11 to 2.15


def check() -> Iterator[Finding]:
    """Check suppress_errors, the recompile limit, whose random numbers are drawn, and whether
    compiling or its cache is off."""
    from torch._dynamo import config
    from torch._inductor import config as inductor_config

    if config.suppress_errors:
        yield Finding(
            "suppress_errors",
            "fail",
            "set: a frame that fails to compile runs eagerly, and only a warning tells",
            "torch._dynamo.config.suppress_errors = False  # unset TORCHDYNAMO_SUPPRESS_ERRORS",
        )
    else:
        yield Finding("suppress_errors", "ok", "not set")
    limit = config.recompile_limit
    if limit < DEFAULT_LIMIT:
        yield Finding(
            "recompile_limit",
            "warn",
            f"{limit}; the function runs eagerly after that many compiles (torch: {DEFAULT_LIMIT})",
            f"torch._dynamo.config.recompile_limit = {DEFAULT_LIMIT}",
        )
    else:
        yield Finding("recompile_limit", "ok", str(limit))
    if config.disable:
        yield Finding(
            "compiling",
            "fail",
            "switched off: torch.compile does nothing",
            "unset TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE",
        )
    if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
        yield Finding(
            "fx graph cache",
            "warn",
            "off: every process compiles everything again",
            "unset TORCHINDUCTOR_FORCE_DISABLE_CACHES TORCHINDUCTOR_FX_GRAPH_CACHE",
        )
    if inductor_config.fallback_random:
        yield Finding(
            "fallback_random",
            "warn",
            "set: dropout draws the numbers of eager mode, so masks of LoRA dropout are stored",
            "torch._inductor.config.fallback_random = False",
        )
