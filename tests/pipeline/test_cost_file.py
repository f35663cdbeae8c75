"""Costs of a model are read from TOML, and wrong costs are rejected with their key."""

from __future__ import annotations

import pytest

from symm_overlap.pipeline.cost_file import read_costs
from symm_overlap.pipeline.layer_costs import LayerCosts
from symm_overlap.pipeline.simulation.costs import PipelineCosts


def test_one_number_is_for_all_layers_and_a_list_has_one_for_each():
    assert read_costs("layers = 3\nforward = 2\nlatency = 0.5\none_receive_stream = true") == LayerCosts(
        3, PipelineCosts(forward=2.0, latency=0.5, one_receive_stream=True)
    )
    assert read_costs("forward = [1, 2.5]").costs.forward == (1.0, 2.5)
    assert read_costs("forward = [1, 2.5]").layers == 2


def test_the_embedding_and_the_head_are_added_to_the_first_and_the_last_layer():
    costs = read_costs("layers = 3\nforward = 1\n[first]\nforward = 0.5\n[last]\nforward = 2\nmessage = 4")
    assert costs.costs.forward == (1.5, 1.0, 3.0)
    assert costs.costs.message == (0.0, 0.0, 4.0)
    assert read_costs("layers = 1\n[first]\nforward = 1\n[last]\nforward = 2").costs.forward == (4.0,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = ", "not TOML"),
        ("layers = " + "[" * 5000 + "]" * 5000, "not TOML"),
        ("forward = 1", "do not say how many layers"),
        ("layers = 0", "layers is 0"),
        ("layers = true", "layers is True"),
        ("layers = 2\nforwards = 1", "no cost forwards: the costs are forward, "),
        ("layers = 2\nforward = [1, 2, 3]", "forward has 3 numbers, but there are 2 layers"),
        ("layers = 2\nforward = 'long'", "forward is 'long': give a number, or a list"),
        ("layers = 2\nforward = [true, 1]", "give a number, or a list"),
        ("layers = 2\nlatency = [1, 2]", r"latency is \[1, 2\]: give a number"),
        ("layers = 2\none_receive_stream = 1", "give true or false"),
        ("layers = 2\nforward = nan", "forward is nan: costs are finite numbers"),
        ("layers = 2\nforward = inf", "forward is inf"),
        ("layers = 2\nweight_grad = -1", "weight_grad is -1.0"),
        ("layers = 2\nforward = 1" + "0" * 400, "forward has a number that is too large"),
        ("layers = 2\nforward = 1e308", "the costs of all layers add up to more than a float can hold"),
        ("layers = 2\nbandwidth = 0", "bandwidth is 0"),
        ("layers = 2\nlast = 3", r"under a line \[last\]"),
        ("layers = 2\n[last]\nlatency = 3", "no cost last.latency"),
        ("layers = 2\n[last]\nforward = -3", "forward is -3.0"),
        ("layers = 2\n[last]\nkept = 3", "give kept of all layers too"),
    ],
)
def test_costs_that_cannot_be_are_refused_with_their_key(text, message):
    with pytest.raises(ValueError, match=message):
        read_costs(text)
