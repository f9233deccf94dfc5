"""Check that the installed packages are ones that were tried together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from inductor_q.diagnostics.checks.finding import Finding, Status
from inductor_q.diagnostics.checks.tested import PACKAGES, Package, release


def check() -> Iterator[Finding]:
    """Yield one finding per package; of missing ones, only torch is at fault."""
    for package in PACKAGES:
        yield judge(package, _installed(package.name))
    yield from _triton_of_torch()


def judge(package: Package, version: str | None) -> Finding:
    """Judge `package` at `version`, None where it is not installed."""
    install = f"pip install '{package.requirement}'"
    if version is None:
        status: Status = "fail" if package.required else "ok"
        return Finding(package.name, status, "not installed", install if package.required else "")
    if not package.admits(version):
        wants = f"needs {package.requirement[len(package.name) :]}"
        return Finding(package.name, "fail", f"{version}; inductor_q {wants}", install)
    if release(version) not in map(release, package.tried):
        known = ", ".join(package.tried)
        return Finding(
            package.name,
            "warn",
            f"{version} was not tried; tried: {known}",
            f"pip install '{package.name}=={_nearest(package, version)}'",
        )
    return Finding(package.name, "ok", version)


def _nearest(package: Package, version: str) -> str:
    """Return the newest tried version that is not newer than this one, else the oldest."""
    older = [v for v in package.tried if release(v) <= release(version)]
    return older[-1] if older else package.tried[0]


def _triton_of_torch() -> Iterator[Finding]:
    """A CUDA build of torch is built against one triton and names it in its metadata."""
    if _installed("torch") is None:
        return
    for requirement in metadata.requires("torch") or ():
        wanted = re.match(r"triton\s*==\s*([\w.]+)", requirement)
        if wanted and (installed := _installed("triton")) != wanted[1]:
            yield Finding(
                "triton of torch",
                "fail",
                f"this torch was built against triton {wanted[1]}, installed: {installed}",
                f"pip install 'triton=={wanted[1]}'",
            )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
