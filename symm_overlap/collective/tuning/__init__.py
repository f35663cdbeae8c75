"""`autotune`: measure once which path is quickest for the calls of a program, and use it for later calls of the group.

Only rank 0 reads the file of earlier measurements, and sends its contents to the others. So all ranks of a group always
use the same measurements, even if they would find different files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ... import _C
from ..._version import VERSION
from ...kernels import has_kernels
from ...runtime import TRAITS, GroupState, backend_of, direct_access
from ...settings import PATHS, current
from ..arguments import Group, group_name
from ..choosing.candidates import Candidate
from ..choosing.tuned import Tuned, keys_of
from ..exchange import Peers
from ..explain import device_of
from ..problem import Problem
from .calls import Shape, Wanted, wanted
from .measuring import candidates, measure, problem_of
from .table import add_if_possible, decoded, encoded, read_if_possible

__all__ = ["Shape", "Tuned", "autotune"]


def autotune(
    shapes: Iterable[Shape],
    group: Group,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    paths: Sequence[str] | None = None,
    rounds: int = 7,
    again: bool = False,
    file: str | os.PathLike[str] | None = None,
) -> list[Tuned]:
    """Measure which path, with how many chunks or which span, is quickest for these calls. Later calls use it.

    Collective: all ranks of the group call it with the same arguments, and make no other call in the group meanwhile.
    Every candidate is called in turn. The time of a candidate is the median of each rank's samples, and then the time
    of the slowest rank. All ranks get the same result.

    Rank 0 also keeps the measurements in a file. The key of a measurement consists of the names of the devices, the
    topology, the versions of torch and of this package, and the call. A call that rank 0 finds in the file is not
    measured again. If the file cannot be read or written, rank 0 warns, and the measurements are used all the same.

    The result is used for calls equal to a measured one, and for other calls of the same op with the same m, n, k, part
    and dtype, if sums are computed in the same order (`sum_order`). `force_path` and SYMM_OVERLAP_PATH take precedence.

    Args:
        shapes: the calls. Each is (op, m, n, k), as in `explain`, along the first dimension, with k 0 for an op without
            a matmul and for ops in which a weight (m, n) travels. Or it is (op, *arguments): the arguments of the
            function without the group, with a shape (a tuple of ints) in place of each tensor, and keyword arguments in
            a dict at the end. A tensor, which may be on "meta", stands for its shape, dtype and layout::

                ("all_gather_matmul", (4, 512, 4096), [(4096, 768), (4096, 256)], 1, {"return_A": False})

            Ops are all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, all_gather, reduce_scatter, all_reduce,
            all_gather_weight_matmul and its gradient weight_grad_reduce_scatter (X, G, reduce_op, scatter_dim),
            all_gather_scaled_matmul and scaled_matmul_reduce_scatter.
        group: ProcessGroup, its name, a DeviceMesh, or (DeviceMesh, dimension).
        dtype: the dtype of tensors that are given as shapes. Scales are float32. The factors of scaled ops are
            float8_e4m3fn if ``dtype`` is not a float8 type.
        device: "cpu" or "cuda". By default that of the group: CUDA if it can send from GPUs, and if there is one, else
            CPU.
        paths: the paths to measure, among "sequential", "pipelined", "fused" and "c10d". By default all that may be
            quick: "fused" on GPUs for which there are kernels, "c10d" only if ranks cannot reach each other's memory.
            On CPU "fused" runs in an interpreter, and is measured only if it is named here.
        rounds: the number of samples of each candidate, at least 1. A sample is three calls.
        again: also measure calls that are already in the file.
        file: the file of measurements. By default the file named by the environment variable SYMM_OVERLAP_AUTOTUNE, or
            symm_overlap/autotune.json in the user's cache folder.

    Returns:
        For each shape, in their order, the measurements, from this call or an earlier one. The list is empty in a group
        of one rank and in a fake group.

    Raises:
        ValueError, TypeError: bad arguments. Every rank raises if all ranks have given the same arguments.
        RuntimeError: a rank has given other arguments, or has failed. Every rank raises, and nothing changes. Also if
            the call is inside `prepare`, where no call runs, so that nothing can be measured.
    """
    settings = current()
    if settings.needs is not None:
        raise RuntimeError("symm_overlap.autotune() inside symm_overlap.prepare(), where no call runs: call it before")
    peers = Peers(group_name(group), settings)
    state, asked = peers.state, list(shapes)

    order = settings.order or "rank"

    def request() -> tuple[torch.device, list[Wanted]]:
        place = device_of(group) if device is None else device
        return _place(place, paths, rounds), [wanted(shape, dtype, state.world) for shape in asked]

    if state.alone:
        request()
        return []

    def start() -> dict[str, Any]:
        place, calls = request()  # here, so that a rank that alone has bad arguments does not leave the others waiting
        return _facts(repr((calls, place.type, paths, rounds, bool(again), order)), place)

    facts = _meet(state, "start", start)
    _require_same(facts)
    place, calls = request()
    direct = direct_access(state, place, settings.comparing)
    allowed = _usual_paths(facts, direct) if paths is None else paths
    cases: list[_Case] = []

    def describe() -> list[Any]:
        for call in calls:
            problem = problem_of(call, group, state, place)
            key = _key(facts, state, direct, problem, order)
            cases.append(_Case(call, problem, key, candidates(problem, allowed)))
        known = {} if again or state.rank else read_if_possible(file)
        return [_encoded_part(known.get(case.key), case.found) for case in cases]

    known = _meet(state, "describe", describe)[0]
    new = [case for case, before in zip(cases, known, strict=True) if before is None]
    times = _meet(state, "measure", lambda: [measure(case.call, case.found, group, place, rounds) for case in new])
    # From here on every rank computes the same with the same numbers.
    slowest = [[max(each) for each in zip(*ranks, strict=True)] for ranks in zip(*times, strict=True)]
    measured = {
        case.key: Tuned(tuple(zip(case.found, each, strict=True))) for case, each in zip(new, slowest, strict=True)
    }
    tuned = [
        measured[case.key] if before is None else decoded(before) for case, before in zip(cases, known, strict=True)
    ]
    for case, entry in zip(reversed(cases), reversed(tuned), strict=True):  # the first call of a kind wins
        for words in keys_of(case.problem, order):
            state.tuned[place.type, words] = entry
    state.forget_routes()  # routes were chosen without the new measurements
    if state.rank == 0 and measured:
        add_if_possible(file, measured)
    return tuned


class _Case(NamedTuple):
    """A call, its problem, its key in the file, and its candidates."""

    call: Wanted
    problem: Problem
    key: str
    found: list[Candidate]


def _place(device: torch.device | str, paths: Sequence[str] | None, rounds: int) -> torch.device:
    """Check the arguments, and return the device."""
    if rounds < 1:
        raise ValueError(f"autotune: rounds is {rounds}: give 1 or more")
    if paths is not None and (isinstance(paths, str) or not paths or not set(paths) <= set(PATHS)):
        raise ValueError(f"autotune: paths is {paths!r}: give a list of some of {', '.join(PATHS)}")
    place = torch.device(device)
    if place.type not in TRAITS:
        raise ValueError(f"autotune: device is {str(device)!r}: allowed are 'cpu' and 'cuda'")
    return backend_of(place.type).resolve(place)


def _facts(arguments: str, device: torch.device) -> dict[str, Any]:
    """Return the facts that a rank sends to the others."""
    backend = backend_of(device.type)
    return {
        "arguments": arguments,
        "device": f"{backend.described(device)}, {torch.get_num_threads()} threads",
        "kernels": backend.traits.kernels and has_kernels(backend.machine(device)[0]),
    }


def _require_same(facts: list[dict[str, Any]]) -> None:
    for rank, fact in enumerate(facts):
        if fact["arguments"] != facts[0]["arguments"]:
            raise RuntimeError(
                "autotune: ranks give different (calls, device, paths, rounds, again, sum_order): rank 0 gives "
                f"{facts[0]['arguments']}; rank {rank} gives {fact['arguments']}"
            )


def _usual_paths(facts: list[dict[str, Any]], direct: bool) -> list[str]:
    """Return the paths that may be quick."""
    if not direct:
        return ["sequential", "c10d"]
    return ["sequential", "pipelined", *(["fused"] if all(fact["kernels"] for fact in facts) else [])]


def _encoded_part(entry: Tuned | None, found: list[Candidate]) -> Any:
    """Return the measurements of these candidates in JSON form, or None unless ``entry`` has all of them."""
    times = {} if entry is None else dict(entry.times)
    if not set(found) <= set(times):
        return None
    return encoded(Tuned(tuple((candidate, times[candidate]) for candidate in found)))


def _key(facts: list[dict[str, Any]], state: GroupState, direct: bool, problem: Problem, order: str) -> str:
    """Return the key of a call in the file."""
    devices = sorted({fact["device"] for fact in facts})
    reach = "reach each other" if direct else "apart"
    return " | ".join(
        [
            ", ".join(devices),
            f"{state.world} ranks on {problem.device}, {reach}",
            f"torch {torch.__version__}, symm_overlap {VERSION}",
            keys_of(problem, order)[0],
        ]
    )


def _meet(state: GroupState, what: str, part: Callable[[], Any]) -> list[Any]:
    """Call ``part`` on every rank, and return all results in rank order. If it fails on one rank, every rank raises."""
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
