"""Names that are in no registry: options, passes, formats, layers, commands."""

from __future__ import annotations

from inductor_q.exc.base import QfuseError, UnknownName


class UnknownOption(UnknownName):
    message = "unknown option {name!r}{where}{hint} List all: inductor_q.list_options()"


class NoOption(UnknownName):
    message = "no option's name contains {name!r}{hint} List all: qfuse options --all"


class UnknownCommand(UnknownName):
    message = "unknown command {name!r}{hint} Known: {known!j}"


class UnknownMode(UnknownName):
    message = "unknown mode {name!r}{where}{hint} Known: {known!j}"


class UnknownRegions(UnknownName):
    message = "unknown regions {name!r}{hint} Known: {known!j}"


class UnknownPreset(UnknownName):
    message = "unknown preset {name!r}{where}{hint} Known: auto, none, {known!j}"


class UnknownPass(UnknownName):
    message = "unknown pass {name!r}{where}{hint} Known, in order: {known!j}"


class UnknownProvider(UnknownName):
    """`op` has no provider of that name."""

    op: str
    message = "no provider {name!r} of qfuse::{op}{where}{hint} Known: auto, {known!j}"


class UnknownBackend(UnknownName):
    message = "unknown backend {name!r}{hint} Known: {known!j}"


class UnknownOp(UnknownName):
    message = "unknown op {name!r}{where}{hint} Known: {known!j}"


class UnknownFormat(UnknownName):
    message = "no quantization format {name!r}{hint} Known: {some!j}"
    most = 20  # the short names, which come first; `qfuse formats` lists all


class UnknownAbsmax(UnknownName):
    message = "no absmax of k-bit blocks is called {name!r}{hint} Known: {known!j}"


class UnknownLayer(UnknownName):
    message = "no linear layer matches {name!r}{where}{hint} Known: {some!j}"


class UnknownProjection(UnknownName):
    message = "unknown projection of experts {name!r}{where}{hint} Known: {known!j}"


class NotNames(QfuseError, TypeError):
    """One text stands where several names are expected; its letters would be taken for them."""

    argument: str
    value: str
    message = "{argument} is the text {value!r}, expected several names: {argument}=[{value!r}]"
