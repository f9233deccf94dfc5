"""Keep `save_pretrained` from writing packed layers that `from_pretrained` cannot load."""

from __future__ import annotations

import sys
from types import FrameType

from inductor_q.exc import CannotSave
from inductor_q.log import warn_once


def check_saver(what: str, *, resumes: bool = True, adapted: bool = False) -> None:
    """Raise where transformers' `save_pretrained` asks for the state of a packed layer.

    Its `from_pretrained` would take random weights for it. Only the calls that lead here tell who
    asks; for anyone else (`kbit.save`, torch) the state is as good as any. A checkpoint of a
    trainer is written too, since the trainer loads it into the model that it trains. Where only
    PEFT's adapters are written, those of an expert would be missing: a warning says so.

    Args:
        what: the layer's name and class.
        resumes: whether a trainer's checkpoint can hold it.
        adapted: whether it is a stack of experts with an adapter.
    """
    names = set()
    frame: FrameType | None = sys._getframe(1)
    saver: FrameType | None = None
    while frame is not None:
        names.add(frame.f_code.co_name)
        if frame.f_code.co_name == "save_pretrained":
            saver = frame
        frame = frame.f_back
    library = "" if saver is None else str(saver.f_globals.get("__name__")).partition(".")[0]
    if saver is None or library not in ("transformers", "peft"):
        return
    model = saver.f_locals.get("self")
    if library == "peft" or getattr(model, "_hf_peft_config_loaded", False):
        if adapted:
            warn_once(
                "save_pretrained leaves out the adapters of experts: "
                "inductor_q.experts.save_adapter(model, folder) writes them with PEFT's"
            )
    elif not (resumes and "_save_checkpoint" in names):
        raise CannotSave(
            what=what,
            problem="from_pretrained would make random weights in its place",
            remedy=(
                "Save the model by inductor_q.kbit.save, adapters of experts by "
                "inductor_q.experts.save_adapter, or 16-bit weights after "
                "inductor_q.kbit.dequantize_model"
            ),
        )
