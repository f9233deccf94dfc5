"""bitsandbytes: 4-bit linear layers and parametrized weights, and 8-bit linear layers."""

from __future__ import annotations

from inductor_q.capture import bnb_gathered, bnb_graph, bnb_state
from inductor_q.capture.library import Library
from inductor_q.formats.bnb import BNB_FORMATS

BITSANDBYTES = Library(
    name="bitsandbytes",
    namespaces=("bitsandbytes",),
    parameters=("Params4bit", "Int8Params"),
    match=bnb_graph.match,
    is_product=bnb_graph.is_product,
    packs_anew=bnb_graph.packs_anew,
    stops_gradients=bnb_graph.stops_gradients,
    packed=bnb_state.packed,
    damaged=bnb_state.damaged,
    quantizers=dict.fromkeys(BNB_FORMATS, bnb_state.quantize),
    trace_gathered=bnb_gathered.trace_gathered,
)
