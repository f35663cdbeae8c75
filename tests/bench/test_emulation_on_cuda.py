"""The workspace of an emulated lane on a GPU that does not exist: what its scripts issue to the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.emulation import on_cuda
from bench.emulation.link import Link, PacedProgram
from bench.emulation.on_cuda import EmulatedCudaWorkspace
from bench.harness import NotAvailableError
from bench.harness.case import Case
from bench.methods.emulated import METHODS
from symm_overlap import _C
from symm_overlap.collective.planners import all_gather_consume
from symm_overlap.plan import Region
from symm_overlap.runtime.cuda.streams import CudaStreams
from symm_overlap.runtime.cuda.workspace import CudaWorkspace
from tests.runtime.test_cuda_script import Driver, made

__all__ = ["made"]  # a fixture

CPU, WORLD = torch.device("cpu"), 3


class LinkDriver(Driver):
    """Replaces _C.CudaDriver."""

    link: object = None
    peers: list[int]

    def emulate_link(self, link: object, peers: list[torch.Tensor]) -> None:
        self.link, self.peers = link, [memory.data_ptr() for memory in peers]


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> EmulatedCudaWorkspace:
    """A workspace of rank 0, in host memory."""
    control = SimpleNamespace(control="the block")

    def signals(block: object, handle: object, **named: Any) -> SimpleNamespace:
        assert (block, handle) == ("the block", control)
        assert named == {"group_name": "tp", "lane": 3, "channels": 8, "hosts": ()}
        return SimpleNamespace(driver=LinkDriver())

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(on_cuda, "ControlMemory", lambda world, channels, device: control)
    monkeypatch.setattr(on_cuda, "CudaSignals", signals)
    group: Any = SimpleNamespace(group_name="tp", size=lambda: WORLD)
    pacer: Any = SimpleNamespace(crossing="the link")
    made = EmulatedCudaWorkspace(group, CPU, 3, "tag", Link.parse("1GB/s"), pacer)
    made.grow(1 << 21, 2)
    return made


@pytest.mark.usefixtures("made")
def test_the_driver_knows_the_link_and_the_memory_behind_it(workspace: EmulatedCudaWorkspace) -> None:
    shard, gathered = torch.zeros(1000), torch.zeros(WORLD, 1000)
    tensors = {"input": shard, "gathered": gathered.view(-1)}

    def at(region: Region) -> torch.Tensor:
        if region.buffer == "workspace":
            return workspace.view(region.rank, 0, 0, (1000,), torch.float32)
        return shard if region.buffer == "input" else gathered[region.start]

    plan = all_gather_consume(0, WORLD, consume=False, keep=True, outbound="compute0")
    script = workspace.script(plan, at, tensors, (), lambda step: None, CudaStreams(CPU))
    script.run("all_gather", list(tensors.values()), {})
    assert workspace._signals is not None
    driver: Any = workspace._signals.driver
    assert driver.link == "the link"
    assert driver.peers == [memory.data_ptr() for memory in workspace.phantoms.ranks[1:]]
    made = driver.take()
    copied = [numbers for what, _, numbers in made if what == "copy"]
    own, phantoms = workspace.phantoms.ranks[0].data_ptr(), [each.data_ptr() for each in workspace.phantoms.ranks[1:]]
    assert sorted(numbers[1] for numbers in copied if numbers[1] in phantoms) == sorted(phantoms)
    assert all(
        own in numbers[:2] or gathered.data_ptr() == numbers[0] for numbers in copied if numbers[1] not in phantoms
    )
    assert "pace" not in [what for what, _, _ in made], "the driver itself paces copies"


def test_kernels_that_read_the_memory_of_phantoms_keep_the_pace_of_the_link() -> None:
    program, driver = PacedProgram(Link.parse("1GB/s")), Driver()
    out = torch.zeros(2000)
    program.await_and_gather(0, 0, [0, 16, 32], 16, _C.Operand.fixed(out), 4000)
    program.run(driver, [], 0, 3)
    made = [(what, numbers) for what, _, numbers in driver.take()]
    assert [what for what, _ in made] == ["pace", "await and gather", "pace"]
    assert (made[0][1], made[2][1]) == ((0,), (4000,)), "4000 bytes at 1 GB/s"


def test_calls_are_not_compared_with_those_of_phantoms(
    workspace: EmulatedCudaWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaWorkspace, "begin", lambda self, *call: begun.append(call))
    workspace.begin("all_gather", 1.0, 77, 5, True)
    assert begun == [("all_gather", 1.0, 0, 5, True)]
    assert workspace.half >= 1 << 21
    assert len(workspace.phantoms.ranks) == WORLD


def test_without_memory_operations_no_row_is_called_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory operations, kernels would wait in the row `ours_memory_waits` too, so it is not available."""
    monkeypatch.setattr(_C, "has_memory_operations", lambda index: index != 1, raising=False)
    rank: Any = SimpleNamespace(device=torch.device("cuda", 1))
    case = Case("all_gather_matmul", 8, 4, 4, torch.bfloat16, 2)
    with pytest.raises(NotAvailableError, match="CUDA_DEVICE_MAX_CONNECTIONS is below 8"):
        METHODS["ours_memory_waits"].prepare(rank, case, torch.empty(0), torch.empty(0))
