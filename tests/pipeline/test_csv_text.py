"""Schedules survive CSV without loss, the text is the same that torch writes, and errors name the row and the cell."""

import csv
import io

import pytest

from symm_overlap.pipeline import read_csv, write_csv
from symm_overlap.pipeline.action import DIALECTS

from .random_tables import random_table

GOLDEN = "0F0,0F1,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,\r\n"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_table_comes_back_as_it_was(dialect):
    for seed in range(200):
        schedule = random_table(seed)
        assert read_csv(write_csv(schedule, dialect), dialect, pipelines=1) == schedule


def test_a_text_comes_back_as_it_was():
    assert write_csv(read_csv(GOLDEN)) == GOLDEN
    with_communication = (
        "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\r\n1RECV_F0,(1F1;1B0)OVERLAP_F_B\r\n"
    )
    assert write_csv(read_csv(with_communication)) == with_communication


def test_other_line_ends_and_spaces_are_read_too():
    assert read_csv(GOLDEN.replace("\r\n", "\n").replace(",", " , ")) == read_csv(GOLDEN)


def test_a_byte_order_mark_is_ignored():
    assert read_csv("\ufeff0F0,0B0\n") == read_csv("0F0,0B0\n")


def test_the_golden_table_is_what_it_looks_like():
    schedule = read_csv(GOLDEN)
    assert [len(row) for row in schedule.rows] == [6, 6]
    assert [str(action) for action in schedule.rows[1]] == ["None", "1F0", "1B0", "1F1", "1B1", "None"]
    assert (schedule.placement, schedule.microbatches) == ((0, 1), 2)


def test_the_lines_are_those_of_pythons_csv_writer():
    for seed in range(20):
        schedule = random_table(seed)
        text = io.StringIO(newline="")
        csv.writer(text).writerows(schedule.rows)  # how torch writes its tables
        assert write_csv(schedule) == text.getvalue()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F1\n1F0,1X1\n", r"^row 2 \(rank 1\), cell 2: '1X1' is not an action.*expected a stage, a kind"),
        ("0F0,3BW1\n", r"^row 1 \(rank 0\), cell 2: '3BW1' is not an action"),
        ("0F0\n\n1F0\n", r"row 2 \(rank 1\) has no actions: remove it"),
        ("0F0\n1F0\n\n", r"row 3 \(rank 2\) has no actions: remove it"),
        ("", "the table has no actions"),
        ("0F0\n0F0\n", r"row 2 \(rank 1\), cell 1: 0F0 is of stage 0, which row 1 has too"),
        ("0F0,'" + "x" * 200000 + "\n", "the text is not CSV: field larger than field limit"),
    ],
)
def test_errors_name_row_and_cell(text, message):
    with pytest.raises(ValueError, match=message):
        read_csv(text)


def test_two_pipelines_are_asked_for():
    assert read_csv("0F0,3F1\n1F0,2F1\n", pipelines=2).previous_stage(2) is None
