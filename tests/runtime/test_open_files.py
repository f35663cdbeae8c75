"""If a rank cannot open another file at any point of a meeting, its error says so, and its peers fail at once."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from symm_overlap import _C
from symm_overlap._torch import symm_mem
from tests.limits import SOON
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import error_of, make


@contextmanager
def spare_files(spare: int) -> Iterator[None]:
    """Inside this context, this process can open only ``spare`` more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, before[1]))
    filling = []
    try:
        while True:
            try:
                filling.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for descriptor in filling[len(filling) - spare :]:
            os.close(descriptor)
        del filling[len(filling) - spare :]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in filling:
            os.close(descriptor)


def meeting(me: Rank, what: str, spare: int) -> tuple[str, str, float]:
    tensor = symm_mem.empty(1, device="cpu")

    def meet() -> None:
        if what == "rendezvous":
            symm_mem.rendezvous(tensor, me.group)
        else:
            _C.exchange(me.group_name, "test", "")

    if me.rank == 1:
        with spare_files(spare):
            found = error_of(meet)
    else:
        found = error_of(meet)
    make(me.group, 1)[1].barrier()  # in step again
    return found


@pytest.mark.parametrize(
    ("what", "spare", "fails"),
    [
        ("exchange", 0, True),
        ("exchange", 1, False),
        ("rendezvous", 0, True),
        ("rendezvous", 1, True),
        ("rendezvous", 2, True),
        ("rendezvous", 4, False),
    ],
)
def test_a_rank_out_of_files_says_so_and_its_peers_are_told(
    fresh_ranks: Callable[..., Pool], what: str, spare: int, fails: bool
) -> None:
    (peer, message, seconds), (own, own_message, _) = fresh_ranks(2).run(2, meeting, what, spare)
    if not fails:
        assert (own, peer) == ("", ""), own_message + message
        return
    assert own == "RuntimeError"
    assert peer == "DistBackendError"
    assert "rank 1 failed: " in message
    for each in (own_message, message):
        assert "Too many open files" in each
        assert "raise the limit (ulimit -n)" in each
    assert seconds < SOON


def store_in_a_file(me: Rank, path: str) -> tuple[str, str, float] | None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=me.rank, world_size=me.world)
    dist.barrier()
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    if me.rank == 0:
        return None
    with spare_files(0):
        return error_of(_C.exchange, name, "test", "")


def test_a_store_in_a_file_that_cannot_be_opened_is_not_called_gone(
    fresh_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    error, message, _ = fresh_ranks(2).run(2, store_in_a_file, str(tmp_path / "store"))[1]
    assert error == "DistBackendError"
    assert "the group's store cannot be used: Too many open files" in message
    assert "raise the limit (ulimit -n)" in message
