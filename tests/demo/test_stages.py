"""A run is cut into stages of consecutive pieces, and a pipeline that cannot be built is rejected with the reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from symm_overlap.demo.config import SIZES, LaunchEnvironment, TrainConfig, problem
from symm_overlap.demo.stages import microbatches_of, pieces_of_stages, pipeline_problem, schedule_of
from symm_overlap.pipeline import write_csv
from symm_overlap.pipeline.generators import GENERATORS, generate

RUN = TrainConfig(pp=2, schedule="ZBV")


@pytest.mark.parametrize("size", SIZES)
def test_stages_have_all_pieces_in_order(size: str) -> None:
    pieces = SIZES[size].pieces
    for stages in range(1, pieces + 1):
        found = pieces_of_stages(SIZES[size], stages)
        assert [piece for stage in found for piece in stage] == list(range(pieces))
        assert all(found)


def test_embedding_and_head_go_with_blocks_where_there_are_enough() -> None:
    assert pieces_of_stages(SIZES["small"], 4) == [range(2), range(2, 3), range(3, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pp": 1}, "--schedule ZBV is for a pipeline: also give --pp 2 or more"),
        ({"pp": 1, "schedule": None, "microbatches": 4}, "--microbatches 4 is for a pipeline"),
        ({"compile": True}, "--compile and --pp 2: stages of a pipeline cannot be compiled yet"),
        ({"microbatches": -1}, "--microbatches is -1"),
        ({"microbatches": 3}, "--batch 4 is not a multiple of the 3 microbatches"),
        ({"fsdp": 2, "microbatches": 4}, "--batch 4 is not a multiple of the 4 microbatches of a step times --fsdp 2"),
        ({"microbatches": 10**12}, "--batch 4 is not a multiple of the 1000000000000 microbatches"),
        ({"pp": 10**6, "schedule": None}, "--pp 1000000 is too many: --size small can be cut into 6 at most"),
        ({"schedule": "ABC"}, "--schedule ABC: there is no schedule 'ABC': it is one of GPipe, 1F1B"),
        ({"schedule": "DualPipe", "pp": 3}, "--schedule DualPipe: DualPipe: ranks make pairs"),
        ({"pp": 4}, "with --pp 4 has 8 stages, but --size small can be cut into 6 at most: the embedding, 4 blocks"),
        ({"schedule": "no/such.csv"}, "--schedule no/such.csv: No such file"),
        ({"timeline": "x.json", "steps": 2}, "--steps is 2; it must be at least 3"),
    ],
)
def test_a_pipeline_that_cannot_be_is_named(change: dict[str, Any], words: str) -> None:
    found = pipeline_problem(dataclasses.replace(RUN, **change))
    assert found is not None
    assert words in found
    assert "\n" not in found


def test_what_can_be_passes() -> None:
    assert pipeline_problem(RUN) is None
    assert pipeline_problem(TrainConfig()) is None
    assert pipeline_problem(dataclasses.replace(RUN, schedule=None, pp=4)) is None
    for name in GENERATORS:
        assert pipeline_problem(dataclasses.replace(RUN, schedule=name, microbatches=4)) is None


def test_microbatches_share_the_batch_equally() -> None:
    counts = {batch: microbatches_of(dataclasses.replace(RUN, batch=batch)) for batch in (1, 2, 4, 5, 6, 7, 8)}
    assert counts == {1: 1, 2: 2, 4: 4, 5: 1, 6: 3, 7: 1, 8: 4}
    assert microbatches_of(dataclasses.replace(RUN, batch=8, microbatches=8)) == 8
    assert microbatches_of(dataclasses.replace(RUN, batch=8, fsdp=4)) == 2


def test_a_schedule_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "found.csv"
    path.write_text(write_csv(generate("V-Half", 2, 4)))
    config = dataclasses.replace(RUN, schedule=str(path))
    assert pipeline_problem(config) is None
    assert schedule_of(config) == generate("V-Half", 2, 4)
    assert "is for 2 ranks, and --pp is 4" in str(pipeline_problem(dataclasses.replace(config, pp=4)))
    assert "has 4 microbatches, and --microbatches is 2" in str(
        pipeline_problem(dataclasses.replace(config, microbatches=2))
    )
    for text, words in (("0F0\n1F0\n", "it has no backward"), ("0F0,0B0\n1F0\n", "missing"), ("0F0,,0X0", "0X0")):
        path.write_text(text)
        assert words in str(pipeline_problem(config))


def test_all_ranks_are_counted() -> None:
    started = LaunchEnvironment(started=4, started_here=4)
    assert problem(RUN, started) is None
    found = str(problem(dataclasses.replace(RUN, tp=4), started))
    assert "--tp 4 --pp 2 are 8 ranks, but torchrun started 4" in found
    cuda = dataclasses.replace(RUN, device="cuda")
    assert "4 ranks on this host need 4 GPUs and 2 are visible" in str(problem(cuda, LaunchEnvironment(gpus=2)))
    assert "--pp is 0" in str(problem(dataclasses.replace(RUN, pp=0), LaunchEnvironment()))
