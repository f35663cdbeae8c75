"""``symm-overlap fsdp``: show, verify and simulate a training step with FSDP2, for layers whose times you give."""

from __future__ import annotations

import argparse
import shutil

from ..fsdp.prefetch.issue_order import DEFAULT, Prefetch
from ..fsdp.prefetch.lists import counts_of, lists, starts_of
from ..fsdp.prefetch.policy import Auto, policy_of
from ..fsdp.prefetch.search import predict, search
from ..fsdp.prefetch.step_plan import Options, step_plan
from ..fsdp.prefetch.trace import Layer, Trace, layers_in_a_row
from ..plan import draw, simulate, verify
from .mistakes import report_errors, require_at_most, require_distinct, require_duration
from .timeline_files import add_options, write_files

_LEGEND = "gather 2 is the gather of layer 2; 2.1 is its second gather"
_MOST = 50_000
"""The largest number of layers, times the number of steps, times the number of calls that --verify considers."""
_MOST_SEARCHED = 1000
"""The largest number of layers, times the number of steps, for the search of ``auto``. It takes half a minute then."""
_COMPARED = ("default", "depth=0", "depth=1", "depth=2", "depth=4", "auto")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "fsdp", help="show, verify and simulate training steps with FSDP2", description=__doc__
    )
    commands = parser.add_subparsers(dest="what", required=True)
    text = "show the plan of a training step, with one row for each stream"
    plan = commands.add_parser("plan", help=text, description=text)
    add = plan.add_argument
    times = "one number for all layers, or one for each, separated by commas"
    add("--layers", type=int, metavar="N", help="number of layers (default: the length of the lists of times, or 4)")
    add("--compute", default="2", metavar="MS,..", help=f"forward of a layer (default 2): {times}")
    add("--backward", metavar="MS,..", help="backward of a layer (default: twice the forward)")
    add("--gather", default="1", metavar="MS,..", help="all-gather of a layer's parameters (default 1)")
    add("--reduce", metavar="MS,..", help="reduce-scatter of a layer's gradients (default: the times of --gather)")
    add("--copy-out", default="0", metavar="MS,..", help="copy from the gathered buffer to the parameters (default 0)")
    add("--copy-in", default="0", metavar="MS,..", help="copy of gradients to the input of the reduction (default 0)")
    add("--mib", default="1", metavar="MIB,..", help="size of a layer's gathered parameters (default 1 MiB)")
    add("--keep", default="", metavar="L,..", help="layers that are not resharded after their forward")
    add("--order", default="", metavar="L,..", help="order in which layers run; any may be left out or repeated")
    add("--prefetch", default="default", metavar="P", help="default, depth=N, bytes=SIZE, auto or auto=SIZE")
    add("--forward-only", action="store_true", help="leave out the backward and the optimizer")
    add("--steps", type=int, default=1, metavar="N", help="training steps one after another (default 1)")
    add("--optimizer", type=float, default=0.0, metavar="MS", help="time of the optimizer (default 0: leave it out)")
    add("--other", type=float, default=0.0, metavar="MS", help="work between optimizer and next forward (default 0)")
    add("--event", action="store_true", help="gathers wait for the optimizer only, not for the work of --other")
    add("--separate-groups", action="store_true", help="give reduce-scatters a communicator of their own")
    add("--world", type=int, default=2, metavar="N", help="ranks for which --verify proves the plan (default 2)")
    add("--verify", action="store_true", help="prove that three calls back to back have no deadlock and no race")
    add("--simulate", action="store_true", help="print the time of a step, its exposed communication and its memory")
    add("--compare", action="store_true", help="print a row for each of several prefetch policies")
    add_options(plan)


@report_errors("fsdp")
def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 for success, 1 if --verify finds a problem in the plan, 2 for wrong arguments."""
    require_distinct(svg=args.svg, trace=args.trace)
    options = _options(args)
    if args.world < 1:
        raise ValueError(f"--world is {args.world}: there must be at least 1 rank")
    trace = _trace(args)
    prefetch = _prefetch(trace, args.prefetch, options)
    made = step_plan(trace, prefetch, options)
    print(draw.text([[made.plan]], width=shutil.get_terminal_size((120, 0))[0]))
    print(f"\n{_LEGEND}")
    if args.prefetch != "default":
        print(f"\n{_lists(prefetch, len(trace.layers))}")
    if args.verify:
        report = verify([[made.for_rank(rank, args.world) for rank in range(args.world)]] * 3)
        print(f"\nthree calls back to back on {args.world} ranks, {report}")
        if not report.ok:
            return 1
    timeline = simulate([[made.plan]], made.costs)
    if args.simulate:
        memory = predict(trace, prefetch, options).memory / 2**20
        print(f"\n{timeline}\ngathered and unsharded parameters: at most {memory:g} MiB")
    if args.compare:
        print(f"\n{_comparison(trace, options)}")
    write_files(args, lambda: draw.svg(timeline), lambda: draw.trace(timeline))
    return 0


def _trace(args: argparse.Namespace) -> Trace:
    given = {
        "--compute": _numbers("--compute", args.compute),
        "--backward": _numbers("--backward", args.backward),
        "--gather": _numbers("--gather", args.gather),
        "--reduce": _numbers("--reduce", args.gather if args.reduce is None else args.reduce),
        "--copy-out": _numbers("--copy-out", args.copy_out),
        "--copy-in": _numbers("--copy-in", args.copy_in),
        "--mib": _numbers("--mib", args.mib),
    }
    several = {len(each) for each in given.values() if len(each) > 1}
    count = max(several, default=4) if args.layers is None else args.layers
    if count < 1:
        raise ValueError(f"--layers is {count}: there must be at least 1 layer")
    calls = 3 * args.world if args.verify else 1
    require_at_most(_MOST, count * args.steps * calls, f"layers * steps{' * 3 calls * ranks' * args.verify}")
    if several - {count}:
        raise ValueError(
            f"{count} layers with lists of {', '.join(map(str, sorted(several)))} numbers: give one number for all "
            "layers, or one for each layer"
        )
    each = {option: numbers * count if len(numbers) == 1 else numbers for option, numbers in given.items()}
    keep, order = _layers("--keep", args.keep, count), _layers("--order", args.order, count)
    layers = [
        Layer(
            f"layer {index}",
            nbytes=int(each["--mib"][index] * 2**20),
            gather=each["--gather"][index],
            reduce=each["--reduce"][index],
            copy_out=each["--copy-out"][index],
            copy_in=each["--copy-in"][index],
            reshards=index not in keep,
        )
        for index in range(count)
    ]
    backward = [] if args.forward_only else each["--backward"] or [2 * time for time in each["--compute"]]
    optimizer = require_duration("--optimizer", args.optimizer)
    return layers_in_a_row(layers, each["--compute"], backward, order or None, 0.0 if args.forward_only else optimizer)


def _options(args: argparse.Namespace) -> Options:
    if args.steps < 1:
        raise ValueError(f"--steps is {args.steps}: there must be at least 1 step")
    return Options(args.steps, args.event, require_duration("--other", args.other), not args.separate_groups)


def _numbers(option: str, text: str | None) -> list[float]:
    try:
        return [] if text is None else [require_duration(option, float(each)) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text}: give numbers of 0 or more, separated by commas") from None


def _layers(option: str, text: str, count: int) -> list[int]:
    found = [int(each) if each.strip().isdecimal() else -1 for each in text.split(",")] if text else []
    if any(not 0 <= each < count for each in found):
        raise ValueError(f"{option} is {text}: name layers 0 to {count - 1}, separated by commas")
    return found


def _prefetch(trace: Trace, text: str, options: Options) -> Prefetch:
    if text == "default":
        return DEFAULT
    policy = policy_of(text)
    if isinstance(policy, Auto):
        require_at_most(_MOST_SEARCHED, len(trace.layers) * options.rounds, "with the prefetch 'auto', layers * steps")
        return search(trace, policy.cap, options)
    starts = starts_of(trace)
    return lists(trace, starts, counts_of(trace, starts, policy))


def _lists(prefetch: Prefetch, count: int) -> str:
    """Return a line for each layer with the layers that it gathers ahead."""
    lines = []
    for layer in range(count):
        words = []
        for name, forward in (("forward", True), ("backward", False)):
            ahead = prefetch.after(layer, forward)
            text = ", ".join(map(str, ahead)) or "torch's default"
            words.append(f"{name} {'nothing' if ahead == (layer,) else text}")
        lines.append(f"layer {layer} gathers ahead: {'; '.join(words)}")
    return "\n".join(lines)


def _comparison(trace: Trace, options: Options) -> str:
    """Return a table with a row for each prefetch policy."""
    rows = [f"{'prefetch':10}{'step ms':>10}{'exposed ms':>12}{'memory MiB':>12}"]
    for text in _COMPARED:
        found = predict(trace, _prefetch(trace, text, options), options)
        rows.append(f"{text:10}{found.step:>10.3f}{found.exposed:>12.3f}{found.memory / 2**20:>12g}")
    return "\n".join(rows)
