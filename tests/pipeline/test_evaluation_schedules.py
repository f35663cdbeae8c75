"""A schedule without backwards evaluates the model. It is checked for that, and its report says so."""

import pytest

from symm_overlap.pipeline import read_csv, verify


def test_the_report_says_that_there_are_no_backwards() -> None:
    report = verify(read_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"))
    assert report.ok
    assert not report.trains
    assert str(report).startswith("8 actions, no backwards: each once and in order, no deadlock; ")
    trained = verify(read_csv("0F0,0B0\n"))
    assert trained.trains
    assert str(trained).startswith("2 actions: each once and in order, no deadlock; ")


@pytest.mark.parametrize("row", ["0F0,0REDUCE_GRAD", "0UNSHARD,0F0,0REDUCE_GRAD,0RESHARD"])
def test_no_gradients_are_reduced_without_a_backward(row: str) -> None:
    (problem,) = verify(read_csv(row)).problems
    assert problem.kind == "unreduced"
    assert "stage 0 has no backward, hence no gradients" in str(problem)
