"""A group whose peers do not exist. Ops run in it as in any other group, on a workspace that the caller provides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from symm_overlap.runtime import TRAITS, backend_of, state_of
from symm_overlap.runtime.backend import Workspace
from symm_overlap.settings import applied, current


@contextmanager
def without_peers(rank: int, world: int, kind: str, workspace: Callable[..., Workspace]) -> Iterator[dist.ProcessGroup]:
    """Yield a group in which ops on devices of this kind use the plans of GPUs.

    Args:
        rank: the rank of this process, the only one that exists.
        kind: the kind of the tensors' devices, as in ``torch.device.type``.
        workspace: creates the workspace of a lane, with the arguments of `Backend.workspace`.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    backend = backend_of(kind)
    try:
        group = dist.group.WORLD
        assert group is not None
        state = state_of(group)
        state.fake = state.alone = False
        state.direct[kind] = True
        with (
            mock.patch.object(backend, "traits", replace(TRAITS["cuda"], device=kind), create=True),
            mock.patch.object(backend, "workspace", workspace),
            mock.patch("symm_overlap._C.refuse_rendezvous"),
            applied(replace(current(), compare=False)),  # there are no peers to compare calls with
        ):
            yield group
    finally:
        dist.destroy_process_group()
