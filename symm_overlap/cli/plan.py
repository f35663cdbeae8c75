"""``symm-overlap plan``: show what each rank does in a collective matmul. Verify, simulate and draw this plan."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from typing import Any

from ..collective.planners import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    all_gather_consume,
    fused_all_gather_matmul,
    fused_matmul_all_reduce,
    fused_matmul_reduce_scatter,
    gather_then_consume,
    one_shot_all_reduce,
    produce_all_reduce,
    produce_reduce_scatter,
    produce_then_all_reduce,
    produce_then_reduce_scatter,
)
from ..plan import Costs, Plan, Step, draw, kind, plan_calls, simulate, verify
from ..plan.draw.text import LEGEND
from .mistakes import report_errors, require_at_most, require_distinct, require_duration
from .timeline_files import add_options, write_files

PLANNERS: dict[str, Callable[..., Plan]] = {
    "all_gather_matmul": all_gather_consume,
    "matmul_reduce_scatter": produce_reduce_scatter,
    "matmul_all_reduce": produce_all_reduce,
}
CONTRACTS = {
    "all_gather_matmul": ALL_GATHER_MATMUL,
    "matmul_reduce_scatter": MATMUL_REDUCE_SCATTER,
    "matmul_all_reduce": MATMUL_ALL_REDUCE,
}
SEQUENTIAL: dict[str, Callable[..., Plan]] = {
    "all_gather_matmul": gather_then_consume,
    "matmul_reduce_scatter": produce_then_reduce_scatter,
    "matmul_all_reduce": produce_then_all_reduce,
}
FUSED: dict[str, Callable[..., Plan]] = {
    "all_gather_matmul": fused_all_gather_matmul,
    "matmul_reduce_scatter": fused_matmul_reduce_scatter,
    "matmul_all_reduce": fused_matmul_all_reduce,
}


MOST_PIECES = 1 << 16
"""The largest number of ranks, times the number of ranks, times the number of chunks: 256 ranks take half a minute."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "plan", help="show the plan of a collective matmul, with one row for each stream", description=__doc__
    )
    add = parser.add_argument
    add("op", choices=list(PLANNERS))
    add("--world", type=int, default=4, metavar="N", help="number of ranks (default 4)")
    add("--chunks", type=int, metavar="N", help="number of chunks that each rank's part is cut into (default 1)")
    add("--rank", type=int, metavar="R", help="show only this rank (default: all ranks)")
    add("--streams", type=int, choices=(1, 2), help="number of compute streams (default 2)")
    add("--copies", type=int, choices=(1, 2), help="number of copy streams (default 1)")
    add("--span", type=int, metavar="N", help="number of peers' parts that one matmul covers at most (default 1)")
    add("--one-thread", action="store_true", help="run everything on one stream, as on CPU")
    add("--in-place", action="store_true", help="read the peers' memory in place, without copies, as on CPU")
    add("--sequential", action="store_true", help="do not overlap: one exchange and one matmul, one after the other")
    add("--one-shot", action="store_true", help="small all-reduce without overlap: every rank computes the whole sum")
    add("--fused", action="store_true", help="one kernel: its tiles wait for copies, or copies wait for its tiles")
    add(
        "--no-sleep",
        action="store_true",
        help="leave out the sleep that makes the streams start in the same order on all ranks",
    )
    add(
        "--verify",
        action="store_true",
        help="prove that three calls back to back have no deadlock, no race and the right values",
    )
    add("--simulate", action="store_true", help="print makespan, exposed communication and overlap efficiency")
    add("--matmul-ms", type=float, default=1.0, metavar="MS", help="time of a chunk's matmul (default %(default)s)")
    add("--copy-ms", type=float, default=0.5, metavar="MS", help="time of a chunk's copy (default %(default)s)")
    add("--seed", type=int, default=0, help="decides which of two kernels that are both ready starts first (default 0)")
    add_options(parser)


@report_errors("plan")
def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 for success, 1 if --verify finds a problem in the plan, 2 for wrong arguments."""
    require_distinct(svg=args.svg, trace=args.trace)
    calls = plan_calls(_planner(args), args.world, 3 if args.verify else 1, **_planner_arguments(args))
    picture = draw.text(calls[:1], None if args.rank is None else [args.rank], shutil.get_terminal_size((120, 0))[0])
    costs = _costs(args)
    print(picture)
    print(f"\n{LEGEND}{'; 1-3 are the parts of ranks 1 to 3' if (args.span or 1) > 1 else ''}")
    if args.verify and not _proven(args, calls):
        return 1
    if args.simulate or args.svg or args.trace:
        timeline = simulate(calls[:1], costs, seed=args.seed)
        if args.simulate:
            print(
                f"\nsimulated with a matmul of {args.matmul_ms} ms and a copy of {args.copy_ms} ms a chunk:\n{timeline}"
            )
        write_files(args, lambda: draw.svg(timeline), lambda: draw.trace(timeline))
    return 0


def _proven(args: argparse.Namespace, calls: list[list[Plan]]) -> bool:
    """Print what `verify` finds. Tiles of a kernel may run in any order, so its plan is proven in two forms."""
    forms = {"": calls}
    if args.fused:
        forms["with tiles in any order, "] = plan_calls(
            _planner(args), args.world, len(calls), **_planner_arguments(args), apart=True
        )
    print()
    holds = True
    for form, each in forms.items():
        report = verify(each, graphs=not args.in_place, contracts=[CONTRACTS[args.op]] * len(each))
        print(f"three calls back to back, {form}{report}")
        holds = holds and report.ok
    return holds


def _planner(args: argparse.Namespace) -> Callable[..., Plan]:
    if args.one_shot:
        if args.op != "matmul_all_reduce":
            raise ValueError(f"--one-shot is for matmul_all_reduce, not for {args.op}")
        return one_shot_all_reduce
    return (FUSED if args.fused else SEQUENTIAL if args.sequential else PLANNERS)[args.op]


def _planner_arguments(args: argparse.Namespace) -> dict[str, Any]:
    if args.world < 1:
        raise ValueError(f"--world is {args.world}: there must be at least 1 rank")
    require_at_most(MOST_PIECES, args.world**2 * (args.chunks or 1), "ranks * ranks * chunks")
    if args.one_thread and 2 in (args.streams, args.copies):
        raise ValueError(f"--one-thread means one stream: leave out --{'streams' if args.streams == 2 else 'copies'} 2")
    if args.fused:
        return _fused_arguments(args)
    if args.sequential or args.one_shot:
        return _sequential_arguments(args)
    return {
        "chunks": 1 if args.chunks is None else args.chunks,
        "compute": ("compute0",) if args.one_thread or args.streams == 1 else ("compute0", "compute1"),
        "copy": "compute0" if args.one_thread else "copy",
        "copies": args.copies or 1,
        "span": 1 if args.span is None else args.span,
        "in_place": args.in_place,
        "sleep": not args.no_sleep,
    }


def _fused_arguments(args: argparse.Namespace) -> dict[str, Any]:
    others = {
        "--sequential": args.sequential,
        "--streams": args.streams is not None,
        "--one-thread": args.one_thread,
        "--in-place": args.in_place,
        "--span": args.span is not None,
        "--one-shot": args.one_shot,
        "--no-sleep": args.no_sleep,  # a fused plan has no sleep to leave out
    }
    if given := [option for option, is_given in others.items() if is_given]:
        raise ValueError(f"--fused means one kernel with copies beside it: leave out {', '.join(given)}")
    return {"chunks": 1 if args.chunks is None else args.chunks, "copies": args.copies or 1}


def _sequential_arguments(args: argparse.Namespace) -> dict[str, Any]:
    asked = "--one-shot" if args.one_shot else "--sequential"
    for option in ("chunks", "streams", "copies", "span"):
        if (given := getattr(args, option)) not in (None, 1):
            raise ValueError(f"{asked} means one part on one stream: leave out --{option} {given}")
    return {"in_place": args.in_place}


def _costs(args: argparse.Namespace) -> Callable[[int, Step], tuple[float, float]]:
    matmul = require_duration("--matmul-ms", args.matmul_ms)
    of_chunk = Costs(compute=matmul, copy=require_duration("--copy-ms", args.copy_ms), tail=matmul / 10)

    def costs(rank: int, step: Step) -> tuple[float, float]:
        body, tail = of_chunk(rank, step)
        spans = step.chunk is not None and kind(step.kind).role == "compute"
        return body * (max(region.stop - region.start for region in step.writes) if spans else 1), tail

    return costs
