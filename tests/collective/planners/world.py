"""Runs every rank of a world as a thread of this process. Plans really run, on Python numbers."""

import threading
from collections import defaultdict

from symm_overlap.plan import InlineStreams, Life, ThreadStreams, execute
from symm_overlap.plan.testing import delayed


class World:
    """Memory of all ranks, and the semaphores behind their signals. Reading an unwritten unit raises KeyError."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.memory = [defaultdict(dict) for _ in range(world)]
        self.running = [None] * world  # for each rank, its plan and the number of the call
        self.signals = defaultdict(lambda: threading.Semaphore(0))
        self.lock = threading.Lock()

    def slot(self, source: int, target: int, channel: int) -> threading.Semaphore:
        with self.lock:
            return self.signals[source, target, channel]

    def buffer(self, rank: int, region) -> dict:
        """Return the memory of a region for rank ``rank``. A workspace has two halves, which calls use in turn."""
        plan, call = self.running[rank]
        half = call % 2 if plan.buffers[region.buffer] is Life.CALL else None
        return self.memory[region.rank][region.buffer, half]

    def table(self, rank: int):
        """Return the table: publish and pull copy, produce and consume multiply by 3, reduce adds in read order."""

        def read(region):
            return [self.buffer(rank, region)[unit] for unit in range(region.start, region.stop)]

        def write(region, values):
            self.buffer(rank, region).update(zip(range(region.start, region.stop), values, strict=True))

        def copy(step):
            for region in step.reads[1:]:  # the offset of the first one, which its rank has announced in this call
                assert read(region) == [f"announced by {region.rank}"]
            write(step.writes[0], read(step.reads[0]))

        def announce(step):
            write(step.writes[0], [f"announced by {rank}"])

        def compute(step):
            if step.chunk is None:  # all chunks at once
                shards = [region for region in step.reads if region.buffer != "offset"]
                for region in step.writes:
                    write(region, [3 * value for shard in shards for value in read(shard)])
                return
            values = read(step.reads[0])
            sums = [read(region)[0] for region in step.reads if region == step.writes[0]]
            for region in step.writes:
                write(region, [3 * value + sum(sums) for value in values])

        def reduce(step):
            total = 0.0
            for region in step.reads:
                total += read(region)[0]
            for region in step.writes:
                write(region, [total])

        def wait(step):
            for peer in step.peers:
                if not self.slot(peer, rank, step.channel).acquire(timeout=20):
                    raise TimeoutError(f"rank {rank}: {step}")

        def signal(step):
            for peer in step.peers:
                self.slot(rank, peer, step.channel).release()

        copies = dict.fromkeys(("publish", "pull"), copy)
        computes = dict.fromkeys(("produce", "consume"), compute)
        return {**copies, **computes, "announce": announce, "reduce": reduce, "wait": wait, "signal": signal}

    def run(self, calls, inputs, *, threads: bool = False, seed: int | None = None):
        """Let every rank make ``calls`` at its own pace. Return, by call and rank, the values that the join may read.

        Args:
            calls: for each call, the plans of all ranks.
            inputs: for each call and rank, the values of "input".
            threads: use one thread per stream instead of one for the whole plan.
            seed: pause at random before every step.
        """
        results = [[None] * self.world for _ in calls]
        errors = []

        def rank_main(rank: int) -> None:
            streams = ThreadStreams() if threads else InlineStreams()
            table = self.table(rank) if seed is None else delayed(self.table(rank), seed, rank, 2e-4)
            try:
                for number, plans in enumerate(calls):
                    plan = plans[rank]
                    self.running[rank] = plan, number
                    mine = self.memory[rank]
                    for buffer, life in plan.buffers.items():
                        if life in (Life.OUTPUT, Life.SCRATCH):
                            mine[buffer, None].clear()
                    mine["input", None] = dict(enumerate(inputs[number][rank]))
                    execute(plan, table, streams)
                    results[number][rank] = [
                        [mine[region.buffer, None][unit] for unit in range(region.start, region.stop)]
                        for region in plan.steps[-1].reads
                    ]
            except BaseException as error:
                errors.append(error)

        ranks = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.world)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
        if errors:
            raise errors[0]
        return results
