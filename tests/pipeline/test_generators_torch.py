"""If torch has a schedule, ours equals torch's, action for action."""

import pytest

from symm_overlap.pipeline import to_torch
from symm_overlap.pipeline._torch import TorchKind
from symm_overlap.pipeline.action import WHOLE_STAGE
from symm_overlap.pipeline.generators import generate, one_f_one_b

from .torch_tables import compute_table


def cells(rows):
    """Return a table as text. An empty cell is ""."""
    return [["" if action is None else str(action) for action in row] for row in rows]


def without_reductions(rows):
    """Remove whole-stage actions and empty cells: torch's GPipe and 1F1B have REDUCE_GRAD, and no empty cells."""
    kinds = tuple(kind for kind in WHOLE_STAGE if kind in {each.value for each in TorchKind})
    return [[cell for cell in row if cell and not cell.endswith(kinds)] for row in rows]


def pairs(name, stages):
    """Yield (our table, torch's table) over a grid of arguments. Both must reject the same arguments."""
    for ranks in range(1, 6):
        for stages_per_rank in stages:
            for microbatches in (*range(1, 13), 16, 20):
                try:
                    torchs = compute_table(name, ranks, microbatches, stages_per_rank)
                except ValueError:
                    with pytest.raises(ValueError, match="nearest"):
                        generate(name, ranks, microbatches, stages_per_rank)
                    continue
                yield (
                    cells(generate(name, ranks, microbatches, stages_per_rank).rows),
                    cells(torchs[rank] for rank in range(ranks)),
                )


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("LoopedBFS", (1, 2, 3)),
        ("Interleaved1F1B", (1, 2, 3)),
        ("InterleavedZeroBubble", (1, 2, 3)),
        ("ZBVZeroBubble", (2,)),
        ("DualPipeV", (2,)),
    ],
)
def test_tables_equal_torch(name, stages):
    compared = 0
    for ours, torchs in pairs(name, stages):
        assert ours == torchs
        compared += 1
    assert compared > 20


def test_gpipe_equals_torch():
    for ours, torchs in pairs("GPipe", (1,)):
        assert without_reductions(ours) == without_reductions(torchs)


def test_1f1b_equals_torch_but_for_its_last_rank():
    """Torch starts the last rank at microbatch 1 and runs a microbatch that does not exist. Our table is right."""
    for ranks in range(1, 6):
        for microbatches in range(ranks, 13):  # torch rejects fewer microbatches
            torchs = compute_table("1F1B", ranks, microbatches)
            *ours, last = without_reductions(cells(one_f_one_b(ranks, microbatches).rows))
            *others, torchs_last = without_reductions(cells(torchs[rank] for rank in range(ranks)))
            assert ours == others
            forwards = [cell for cell in torchs_last if "F" in cell]
            assert forwards == [f"{ranks - 1}F{microbatch}" for microbatch in range(1, microbatches + 1)]
            torchs_last[::2] = [f"{ranks - 1}F{microbatch}" for microbatch in range(microbatches)]
            assert last == torchs_last


def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank():
    for ranks in range(1, 6):
        for microbatches in (ranks, 2 * ranks, 3 * ranks):
            torchs = compute_table("InterleavedZeroBubble", ranks, microbatches, 1)
            ours = generate("ZB-H1", ranks, microbatches)
            assert cells(ours.rows) == cells(torchs[rank] for rank in range(ranks))
            assert to_torch(ours) == torchs
