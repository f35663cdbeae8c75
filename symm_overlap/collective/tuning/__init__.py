"""`autotune`: measure which path is quickest for the calls of a program, once, and let the group's calls take it.

What is in force is what all ranks of a group have agreed on here, and never what one of them finds in a file: rank 0
alone reads the file and tells the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ... import _C
from ..._version import VERSION
from ...runtime import TRAITS, GroupState, backend_of, direct_access
from ...settings import current
from ..arguments import Group, group_name
from ..exchange import Peers
from ..problem import Problem
from ..tuned import Tuned, kind_of_call
from .measuring import Shape, candidates, described, measure
from .table import add, decoded, encoded, file_of, read

__all__ = ["Shape", "Tuned", "autotune"]


def autotune(
    shapes: Iterable[Shape],
    group: Group,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    rounds: int = 7,
    again: bool = False,
    file: str | os.PathLike[str] | None = None,
) -> dict[Shape, Tuned]:
    """Measure which path and how many chunks are quickest for calls of these shapes, for later calls of the group.

    Collective: all ranks of the group call it with the same arguments, and meanwhile make no other call in the group.
    Every candidate is called in turn; what counts is the median of a rank, and then the slowest rank. Rank 0 decides,
    and all ranks get the same answer. It also keeps what was measured in a file, by the names of the devices, the
    topology, the versions of torch and of this package, and the shape. What it finds there is not measured again.

    What `force_path` or SYMM_OVERLAP_PATH says goes before what was measured.

    Args:
        shapes: of each kind of calls (op, m, n, k), as `explain` takes them; k is 0 for an op without a matmul. Ops are
            all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, all_gather, reduce_scatter and all_reduce,
            along the first dimension.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        dtype: of the tensors.
        device: "cpu" or "cuda".
        rounds: samples of each candidate, of three calls each; from 1 on.
        again: measure also what the file knows.
        file: by default that of the environment variable SYMM_OVERLAP_AUTOTUNE, and else symm_overlap/autotune.json in
            the user's cache folder.

    Returns:
        For each shape what was measured, now or before. Nothing in a group of one rank, and in a fake one.

    Raises:
        ValueError, TypeError: bad arguments, on every rank where all have given the same ones.
        RuntimeError: a rank has given other arguments, or has failed, such as rank 0 at reading or writing the file;
            every rank raises. Nothing changes then.
    """
    settings = current()
    peers = Peers(group_name(group), settings)
    state = peers.state
    asked = list(shapes)

    def request() -> tuple[torch.device, dict[Shape, Problem]]:
        place = _place(device)
        if rounds < 1:
            raise ValueError(f"autotune: rounds is {rounds}: give 1 or more")
        # As tuples, which a shape from a JSON file is not.
        return place, {shape: described(shape, dtype, state.world, place.type) for shape in map(_shape, asked)}

    if state.alone:
        request()
        return {}

    def start() -> dict[str, Any]:
        place, problems = request()  # here: a rank with bad arguments of its own does not leave the others waiting
        arguments = repr((list(problems), str(dtype), str(place.type), rounds, bool(again)))
        return _facts(state, file, arguments, place)

    facts = _meet(state, "start", start)
    _require_same(facts)
    place, problems = request()
    direct = direct_access(state, place, settings.comparing)
    keys = {shape: _key(facts, state, direct, problem) for shape, problem in problems.items()}
    known = {} if again else facts[0]["known"]
    new = [shape for shape in problems if keys[shape] not in known]

    def measured() -> Any:
        return [measure(problems[shape], candidates(problems[shape], direct), group, place, rounds) for shape in new]

    times = _meet(state, "measured", measured)
    slowest = [[max(each) for each in zip(*ranks, strict=True)] for ranks in zip(*times, strict=True)]

    def decided() -> Any:
        if state.rank:
            return None
        found = {
            keys[shape]: Tuned(tuple(zip(candidates(problems[shape], direct), each, strict=True)))
            for shape, each in zip(new, slowest, strict=True)
        }
        if found:
            add(file_of(file), found)
        return {**known, **{key: encoded(entry) for key, entry in found.items()}}

    answers = _meet(state, "decided", decided)[0]
    tuned = {shape: decoded(answers[keys[shape]]) for shape in problems}
    state.tuned.update({(place.type, kind_of_call(problems[shape])): entry for shape, entry in tuned.items()})
    state.routes.clear()  # they were chosen without it
    return tuned


def _place(device: torch.device | str) -> torch.device:
    place = torch.device(device)
    if place.type not in TRAITS:
        raise ValueError(f"autotune: device is {str(device)!r}: allowed are 'cpu' and 'cuda'")
    return backend_of(place.type).resolve(place)


def _shape(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _facts(
    state: GroupState, file: str | os.PathLike[str] | None, arguments: str, device: torch.device
) -> dict[str, Any]:
    """What a rank tells the others; rank 0 also, what its file knows."""
    known = read(file_of(file)) if state.rank == 0 else {}
    return {
        "arguments": arguments,
        "device": f"{backend_of(device.type).described(device)}, {torch.get_num_threads()} threads",
        "known": {key: encoded(entry) for key, entry in known.items()},
    }


def _require_same(facts: list[dict[str, Any]]) -> None:
    for rank, fact in enumerate(facts):
        if fact["arguments"] != facts[0]["arguments"]:
            raise RuntimeError(
                "autotune: ranks give different (shapes, dtype, device, rounds, again): rank 0 gives "
                f"{facts[0]['arguments']}; rank {rank} gives {fact['arguments']}"
            )


def _key(facts: list[dict[str, Any]], state: GroupState, direct: bool, problem: Problem) -> str:
    """Under which key a kind of calls stands in a file."""
    devices = sorted({fact["device"] for fact in facts})
    reach = "reach each other" if direct else "apart"
    return " | ".join(
        [
            ", ".join(devices),
            f"{state.world} ranks on {problem.device}, {reach}",
            f"torch {torch.__version__}, symm_overlap {VERSION}",
            kind_of_call(problem),
        ]
    )


def _meet(state: GroupState, what: str, part: Callable[[], Any]) -> list[Any]:
    """What ``part`` returns on every rank, by rank. If it fails on one, every rank raises."""
    failure: Exception | None = None
    said: dict[str, Any] = {}
    try:
        said = {"value": part()}
    except Exception as error:
        failure, said = error, {"failed": f"{type(error).__name__}: {error}"}
    answers = [json.loads(each) for each in _C.exchange(state.name, f"autotune, {what}", json.dumps(said))]
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if "failed" in answer:
            raise RuntimeError(f"autotune: rank {rank} has failed: {answer['failed']}")
    return [answer["value"] for answer in answers]
