"""Which collectives are fused and which are not, in traced graphs of fake groups without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.nn.functional import ScalingType, scaled_mm

from symm_overlap.inductor import NotFusedError
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from symm_overlap.inductor.report import recorded
from tests.collective.test_fake_group import fake_group
from tests.inductor.all_cases import CASES, kept_cases
from tests.inductor.cases import New, Program, c10d, gather, reduce, scatter
from tests.inductor.scaled_cases import float8, gather_float8
from tests.inductor.tracing import inputs_of, overlapped, traced
from tests.quick import one_in

FUSED = [name for name, case in CASES.items() if case.matmuls]
# In these programs, a product that is also used elsewhere is computed before the fused op, which adds it to its sum.
MADE_BEFORE = (
    "a_product_that_another_one_depends_on",
    "a_product_that_is_added_in_another_arrangement",
    "a_product_and_a_scaled_one_that_is_used_elsewhere",
)
SKIPPED = [name for name, case in CASES.items() if case.reason]
STRICT = Choices(strict=True)


@pytest.mark.parametrize("world", one_in(2, [2, 4]))
@pytest.mark.parametrize("name", FUSED)
def test_collectives_beside_matmuls_are_fused(name: str, world: int) -> None:
    case = CASES[name]
    with fake_group(world) as group:
        graph = traced(case.program, world, group, inputs_of(case.program, world, group, torch.float32))
        changed, report = overlapped(graph, strict=True)
    assert sorted(site.matmuls for site in report.sites) == sorted(case.matmuls), str(report)
    targets = [str(node.target) for node in changed.graph.nodes]
    assert not [target for target in targets if "_c10d_functional" in target]
    ours = ("symm_overlap.fused", "symm_overlap.all_gather_weight_grad")
    assert sum(target.startswith(ours) for target in targets) == len(case.matmuls)


def multiplications(graph: GraphModule) -> int:
    names = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2")
    return sum(str(node.target) in [f"aten.{name}.default" for name in names] for node in graph.graph.nodes)


@pytest.mark.parametrize("name", [name for name in FUSED if CASES[name].program.__module__ == kept_cases.__name__])
def test_products_that_are_used_elsewhere_are_made_once(name: str) -> None:
    """A product that is also used elsewhere is computed once. The fused op returns it too, except in MADE_BEFORE."""
    case = CASES[name]
    with fake_group(2) as group:
        graph = traced(case.program, 2, group, inputs_of(case.program, 2, group, torch.float32))
        changed, _ = overlapped(graph)
    twice = name == "a_product_that_is_added_twice_is_used_elsewhere"
    assert multiplications(graph) - multiplications(changed) == sum(case.matmuls) - twice
    keeps = [node for node in changed.graph.nodes if "reduce_scatter_keep" in str(node.target)]
    assert len(keeps) == (0 if name in MADE_BEFORE else len(case.matmuls))


@pytest.mark.parametrize("world", one_in(2, [2, 4]))
@pytest.mark.parametrize("name", SKIPPED)
def test_what_cannot_be_fused_stays_as_it_is_and_the_report_says_why(name: str, world: int) -> None:
    case = CASES[name]
    with fake_group(world) as group:
        graph = traced(case.program, world, group, inputs_of(case.program, world, group, torch.float32))
        changed, report = overlapped(graph)
    (site,) = report.sites
    assert case.reason in site.reason
    assert site.candidate == case.candidate
    assert changed.code == graph.code


def test_coalesced_collectives_without_a_matmul_stay_as_they_are() -> None:
    def program(world: int, name: str, new: New) -> Any:
        both = c10d.all_gather_into_tensor_coalesced([new(4, 6), new(2, 3)], world, name)
        return [c10d.wait_tensor(whole) for whole in both]

    with fake_group(2) as group:
        graph = traced(program, 2, group, inputs_of(program, 2, group, torch.float32))
        changed, report = overlapped(graph)
    assert changed.code == graph.code
    assert not report.sites


def test_of_coalesced_collectives_one_with_a_matmul_is_enough() -> None:
    """A coalesced collective is split up and fused if at least one of its tensors is used by a matmul."""

    def program(world: int, name: str, new: New) -> Any:
        both = c10d.all_gather_into_tensor_coalesced([new(4, 6), new(2, 3)], world, name)
        one, two = (c10d.wait_tensor(whole) for whole in both)
        return one @ new(6, 5), two.relu()

    with fake_group(2) as group:
        graph = traced(program, 2, group, inputs_of(program, 2, group, torch.float32))
        _, report = overlapped(graph)
    assert [(site.matmuls, site.candidate) for site in report.sites] == [(1, True), (0, False)]


def sites_of(program: Program, choices: Choices = STRICT, world: int = 2) -> list[int]:
    """Return, for each collective of a program after merging, the number of matmuls that it was fused with."""
    with fake_group(world) as group:
        graph = traced(program, world, group, inputs_of(program, world, group, torch.float32))
        OverlapPass(choices)(graph.graph)
    return [site.matmuls for site in recorded().graphs[-1].sites]


def test_sums_are_not_merged_if_that_is_not_wanted() -> None:
    program = CASES["three_sums_are_added"].program
    assert sites_of(program, Choices(merge_sums=False)) == [1, 1, 1]
    assert sites_of(program) == [3]


def test_collectives_without_a_matmul_are_not_merged() -> None:
    def program(world: int, name: str, new: New) -> Any:
        return reduce(new(4, 6), name) + reduce(new(4, 6), name), reduce(new(2, 6) @ new(6, 3), name)

    assert sites_of(program) == [0, 0, 1]


def test_what_is_reduced_need_not_have_the_views_of_its_sum() -> None:
    program = CASES["a_view_of_the_sum_of_every_other_block_is_added"].program
    with fake_group(2) as group:
        graph = traced(program, 2, group, inputs_of(program, 2, group, torch.float32))
        (reshaped,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.reshape.default)
        reshaped.target = torch.ops.aten.view.default  # as another pass may write; Inductor has replaced its views
        OverlapPass(STRICT)(graph.graph)
    assert [site.matmuls for site in recorded().graphs[-1].sites] == [1]


def test_bits_that_are_read_as_another_dtype_are_not_added() -> None:
    def program(world: int, name: str, new: New) -> Any:
        halves = reduce(new(4, 5).half(), name).view(torch.bfloat16)
        return halves + reduce(new(4, 6).bfloat16() @ new(6, 5).bfloat16(), name)

    assert sites_of(program) == [0, 1]


def test_sums_stay_apart_if_their_sum_could_not_be_fused() -> None:
    """A product that is used elsewhere too is scattered first, and two ranks cannot share one row."""

    def program(world: int, name: str, new: New) -> Any:
        product = new(1, 6) @ new(6, 5)
        return reduce(product, name) + reduce(new(1, 3) @ new(3, 5), name), product.relu()

    assert sites_of(program, Choices()) == [0, 1]


def test_sums_and_means_are_merged_apart() -> None:
    def program(world: int, name: str, new: New) -> Any:
        one, two, three, four = (new(4, n) @ new(n, 5) for n in (6, 3, 4, 2))
        return reduce(one, name) + reduce(two, name, "avg") + reduce(three, name) + reduce(four, name, "avg")

    assert sites_of(program) == [2, 2]


def test_sums_are_not_merged_if_numbers_would_be_drawn_in_another_order() -> None:
    """The first product is used elsewhere too, so an op that also computed the second one would be written early."""

    def program(world: int, name: str, new: New) -> Any:
        one = new(4, 6) @ new(6, 5)
        total = reduce(one, name)
        return total + reduce((new(4, 3) * torch.rand(4, 3)) @ new(3, 5), name), one

    assert sites_of(program) == [1, 1]


def test_sums_are_not_merged_if_a_term_is_written_before_the_last_is_added() -> None:
    def program(world: int, name: str, new: New) -> Any:
        term = new(4, 5)
        total = reduce(new(4, 6) @ new(6, 5), name) + term
        term.add_(1)
        return total + reduce(new(4, 3) @ new(3, 5), name)

    assert sites_of(program) == [1, 1]


def test_zero_is_added_to_what_a_tensor_held_before_it_was_written() -> None:
    def program(world: int, name: str, new: New) -> Any:
        term = new(4, 5)
        before = term + 0
        term.add_(1)
        return before + reduce(new(4, 6) @ new(6, 5), name) + reduce(new(4, 3) @ new(3, 5), name)

    with fake_group(2) as group:
        graph = traced(program, 2, group, inputs_of(program, 2, group, torch.float32))
        changed, report = overlapped(graph)
    assert [site.matmuls for site in report.sites] == [2]
    (zero,) = (node for node in changed.graph.nodes if node.args[1:] == (0,))
    assert zero.target is torch.ops.aten.add.Tensor


def test_sums_of_different_groups_are_merged_by_group() -> None:
    def program(world: int, name: str, new: New) -> Any:
        groups = name, dist.new_group([0, 1]).group_name
        terms = [reduce(new(4, n) @ new(n, 5), groups[n % 2]) for n in (6, 3, 2, 1)]
        return terms[0] + terms[1] + terms[2] + terms[3]

    assert sites_of(program, world=4) == [2, 2]


def test_collectives_of_different_groups_stay_with_their_groups() -> None:
    with fake_group(4) as whole:
        half = dist.new_group([0, 1]).group_name

        def program(world: int, name: str, new: New) -> Any:
            hidden = gather(new(4, 6), 2, half) @ new(6, 5)
            return scatter(hidden @ new(5, 6), world, name), reduce(hidden @ new(5, 3), half)

        graph = traced(program, 4, whole, inputs_of(program, 4, whole, torch.float32))
        changed, report = overlapped(graph, strict=True)
    assert report.fused == 3
    groups = {
        str(node.target).split(".")[1]: [each for each in node.args if each in (whole, half)]
        for node in changed.graph.nodes
        if "symm_overlap" in str(node.target)
    }
    assert groups == {
        "fused_all_gather_matmul": [half],
        "fused_matmuls_reduce_scatter": [whole],
        "fused_matmul_all_reduce": [half],
    }


def test_strict_raises_for_a_candidate_that_is_skipped_beside_one_that_is_fused() -> None:
    def both(world: int, name: str, new: New) -> object:
        return gather(new(4, 6), world, name) @ new(6, 5), CASES["the_largest_of_all_ranks"].program(world, name, new)

    with fake_group(2) as group:
        graph = traced(both, 2, group, inputs_of(both, 2, group, torch.float32))
        _, report = overlapped(graph)
        assert (report.fused, len(report.skipped)) == (1, 1)
        with pytest.raises(NotFusedError, match=r"not everything was fused(.|\n)*the reduction is 'max'"):
            overlapped(graph, strict=True)


def test_a_matmul_with_a_recipe_of_gpus_is_left_alone_and_named() -> None:
    def with_blocks(new: New, x: Tensor) -> Tensor:
        weight, recipe = float8(new, 128, 128).t(), ScalingType.BlockWise1x128
        return scaled_mm(x, weight, new(len(x), 1), recipe, new(128, 1), recipe)

    def program(world: int, name: str, new: New) -> object:
        x = float8(new, 2 * world, 128)
        gathered = with_blocks(new, gather_float8(float8(new, 2, 128), world, name))
        return (
            gathered,
            scatter(with_blocks(new, x) + with_blocks(new, x), world, name),
            reduce(with_blocks(new, x), name),
        )

    inputs: list[Tensor] = []

    def new(*shape: int) -> Tensor:
        inputs.append(torch.zeros(shape))
        return inputs[-1]

    with fake_group(2) as group:
        with FakeTensorMode():  # CPUs do not have this matmul
            program(2, group, new)
        graph = traced(program, 2, group, [torch.zeros(tensor.shape) for tensor in inputs])
        changed, report = overlapped(graph)
    assert changed.code == graph.code
    assert len(report.sites) == 3
    for site in report.sites:
        assert site.reason.startswith("scaled_mm has other scales than one number for each matrix")
        assert site.candidate


@pytest.mark.parametrize("asked", ["1", "0", None])
def test_the_environment_asks_for_the_report_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str | None
) -> None:
    monkeypatch.delenv("SYMM_OVERLAP_COMPILE_REPORT", raising=False)
    if asked is not None:
        monkeypatch.setenv("SYMM_OVERLAP_COMPILE_REPORT", asked)
    program = CASES["gather_rows"].program
    with fake_group(4) as group:
        overlapped(traced(program, 4, group, inputs_of(program, 4, group, torch.float32)))
    printed = capsys.readouterr().err
    if asked == "1":
        # (4, 6) numbers of 4 bytes from each of 3 ranks; a traced graph does not know the source lines of its nodes
        assert (
            "rank 0, one graph:\n?: all_gather_into_tensor, 288 bytes moved: fused with 1 matmul, sequential\n"
            in printed
        )
        assert "1 of 1 collectives beside a matmul fused" in printed
    else:
        assert not printed
