"""`qfuse presets` lists the settings for each architecture, and the evidence."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from inductor_q.commands import listing

if TYPE_CHECKING:
    from inductor_q.commands import Subparsers
    from inductor_q.presets import Preset


def register(subparsers: Subparsers) -> None:
    parser = listing.add_parser(
        subparsers, "presets", main, "what is set for each architecture, and the evidence for it"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these: sm_90, tuned, ...")


def main(args: argparse.Namespace) -> int:
    """List what ships and then what `qfuse tune` measured; a page of Markdown has what ships."""
    shipped = [name for name in args.names if name != "tuned"]
    shown = tables(shipped) if shipped or not args.names else []
    if not args.markdown and (not args.names or "tuned" in args.names):
        shown += _tuned()
    return listing.show(shown, args)


def tables(names: list[str] | None = None) -> list[listing.Table]:
    """Make one table per preset, generic first: the others list only what differs from it."""
    from inductor_q.exc import UnknownPreset
    from inductor_q.presets import PRESETS

    for name in names or ():
        if name not in PRESETS:
            raise UnknownPreset(name=name, known=tuple(PRESETS))
    order = sorted(PRESETS.values(), key=lambda preset: preset.name != "generic")
    return [_table(preset) for preset in order if not names or preset.name in names]


def _tuned() -> list[listing.Table]:
    from inductor_q.presets import tuned

    return [
        replace(_table(preset), note=f"{preset.reason}; in {path}.")
        for path, _, preset in tuned.everything()
    ]


def _table(preset: Preset) -> listing.Table:
    from inductor_q.presets import MAPPINGS
    from inductor_q.presets.generic import GENERIC

    rows: list[tuple[str, ...]] = []
    for kind in MAPPINGS:
        generic = {} if preset is GENERIC else getattr(GENERIC, kind)
        for name, entry in getattr(preset, kind).items():
            if entry is not generic.get(name):
                rows.append((kind, name, str(entry.value), entry.evidence))
    rows += [("fact", "", "", fact) for fact in preset.facts]
    return listing.Table(
        ("kind", "name", "value", "evidence"),
        rows,
        title=preset.name,
        note=_note(preset),
        below=True,
    )


def _note(preset: Preset) -> str:
    parts = []
    if preset.arch:
        parts.append(f"compute capability {preset.arch[0]}.{preset.arch[1]}")
    if preset.name == "generic":
        parts.append("where every device starts")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
