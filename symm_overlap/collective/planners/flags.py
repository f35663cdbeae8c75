"""What the flags and the tiles of a plan must be, so that the kernel that is launched does what the proof says.

In a proof, every ``tiles`` is a step of its own and comes after the steps that its ``after`` names. But all of them are
one launch (`one_launch`), and the kernel knows nothing of ``after``. A kernel that gathers waits for the flag of each
chunk of another rank, and sets none. A kernel that reduces sets the flag of each of its chunks, and waits for none. So
these are the rules:

- Every flag that the kernel or a ``poll`` waits for is set by one step, and that step is named in ``after``.
- An event ahead of the kernel is named by the first of the tiles. On their stream, nothing is between the tiles.
- An event behind tiles comes after the whole kernel, so only the join has such events. Other steps ``poll`` a flag, or
  come later on the stream of the tiles.

With them, the order of the steps in the two proofs is the order of the launch: see `fused_all_gather_matmul`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...plan import Plan, Step
from .kinds import POLL, RAISE, TILES
from .one_launch import by_flag

_FOUND = "flags: what is wrong with the flags of a kernel that {}"
"""A key of `Plan.derived`."""


def require_flags(plan: Plan, gathers: bool) -> None:
    """Raise ValueError if the flags or the tiles of a plan are not what the kernel needs.

    Args:
        gathers: whether the kernel gathers. Otherwise it reduces.
    """
    key = _FOUND.format("gathers" if gathers else "reduces")
    if key not in plan.derived:
        plan.derived[key] = next(_problems(plan, gathers), None)
    if plan.derived[key] is not None:
        raise ValueError(plan.derived[key])


def _problems(plan: Plan, gathers: bool) -> Iterator[str]:
    setters = Counter((step.kind, step.chunk) for step in plan.steps if step.kind in (RAISE, TILES))
    for index, step in enumerate(plan.steps):
        flags = [earlier for earlier in step.after if by_flag(plan.steps[earlier], step)]
        wrong = None
        if step.kind in (RAISE, TILES, POLL):
            wrong = _wrong_flag(plan, step, flags, gathers)
            if wrong is None and setters[step.kind, step.chunk] > 1:
                wrong = "several steps set the flag of this chunk"
        if wrong is None:
            wrong = _beside_the_launch(plan, index, [earlier for earlier in step.after if earlier not in flags])
        if wrong is not None:
            yield f"step {index}, {step}: {wrong}"


def _wrong_flag(plan: Plan, step: Step, flags: list[int], gathers: bool) -> str | None:
    """Return what is wrong with the chunk of a step, or with the steps in its ``after`` that set a flag."""
    if step.chunk is None:
        return "it names no chunk, but every flag is that of a chunk"
    if step.kind == POLL and gathers:
        return "it waits for a flag, but a kernel that gathers sets none"
    waits = step.kind == POLL or (step.kind == TILES and gathers and step.chunk[0] != plan.rank)
    for setter in (plan.steps[flag] for flag in flags):
        if setter.chunk != step.chunk:
            return f"it waits for the flag of another chunk than it names: that of {setter}"
        if not waits:
            return f"its kernel does not wait for the flag of {setter}"
    if waits and not flags:
        return "it waits for the flag of its chunk, but comes after no step that sets it"
    return None


def _beside_the_launch(plan: Plan, index: int, events: list[int]) -> str | None:
    """Return why a step cannot be where it is, because all tiles are one launch, or None.

    Args:
        events: the steps in its ``after`` that set no flag for it.
    """
    tiles = [number for number, step in enumerate(plan.steps) if step.kind == TILES]
    streams, step = {plan.steps[number].stream for number in tiles}, plan.steps[index]
    if step.kind == TILES:
        if index != tiles[0] and any(events):  # all steps come after the fork, which is step 0
            return f"all tiles are one launch, so only the first of them can come after {plan.steps[max(events)]}"
    elif step.kind != "join" and any(earlier in tiles for earlier in events):
        return "all tiles are one launch, so it comes after the whole kernel: let it poll the flag of a chunk instead"
    elif step.stream in streams and len(streams) > 1:
        return "all tiles are one launch, so a stream that has some of the tiles can have no other step"
    elif step.stream in streams and tiles[0] < index < tiles[-1]:
        return "all tiles are one launch, so nothing can be between them on their stream"
    return None
