"""Cases, inputs and references of benchmarks. The references, with which results are compared, must be right."""

from __future__ import annotations

import pytest
import torch

from bench.harness import shapes
from bench.harness.case import OPS, Case, inputs, reference

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", OPS.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["binary", "normal"])
def test_reference_is_the_unsharded_product(op: str, dtype: torch.dtype, kind: str) -> None:
    case = Case(op, 12, 5, 8, dtype, 3)
    a, b = zip(*(inputs(case, rank, kind, CPU) for rank in range(3)), strict=True)
    for rank in range(3):
        if case.gathers:
            whole = torch.cat(a).double() @ b[rank].double()
        else:  # summing over ranks is one product with the contraction dimension put together
            whole = torch.cat(a, 1).double() @ torch.cat(b, 0).double()
        if op == "matmul_reduce_scatter":
            whole = whole[4 * rank : 4 * rank + 4]
        found = reference(case, rank, kind, CPU)["output"]
        assert found.shape == case.out_shape
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def test_inputs_differ_between_ranks_and_repeat_for_one() -> None:
    case = Case("all_gather_matmul", 64, 8, 32, torch.float32, 2)
    first, again, other = (inputs(case, rank, "binary", CPU)[0] for rank in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, 1.0}


def test_binary_sums_are_exact_in_bfloat16_at_large_k() -> None:
    case = Case("matmul_reduce_scatter", 8, 64, 4096, torch.bfloat16, 8)
    output = reference(case, 0, "binary", CPU)["output"]
    assert output.max() > 8  # sums are large enough that a missing term shows
    assert torch.equal(output, output.bfloat16().double())


def test_case_refuses_rows_that_the_ranks_do_not_divide() -> None:
    with pytest.raises(ValueError, match="m is 10, which 3 ranks do not divide"):
        Case("all_gather_matmul", 10, 4, 4, torch.float32, 3)


def test_cpu_shapes_scale_with_the_world_and_count_gathered_rows() -> None:
    found = [(shape.m, shape.k, shape.n) for shape in shapes.named("cpu", 2)]
    assert found == [
        (2048, 4096, 256),
        (2048, 4096, 2048),
        (128, 4096, 4096),
        (32, 1024, 1024),
        (1024, 1024, 1024),
    ]


@pytest.mark.parametrize("name", shapes.SETS)
@pytest.mark.parametrize("world", [2, 8])
def test_every_named_set_makes_valid_cases(name: str, world: int) -> None:
    for shape in shapes.named(name, world):
        for op in shape.ops:
            Case(OPS[op], shape.m, shape.n, shape.k, torch.float32, world)


def test_parse_keeps_the_order_and_reads_triples() -> None:
    found = shapes.parse(["64,32,16", "cpu"], 2)
    assert (found[0].m, found[0].n, found[0].k) == (64, 32, 16)
    assert len(found) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [("nothing", "shape set is 'nothing'"), ("1,2", "give M,N,K"), ("0,2,3", "give M,N,K"), ("7,2,3", "split over 2")],
)
def test_parse_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes.parse([text], 2)


def test_a_transposed_weight_has_the_same_values_and_other_strides() -> None:
    shape = ("matmul_reduce_scatter", 8, 64, 32, torch.float32, 2)
    (_, b), (_, turned) = (inputs(Case(*shape, transposed=is_so), 0, "normal", CPU) for is_so in (False, True))
    assert torch.equal(b, turned)
    assert (b.stride(), turned.stride()) == ((64, 1), (1, 32))
    assert Case(*shape, transposed=True).key() != Case(*shape).key()
