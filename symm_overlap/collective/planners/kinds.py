"""The kinds of steps of collective matmul, besides the kinds that every plan has (`symm_overlap.plan.kinds`).

========  =========================================================================================================
publish   copy ``reads[0]``, this rank's input, to ``writes[0]``, memory that the peers can read
pull      copy ``reads[0]``, a peer's memory or this rank's input, to ``writes[0]``, this rank's memory
announce  write at which offset this rank's input begins in symmetric memory, to where the peers can read it
produce   compute a chunk that is for rank ``chunk[0]``, or, without a chunk, the chunks for all ranks, in rank order;
          the result is written to each of ``writes``
consume   compute with a chunk that comes from rank ``chunk[0]``, or, without a chunk, with the chunks of all ranks
reduce    sum ``reads``, in the order given, into each of ``writes``
tiles     a part of one kernel: the tiles that compute with the chunk from, or for, rank ``chunk[0]``
raise     set the flag of a chunk; the chunk's tiles wait for this flag inside their kernel
push      copy ``reads[0]``, this rank's memory, to ``writes[0]``, a peer's memory
poll      wait for the flag of a chunk, which the last tile of that chunk sets
========  =========================================================================================================
"""

from __future__ import annotations

from ...plan import Kind, register

PUBLISH = register(Kind("publish", "copy engine", "copy", "#f2a541")).name
PULL = register(Kind("pull", "copy engine", "copy", "#e8833a")).name
ANNOUNCE = register(Kind("announce", "", "order", "#9d755d")).name
PRODUCE = register(Kind("produce", "SMs", "compute", "#4c78a8")).name
CONSUME = register(Kind("consume", "SMs", "compute", "#6f9bd1")).name
REDUCE = register(Kind("reduce", "SMs", "compute", "#72b7b2", overhead=True)).name
TILES = register(Kind("tiles", "SMs", "compute", "#9467bd")).name
RAISE = register(Kind("raise", "", "order", "#8fbf8f", memory=False)).name
POLL = register(Kind("poll", "", "order", "#d0d0d0", memory=False)).name
PUSH = register(Kind("push", "copy engine", "copy", "#d97b29")).name
