"""Compare pipeline schedules found by search with the best handcrafted ones at the same cap on activations.

    python -m bench.schedule_search --json result.json

Each file of bench/schedule_costs contains the costs of a model. The caps are the memory that 1F1B needs at these costs,
and 65 % of it. At 65 %, few handcrafted schedules besides V-Half and V-Min fit. Times are simulated, and every schedule
is verified. The result does not depend on the machine: the same seed gives the same table everywhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from symm_overlap.pipeline.cost_file import read_costs
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.layer_costs import LayerCosts
from symm_overlap.pipeline.partition import balanced
from symm_overlap.pipeline.search import search
from symm_overlap.pipeline.search.find import STEPS
from symm_overlap.pipeline.simulation.activations import peak_activations
from symm_overlap.pipeline.simulation.encoded import encode

FOLDER = Path(__file__).parent / "schedule_costs"
RANKS, MICROBATCHES = 8, 16
SHARES = (1.0, 0.65)
"""The caps, as shares of the memory that 1F1B needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and print. Return 0 if no schedule found is worse than the best handcrafted one, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.schedule_search", description=__doc__.splitlines()[0])
    sets = sorted(path.stem for path in FOLDER.glob("*.toml"))
    parser.add_argument("--sets", default=",".join(sets), help="cost sets, separated by commas (default: all)")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"number of ranks (default {RANKS})")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES, help=f"microbatches (default {MICROBATCHES})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"schedules simulated for each row (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search (default 0)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    names = options.sets.split(",")
    if unknown := [name for name in names if name not in sets]:
        parser.error(f"--sets has {', '.join(unknown)}; give some of {', '.join(sets)}")
    print("| costs | cap | best handcrafted | its makespan | found | gain | bubble before | bubble after |")
    print("|---|---:|---|---:|---:|---:|---:|---:|", flush=True)
    rows = []
    for name in names:
        layers = read_costs((FOLDER / f"{name}.toml").read_text())
        for share in SHARES:
            rows.append(row(name, layers, share, options))
            print(line(rows[-1]), flush=True)
    arguments = {"ranks": options.ranks, "microbatches": options.microbatches, "seed": options.seed}
    write_json(options.json, environment("cpu", 1, 1), **arguments, rows=rows)
    return 0 if all(one["gain"] is None or one["gain"] >= 0 for one in rows) else 1


def row(name: str, layers: LayerCosts, share: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run one search, with a cap of ``share`` times the memory that 1F1B needs."""
    schedule = encode(generate("1F1B", options.ranks, options.microbatches))
    cap = share * max(peak_activations(schedule, layers.of_stages(balanced(layers, options.ranks))))
    begin = time.perf_counter()
    found = search(options.ranks, options.microbatches, layers, memory_cap=cap, seed=options.seed, steps=options.steps)
    best = found.best_start
    return {
        "costs": name,
        "cap": cap,
        "handcrafted": f"{best.name}, {best.stages_per_rank}" if best else None,
        "handcrafted_makespan": best.makespan if best else None,
        "handcrafted_bubble": best.bubble if best else None,
        "from": found.name,
        "makespan": found.makespan,
        "bubble": found.bubble,
        "peak": found.peak,
        "gain": found.gain,
        "evaluated": found.evaluated,
        "seconds": time.perf_counter() - begin,
    }


def line(one: Mapping[str, Any]) -> str:
    """Format a row of the table."""
    if one["gain"] is None:
        before, bubble, gain = "none fits |", "", ""
    else:
        before = f"{one['handcrafted']} | {one['handcrafted_makespan']:.1f}"
        bubble, gain = f"{one['handcrafted_bubble']:.1%}", f"{one['gain']:.1%}"
    cells = (one["costs"], f"{one['cap']:g}", before, f"{one['makespan']:.1f}", gain, bubble, f"{one['bubble']:.1%}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
