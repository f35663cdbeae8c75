"""Slow references for `bench.pipeline_schedule`, which search through all earlier actions to find an action's inputs.

torch.distributed.pipelining worked this way before it kept sets of the finished actions. The time is quadratic in the
number of actions.
"""

from __future__ import annotations

from symm_overlap.pipeline import Action, Schedule

Rows = list[list[Action | None]]


def ready(schedule: Schedule, action: Action, earlier: list[list[Action | None]]) -> bool:
    """True if an action other than a receive has its input. ``earlier`` lists the actions that each rank has done."""
    stage, kind, microbatch, _ = action
    done = earlier[schedule.placement[stage]]
    if kind == "F":
        before = schedule.previous_stage(stage)
        return before is None or Action(stage, "RECV_F", microbatch) in done or Action(before, "F", microbatch) in done
    if kind in ("I", "B"):
        after = schedule.next_stage(stage)
        return after is None or any(
            wanted in done
            for wanted in (
                Action(stage, "RECV_B", microbatch),
                Action(after, "I", microbatch),
                Action(after, "B", microbatch),
            )
        )
    if kind == "SEND_F":
        return Action(stage, "F", microbatch) in done
    if kind == "SEND_B":
        return Action(stage, "I", microbatch) in done or Action(stage, "B", microbatch) in done
    return True


def add_send_recv(schedule: Schedule) -> Rows:
    """Return the rows with sends and receives added; see `symm_overlap.pipeline.lowering.send_recv`."""
    todo = [list(row) for row in schedule.rows]
    rows: Rows = [[] for _ in todo]
    while any(todo):
        progress = False
        for rank, queue in enumerate(todo):
            if not queue or (queue[0] is not None and not ready(schedule, queue[0], rows)):
                continue
            progress = True
            action = queue.pop(0)
            if action is None:
                continue
            rows[rank].append(action)
            to = {"F": schedule.next_stage, "I": schedule.previous_stage, "B": schedule.previous_stage}.get(action.kind)
            target = to(action.stage) if to else None
            if target is not None and schedule.placement[target] != rank:
                way = "F" if action.kind == "F" else "B"
                rows[rank].append(Action(action.stage, f"SEND_{way}", action.microbatch))
                rows[schedule.placement[target]].append(Action(target, f"RECV_{way}", action.microbatch))
        if not progress:
            raise ValueError("some action never gets its input")
    return rows


def simulate(schedule: Schedule) -> Rows:
    """Return the same table as `symm_overlap.pipeline.simulation.unit_time`."""
    todo = [[action for action in row if action is not None] for row in schedule.rows]
    table: Rows = [[] for _ in todo]

    def may_run(action: Action) -> bool:
        if action.kind not in ("RECV_F", "RECV_B"):
            return ready(schedule, action, table)
        forward = action.kind == "RECV_F"
        sender = schedule.previous_stage(action.stage) if forward else schedule.next_stage(action.stage)
        if sender is None:
            return False
        send = Action(sender, "SEND_F" if forward else "SEND_B", action.microbatch)
        return send in table[schedule.placement[sender]]

    while any(todo):
        active = [rank for rank, queue in enumerate(todo) if queue]
        waiting = []
        for rank in active:
            if may_run(todo[rank][0]):
                table[rank].append(todo[rank].pop(0))
            else:
                table[rank].append(None)
                waiting.append(rank)
        if waiting == active:
            raise ValueError("the schedule deadlocks")
        for rank in waiting:  # a later rank's action in this step may have made the input available
            if may_run(todo[rank][0]):
                table[rank][-1] = todo[rank].pop(0)
    return table
