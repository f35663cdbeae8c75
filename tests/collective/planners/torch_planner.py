"""Plans of the algorithms that torch publishes for its async tensor parallelism, to verify and simulate beside ours.

Two streams take turns, each computing chunks and copying what belongs to them; ranks meet in barriers, one channel a
stream. One workspace serves every call, so barriers also keep calls apart. What torch's authors had to decide is an
argument here.
"""

from symm_overlap.collective.planners.builder import CollectiveBuilder
from symm_overlap.plan import Life, Plan, Region

STREAMS = ("compute0", "compute1")
BUFFERS = {
    "input": Life.INPUT,
    **dict.fromkeys(["workspace", "pingpong0", "pingpong1"], Life.PERSISTENT),  # one for all calls
    **dict.fromkeys(["gathered", "stage"], Life.SCRATCH),
    "output": Life.OUTPUT,
}


def _builder(op, rank, world, inputs):
    return CollectiveBuilder(op, rank, world, 1, STREAMS, "compute0", buffers=BUFFERS, inputs=inputs)


def torch_all_gather_matmul(rank, world, *, first=True, last=True, mv_first=True) -> Plan:
    """Torch's plan, with choices.

    Args:
        first, last: meet when a call starts (the workspace is free), and when it ends (everything is read).
        mv_first: copy the shard and meet ahead of the first matmul; otherwise beside it, on the other stream.
    """
    plan = _builder("torch_all_gather_matmul", rank, world, inputs=1)
    if first:
        plan.add("barrier", "compute0", channel=0, label="[workspace free]")
    started = plan.ends
    mv = STREAMS[0 if mv_first else 1]
    own = plan.here("input", 0)
    plan.add("publish", mv, reads=[own], writes=[plan.here("workspace", 0)], after=started, chunk=(rank, 0))
    published = plan.add("barrier", mv, channel=STREAMS.index(mv), label="[published]")
    plan.add("consume", "compute0", reads=[own], writes=[plan.here("output", rank)], after=started, chunk=(rank, 0))
    for step in range(1, world):
        stream, source = STREAMS[step % 2], (rank + step) % world
        there, here = Region("workspace", source, 0, 1), plan.here("gathered", source)
        plan.add("pull", stream, reads=[there], writes=[here], after=[published], peers=(source,), chunk=(source, 0))
        plan.add("consume", stream, reads=[here], writes=[plan.here("output", source)], chunk=(source, 0))
    if last:
        plan.add("barrier", "compute0", after=plan.ends, channel=0, label="[all read]")
    return plan.finish(plan.here("output", 0, world))


def torch_matmul_reduce_scatter(rank, world, *, first=True, last=True, pulled=True, order="sleep") -> Plan:
    """Torch's plan, with choices.

    Args:
        first, last: meet when a call starts (the workspace is free), and when it ends (everything is read).
        pulled: meet after each copy (the buffer it came from is free).
        order: what keeps the streams in step on all ranks: "sleep", of the caller's stream before its first matmul,
            as torch does; "wait", of each stream for the other's last matmul; or None.
    """
    plan = _builder("torch_matmul_reduce_scatter", rank, world, inputs=world)
    if first:
        plan.add("barrier", "compute0", channel=0, label="[workspace free]")
    after = plan.ends

    def produce(stream, owner, buffer, unit):
        nonlocal after
        if order == "sleep" and stream == "compute0" and owner == (rank + min(2, world)) % world:
            plan.add("sleep", stream)
        reads, writes = [plan.here("input", owner)], [plan.here(buffer, unit)]
        produced = plan.add("produce", stream, reads=reads, writes=writes, after=after, chunk=(owner, 0))
        after = [produced] if order == "wait" else after

    for step in range(1, world):
        stream, source, buffer = STREAMS[step % 2], (rank - step) % world, f"pingpong{step % 2}"
        produce(stream, (rank + step) % world, buffer, 0)
        plan.add("barrier", stream, channel=step % 2, label=f"[produced {step}]")
        there, here = Region(buffer, source, 0, 1), plan.here("stage", source)
        plan.add("pull", stream, reads=[there], writes=[here], peers=(source,), chunk=(source, 0))
        if pulled:
            plan.add("barrier", stream, channel=step % 2, label=f"[pulled {step}]")
    produce("compute0", rank, "stage", rank)
    if last:
        plan.add("barrier", "compute0", after=plan.ends, channel=0, label="[all read]")
    partials = [plan.here("stage", source) for source in range(world)]
    plan.add("reduce", "compute0", reads=partials, writes=[plan.here("output", 0)], after=plan.ends, chunk=(rank, 0))
    return plan.finish(plan.here("output", 0))
