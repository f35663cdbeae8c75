"""Planners of the algorithms that torch publishes for its async tensor parallelism: benchmarks compare them with ours.

Two streams take turns; each computes chunks and copies the data of these chunks. Ranks synchronise in barriers, with
one channel for each stream. All calls share one workspace, so barriers also keep calls apart. The design choices of
torch's authors are arguments here. World size 3, rank 0::

    all-gather      compute0  barrier, publish 0, barrier | consume 0         | pull 2, consume 2 | barrier
                    compute1                              | pull 1, consume 1 |

    reduce-scatter  compute1  barrier | produce 1, barrier, pull 2, barrier |
                    compute0          | sleep | produce 2, barrier, pull 1, barrier | produce 0, barrier, reduce

Source: ``_fused_all_gather_matmul_impl``, ``_pipelined_multi_all_gather_and_consume`` and
``_pipelined_produce_and_all2all`` in torch/distributed/_symmetric_memory/__init__.py of torch 2.13.
"""

from __future__ import annotations

from functools import lru_cache

from ...plan import Life, Plan, Region
from .builder import CollectiveBuilder
from .kinds import CONSUME, PRODUCE, PUBLISH, PULL, REDUCE

STREAMS = ("compute0", "compute1")
BUFFERS = {
    "input": Life.INPUT,
    **dict.fromkeys(["workspace", "pingpong0", "pingpong1"], Life.PERSISTENT),  # shared by all calls
    **dict.fromkeys(["gathered", "stage"], Life.SCRATCH),
    "output": Life.OUTPUT,
}


def _builder(op: str, rank: int, world: int, inputs: int) -> CollectiveBuilder:
    return CollectiveBuilder(op, rank, world, 1, STREAMS, STREAMS[0], buffers=BUFFERS, inputs=inputs)


@lru_cache(maxsize=4096)
def torch_all_gather_matmul(
    rank: int, world: int, *, first: bool = True, last: bool = True, mv_first: bool = True
) -> Plan:
    """Return torch's plan for ``Y = all_gather(X) @ B``, with its design choices as arguments.

    Args:
        rank, world: the rank that runs the plan, and the world size.
        first, last: have a barrier when a call starts (the workspace is free), and when it ends (all shards are read).
        mv_first: copy the shard and have a barrier before the first matmul. If False, do both beside that matmul, on
            the other stream.

    Raises:
        ValueError: the rank is not in the world.
    """
    plan = _builder("torch_all_gather_matmul", rank, world, inputs=1)
    if first:
        plan.add("barrier", "compute0", channel=0, label="[workspace free]")
    started = plan.ends
    mv = STREAMS[0 if mv_first else 1]
    own = plan.here("input", 0)
    plan.add(PUBLISH, mv, reads=[own], writes=[plan.here("workspace", 0)], after=started, chunk=(rank, 0))
    published = plan.add("barrier", mv, channel=STREAMS.index(mv), label="[published]")
    plan.add(CONSUME, "compute0", reads=[own], writes=[plan.here("output", rank)], after=started, chunk=(rank, 0))
    for step in range(1, world):
        stream, source = STREAMS[step % 2], (rank + step) % world
        there, here = Region("workspace", source, 0, 1), plan.here("gathered", source)
        plan.add(PULL, stream, reads=[there], writes=[here], after=[published], peers=(source,), chunk=(source, 0))
        plan.add(CONSUME, stream, reads=[here], writes=[plan.here("output", source)], chunk=(source, 0))
    if last:
        plan.add("barrier", "compute0", after=plan.ends, channel=0, label="[all read]")
    return plan.finish(plan.here("output", 0, world))


@lru_cache(maxsize=4096)
def torch_matmul_reduce_scatter(
    rank: int, world: int, *, first: bool = True, last: bool = True, pulled: bool = True, order: str | None = "sleep"
) -> Plan:
    """Return torch's plan for ``Y = reduce_scatter(X @ B)``, with its design choices as arguments.

    Args:
        rank, world: the rank that runs the plan, and the world size.
        first, last: have a barrier when a call starts (the workspace is free), and when it ends (all chunks are read).
        pulled: have a barrier after each copy (the buffer that was copied from is free).
        order: how the streams are kept in the same order on all ranks. "sleep": the caller's stream sleeps before its
            first matmul, as in torch. "wait": each stream waits for the other stream's last matmul. None: not at all.

    Raises:
        ValueError: the rank is not in the world.
    """
    plan = _builder("torch_matmul_reduce_scatter", rank, world, inputs=world)
    if first:
        plan.add("barrier", "compute0", channel=0, label="[workspace free]")
    after = plan.ends

    def produce(stream: str, owner: int, buffer: str, unit: int) -> None:
        nonlocal after
        if order == "sleep" and stream == "compute0" and owner == (rank + min(2, world)) % world:
            plan.add("sleep", stream)
        reads, writes = [plan.here("input", owner)], [plan.here(buffer, unit)]
        produced = plan.add(PRODUCE, stream, reads=reads, writes=writes, after=after, chunk=(owner, 0))
        after = [produced] if order == "wait" else after

    for step in range(1, world):
        stream, source, buffer = STREAMS[step % 2], (rank - step) % world, f"pingpong{step % 2}"
        produce(stream, (rank + step) % world, buffer, 0)
        plan.add("barrier", stream, channel=step % 2, label=f"[produced {step}]")
        there, here = Region(buffer, source, 0, 1), plan.here("stage", source)
        plan.add(PULL, stream, reads=[there], writes=[here], peers=(source,), chunk=(source, 0))
        if pulled:
            plan.add("barrier", stream, channel=step % 2, label=f"[pulled {step}]")
    produce("compute0", rank, "stage", rank)
    if last:
        plan.add("barrier", "compute0", after=plan.ends, channel=0, label="[all read]")
    partials = [plan.here("stage", source) for source in range(world)]
    output = plan.here("output", 0)
    plan.add(REDUCE, "compute0", reads=partials, writes=[output], after=plan.ends, chunk=(rank, 0))
    return plan.finish(output)
