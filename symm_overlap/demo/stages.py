"""The pipeline of a run: its schedule, the pieces of the model in each stage, and the checks of both.

Nothing here needs torch or another process. The model is cut where little data passes: between the embedding, the
blocks, and norm with head.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

from symm_overlap.demo.config import VOCABULARY, ModelSize, TrainConfig
from symm_overlap.pipeline import PipelineCosts, Schedule, read_csv, verify
from symm_overlap.pipeline.action import BACKWARDS
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.layer_costs import LayerCosts
from symm_overlap.pipeline.partition import balanced

DEFAULT_SCHEDULE = "1F1B"
TIMED_STEPS = 3
"""The fewest steps for a timeline: the first sets up, the last is shown, and at least one between them is measured."""


def schedule_of(config: TrainConfig) -> Schedule:
    """Return the schedule of a pipelined run.

    Raises:
        OSError: the file with the schedule cannot be read.
        ValueError: the file holds no schedule that can run, no generator has the given name, or the generator has no
            schedule for this number of ranks and microbatches.
    """
    name = config.schedule or DEFAULT_SCHEDULE
    if not name.endswith(".csv"):
        return generate(name, config.pp, microbatches_of(config))
    schedule = read_csv(Path(name).read_text())
    verify(schedule, transport="queued").raise_for_problems()
    if not any(leaf.kind in BACKWARDS for row in schedule.rows for action in row if action for leaf in action.leaves):
        raise ValueError("it has no backward, so it would train nothing")
    return schedule


def microbatches_of(config: TrainConfig) -> int:
    """Return the number of microbatches in a step.

    By default, this is the largest number up to twice the parts of the pipeline that divides the windows evenly.
    """
    most = min(config.share, 2 * config.pp)
    return config.microbatches or next(count for count in range(most, 0, -1) if config.share % count == 0)


def pieces_of_stages(size: ModelSize, stages: int) -> list[range]:
    """Return the pieces of each stage of one pipeline (see `LanguageModel`), so that the longest stage is the shortest
    possible.

    Raises:
        ValueError: there are more stages than pieces.
    """
    # Count the multiplications for one byte. Attention between bytes costs the same in all blocks and is left out.
    block = 4 * size.dim**2 + 3 * size.dim * size.hidden
    work = (float(size.dim), *[float(block)] * size.layers, float(size.dim * VOCABULARY))
    costs = PipelineCosts(forward=work, input_grad=work, weight_grad=work)
    borders = accumulate(balanced(LayerCosts(size.pieces, costs), stages), initial=0)
    return [range(start, stop) for start, stop in pairwise(borders)]


def pipeline_problem(config: TrainConfig) -> str | None:
    """Return one line that describes the first problem of the pipeline of ``config``, or None."""
    if config.pp == 1:
        for option, value in (("--schedule", config.schedule), ("--microbatches", config.microbatches)):
            if value:
                return f"{option} {value} is for a pipeline: also give --pp 2 or more"
        return None
    if config.compile:
        return f"--compile and --pp {config.pp}: stages of a pipeline cannot be compiled yet; leave one of them out"
    if config.microbatches < 0:
        return f"--microbatches is {config.microbatches}; it must be 0 (a number that suits the batch) or more"
    if config.pp > config.model.pieces:  # checked here, because a schedule of very many ranks takes all memory
        return f"--pp {config.pp} is too many: {_pieces(config)}"
    if config.microbatches and (found := _uneven(config, config.microbatches)) is not None:
        return found
    if config.timeline is not None and config.steps < TIMED_STEPS:
        return (
            f"--steps is {config.steps}; it must be at least {TIMED_STEPS} for the --timeline of a pipeline, which "
            "predicts the last step from the steps before it"
        )
    try:
        schedule = schedule_of(config)
    except OSError as error:
        return f"--schedule {config.schedule}: {error.strerror}"
    except ValueError as error:
        return f"--schedule {config.schedule or DEFAULT_SCHEDULE}: {' '.join(str(error).split())}"
    return _misfit(config, schedule)


def _misfit(config: TrainConfig, schedule: Schedule) -> str | None:
    """Return one line that says why the schedule does not fit the run, or None."""
    name, pieces = config.schedule or DEFAULT_SCHEDULE, config.model.pieces
    if schedule.ranks != config.pp:
        return f"--schedule {name} is for {schedule.ranks} ranks, and --pp is {config.pp}"
    if config.microbatches not in (0, schedule.microbatches):
        return (
            f"--schedule {name} has {schedule.microbatches} microbatches, and --microbatches is {config.microbatches}"
        )
    if (found := _uneven(config, schedule.microbatches)) is not None:
        return found
    stages = schedule.stages // schedule.pipelines
    if stages > pieces:
        return f"--schedule {name} with --pp {config.pp} has {stages} stages, but {_pieces(config)}"
    return None


def _uneven(config: TrainConfig, microbatches: int) -> str | None:
    """Return one line that says that a batch cannot be divided into so many microbatches, or None."""
    if config.share % microbatches == 0:
        return None
    each = "" if config.fsdp == 1 else f" times --fsdp {config.fsdp}"
    return f"--batch {config.batch} is not a multiple of the {microbatches} microbatches of a step{each}"


def _pieces(config: TrainConfig) -> str:
    """Return words that say into how many stages the model can be cut."""
    return (
        f"--size {config.size} can be cut into {config.model.pieces} at most: the embedding, {config.model.layers} "
        "blocks, and norm and head"
    )
