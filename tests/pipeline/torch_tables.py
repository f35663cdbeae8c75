"""The tables of torch's own schedules, which torch's classes create without process groups or tensors."""

from types import SimpleNamespace

from torch.distributed.pipelining import schedules


def stage(ranks, stages, index):
    """Return a stand-in for a stage, with the attributes that torch's schedules read to create their tables."""
    return SimpleNamespace(
        group=None,
        group_rank=0,
        group_size=ranks,
        has_backward=True,
        is_first=index == 0,
        is_last=index == stages - 1,
        num_stages=stages,
        stage_index=index,
        submod=None,
    )


def torch_schedule(name, ranks, microbatches, stages_per_rank=1, **arguments):
    """Return torch's schedule of this name, on rank 0 of ``ranks``."""
    stages = [stage(ranks, ranks * stages_per_rank, index * ranks) for index in range(stages_per_rank)]
    made = getattr(schedules, f"Schedule{name}")
    if issubclass(made, schedules.PipelineScheduleSingle):
        return made(stages[0], microbatches, **arguments)
    return made(stages, microbatches, **arguments)


def compute_table(name, ranks, microbatches, stages_per_rank=1):
    """Return torch's table of compute actions. GPipe and 1F1B also have REDUCE_GRAD in it, and no empty cells."""
    schedule = torch_schedule(name, ranks, microbatches, stages_per_rank)
    table = getattr(schedule, "pipeline_order", None)
    return schedule._get_pipeline_order() if table is None else table
