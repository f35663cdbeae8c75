"""Pipeline schedules that a search finds, beside the best handcrafted one at the same cap on activations.

    python -m bench.schedule_search --json result.json

Each file of bench/schedule_costs has the costs of a model. The cap is what 1F1B keeps on its first rank with equal
stages: one whole pipeline of microbatches; and half of that, where V-Half and V-Min are all that fits. Times are
simulated, and every schedule is verified. The machine does not matter: the same seed gives the same table everywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symm_overlap.pipeline.cost_file import read_costs
from symm_overlap.pipeline.layer_costs import LayerCosts
from symm_overlap.pipeline.search import search

FOLDER = Path(__file__).parent / "schedule_costs"
RANKS, MICROBATCHES = 8, 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and print; 0 when nothing found is worse than what there was, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.schedule_search", description=__doc__.splitlines()[0])
    sets = sorted(path.stem for path in FOLDER.glob("*.toml"))
    parser.add_argument("--sets", default=",".join(sets), help="cost sets to search (default: all, with commas)")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"ranks (default {RANKS})")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES, help=f"default {MICROBATCHES}")
    parser.add_argument("--steps", type=int, default=3000, help="schedules simulated for each row (default 3000)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    options = parser.parse_args(arguments)
    names = options.sets.split(",")
    if unknown := [name for name in names if name not in sets]:
        parser.error(f"--sets has {', '.join(unknown)}; give some of {', '.join(sets)}")
    print("| costs | cap | best handcrafted | its makespan | found | gain | bubble before | bubble after |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for name in names:
        layers = read_costs((FOLDER / f"{name}.toml").read_text())
        for share in (1.0, 0.5):
            rows.append(row(name, layers, share, options))
            print(line(rows[-1]), flush=True)
    if options.json:
        text = {"ranks": options.ranks, "microbatches": options.microbatches, "seed": options.seed, "rows": rows}
        Path(options.json).write_text(json.dumps(text, indent=1) + "\n")
    return 0 if all(one["gain"] is None or one["gain"] >= 0 for one in rows) else 1


def row(name: str, layers: LayerCosts, share: float, options: argparse.Namespace) -> dict[str, Any]:
    """One search: the cap is ``share`` of the activations of one microbatch on all layers, rounded up a little."""
    cap = round(1.1 * share * sum(layers.costs.each("activation", layers.layers)), 2)
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
    """A row of the table."""
    if one["gain"] is None:
        before, bubble, gain = "none fits | –", "–", "–"
    else:
        before = f"{one['handcrafted']} | {one['handcrafted_makespan']:.1f}"
        bubble, gain = f"{one['handcrafted_bubble']:.1%}", f"{one['gain']:.1%}"
    return f"| {one['costs']} | {one['cap']:g} | {before} | {one['makespan']:.1f} | {gain} | {bubble} | {one['bubble']:.1%} |"


if __name__ == "__main__":
    sys.exit(main())
