"""One call of an op: the group that makes it, its settings, and how it is carried out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ...runtime import GroupState, Lane, NotPreparedError, backend_of, direct_access, lane_group, rendezvous
from ..choosing.chooser import choose_in_group
from ..problem import Problem
from .comparison import compare_calls
from .peers import Peers
from .route import Route, digest_of, keep_route


class Call:
    """A call whose arguments have been checked.

    Args:
        problem: the op, shapes and dtypes of the call.
        device: the device of the tensors.
        shard: the flat tensor that is gathered; None if nothing is gathered.

    Attributes:
        problem: the op, shapes and dtypes of the call.
        choice: the path, and the reason for it.
        route: the decisions that are the same for all calls of this problem.
        lane: the lane that the call runs on, if it has peers.

    Raises:
        RuntimeError: the lane is out of step, or (with checking) ranks make different calls.
        ValueError: the forced path cannot run here.
    """

    def __init__(self, peers: Peers, problem: Problem, device: torch.device, shard: Tensor | None = None) -> None:
        state, settings, place = peers.state, peers.settings, (0, 0)
        if shard is not None and not state.alone:
            place = place_of(shard, state)
        key = problem, device, settings.routing, place
        route: Route | None = state.routes.get(key)
        if route is None:
            route = _find_route(peers, problem, device, place)
            keep_route(state, key, route)
        elif route.comparing:
            _compare(peers, route.lane, problem, place)  # type: ignore[arg-type]
        self.op, self.problem, self.peers, self.route, self.settings = problem.op, problem, peers, route, settings
        self.rank, self.world = peers.rank, peers.world
        self.backend, self.choice = route.backend, route.choice
        self.lane: Lane = route.lane  # type: ignore[assignment]

    @property
    def symmetric(self) -> bool:
        """True if peers can read the shard directly, because it is in symmetric memory of the group."""
        return self.route.place[0] > 0

    def peer_shard(self, shard: Tensor, rank: int, offset: int) -> Tensor:
        """Return the shard of a rank, which begins ``offset`` elements into that rank's symmetric memory."""
        handle = rendezvous(shard, self.peers.group)
        return handle.get_buffer(rank, tuple(shard.shape), shard.dtype, offset)

    def not_prepared(self, error: NotPreparedError) -> NotPreparedError:
        """Return an error that also says which call needs what is not prepared."""
        return NotPreparedError(f"{error} {self.problem}")

    @contextmanager
    def turn(self) -> Iterator[dist.ProcessGroup]:
        """Yield the lane's group, for collectives of torch.distributed that belong only to this call.

        Raises:
            RuntimeError: a CUDA graph is being captured that cannot hold these collectives. It is raised before the
                call begins.
        """
        self.lane.workspace.require_capturable(str(self.problem))
        captured = self.lane.workspace.capturing()
        with self.lane.turn(self.op):
            try:
                yield lane_group(self.peers.state, self.peers.group, self.lane.index, self.settings.seconds)
            except dist.DistBackendError as error:
                raise dist.DistBackendError(f"{self.op}: {error}") from error
        if captured:
            self.peers.forget()


def place_of(shard: Tensor, state: GroupState) -> tuple[int, int]:
    """Return (number of the rendezvous of the shard's symmetric memory, offset of the shard in it).

    The number is 0 if the shard is not in symmetric memory of the group. The offset is 0 unless it has to be the same
    on every rank.
    """
    backend = backend_of(shard.device.type)
    number = backend.rendezvous_number(shard, state)
    if not number or not shard.numel():  # an empty shard may begin past the end of the memory
        return 0, 0
    return number, 0 if backend.traits.announces_offset else int(shard.storage_offset())


def _find_route(peers: Peers, problem: Problem, device: torch.device, place: tuple[int, int]) -> Route:
    """Return the route for the first call of its kind. With checking, first compare the call with the peers' calls."""
    state, settings, backend = peers.state, peers.settings, backend_of(problem.device)
    forced = settings.forced
    lane, direct, digest = None, True, 0
    if not state.alone:
        lane = state.lane(peers.group, device, settings.lane_index)
        lane.require_in_step()
        # The comparison comes first, because direct_access is collective, and a peer may have rejected its arguments.
        if settings.comparing:
            _compare(peers, lane, problem, place)
        if forced[0] != "c10d" and problem.device not in state.direct:
            lane.workspace.require_preparable(f"{problem}: its ranks have not checked yet whose memory they reach")
        try:
            direct = forced[0] != "c10d" and direct_access(state, device, settings.comparing)
        except dist.DistBackendError as error:
            why = str(error).removeprefix("symm_overlap: ")
            raise dist.DistBackendError(f"symm_overlap: {problem.op}, the first call of its group: {why}") from error
    choice = choose_in_group(state, problem, settings, direct=direct, fake=state.fake)
    if not state.alone:  # if ranks choose differently, the digests differ: they get an error and do not wait for ever
        # Ranks may have different numbers of copy streams (tests/collective/planners/test_copies.py). In gathers that
        # copy, their matmuls may span different numbers of shards (tests/collective/planners/test_spans.py).
        span = 1 if problem.op_kind.gathers and not backend.traits.in_place else choice.span
        digest = digest_of(problem.common, *place, *forced, choice.path, choice.chunks, span, choice.compute)
    return Route(backend, choice, lane, place, digest, lane is not None and settings.comparing)


def _compare(peers: Peers, lane: Lane, problem: Problem, place: tuple[int, int]) -> None:
    lane.require_in_step()
    forced = peers.settings.forced
    prefix = "" if peers.settings.needs is None else "prepare: "
    compare_calls(peers, lane, lambda: prefix + _describe(problem, place, *forced))


def _describe(
    problem: Problem,
    place: tuple[int, int],
    path: str | None,
    chunks: int | None,
    streams: int | None,
    span: int | None,
    order: str | None,
) -> str:
    """Return what must be the same on all ranks as text."""
    text = problem.common
    rendezvous, offset = place
    if rendezvous:
        text += f" in symmetric memory of rendezvous {rendezvous}" + (f", from element {offset}" if offset else "")
    forced = {"path": path, "chunks": chunks, "streams": streams, "span": span, "order": order}
    if settings := ", ".join(f"{name} {value}" for name, value in forced.items() if value is not None):
        text += f" with forced {settings}"
    return text
