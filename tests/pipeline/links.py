"""Messages of a lowered schedule, link by link, found without the package's own passes."""

from collections import defaultdict


def messages(schedule):
    """For each link (from rank, to rank): what is sent and what is received, as (F or B, the stage it is for, m)."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action is None:
                continue
            step = 1 if action.kind.endswith("F") else -1
            if action.kind in ("SEND_F", "SEND_B"):
                peer = schedule.rank_of(action.stage + step)
                sent[rank, peer].append((action.kind[-1], action.stage + step, action.microbatch))
            elif action.kind in ("RECV_F", "RECV_B"):
                peer = schedule.rank_of(action.stage - step)
                received[peer, rank].append((action.kind[-1], action.stage, action.microbatch))
    return sent, received


def in_order(schedule):
    """Whether every link receives what is sent, in the order in which it is sent."""
    sent, received = messages(schedule)
    return sent == received


def finishes(schedule):
    """Whether the schedule runs to its end if a send does not wait for its receiver: a second, simpler machine."""
    rows = [[action for action in row if action is not None] for row in schedule.rows]
    at, done = [0] * len(rows), set()
    last = {stage: schedule.following(stage) is None for stage in range(schedule.stages)}
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(ready(schedule, last, leaf, done) for leaf in row[at[rank]].leaves):
                done.update((leaf.kind, leaf.stage, leaf.microbatch) for leaf in row[at[rank]].leaves)
                at[rank] += 1
                progress = True
    return at == [len(row) for row in rows]


def ready(schedule, last, action, done):
    """Whether everything is done that an action needs on its rank, or for a receive its send."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    before, after = schedule.previous(stage), schedule.following(stage)
    if kind == "F":
        here = before is not None and schedule.rank_of(before) == schedule.rank_of(stage)
        return before is None or (("F", before) if here else ("RECV_F", stage)) + (microbatch,) in done
    if kind in "BI" and len(kind) == 1:
        if ("F", stage, microbatch) not in done:
            return False
        if last[stage]:
            return True
        if schedule.rank_of(after) == schedule.rank_of(stage):
            return any((made, after, microbatch) in done for made in "BI")
        return ("RECV_B", stage, microbatch) in done
    if kind == "W":
        return ("I", stage, microbatch) in done
    if kind == "RECV_F":
        return ("SEND_F", before, microbatch) in done
    if kind == "RECV_B":
        return ("SEND_B", after, microbatch) in done
    if kind == "SEND_F":
        return ("F", stage, microbatch) in done
    if kind == "SEND_B":
        return any((made, stage, microbatch) in done for made in "BI")
    return True
