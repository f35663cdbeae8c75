"""Run programs on a rank, one after the other."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import symm_overlap
from tests.gpu.conditions import on_path
from tests.gpu.fuzz.programs import SETS, SYMMETRIC, Call, Program, draw, numbers
from tests.gpu.test_shapes import strided
from tests.gpu.test_values import difference
from tests.ranks import Rank

KEPT_GRAPHS = 6


@dataclass
class Counts:
    """The numbers of programs, graphs, calls and outputs of a rank."""

    programs: int = 0
    graphs: int = 0
    calls: int = 0
    outputs: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{value} {name}" for name, value in vars(self).items())


def placed(call: Call, index: int, source: Tensor, me: Rank) -> Tensor:
    """Copy a tensor to the device, with the strides of the input of that index. Gradients of outputs use them again."""
    how = call.strides[index % len(call.strides)]
    if how == SYMMETRIC and index == 0:
        return symm_overlap.empty(source.shape, group=me.group, dtype=source.dtype, device=me.device).copy_(source)
    there = source.to(me.device, copy=True)
    return strided(there, how) if how not in ("", SYMMETRIC) and source.dim() else there


def results(call: Call, given: list[Tensor], me: Rank) -> list[Tensor]:
    """Return the outputs, and the gradients of all inputs if the call has a backward pass."""
    count = len(call.strides)
    leaves = [each.detach().requires_grad_(call.backward) for each in given[:count]]
    with on_path(call.path), symm_overlap.sum_order(call.order):
        outputs = call.case.run(leaves, me)
        grads = torch.autograd.grad(outputs, leaves, given[count:]) if call.backward else []
    return [each.detach() for each in (*outputs, *grads)]


class Running:
    """A program that is running on a rank. Its steps are issued without waiting. `compare` waits for all of them.

    Attributes:
        graph: the graph of the program, or None if it has not been captured.
    """

    def __init__(self, program: Program, me: Rank, seed: int, stream: torch.cuda.Stream, counts: Counts) -> None:
        self.program, self.me, self.stream, self.counts = program, me, stream, counts
        self.sets = [[numbers(call, me.world, me.rank, seed + i) for call in program.calls] for i in range(SETS)]
        self.uploaded = [[[x.to(me.device) for x in of_call.given] for of_call in of_set] for of_set in self.sets]
        self.given = [
            [placed(call, index, x, me) for index, x in enumerate(of_call.given)]
            for call, of_call in zip(program.calls, self.sets[0], strict=True)
        ]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captured: list[list[Tensor]] = []
        self.found: list[tuple[str, int, list[list[Tensor]]]] = []

    def call_all(self) -> list[list[Tensor]]:
        """Make all calls and return the results of each."""
        return [results(call, given, self.me) for call, given in zip(self.program.calls, self.given, strict=True)]

    def capture(self) -> None:
        self.counts.graphs += 1
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.captured = self.call_all()

    def step(self, how: str, number: int) -> None:
        """Run all calls on a set of numbers: eagerly, or by replaying the graph several times if there is one."""
        for given, sources in zip(self.given, self.uploaded[number], strict=True):
            for tensor, source in zip(given, sources, strict=True):
                tensor.copy_(source)
        self.counts.calls += len(self.program.calls)
        if self.graph is None or how == "eager":
            self.found.append((f"set {number}, eager", number, self.call_all()))
            return
        for _ in range(1 + number):
            self.graph.replay()
        copies = [[each.clone() for each in of_call] for of_call in self.captured]
        self.found.append((f"set {number}, replay {1 + number}", number, copies))

    def compare(self) -> list[str]:
        """Wait for the device, and return a line for each wrong result so far."""
        torch.cuda.synchronize()
        problems = []
        for step, (how, number, found) in enumerate(self.found):
            for call, of_call, of_numbers in zip(self.program.calls, found, self.sets[number], strict=True):
                for index, (one, expected) in enumerate(zip(of_call, of_numbers.expected, strict=True)):
                    self.counts.outputs += 1
                    if text := difference(one.cpu(), expected):
                        problems.append(f"step {step}, {how}, result {index} of {call}: {text}")
        self.found = []
        return problems


class Session:
    """Runs the programs of a seed on a rank, and keeps the graphs of the latest programs."""

    def __init__(self, me: Rank, seed: int) -> None:
        self.me, self.seed, self.counts = me, seed, Counts()
        self.aside = torch.cuda.Stream()
        self.earlier: deque[Running] = deque(maxlen=KEPT_GRAPHS)

    def run(self, number: int) -> None:
        """Run a program, and check all its results."""
        program = draw(self.seed, number, self.me.world)
        where = f"--world {self.me.world} --seed {self.seed} --first {number}: {program}"
        try:
            stream = self.aside if program.aside else torch.cuda.default_stream()
            with symm_overlap.lane(program.lane), torch.cuda.stream(stream):
                running = Running(program, self.me, SETS * number, stream, self.counts)
                torch.cuda.synchronize()
                self._run(running)
            problems = [text for each in (running, *self.earlier) for text in each.compare()]
            symm_overlap.raise_failures()
        except BaseException as error:
            raise AssertionError(where) from error
        assert not problems, "\n".join([where, *problems])
        if running.graph is not None:
            self.earlier.append(running)

    def _run(self, running: Running) -> None:
        program = running.program
        if program.prepared:
            with symm_overlap.prepare():
                running.call_all()
        else:
            running.step("eager", 0)
        if program.graph:
            running.capture()
        for how, number in program.steps:
            if how == "earlier":
                self._replay_earlier(number)
            else:
                running.step(how, number)
        self.counts.programs += 1

    def _replay_earlier(self, number: int) -> None:
        """Replay an earlier graph on its own stream. A lane does not see replays, so events order them."""
        if not self.earlier:
            return
        other, here = self.earlier[number % len(self.earlier)], torch.cuda.current_stream()
        other.stream.wait_stream(here)
        with torch.cuda.stream(other.stream):
            other.step("replay", number)
        here.wait_stream(other.stream)


def until(me: Rank, first: int, seconds: float) -> Iterator[int]:
    """Yield numbers of programs until the time is over on rank 0."""
    end = time.monotonic() + seconds
    for number in itertools.count(first):
        go_on = torch.tensor([time.monotonic() < end])
        dist.broadcast(go_on, 0, group=me.group)
        if not go_on:
            return
        yield number


def run_programs(me: Rank, seed: int, which: Iterable[int]) -> Counts:
    """Run these programs of a seed."""
    session = Session(me, seed)
    for number in which:
        session.run(number)
    return session.counts


def run_for(me: Rank, seed: int, first: int, seconds: float) -> Counts:
    """Run the programs of a seed, beginning with number ``first``, for so many seconds."""
    return run_programs(me, seed, until(me, first, seconds))
