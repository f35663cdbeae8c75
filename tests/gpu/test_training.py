"""Small trainings on GPUs with every kind of parallelism have the same losses as one process on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any

import pytest

from symm_overlap.demo.forms import forms_of
from symm_overlap.demo.training import train_as
from tests.demo.models import CONFIG, alone, here, windows
from tests.gpu.conditions import Path, on_path
from tests.gpu.conftest import Worlds
from tests.ranks import Rank

pytestmark = pytest.mark.gpu(cpu_too=True)

SHORT = dataclasses.replace(CONFIG, steps=3)
CHOSEN: Path = (None, None, None)
WAYS: list[tuple[dict[str, Any], Path]] = [
    ({"tp": 2}, ("pipelined", 2, 2)),
    ({"tp": 2}, ("fused", 1, None)),
    ({"fsdp": 2, "tp": 1}, CHOSEN),
    ({"pp": 2, "tp": 1, "microbatches": 2}, CHOSEN),
    ({"pp": 2, "tp": 2, "schedule": "zbv"}, ("pipelined", 1, 2)),
]


def comparison(me: Rank, change: dict[str, Any], path: Path) -> tuple[int, str, list[list[float]]]:
    """Return the exit code of ``train --compare``, its output, and the losses of every form in every step."""
    config = dataclasses.replace(SHORT, compare=True, device=me.device.type, **change)
    place = here(config.pp, config.fsdp, me.device)
    out, forms = io.StringIO(), forms_of(config, place)
    with contextlib.redirect_stdout(out), on_path(path):
        code = train_as(config, place, forms)
    shown = out.getvalue()
    rows = [line.split() for line in shown.splitlines()[2 : 2 + SHORT.steps]]  # after two header lines
    return code, shown, [[float(loss) for loss in row[1 : 1 + len(forms)]] for row in rows]


@pytest.mark.parametrize(("change", "path"), WAYS, ids=str)
def test_every_way_has_the_losses_of_one_process(gpu_ranks: Worlds, change: dict[str, Any], path: Path) -> None:
    trainer, batches = alone(SHORT), windows(SHORT)
    expected = [trainer.step(batches.next()) for _ in range(SHORT.steps)]
    assert expected[-1] < expected[0] - 0.1, "the reference does not learn, so equal losses would prove little"
    world = change.get("tp", 1) * change.get("fsdp", 1) * change.get("pp", 1)
    code, shown, losses = gpu_ranks.run(world, comparison, change, path)[0]
    assert code == 0, shown
    ways = len(losses[0])
    assert ways >= 2
    assert shown.count("losses agree at every step") == ways - 1, shown
    for row, wanted in zip(losses, expected, strict=True):
        assert row == pytest.approx([wanted] * ways, rel=1e-4), shown
