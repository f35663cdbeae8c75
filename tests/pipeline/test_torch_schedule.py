"""Our schedules train right in torch's own runtime. What it cannot run is rejected before any rank waits."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from symm_overlap.pipeline import Action, PipelineCosts, Schedule, read_csv, torch_schedule, write_csv
from symm_overlap.pipeline._torch import TorchKind
from symm_overlap.pipeline.generators import GENERATORS, generate
from symm_overlap.pipeline.layer_costs import LayerCosts
from symm_overlap.pipeline.lowering import add_reduce_grad, add_send_recv, lower, merge_backward
from symm_overlap.pipeline.search import search
from tests.quick import one_in
from tests.ranks import Rank

WIDTH = 6
WAITS = "WAIT_SEND_F" in {kind.value for kind in TorchKind}
NAMES = [name for name in GENERATORS if name != "DualPipe"]


class Block(nn.Module):
    """A block with all that a split backward can get wrong: a residual, a norm, a bias, a weight that is used twice."""

    def __init__(self, stage):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stage)
            self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.randn(WIDTH))
        self.double()

    def forward(self, x):
        return x + torch.tanh(self.linear(self.linear(self.norm(x)))) * self.scale


def batch(microbatches):
    """Return input and target."""
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(2 * microbatches, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def reference(stages, microbatches):
    """Return (losses, output, gradients by name) of the whole model. A microbatch has two rows."""
    model = nn.Sequential(*map(Block, range(stages)))
    x, target = batch(microbatches)
    losses = [
        nn.functional.mse_loss(model(part), wanted)
        for part, wanted in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True)
    ]
    (sum(losses) / microbatches).backward()
    return losses, model(x), {name: parameter.grad for name, parameter in model.named_parameters()}


def pipeline_stages(me, schedule):
    return [
        PipelineStage(Block(index), index, schedule.stages, me.device, group=me.group)
        for index in schedule.stages_of_ranks[me.rank]
    ]


def exact(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def step_is_right(me, schedule, runtime, stages):
    """Compare one step of torch's schedule object with the whole model."""
    losses, output, gradients = reference(schedule.stages, schedule.microbatches)
    x, target = batch(schedule.microbatches)
    last = schedule.rank_of(schedule.stages - 1) == me.rank
    found = []
    arguments = (x,) if schedule.rank_of(0) == me.rank else ()
    returned = runtime.step(*arguments, target=target if last else None, losses=found)
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            exact(parameter.grad, gradients[f"{stage.stage_index}.{name}"])
    if last:
        exact(returned, output)
        exact(found, losses)


def trains(me: Rank, *tables):
    """Check that every table of (schedule, options) trains right."""
    for schedule, options in tables:
        stages = pipeline_stages(me, schedule)
        runtime = torch_schedule(schedule, stages, nn.functional.mse_loss, **options)
        assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))
        step_is_right(me, schedule, runtime, stages)


@pytest.mark.parametrize("world", one_in(2, [2, 4]))
@pytest.mark.parametrize("name", NAMES)
def test_every_generator_trains_right(ranks, world, name):
    fewer, more = (generate(name, world, count * world) for count in (2, 3))
    ranks.run(world, trains, (fewer, {"deferred": True}), (more, {}))


def test_every_generator_trains_right_without_a_split_backward(ranks):
    ranks.run(4, trains, *[(generate(name, 4, 12), {"split": False}) for name in NAMES])


def test_fewer_microbatches_than_stages_train_right(ranks):
    tables = [(generate(name, 4, 2), {}) for name in ("GPipe", "1F1B", "LoopedBFS", "V-Min")]
    ranks.run(4, trains, *tables)


def test_what_was_lowered_already_trains_right(ranks):
    schedule = generate("ZBV", 2, 4)
    tables = [
        lower(schedule, waits=WAITS),
        add_send_recv(schedule),  # without REDUCE_GRAD, where torch divides the gradients
        add_reduce_grad(merge_backward(generate("1F1B", 2, 4))),  # without messages
        lower(generate("DualPipeV", 2, 4), waits=WAITS, deferred=True),
    ]
    ranks.run(2, trains, *[(each, {}) for each in tables])


def test_a_schedule_that_was_searched_trains_right(ranks):
    layers = LayerCosts(4, PipelineCosts(forward=(1.0, 1.0, 1.0, 4.0), message=0.1))
    found = search(2, 5, layers, stages_per_rank=(2,), steps=60)
    assert found.gain, "the search must find a better schedule than the handcrafted ones"
    ranks.run(2, trains, (found.schedule, {}), (found.lowered, {}))


def trains_by_csv(me: Rank, schedule, folder):
    for kind, table in (("compute_only", schedule), ("compute_comms", lower(schedule, waits=WAITS))):
        path = folder / f"{kind}{me.rank}.csv"
        path.write_bytes(write_csv(table).encode())
        stages = pipeline_stages(me, schedule)
        runtime = schedules._PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=nn.functional.mse_loss)
        runtime._load_csv(str(path), kind)
        step_is_right(me, schedule, runtime, stages)


NO_TURN = pytest.mark.skipif(torch.__version__ < "2.13", reason="at a turn it sends to its own rank, which gloo cannot")


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", *(pytest.param(name, marks=NO_TURN) for name in ("ZBV", "DualPipeV"))]
)
def test_torch_loads_our_csv_and_trains_right(ranks, name, tmp_path):
    ranks.run(2, trains_by_csv, generate(name, 2, 4), tmp_path)


def evaluates(me: Rank, schedule):
    stages = pipeline_stages(me, schedule)
    runtime = torch_schedule(schedule, stages, nn.functional.mse_loss)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    losses, output, _ = reference(schedule.stages, schedule.microbatches)
    x, target = batch(schedule.microbatches)
    last = schedule.rank_of(schedule.stages - 1) == me.rank
    found = []
    returned = runtime.eval(*([x] if schedule.rank_of(0) == me.rank else []), target=target, losses=found)
    assert all(bool((parameter.grad == 1).all()) for parameter in parameters), "eval must not change gradients"
    if last:
        exact(returned, output)
        exact(found, losses)
    for parameter in parameters:
        parameter.grad = None
    step_is_right(me, schedule, runtime, stages)


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipeV"])
def test_eval_runs_the_forwards_alone(ranks, name):
    ranks.run(2, evaluates, generate(name, 2, 4))


def refusal(me: Rank, schedule, stages):
    """Return the error for PipelineStages with these indices, or "nothing"."""
    made = [PipelineStage(Block(index), index, schedule.stages, me.device, group=me.group) for index in stages]
    try:
        torch_schedule(schedule, made)
    except ValueError as error:
        return str(error)
    return "nothing"


def table(text):
    return read_csv(text.replace(" ", ",").replace("/", "\n"))


@pytest.mark.parametrize(
    ("schedule", "stages", "words"),
    [
        (generate("DualPipe", 2, 4), [0], "DualPipeV is the form of DualPipe that torch can run"),
        (generate("GPipe", 1, 2), [], "there are no stages: give those of this rank"),
        (generate("1F1B", 2, 2), [0], "2 stages on 2 ranks, but the PipelineStages say that there are 2 on 1"),
        (generate("ZBV", 1, 2), [0], "rank 0 has stages [0, 1] in the schedule, but was given PipelineStages [0]"),
        (table("0F1 0F0 0B0 0B1"), [0], "as microbatches 0, 1, 2, ...; but 0F1 comes where 0F0 should be"),
        (table("0F0 0F1 0B0"), [0], "missing"),
        pytest.param(
            Schedule.from_rows([[*table("0F0 0B0").rows[0], Action(0, "WAIT_REDUCE_GRAD")]]),
            [0],
            "has no 0WAIT_REDUCE_GRAD",
            marks=pytest.mark.skipif(WAITS, reason="this torch has the kinds that wait"),
        ),
    ],
)
def test_what_torch_cannot_run_is_refused(ranks, schedule, stages, words):
    (said,) = ranks.run(1, refusal, schedule, stages)
    assert words in said
