"""inductor_q: `torch.compile(model, backend="qfuse")` for models with quantized weights and LoRA.

Importing this package does nothing else: names are resolved on first use. (PYTEST_DONT_REWRITE:
pytest, which loads `pytest_plugin`, need not warn that `qfuse explain` has imported the package.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inductor_q.version import VERSION

if TYPE_CHECKING:
    from inductor_q.backend import last_report as last_report
    from inductor_q.capture.values import dequantize as dequantize
    from inductor_q.formats import FORMATS as FORMATS
    from inductor_q.formats import QuantFormat as QuantFormat
    from inductor_q.integrations.regions import compile as compile
    from inductor_q.options import check_options as check_options
    from inductor_q.options import list_options as list_options
    from inductor_q.process import report as report
    from inductor_q.quantization import quantize as quantize
    from inductor_q.shipped import load_checkpoint as load_checkpoint

__version__ = VERSION

_PUBLIC = {
    "FORMATS": "inductor_q.formats",
    "QuantFormat": "inductor_q.formats",
    "check_options": "inductor_q.options",
    "compile": "inductor_q.integrations.regions",
    "dequantize": "inductor_q.capture.values",
    "last_report": "inductor_q.backend",
    "list_options": "inductor_q.options",
    "load_checkpoint": "inductor_q.shipped",
    "quantize": "inductor_q.quantization",
    "report": "inductor_q.process",
}

__all__ = [
    "FORMATS",
    "QuantFormat",
    "__version__",
    "check_options",
    "compile",
    "dequantize",
    "last_report",
    "list_options",
    "load_checkpoint",
    "quantize",
    "report",
]


def __dir__() -> list[str]:
    """List the public names too, so that `help(inductor_q)` and completion know them."""
    return sorted({*globals(), *_PUBLIC})


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
