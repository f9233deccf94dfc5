"""Write the reference of the public names as Markdown, from their signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

#: Public values, which cannot carry a docstring.
VALUES = {
    "inductor_q.FORMATS": "Every quantized format by name, as `qfuse formats` lists them.",
    "inductor_q.__version__": "The version of the package.",
}


class Undocumented(ValueError):
    """Raised for a public name without a docstring."""


def reference(module: str) -> str:
    """Describe the public names of a module in the order of `__all__`."""
    names = importlib.import_module(module)
    return "\n\n".join(entry(f"{module}.{name}", getattr(names, name)) for name in names.__all__)


def entry(name: str, value: Any) -> str:
    """Describe one name: a heading, how it is called, what it says about itself."""
    if name in VALUES:
        return f"### `{name}`\n\n{VALUES[name]}"
    lines = [f"### `{name}`", f"```python\n{signature(name, value)}\n```", text(name, value)]
    if inspect.isclass(value):
        lines += [
            f"- `{member}`: {first_sentence(doc)}" for member, doc in documented_members(value)
        ]
    return "\n\n".join(lines[:3]) + ("\n\n" + "\n".join(lines[3:]) if lines[3:] else "")


def signature(name: str, value: Any) -> str:
    """Show how a name is called; each parameter has its line where one line is not enough."""
    called = inspect.signature(value)
    parts: list[str] = []
    starred = False
    for parameter in called.parameters.values():
        if parameter.name.startswith("_"):
            continue
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        parts.append(shown(parameter))
    short = name.rpartition(".")[2]
    unsaid = inspect.isclass(value) or called.return_annotation is called.empty
    answer = "" if unsaid else f" -> {plain(called.return_annotation)}"
    line = f"{short}({', '.join(parts)}){answer}"
    if len(line) <= 88:
        return line
    return "\n".join([f"{short}(", *(f"    {part}," for part in parts), f"){answer}"])


def shown(parameter: inspect.Parameter) -> str:
    stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL)
    stars += "**" * (parameter.kind is parameter.VAR_KEYWORD)
    annotation, default = "", ""
    if parameter.annotation is not parameter.empty:
        annotation = f": {plain(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        made = repr(parameter.default).startswith("<")  # anew for each call
        value = "..." if made else repr(parameter.default)
        default = f" = {value}" if annotation else f"={value}"
    return f"{stars}{parameter.name}{annotation}{default}"


def plain(annotation: Any) -> str:
    """Write an annotation as it is written in the source."""
    written = getattr(annotation, "__forward_arg__", annotation)
    return written if isinstance(written, str) else inspect.formatannotation(written)


def text(name: str, value: Any) -> str:
    """Return the docstring; sections of arguments become lists."""
    doc = value.__doc__
    if not doc or doc.startswith(f"{name.rpartition('.')[2]}("):  # what a dataclass makes itself
        raise Undocumented(f"{name} has no docstring")
    return "\n".join(as_markdown(inspect.cleandoc(doc).splitlines()))


def as_markdown(lines: list[str]) -> Iterator[str]:
    """Turn sections of arguments and errors into lists, that of the result into a paragraph."""
    section = ""
    for line in lines:
        if found := re.fullmatch(r"(Args|Returns|Raises|Yields):", line):
            section = found[1]
            yield f"{section.replace('Args', 'Arguments')}:\n"
        elif section and line.startswith("    "):
            head = re.match(r"    (\S[^:]*): (.*)", line) if section in ("Args", "Raises") else None
            yield f"- `{head[1]}`: {head[2]}" if head else f"  {line.strip()}"
        elif field := not section and re.fullmatch(r"(\w+): (.*)", line):
            yield f"- `{field[1]}`: {field[2]}"
        else:
            section = "" if line else section
            yield line


def documented_members(value: type) -> Iterator[tuple[str, str]]:
    """Yield public methods and properties that the class itself defines and describes."""
    for name, member in vars(value).items():
        member = getattr(member, "__func__", member)
        callable_ = inspect.isfunction(member) or isinstance(member, property)
        if not name.startswith("_") and callable_ and member.__doc__:
            called = "" if isinstance(member, property) else "()"
            yield f"{name}{called}", inspect.cleandoc(member.__doc__)


def first_sentence(doc: str) -> str:
    """Return the first paragraph in one line."""
    return " ".join(doc.split("\n\n")[0].split())
