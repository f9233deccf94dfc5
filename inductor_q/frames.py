"""Find out whose code a stack frame is: the user's own, or a library's."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def library_of(path: str) -> str:
    """Return the distribution a source file belongs to, as "peft"; "" for the user's own code.

    "Python" is the standard library, "torch" also code that torch generates. Installed is what lies
    below a folder that holds `*.dist-info`, whatever its name: site-packages, the target of
    `pip install --target`, a folder on PYTHONPATH. So an editable install is the user's own code.
    """
    if path.startswith("<"):
        if path.startswith("<frozen "):
            return "Python"
        return "torch" if path.startswith("<eval_with_key>") else ""
    path = os.path.abspath(path)
    for folder, library in _TREES.items():
        if path.startswith(folder + os.sep):
            return library
    root = _installed_below(os.path.dirname(path))
    if root:
        package = Path(path).relative_to(root).parts[0].removesuffix(".py")
        return _packages_in(root).get(package, package)
    return "Python" if path.startswith(sysconfig.get_path("stdlib") + os.sep) else ""


def user_frame(node: fx.Node) -> str:
    """Return the innermost frame of the user's own code as `file:line`; failing that, the
    innermost.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not library_of(frame[0])]
    return ":".join((own or frames)[-1]) if frames else ""


# Libraries by their place, for they may run from a checkout.
_TREES = {
    os.path.dirname(os.path.abspath(torch.__file__)): "torch",
    str(Path(os.path.abspath(__file__)).parent): "inductor-q",
}


@cache
def _installed_below(folder: str) -> str:
    """Return the nearest folder from `folder` up that distributions are installed in, or ""."""
    if any(Path(folder).glob("*.dist-info")):
        return folder
    above = os.path.dirname(folder)
    return _installed_below(above) if above != folder else ""


@cache
def _packages_in(root: str) -> dict[str, str]:
    """Return which distribution brought each package and module of a folder."""
    owners: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=[root]):
        names = (distribution.read_text("top_level.txt") or "").split()
        if not names:
            # Not `distribution.files`: Python 3.12 looks for each, which takes seconds.
            lines = (distribution.read_text("RECORD") or "").splitlines()
            names = sorted({line.partition(",")[0].partition("/")[0] for line in lines})
        for name in names:
            owners.setdefault(name.removesuffix(".py"), str(distribution.metadata["Name"]))
    return owners
