"""The fused kernels, compiled for GPUs without a GPU: no spills, shared memory that fits, the required instructions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from symm_overlap.kernels import load
from symm_overlap.kernels.configuration import RESERVED_SHARED_BYTES, SHARED_BYTES, configure, most_weights

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from symm_overlap.kernels.launch import compiler_options
from tests.kernels.compiled import Compiled, Variant, branches_on, compiled

KERNELS = ("all_gather_matmul", "matmul_reduce_scatter")
LARGE, SMALL = (1024, 7168, 8192), (64, 200, 72)
BFLOAT16 = LARGE, Variant(torch.bfloat16)
FLOAT8 = LARGE, Variant(torch.float8_e4m3fn, transposed=True, scaled=True, biased=True)
TO_FLOAT8 = LARGE, FLOAT8[1]._replace(rescaled=True)
# Every kind of tiles once, on some architecture. The tiles that large models get are on every architecture.
CASES: dict[int, list[tuple[tuple[int, int, int], Variant]]] = {
    80: [BFLOAT16, (LARGE, Variant(torch.float32, transposed=True))],
    90: [
        BFLOAT16,
        FLOAT8,
        TO_FLOAT8,
        (SMALL, Variant(torch.float16, transposed=True, biased=True)),
        (LARGE, Variant(torch.bfloat16, aligned=False)),
    ],
    100: [
        BFLOAT16,
        FLOAT8,
        (LARGE, TO_FLOAT8[1]._replace(dtype=torch.float8_e5m2)),
        (LARGE, Variant(torch.float64, aligned=False, transposed=True)),
    ],
}


@pytest.fixture(autouse=True)
def nothing_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_for(architecture: int, name: str, shape: tuple[int, int, int], variant: Variant) -> Compiled:
    kernel = getattr(load(name, architecture), f"{name}_kernel")
    rows, n, k = shape
    total = variant.count * n
    configuration = configure(rows, n, k, variant.dtype, architecture, total=total, aligned=variant.aligned)
    return compiled(kernel, architecture, configuration, variant)


@pytest.mark.parametrize(
    "architecture", [90, *(pytest.param(each, marks=pytest.mark.slow) for each in CASES if each != 90)]
)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_fit_and_use_what_their_gpu_has(
    architecture: int, name: str, record_property: pytest.RecordProperty
) -> None:
    for shape, alone in CASES[architecture]:
        if alone.rescaled and name != "all_gather_matmul":
            continue  # sums over ranks are never float8
        # For large shapes, the gather is compiled with the largest number of weights of one launch.
        most = most_weights(alone.dtype, architecture) if name == "all_gather_matmul" and shape == LARGE else 1
        variant = alone._replace(count=most)
        found = compile_for(architecture, name, shape, variant)
        case = f"{name} sm_{architecture} {shape} {variant}"
        record_property(case, f"{found.registers} registers, {found.shared_bytes} bytes shared")
        assert found.spilled_bytes == 0, case
        assert found.registers <= 255
        assert found.shared_bytes <= SHARED_BYTES[architecture] - RESERVED_SHARED_BYTES, case
        assert "__local_depot" not in found.ptx, "the copy unit could not use a local copy of a tensor descriptor"
        assert ("cvt.rn.satfinite.e" in found.ptx) == variant.rescaled, "rounds to the nearest number, and saturates"
        low = variant.dtype.itemsize <= 2
        if low:
            matmul = {80: r"mma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}[architecture]
            assert re.search(matmul, found.ptx), case
        if low and variant.aligned:
            load_tile = r"cp\.async\.cg" if architecture == 80 else r"cp\.async\.bulk\.tensor"
            assert re.search(load_tile, found.ptx), case
        require_order(name, found.ptx, low and variant.aligned and architecture >= 90)


def require_order(name: str, ptx: str, descriptors: bool) -> None:
    """Check the memory orders of flags: the first look is an acquire, polls are relaxed, one acquire follows them, and
    raising a flag is a release. All have system scope.
    """
    if name == "all_gather_matmul":
        assert re.search(r"ld\.global\.sys\.relaxed|atom\.global\.relaxed\.sys", ptx), "polls"
        acquired = [match.end() for match in re.finditer(r"\.acquire\S*", ptx)]
        assert len(acquired) == 2, "one if the flag is up at once, one behind the polls, and none in the polls"
        assert re.search(r"ld\.global\.sys\.acquire|ld\.acquire\.sys\.global", ptx), "the first look writes nothing"
        assert "atom.global.acquire.sys.cas" in ptx
        assert "bar.sync" in ptx[acquired[0] :], "no thread reads the chunk before the flag has been seen"
        assert ("fence.proxy.async.global" in ptx[acquired[0] :]) == descriptors
        assert "%globaltimer" in ptx, "a wait has a limit in time"
        # If some warps gave up while others poll once more, they would meet in different barriers.
        assert not branches_on("%globaltimer", ptx), "each warp reads the time at a different moment"
    else:
        counted, raised = ptx.index("atom.global.gpu.acq_rel.add"), ptx.index("atom.global.sys.release.exch")
        assert "bar.sync" in ptx[:counted], "all threads have stored their results before one thread counts the tile"
        assert counted < raised


def test_the_last_bit_of_a_product_does_not_depend_on_tritons_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    backend = make_backend(GPUTarget("cuda", 90, 32))
    plain = backend.parse_options({})
    assert not plain.enable_fp_fusion
    ours = backend.parse_options(compiler_options(configure(*LARGE, torch.bfloat16, 90)))
    assert ours.enable_fp_fusion
