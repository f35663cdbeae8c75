"""``symm-overlap schedule``: show, verify, simulate, convert, compare and search pipeline schedules."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..pipeline import Schedule, read_csv, write_csv
from ..pipeline.action import COMMUNICATION, DIALECTS
from ..pipeline.drawing import timeline, trace
from ..pipeline.generators import GENERATORS, generate
from ..pipeline.lowering import add_send_recv, lower, merge_backward
from ..pipeline.simulation.cost import simulate_cost
from ..pipeline.simulation.costs import PipelineCosts
from ..pipeline.simulation.unit_time import simulate_unit_time
from ..pipeline.verify import TRANSPORTS, verify
from ..plan import draw
from . import schedule_search
from .mistakes import report_errors, require_at_most, require_distinct, write_file
from .schedule_table import describe, per_rank, side_by_side, title
from .timeline_files import add_options, write_files

_MOST_CELLS = 1_000_000
"""The largest generated table, in cells."""

_SOURCE = f"a generator ({', '.join(GENERATORS)}), a CSV file, or - for standard input"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("schedule", help="show, verify and simulate pipeline schedules", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    searching = schedule_search.add_parser(commands)
    searching.set_defaults(schedule_command=schedule_search.run)
    for name, function in (
        ("show", _add_show),
        ("verify", _add_verify),
        ("simulate", _add_simulate),
        ("convert", _add_convert),
        ("compare", _add_compare),
    ):
        run_, text = _COMMANDS[name]
        of = commands.add_parser(name, help=text, description=text)
        function(of)
        of.set_defaults(schedule_command=run_)
        add = of.add_argument
        add("--ranks", type=int, metavar="N", help="ranks (default: the file's, or 4)")
        add("--microbatches", type=int, metavar="N", help="microbatches (default: the file's, or 8)")
        add("--stages-per-rank", type=int, metavar="N", help="stages on each rank (default: the source's own)")
        add("--dialect", choices=DIALECTS, default="torch", help="names of actions in a CSV file (default torch)")
        add("--pipelines", type=int, metavar="N", help="pipelines in a CSV file (default: 2 if it looks like DualPipe)")


@report_errors("schedule")
def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 for success, 1 if `verify` finds a problem in the schedule, 2 for wrong arguments."""
    return int(args.schedule_command(args))


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help=_SOURCE)


def _add_costs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, what in (
        ("forward", "time of F, the forward of one microbatch through all layers of a rank"),
        ("input-grad", "time of I, the gradient of the input of these layers"),
        ("weight-grad", "time of W, the gradients of the parameters of these layers"),
        ("message", "time to transfer the output of a stage"),
        ("latency", "time from the end of a transfer until the message has arrived"),
    ):
        default = 0.0 if name in ("message", "latency") else 1.0
        add(f"--{name}", type=float, default=default, metavar="MS", help=f"{what} (default %(default)g ms)")
    add("--slow-down", type=float, default=1.0, metavar="X", help="compute takes X times as long during a transfer")


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--lowered", action="store_true", help="add messages, gathers and reductions, step by step")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="rendezvous", help="how a send waits (default: until it is received)"
    )


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    _add_costs(parser)
    add_options(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    add = parser.add_argument
    add("--to", choices=DIALECTS, default="torch", help="names of actions in the output (default torch)")
    add("--merge", action="store_true", help="merge I and W that follow each other directly into B")
    add("--lower", action="store_true", help="add messages, gathers and reductions, as torch's runtime does")
    add("--waits", action="store_true", help="with --lower: add the WAIT actions of torch 2.15")
    add("--deferred", action="store_true", help="with --lower: receive as late as possible")
    add("--out", type=Path, metavar="FILE", help="write to a file (default: standard output)")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="*", metavar="source", help=f"{_SOURCE} (default: every generator)")
    _add_costs(parser)


def _show(args: argparse.Namespace) -> int:
    schedule = _schedule(args.source, args)
    print(title(schedule, args.source))
    if args.lowered:
        print(simulate_unit_time(schedule if _communicates(schedule) else lower(schedule)))
    else:
        print(describe(schedule))
    return 0


def _verify(args: argparse.Namespace) -> int:
    schedule = _schedule(args.source, args)
    report = verify(schedule, transport=args.transport)
    print(f"{title(schedule, args.source)}\n{report}")
    return 0 if report.ok else 1


def _simulate(args: argparse.Namespace) -> int:
    require_distinct(source=Path(args.source), svg=args.svg, trace=args.trace)
    schedule = _schedule(args.source, args)
    result = simulate_cost(schedule, _costs(args, _share(schedule)))
    print(f"{title(schedule, args.source)}\n{per_rank(result)}{_note(args.source, schedule)}")
    write_files(
        args,
        lambda: draw.svg(timeline(result, title(schedule, args.source))),
        lambda: trace(result, args.source),
    )
    return 0


def _convert(args: argparse.Namespace) -> int:
    if (args.waits or args.deferred) and not args.lower:
        raise ValueError("--waits and --deferred have an effect only together with --lower: add --lower")
    schedule = _schedule(args.source, args)
    schedule = merge_backward(schedule) if args.merge else schedule
    schedule = lower(schedule, waits=args.waits, deferred=args.deferred) if args.lower else schedule
    text = write_csv(schedule, args.to)
    if args.out:
        write_file(args.out, text)
    else:
        print(text, end="")
    return 0


def _compare(args: argparse.Namespace) -> int:
    _costs(args, 1.0)  # raise for wrong costs here: they are wrong for every row
    rows, refused = [], []
    for source in args.sources or GENERATORS:
        try:
            schedule = _schedule(source, args)
            steps = simulate_unit_time(schedule if _communicates(schedule) else add_send_recv(schedule)).length
            rows.append((source, schedule, steps, simulate_cost(schedule, _costs(args, _share(schedule)))))
        except ValueError as error:
            refused.append(f"{source} is left out: {error}")
    if not rows:
        raise ValueError("\n".join(refused))
    print(side_by_side(rows) + "".join(_note(source, schedule) for source, schedule, *_ in rows))
    for text in refused:
        print(text)
    return 0


def _note(source: str, schedule: Schedule) -> str:
    """Return a line that says that a schedule does not train, if that is so: a time can be simulated nevertheless."""
    if not _is_file(source):  # tests verify those of the generators
        return ""
    problems = len(verify(schedule, transport="queued").problems)  # how our runtime sends
    found = f"{problems} problem{'s' if problems > 1 else ''}"
    return f"\n{source} does not train a model: schedule verify --transport queued finds {found}" if problems else ""


def _is_file(source: str) -> bool:
    return source == "-" or source.endswith(".csv") or Path(source).is_file()


def _schedule(source: str, args: argparse.Namespace) -> Schedule:
    """Read or generate the schedule that ``source`` names.

    Raises:
        ValueError: the schedule in a file has another size than the options say.
    """
    if _is_file(source):
        schedule = _read(source, args)
        _require_size(schedule, source, args)
        return schedule
    ranks = 4 if args.ranks is None else args.ranks
    microbatches = 8 if args.microbatches is None else args.microbatches
    stages = ranks * (2 if args.stages_per_rank is None else args.stages_per_rank)
    require_at_most(_MOST_CELLS, stages * (microbatches + ranks), "stages * (microbatches + ranks)")
    return generate(source, ranks, microbatches, args.stages_per_rank)


def _require_size(schedule: Schedule, source: str, args: argparse.Namespace) -> None:
    for option, size in (
        ("ranks", schedule.ranks),
        ("microbatches", schedule.microbatches),
        ("stages-per-rank", schedule.stages // schedule.ranks),
    ):
        wanted = getattr(args, option.replace("-", "_"))
        if wanted not in (None, size):
            raise ValueError(f"--{option} is {wanted}, and the schedule in {source} has {size}")


def _read(source: str, args: argparse.Namespace) -> Schedule:
    """Read the schedule in a file, or in standard input if ``source`` is "-"."""
    try:
        if source != "-":
            text = Path(source).read_text(encoding="utf-8")
        elif sys.stdin is None:
            raise ValueError("it is closed")
        else:
            text = sys.stdin.read()
        return read_csv(text, args.dialect, pipelines=args.pipelines)
    except ValueError as error:
        raise ValueError(f"{'standard input' if source == '-' else source}: {error}") from error


def _communicates(schedule: Schedule) -> bool:
    return any(action is not None and action.kind in COMMUNICATION for row in schedule.rows for action in row)


def _share(schedule: Schedule) -> float:
    """Return the share of a rank's layers that one stage has.

    A rank has the same number of layers in every schedule. It keeps them in one stage or in several.
    """
    return schedule.ranks * schedule.pipelines / schedule.stages


def _costs(args: argparse.Namespace, share: float) -> PipelineCosts:
    """Return the costs of a stage that has the given share of a rank's layers."""
    return PipelineCosts(
        forward=args.forward * share,
        input_grad=args.input_grad * share,
        weight_grad=args.weight_grad * share,
        message=args.message,
        latency=args.latency,
        slow_down=args.slow_down,
        activation=share,
        parameters=share,
    )


_COMMANDS = {
    "show": (_show, "print a schedule as a table with one row for each step and one column for each rank"),
    "verify": (_verify, "prove that a schedule trains the model and does not deadlock"),
    "simulate": (_simulate, "print how long a step takes, where ranks idle, and how much memory they need"),
    "convert": (_convert, "write a schedule as CSV, with other names of actions or lowered"),
    "compare": (_compare, "print a row for each of several schedules"),
}
