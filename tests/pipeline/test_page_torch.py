"""The programs of the pages that run a schedule print the losses of the whole model."""

import pytest
import torch
from torch import nn

from tests import huggingface
from tests.docs.pages import ROOT
from tests.docs.two_ranks import printed_on_two_ranks


def test_the_program_of_the_runtime_trains_as_the_whole_model_does(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    lines = []
    for _ in range(3):
        loss = nn.functional.mse_loss(model(x), target)
        lines.append(f"loss {loss:.4f}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = printed_on_two_ranks((ROOT / "tests/docs/examples/pipeline_runtime.py").read_text(), tmp_path)
    assert first.splitlines()[-3:] == lines, first
    assert second == ""
    assert "\n".join(lines) in (ROOT / "docs/pipeline_run.md").read_text()


def test_the_program_trains_as_the_whole_model_does(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    loss = nn.functional.mse_loss(model(torch.randn(16, 8)), torch.randn(16, 8))
    first, second = printed_on_two_ranks((ROOT / "tests/docs/examples/torch_schedule.py").read_text(), tmp_path)
    assert first.splitlines()[-1:] == [f"loss {loss:.4f}"], first
    assert second == ""


def test_the_program_that_measures_a_step_says_how_long_it_takes(tmp_path):
    program = (ROOT / "tests/docs/examples/measured_step.py").read_text()
    first, second = printed_on_two_ranks(program, tmp_path)
    forwards, step = first.splitlines()[-2:]
    *_, one, _, other, _ = forwards.split()
    assert forwards.startswith("forwards take")
    assert step.startswith("a step takes")
    predicted, took = float(step.split()[3]), float(step.split()[-2])
    assert predicted >= 5 * min(float(one), float(other)) > 0, (
        "a step takes at least four forwards on one rank after the first one on the other"
    )
    assert took > 0
    assert second == ""


@pytest.mark.slow
def test_the_program_of_the_front_end_trains_as_the_whole_model_does(tmp_path):
    torch.manual_seed(0)
    model = huggingface.gpt2(64, 16, 32, 6, heads=2)
    ids = torch.randint(0, 64, (8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(f"loss {loss:.4f}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = printed_on_two_ranks((ROOT / "tests/docs/examples/pipeline_model.py").read_text(), tmp_path)
    lines = first.splitlines()[-3:]
    assert [line.partition(" layers, ")[2] for line in lines] == losses, first
    assert "layers, loss" not in second
    assert "\n".join(lines) in (ROOT / "docs/pipeline_run.md").read_text()
