"""Messages of a rendezvous for symmetric memory on a GPU. torch numbers them per process, _OwnNumbers per group."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from symm_overlap.runtime._torch import _OwnNumbers


def store() -> dist.HashStore:
    """Return the store of a group. A wait in it for a message that no rank sends fails soon."""
    made = dist.HashStore()
    made.set_timeout(timedelta(seconds=2))
    return made


def test_ranks_whose_processes_have_sent_different_numbers_of_messages_find_each_other() -> None:
    of_group = store()
    first, second = _OwnNumbers(of_group), _OwnNumbers(of_group)
    for meeting in range(2):
        mine, theirs = f"memory/{4 + 3 * meeting}", f"memory/{meeting}"  # the first has met in other groups
        first.set(f"{mine}/0", f"from 0 in {meeting}")
        second.set(f"{theirs}/1", f"from 1 in {meeting}")
        first.wait([f"{mine}/1"])
        second.wait([f"{theirs}/0"])
        assert first.get(f"{mine}/1") == f"from 1 in {meeting}".encode()
        assert second.get(f"{theirs}/0") == f"from 0 in {meeting}".encode()


def test_other_messages_of_a_group_are_apart() -> None:
    """Messages with different names do not mix, even if their numbers are equal."""
    of_group = store()
    for number in range(2):
        _OwnNumbers(of_group).set(f"memory {number}/7/0", str(number))
    assert [of_group.get(f"memory {number}/0/0") for number in range(2)] == [b"0", b"1"]


def test_a_torch_that_numbers_otherwise_is_left_to_itself() -> None:
    """A message name without torch's numbering is passed on unchanged."""
    of_group = store()
    _OwnNumbers(of_group).set("memory of group 7", "as it is")
    assert of_group.get("memory of group 7") == b"as it is"
