"""`post_optimizer_event` records a new event after each step, behind all optimizers, and gathers wait for it once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from symm_overlap.fsdp import post_optimizer_event
from tests.fsdp.models import Model, built, data, sharded
from tests.ranks import Pool, Rank

Log = list[str]


class Event:
    """An event that logs on which stream it is recorded."""

    made = 0

    def __init__(self, log: Log) -> None:
        self.log, self.name = log, f"e{Event.made}"
        Event.made += 1

    def record(self, stream: Any = None) -> None:
        self.log.append(f"{self.name} on {stream.name}")


class Stream:
    """A stream that logs what it must wait for."""

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Any) -> None:
        if isinstance(event, Event):  # torch's own event after a copy-out is not logged
            self.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: Any) -> None:
        if other.name == "main":  # a gather that waits for its copy-in is not logged
            self.log.append(f"{self.name} waits for all of {other.name}")

    def record_event(self) -> None:
        return None


class Device:
    """A stand-in for torch.cpu, whose streams do nothing."""

    def __init__(self, log: Log) -> None:
        self.log, self.current = log, Stream(log, "main")

    def Event(self) -> Event:  # noqa: N802
        return Event(self.log)

    def current_stream(self) -> Stream:
        return self.current


def watched(me: Rank, model: Model, *optimizers: torch.optim.Optimizer) -> tuple[Any, Device, Log]:
    """Return the handle, the device and the log. All streams, also those of the gathers, log what they wait for."""
    log: Log = []
    device, Event.made = Device(log), 0
    handle = post_optimizer_event(optimizers[0] if len(optimizers) == 1 else optimizers, model)
    handle._device = device
    model(data(me, 0)).sum().backward()  # torch creates its streams here
    state = model._get_fsdp_state()  # type: ignore[operator]
    state._device_handle = _Handle(state._device_handle, device)
    state._comm_ctx.all_gather_copy_in_stream = Stream(log, "copy-in")
    state._comm_ctx.all_gather_stream = Stream(log, "gather")
    return handle, device, log


class _Handle:
    """A device handle that returns the current stream of ``device`` to FSDP."""

    def __init__(self, inner: Any, device: Device) -> None:
        self._inner, self._device = inner, device

    def __getattr__(self, name: str) -> Any:
        return self._device.current_stream if name == "current_stream" else getattr(self._inner, name)


def at_the_start(log: Log) -> Log:
    """Return what was logged since the last call, and clear the log."""
    found = list(log)
    log.clear()
    return found


ALL = ["copy-in waits for all of main", "gather waits for all of main"]


def steps(me: Rank) -> None:
    model = sharded(me, built())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle, _, log = watched(me, model, optimizer)
    x = data(me, 0)
    for number in range(2):
        optimizer.step()
        model(x)
        event = f"e{number}"
        assert at_the_start(log) == [f"{event} on main", f"copy-in waits for {event}", f"gather waits for {event}"]
    model(x)
    assert at_the_start(log) == ALL, "without a step since, gathers must wait for all of main"
    model.load_state_dict(model.state_dict())
    model(x)
    assert at_the_start(log) == ["e2 on main", "copy-in waits for e2", "gather waits for e2"]
    handle.record()
    optimizer.step()
    model(x)
    assert at_the_start(log)[-2:] == ["copy-in waits for e4", "gather waits for e4"]
    optimizer.step()  # its event is not for a forward after the block
    with handle:
        pass
    handle.remove()
    log.clear()
    model(x)
    assert at_the_start(log) == ALL, "the event must go with the handle"
    optimizer.step()
    model.load_state_dict(model.state_dict())
    model(x)
    assert at_the_start(log) == ALL, "removed"


def several_optimizers(me: Rank) -> None:
    model = sharded(me, built())
    halves = [list(model.blocks[:2].parameters()), list(model.blocks[2:].parameters())]  # type: ignore[index]
    first, second = (torch.optim.SGD(half, lr=0.1) for half in halves)
    _, device, log = watched(me, model, first, second)
    first.step()
    device.current = Stream(log, "side")
    second.step()
    device.current = Stream(log, "main")
    model(data(me, 0))
    assert at_the_start(log) == [
        "e0 on main",
        "side waits for e0",  # so the event of the optimizer that steps last is behind both
        "e1 on side",
        "copy-in waits for e1",
        "gather waits for e1",
    ]
    second.step()
    first.step()
    model(data(me, 0))
    assert at_the_start(log) == [
        "e2 on main",
        "main waits for e2",
        "e3 on main",
        "copy-in waits for e3",
        "gather waits for e3",
    ]
    second.step()
    model(data(me, 0))
    assert at_the_start(log) == ["e4 on main", "copy-in waits for e4", "gather waits for e4"], (
        "an optimizer may step alone"
    )


def inside_another(me: Rank) -> None:
    """Two towers, each an FSDP root, are in a module that is not sharded. The streams are the real ones of the CPU."""
    towers = nn.ModuleDict({"a": sharded(me, built(1)), "b": sharded(me, built(2))})
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.1)
    post_optimizer_event(optimizer, towers)
    for number in range(2):
        sum(tower(data(me, number)).sum() for tower in towers.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        events = [tower._get_fsdp_state()._state_ctx.post_optim_event for tower in towers.values()]  # type: ignore[operator]
        assert all(isinstance(event, torch.cpu.Event) for event in events)
    for tower in towers.values():
        tower(data(me, 0))
        assert tower._get_fsdp_state()._state_ctx.post_optim_event is None, "used"  # type: ignore[operator]


@pytest.mark.parametrize("function", [steps, several_optimizers, inside_another])
def test_gathers_wait_for_the_optimizer(ranks: Pool, function: Any) -> None:
    ranks.run(2, function)


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer without being initialised as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_what_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="nothing in the model is sharded"):
        post_optimizer_event(optimizer, model)
    with pytest.raises(TypeError, match=r"Linear is not a torch\.optim\.Optimizer"):
        post_optimizer_event([optimizer, model], model)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="Wrapper accepts no hooks"):
        post_optimizer_event(Wrapper(optimizer), model)


def sharded_without_optimizers(me: Rank) -> str:
    with pytest.raises(ValueError, match="no optimizer") as error:
        post_optimizer_event([], sharded(me, built()))
    return str(error.value)


def test_an_optimizer_is_needed(ranks: Pool) -> None:
    assert ranks.run(1, sharded_without_optimizers) == ["post_optimizer_event: no optimizer was given"]
