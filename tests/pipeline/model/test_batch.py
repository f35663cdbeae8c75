"""A batch is cut along its samples. What may be something else is cut only if the caller says so."""

from __future__ import annotations

import warnings

import pytest
import torch

from symm_overlap.pipeline.model.batch import Batch
from tests.pipeline.model.models import reals

BATCH = {"x": reals(8, 4), "weights": reals(4), "scale": torch.tensor(2.0), "target": reals(8, 4)}


def test_a_tensor_of_another_size_is_not_taken_for_samples() -> None:
    with pytest.raises(ValueError, match=r"\['x'\] has 8, \['weights'\] has 4, \['target'\] has 8\. Give batch_dims="):
        Batch.of(BATCH, "target", {}, 2)
    with pytest.raises(ValueError, match=r"have different sizes"):
        Batch.of(BATCH, "target", {"x": 1}, 2)
    shared = Batch.of(BATCH, "target", {"weights": None}, 2)
    assert list(shared.shared) == ["['weights']", "['scale']"]
    given = Batch.of(BATCH, "target", dict.fromkeys(("x", "weights", "target"), 0), 2)
    assert [tensors["['weights']"].shape[0] for tensors in given.microbatches(2)] == [2, 2]


def test_a_dimension_for_an_entry_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_dims names weigths, which the batch does not have: it has x, weights,"):
        Batch.of(BATCH, "target", {"weigths": None}, 2)
    Batch.of({"x": BATCH["x"]}, "target", {"target": 0}, 2)
    Batch.of({"x": BATCH["x"], "mask": None}, "target", {"mask": 1}, 2)


def test_microbatches_of_different_sizes_are_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Batch.of({"x": BATCH["x"]}, None, {}, 4)
        with pytest.raises(
            UserWarning, match=r"\['x'\] of the batch has 8 samples, which 3 .*: some have 3 and some 2\."
        ):
            Batch.of({"x": BATCH["x"]}, None, {}, 3)
