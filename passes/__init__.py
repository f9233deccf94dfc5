"""Passes rewrite an FX graph in terms of qfuse:: ops. Their order has these reasons:

unwrap_weights reads the graph as Dynamo captured it, in which a weight in a tensor subclass is one
input; so do causal_attention, group_queries and chunk_loss, before AOTAutograd chooses attention's
kernels and splits the loss into parts. canonicalize precedes the rest, which then know
one form. read_packed makes layers of products of few rows for fuse_rows, which takes them with
their adapters, of which fold_lora then finds none. fuse_scatter2scatter is next, so that no other
pass sees a dequantized stack of experts.
fold_lora precedes the stacking, since a scale or a cast between two products hides that they share
an input. stack_adapters precedes extend_k, so that one projection serves all of a group's products.
quantize_products stands between them: products in eight bits are none that an adapter of 16 bits
can ride in, so extend_k finds those that were refused there.
stack_gradients follows when extend_k has laid the gradients side by side, and add_gradients when
both have made the products that are left. recompute_products,
keep_checkpointed, which reads its marks, and keep_packed run in the partitioner, on what is left,
decode_again on the backward graph that it makes, and project_in_place and read_gradients on both
graphs. cast_together runs on the graphs that are lowered, in which it sees what is left
to cast. widen_products is the last, since it puts casts around products.
"""

# ruff: noqa: E402 - the name is checked before any submodule loads
assert __name__ == "inductor_q.passes", f"import it as inductor_q.passes, not {__name__}"

from inductor_q.passes.add_gradients import AddGradients
from inductor_q.passes.canonicalize import Canonicalize
from inductor_q.passes.cast_together import CastTogether
from inductor_q.passes.causal_attention import CausalAttention
from inductor_q.passes.chunk_loss import ChunkLoss
from inductor_q.passes.decode_again import DecodeAgain
from inductor_q.passes.extend_k import ExtendK
from inductor_q.passes.fold_lora import FoldLora
from inductor_q.passes.fuse_dropout import FuseDropout
from inductor_q.passes.fuse_rows import FuseRows
from inductor_q.passes.fuse_scatter2scatter import FuseScatter2Scatter
from inductor_q.passes.group_queries import GroupQueries
from inductor_q.passes.keep_checkpointed import KeepCheckpointed
from inductor_q.passes.keep_packed import KeepPacked
from inductor_q.passes.project_in_place import ProjectInPlace
from inductor_q.passes.quantize_products import QuantizeProducts
from inductor_q.passes.read_gradients import ReadGradients
from inductor_q.passes.read_packed import ReadPacked
from inductor_q.passes.recompute_products import RecomputeProducts
from inductor_q.passes.rotary_tables import RotaryTables
from inductor_q.passes.runner import Pass, Site
from inductor_q.passes.stack_adapters import StackAdapters
from inductor_q.passes.stack_gradients import StackGradients
from inductor_q.passes.unwrap_weights import UnwrapWeights
from inductor_q.passes.varying_lengths import VaryingLengths
from inductor_q.passes.widen_products import WidenProducts

PIPELINE: tuple[Pass, ...] = (
    UnwrapWeights(),  # a weight in a tensor subclass -> qfuse.dequantize of what it is made of
    CausalAttention(),  # a causal mask written out -> is_causal, of keys that are not repeated
    GroupQueries(),  # heads of one query that share keys -> queries of one head
    ChunkLoss(),  # the loss of a product with the head, without having all logits at a time
    Canonicalize(),  # every source of a quantized weight -> qfuse.dequantize + mm
    ReadPacked(),  # few rows times a weight that the graph decodes -> qfuse.linear
    FuseRows(),  # layers of few rows of one input, and their adapters: one launch
    FuseScatter2Scatter(),  # products with packed experts: one op that reads them packed
    FuseDropout(),  # adapters' masks are made in the kernels that use them
    FoldLora(),  # no clone, no [M, N] scaling, no float32 detour
    StackAdapters(),  # adapters that share an input: one projection
    QuantizeProducts(),  # products with frozen weights in eight bits, where asked for
    ExtendK(),  # the adapter rides in the main product
    StackGradients(),  # gradients of A that share an input: one product
    AddGradients(),  # the gradient that dropout gives an input is added to a product in place
    VaryingLengths(),  # attention of varying lengths: no kernel that plans for each of them
    RotaryTables(),  # cosines and sines of positions: once, not for every head
    RecomputeProducts(),  # wide products of a checkpointed segment that torch 2.11 would keep
    KeepCheckpointed(),  # small parts of checkpointed segments are saved, not recomputed
    KeepPacked(),  # dequantized weights are recomputed, not saved
    DecodeAgain(),  # a decode for each wide product of backward
    ProjectInPlace(),  # a projection that is not kept goes into the buffer it is computed for
    ReadGradients(),  # both products of an adapter with its layer's gradient, which is read once
    CastTogether(),  # casts of adapters and of their gradients: a few launches
    WidenProducts(),  # products in 16 bits that this CPU computes slowly: in float32
)

__all__ = ["PIPELINE", "Pass", "Site"]
