"""The kinds of steps of collective matmul, besides those that every plan has.

========  =========================================================================================================
publish   copy ``reads[0]``, my input, to ``writes[0]``, memory that my peers can read
pull      copy ``reads[0]``, a peer's memory or my own input, to ``writes[0]``, mine
announce  write, where my peers can read it, at which offset my input lies in symmetric memory
produce   compute a chunk that is for rank ``chunk[0]``; without a chunk, those for all ranks, in rank order; into
          each of ``writes``
consume   compute with a chunk that comes from rank ``chunk[0]``; without a chunk, with those of all ranks
reduce    sum ``reads``, in the order given, into each of ``writes``
tiles     a part of one kernel: the tiles that compute with the chunk from, or for, rank ``chunk[0]``
raise     raise the flag of a chunk, for which its tiles wait inside their kernel
push      copy ``reads[0]``, mine, to ``writes[0]``, a peer's memory
poll      wait for the flag of a chunk, which its last tile raises
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
