"""Random training programs for FSDP2: a random model, the options of FSDP2, and what is done step by step.

A program is drawn from a seed, so all ranks run the same one. It runs with plain FSDP2, or with `symm_overlap.fsdp`. It
records outputs, gradients and parameters, which must be the same, bit for bit on two ranks.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointError

import symm_overlap.fsdp
from tests.fsdp.random_models import WORDS, Part, sharded
from tests.ranks import Rank

Record = list[tuple[str, list[Tensor]]]
POLICIES = "depth=0", "depth=1", "depth=2", "bytes=1KiB", "bytes=1MiB", "auto", "auto=1KiB"
RESETS = hasattr(FSDPModule, "reset_iter_state")  # since torch 2.13


class Run:
    """One run of a program, with plain FSDP2 or with ours."""

    def __init__(self, me: Rank, seed: int, mesh: DeviceMesh, ours: bool) -> None:
        self.me, self.record = me, Record()
        self.draw = draw = random.Random(seed)
        self.model = sharded(draw, seed, mesh)
        self.states = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self.dtype = next(self.model.parameters()).dtype
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kind = draw.choice(["sgd", "momentum", "adam", "two"])
        groups = [trained[::2], trained[1::2]] if kind == "two" and len(trained) > 1 else [trained]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(group, lr=0.01)
            if kind == "adam"
            else torch.optim.SGD(group, lr=0.05, momentum=0.9 * (kind == "momentum"))
            for group in groups
            if group
        ]
        self.clips, self.uneven = draw.random() < 0.3, draw.random() < 0.5
        slots, halves = draw.choice([None, None, 2, 5]), draw.choice([True, False])
        applied, planned = draw.choice([-1, -1, 0, 1]), draw.choice([0, 1, 2, 99])
        reset, policy, records_event = draw.choice([3, 99]), draw.choice(POLICIES), draw.random() < 0.3
        first = draw.random() < 0.5
        if first:
            self.set_options()
        actions = [getattr(self, draw.choice(ACTIONS)) for _ in range(draw.randint(3, 6))]
        seeds = [draw.randrange(10**6) for _ in actions]
        event = plan = None
        for number in range(-1, len(actions)):
            if ours and number == applied:
                symm_overlap.fsdp.apply(self.model, slots=slots, half_gradients=halves)
                event = symm_overlap.fsdp.post_optimizer_event(self.optimizers, self.model) if records_event else None
            if ours and number == max(planned, applied):
                plan = symm_overlap.fsdp.plan_prefetch(self.model, policy, verbose=False)
            if plan is not None and number == reset:
                plan.reset()
            if number == -1:
                if not first:
                    self.set_options()
                continue
            self.step, self.draw = number, random.Random(seeds[number])
            actions[number](seeds[number])
        self.note("end", [each for pair in self.parameters() for each in pair])
        if event is not None:
            event.remove()

    def note(self, label: str, tensors: list[Tensor]) -> None:
        local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        self.record.append((label, [each.detach().clone() for each in local]))

    def parameters(self) -> list[tuple[Tensor, ...]]:
        """Return every parameter, with its gradient if it has one."""
        return [(each,) if each.grad is None else (each, each.grad) for each in self.model.parameters()]

    def set_options(self) -> None:
        """Set some of the options that FSDP2 has."""
        draw, states = self.draw, self.states
        inner = states[1:]
        for state in states:
            if inner and draw.random() < 0.2:
                state.set_modules_to_forward_prefetch(draw.sample(inner, draw.randint(0, min(3, len(inner)))))
            if inner and draw.random() < 0.2:
                state.set_modules_to_backward_prefetch(draw.sample(inner, draw.randint(0, min(3, len(inner)))))
        if draw.random() < 0.1:
            states[0].set_reshard_after_backward(False)
        if draw.random() < 0.2:
            factor = draw.choice([0.5, 1.0, 3.0, 8.0])
            for state in states:
                state.set_gradient_divide_factor(factor)
                state.set_force_sum_reduction_for_comms(True)
        if draw.random() < 0.1:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda each: each.grad.mul_(0.5))

    def batch(self, seed: int) -> Tensor:
        """Return the batch of this rank. The ranks may have batches of different sizes."""
        rows = random.Random(seed + self.me.rank * self.uneven).choice([1, 2, 3, 4, 6])
        generator = torch.Generator().manual_seed(seed + self.me.rank)
        if self.model.embedding is not None:
            return torch.randint(WORDS, (rows,), generator=generator)
        return torch.randn(rows, self.model.width, generator=generator).to(self.dtype)

    def loss(self, seed: int) -> Tensor:
        output = self.model(self.batch(seed), self.step)
        self.note("output", [output])
        loss: Tensor = output.double().square().mean()
        return loss if loss.requires_grad or not torch.is_grad_enabled() else loss.requires_grad_()

    def update(self) -> None:
        """Let the optimizers make their step."""
        if self.clips:
            self.note("norm", [nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)])
        self.note("gradients", [each for pair in self.parameters() for each in pair])
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, seed: int) -> None:
        backward(self.loss(seed))
        self.update()

    def accumulate(self, seed: int) -> None:
        """Accumulate gradients, which are reduced each time, or only the last time."""
        last = self.draw.choice([True, False])
        for number in range(3):
            self.model.set_requires_gradient_sync(number == 2 or not last)  # type: ignore[operator]
            self.model.set_is_last_backward(number == 2 or not last)  # type: ignore[operator]
            backward(self.loss(seed + number))
            self.note("accumulated", [each for pair in self.parameters() for each in pair])
        self.update()

    def several(self, seed: int) -> None:
        """Call the model several times before the backward passes."""
        losses = [self.loss(seed + number) for number in range(self.draw.randint(2, 3))]
        if self.draw.random() < 0.5:
            backward(sum(losses, torch.zeros((), dtype=torch.float64)))
        else:
            for number, loss in enumerate(reversed(losses)):
                self.model.set_is_last_backward(number == len(losses) - 1)  # type: ignore[operator]
                backward(loss)
        self.update()

    def evaluate(self, seed: int) -> None:
        with torch.no_grad():
            for number in range(self.draw.randint(1, 2)):
                self.loss(seed + number)

    def gather_by_hand(self, seed: int) -> None:
        chosen = self.draw.sample(self.states, self.draw.randint(1, min(3, len(self.states))))
        for state in chosen:
            handle = state.unshard(async_op=self.draw.random() < 0.5)
            if handle is not None:
                handle.wait()
        self.note("gathered", [each for state in chosen for each in state.parameters()])  # type: ignore[attr-defined]
        for state in chosen:
            state.reshard()
        self.train(seed)

    def go_back(self, seed: int) -> None:
        """Take a step, and load the state that the model had before."""
        state = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.note("state", [each.full_tensor() for each in state.values()])
        self.train(seed)
        self.model.load_state_dict(state)

    def forward_only(self, seed: int) -> None:
        """Call the model with gradients, and drop its output."""
        self.loss(seed)

    def fail(self, seed: int) -> None:
        """An error of the user's own ends a forward pass on all ranks. It is caught, and the model is reset."""
        if not RESETS:
            return
        part = self.draw.choice([module for module in self.model.modules() if isinstance(module, Part)])
        hook = part.register_forward_hook(_raise)
        try:
            backward(self.loss(seed))
        except KeyError:
            self.note("failed", [])
        hook.remove()
        self.model.reset_iter_state()  # type: ignore[operator]
        self.model.zero_grad()


ACTIONS = [
    *["train"] * 4,
    *["accumulate", "several", "evaluate", "gather_by_hand", "go_back", "forward_only", "fail"],
]


def _raise(*unused: object) -> None:
    raise KeyError("of the user's own")


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def difference(me: Rank, seed: int, exact: bool) -> str:
    """Return how a program with ours differs from the same one with plain FSDP2: "" if it does not."""
    mesh = DeviceMesh.from_group(me.group, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = Run(me, seed, mesh, False).record
        except CheckpointError:
            if RESETS:
                raise
            return ""  # with plain FSDP2, torch 2.11 recomputes some blocks in another dtype
        ours = Run(me, seed, mesh, True).record
    compared: Callable[[Tensor, Tensor], bool] = torch.equal if exact else _near
    for number, ((label, wanted), (other, found)) in enumerate(zip(plain, ours, strict=True)):
        if label != other or len(wanted) != len(found):
            return f"record {number}: {label} of {len(wanted)} tensors, and {other} of {len(found)}"
        for place, (one, two) in enumerate(zip(wanted, found, strict=True)):
            if one.dtype != two.dtype or one.shape != two.shape or not compared(one.nan_to_num(), two.nan_to_num()):
                return f"record {number}, {label}, tensor {place}: {one} and {two}"
    return ""


def _near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=2e-5, atol=2e-5)
