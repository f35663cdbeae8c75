"""Find the messages of a lowered schedule, link by link, without the package's own passes."""

from collections import defaultdict, deque


def messages(schedule):
    """Return what is sent and what is received on each link (from rank, to rank).

    A message is (F or B, the stage it is for, microbatch).
    """
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            found = action and message(schedule, action)
            if found:
                peer, content = found
                (sent[rank, peer] if action.kind.startswith("SEND") else received[peer, rank]).append(content)
    return sent, received


def in_order(schedule):
    """True if every link receives what is sent, in the order in which it is sent."""
    sent, received = messages(schedule)
    return sent == received


def finishes(schedule, transport):
    """True if a schedule runs to its end on a machine that passes messages, with a transport of `defer_receives`.

    "buffered": a receive needs only its send. "queued": the messages of two ranks pass in order, so the first one in a
    rank's queue passes only when it is also the first one in the peer's queue. "rendezvous": in addition, a rank waits
    for each of its messages.
    """
    at, passed, queues = [0] * schedule.ranks, set(), defaultdict(deque)
    waiting = [None] * schedule.ranks  # the message for which a rank waits
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and (waiting[rank] is None or waiting[rank] in passed):
                waiting[rank] = None
                action = row[at[rank]]
                found = action and message(schedule, action)
                if found:
                    peer, content = found
                    queues[rank, peer].append((action.kind[:4], content))
                    if transport == "rendezvous":
                        waiting[rank] = content
                elif action and not needs(schedule, action) <= passed:
                    break
                at[rank] += 1
                progress = True
        for (rank, peer), queue in list(queues.items()):
            if rank < peer:
                progress |= match(queue, queues[peer, rank], passed, in_order=transport != "buffered")
    return at == [len(row) for row in schedule.rows] and not any(queues.values())


def match(ours, others, passed, in_order):
    """Pass messages between two ranks whose operations are in two queues. Return whether any message passed."""
    before = len(passed)
    if in_order:
        while ours and others and {ours[0][0], others[0][0]} == {"SEND", "RECV"} and ours[0][1] == others[0][1]:
            passed.add(ours.popleft()[1])
            others.popleft()
        return len(passed) > before
    for senders, receivers in ((ours, others), (others, ours)):
        both = {content for kind, content in senders if kind == "SEND"}
        both &= {content for kind, content in receivers if kind == "RECV"}
        passed |= both
        for queue, kind in ((senders, "SEND"), (receivers, "RECV")):
            kept = [each for each in queue if each[0] != kind or each[1] not in both]
            queue.clear()
            queue.extend(kept)
    return len(passed) > before


def message(schedule, action):
    """Return the peer and the message (F or B, the stage it is for, microbatch) of an action that sends or receives."""
    if not action.kind.startswith(("SEND", "RECV")):
        return None
    step = 1 if action.kind.endswith("F") else -1
    if action.kind.startswith("SEND"):
        return schedule.rank_of(action.stage + step), (action.kind[-1], action.stage + step, action.microbatch)
    return schedule.rank_of(action.stage - step), (action.kind[-1], action.stage, action.microbatch)


def needs(schedule, action):
    """Return the messages without which an action cannot run."""
    found = set()
    for leaf in action.leaves:
        kind = {"F": "F", "B": "B", "I": "B"}.get(leaf.kind)
        other = schedule.previous_stage(leaf.stage) if kind == "F" else schedule.next_stage(leaf.stage)
        if kind and other is not None and schedule.rank_of(other) != schedule.rank_of(leaf.stage):
            found.add((kind, leaf.stage, leaf.microbatch))
    return found
