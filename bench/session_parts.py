"""The parts that `bench.session` runs: the commands for a machine with GPUs, and the commands for a dry run.

Nothing here imports the package or torch, because the first part builds the package.
"""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUTCOMES, RESULT = "{outcomes}", "{result}"
"""Placeholders in a command: the file for the outcomes of tests, and the file for the command's result as JSON."""


@dataclass(frozen=True)
class Part:
    """One part of a session.

    Attributes:
        name: the name on the command line and in the results.
        command: the command on a machine with GPUs.
        dry: the command in a dry run.
        environment: variables that are set for the command.
        needs: the reason why the part cannot run on this machine, or an empty string.
        after: parts that this part depends on. If one of them has failed, it does not run.
        limit: the time in seconds after which the part is interrupted and counts as failed, so that a part that hangs
            does not take the time of all others.
    """

    name: str
    command: list[str]
    dry: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    after: tuple[str, ...] = ("build",)
    limit: float = float("inf")


# Tests in one process. Tools that check every access may run kernels one by one, so no test may need two at once.
CHECKED = [
    "tests/gpu/test_reduce.py::test_the_order_of_ranks_shows_in_the_last_bit",
    "tests/gpu/test_reduce.py::test_bfloat16_is_accumulated_in_float32",
    "tests/gpu/test_reduce.py::test_only_the_output_is_written",
    "tests/gpu/test_reduce.py::test_sums_are_made_in_rank_order_and_rounded_once[False-3-torch.bfloat16]",
    "tests/gpu/test_signals.py::test_signals_may_run_ahead_of_their_waits",
    "tests/gpu/test_signals.py::test_a_rank_is_named_once_in_a_launch",
    "tests/gpu/test_deadline.py::test_a_late_wait_records_who_waited_for_whom",
    "tests/gpu/test_deadline.py::test_outputs_are_poisoned_if_and_only_if_a_wait_failed",
]

# Tests with several ranks. Such a part has to run as a whole, so there are only as many as fit into one session.
CHECKED_ON_RANKS = [
    f"tests/gpu/test_values.py::test_zeros_and_ones_are_exact_on_two_ranks[{case}]"
    for case in (
        "('fused', 2, None)-Gather",
        "('fused', 2, None)-Scatter",
        "('pipelined', 2, 2)-Gather",
        "('pipelined', 2, 2)-Scatter",
        "('pipelined', 2, 2)-KeptScatter",
        "('pipelined', 2, 2)-GatherWeight",
        "('pipelined', 2, 2)-ScatterWeightGrad",
    )
]

# Tests of plans of which torch's sanitizer sees every step. It knows streams and events, but no signals.
SANITIZED = ["tests/gpu/test_values.py", "tests/gpu/test_shapes.py", "tests/gpu/test_scaled.py"]

PYTEST = 9
"""The oldest version that the tests run with: minversion in pyproject.toml."""

# Tests that measure times. They cannot run while other tests use the GPU.
TIMED = [f"tests/gpu/test_{name}.py" for name in ("emulation", "fsdp_async", "fsdp_prefetch")]

WORKERS = 3
"""The number of processes that run tests, if pytest-xdist is there: a test of ranks that share a GPU waits for most of
its time. Each keeps ranks alive, of which a GPU allows some 16 (tests/gpu/conftest.py)."""

FIRST = ("primitives", "fused_kernels", "emulate_llama", "emulate_device")
"""The benchmarks that are judged by the targets of GPUs. They check their results themselves."""

_PROFILED = "sequential", "published", "ours", "ours_memory_waits", "ours_kernel_waits", "ours_fused"
"""The methods whose calls are recorded."""

_LIMIT = 240.0
"""Seconds for a benchmark, estimated as about twice what it takes on an H100."""

PROBE = "checking_tool"
"""The part that tries whether compute-sanitizer works."""

_FEW = "two_ranks and PlainGather and sequential"  # the selection of tests in a dry run


def parts(python: str, machine: dict[str, Any]) -> list[Part]:
    """Return all parts, in order.

    Args:
        python: the interpreter.
        machine: the result of `bench.session.machine`, of which "gpus", "architecture" and "versions" are used.
    """
    lacks = _without_pytest(machine)
    tests, *more_tests = _tests(python, lacks, "pytest-xdist" in machine.get("versions", {}))
    benchmarks = {part.name: part for part in _benchmarks(python, machine["gpus"])}
    # What the targets of GPUs need comes first, and takes some minutes. A machine may be lent for half an hour.
    first = [benchmarks.pop(name) for name in FIRST]
    return [
        _build(python, machine["architecture"]),
        *first,
        tests,
        *benchmarks.values(),
        *more_tests,
        *_checks(python, lacks),
        *(_fuzz(python, waits) for waits in ("kernels", "memory")),
    ]


def _build(python: str, architecture: str) -> Part:
    # Build only for the architecture of this machine, not for all architectures of a release.
    return Part(
        "build",
        [python, "setup.py", "build_ext", "--inplace"],
        [python, "-c", "print('nothing is compiled in a dry run')"],
        {
            "SYMM_OVERLAP_CUDA": "1",
            "TORCH_CUDA_ARCH_LIST": architecture,
            "MAX_JOBS": str(len(os.sched_getaffinity(0))),
        },
        "" if architecture else "torch cannot tell the GPU's architecture",
        after=(),
    )


def _without_pytest(machine: dict[str, Any]) -> str:
    """Return the reason why tests cannot run on a machine, or an empty string."""
    found = machine.get("versions", {}).get("pytest", "")
    if int(found.partition(".")[0] or 0) >= PYTEST:
        return ""
    return f"there is {f'pytest {found}' if found else 'no pytest'}, and the tests need {PYTEST}.0 or newer"


def _tests(python: str, lacks: str, xdist: bool) -> list[Part]:
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "--outcomes", OUTCOMES]
    spread = ["-n", str(WORKERS), "--dist", "loadfile"] if xdist else []

    def part(name: str, files: list[str], *options: str, leave_out: str = "") -> Part:
        dry = ["-q", "--gpu-tests-on", "cpu", "-k", _FEW, "tests/gpu/test_values.py", *options]
        selection = ["-k", f"not ({leave_out})"] if leave_out else []
        # Stop after some failures: a hanging rank is detected only after minutes.
        together = [] if files == TIMED else spread
        command = [*pytest, "-v", "-m", "gpu", "--maxfail=8", *together, *selection, *files, *options]
        return Part(name, command, [*pytest, *dry], needs=lacks)

    return [
        part("tests", ["tests/gpu"], "--durations=10", *(f"--ignore={file}" for file in TIMED)),
        part("timed_tests", TIMED),
        # Tests with a time limit are left out, because sleeps might make them exceed it.
        part("sleeps", [*SANITIZED, "tests/gpu/test_collectives.py"], "--random-sleeps", "1"),
        part("sanitizer", SANITIZED, "--cuda-sanitizer", leave_out="memory_operations or hardware_queue or large"),
    ]


def _fuzz(python: str, waits: str) -> Part:
    fuzz = [python, "-m", "tests.gpu.fuzz"]
    return Part(f"fuzz_{waits}", [*fuzz, "--seconds", "60", "--seed", "1", "--waits", waits], [*fuzz, "--help"])


def _checks(python: str, lacks_pytest: str) -> list[Part]:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(Path(home, "bin")))
    lacks = "" if tool else "there is no compute-sanitizer"
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "-v"]
    # With torch's caching allocator, an access past the end of a tensor may hit a block that is allocated.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SYMM_OVERLAP_TIMEOUT": "500"}

    def under(check: str) -> list[str]:
        return [tool or "compute-sanitizer", "--tool", check, "--error-exitcode", "86", "--target-processes", "all"]

    def part(name: str, check: str, tests: list[str], *options: str) -> Part:
        return Part(
            name,
            [*under(check), *pytest, *tests, *options],
            [*pytest, "--collect-only", "-q", *tests, *options],
            environment,
            lacks or lacks_pytest,
            after=("build", PROBE),
        )

    # compute-sanitizer may be installed but not work, with this driver or in a container. One part tries this first,
    # so that not every part that needs it has to fail.
    program = "import torch; print(torch.ones(1, device='cuda').item(), 'under compute-sanitizer')"
    probe = Part(
        PROBE, [*under("memcheck"), python, "-c", program], [python, "-c", "print('needs a GPU')"], needs=lacks
    )
    # The limit of the ranks must fit into one session. pytest's own limit must be longer, so that ranks report first.
    slow = ["--rank-timeout", "480", "-o", "faulthandler_timeout=500"]
    return [
        probe,
        *(part(check, check, CHECKED) for check in ("memcheck", "racecheck", "synccheck")),
        part("memcheck_ranks", "memcheck", CHECKED_ON_RANKS, *slow),
    ]


def _nsight(python: str) -> Part:
    """Return the part that shows what is exposed in a report of Nsight Systems."""
    own = shlex.quote(python)
    matmul = f"{own} -m bench.collective_matmul --device cuda --emulate 8 --shapes 8192,3584,4096 --rounds 1 --nvtx"
    methods = " ".join(_PROFILED)
    program = f"""
        set -e
        report=$(mktemp -d)/report
        nsys profile -t cuda,nvtx -o "$report" {matmul} --methods {methods}
        nsys export --type sqlite -o "$report.sqlite" "$report.nsys-rep"
        {own} -m symm_overlap.cli profile "$report.sqlite" --json "{RESULT}"
    """
    dry = [python, "-m", "symm_overlap.cli", "profile", "--help"]
    return Part("nsight", ["bash", "-c", program], dry, needs="" if shutil.which("nsys") else "there is no nsys")


def _benchmarks(python: str, gpus: int) -> list[Part]:
    matmul, cpu = (
        [python, "-m", "bench.collective_matmul"],
        ["--rounds", "1", "--shapes", "64,32,16", "--device", "cpu"],
    )

    def emulated(name: str, *options: str) -> Part:
        command = [*matmul, "--device", "cuda", "--emulate", "8", "--json", RESULT, *options]
        dry = [*matmul, "--emulate", "2", "--link", "device", "--json", RESULT, *cpu]
        return Part(name, command, dry, limit=_LIMIT)

    def measured(shapes: str) -> Part:
        # One set of shapes in a part: a benchmark that is cut off starts again from the beginning.
        command = [*matmul, "--device", "cuda", "--world", str(max(2, gpus)), "--shapes", shapes, "--json", RESULT]
        dry = [*matmul, "--world", "2", "--no-memory", "--json", RESULT, *cpu]
        lacks = "" if gpus > 1 else "needs two GPUs: ranks that share a GPU cannot overlap anything"
        return Part(f"collectives_{shapes}", command, dry, needs=lacks)

    def without_judging(module: str, *arguments: str) -> list[str]:
        """Return a command that ignores whether targets are met, because times of a dry run are meaningless."""
        return [python, "-c", f"from {module} import main; main({list(arguments)!r})"]

    return [
        Part(
            "primitives",
            [python, "-m", "bench.gpu_primitives", "--json", RESULT],
            [python, "-c", "import bench.gpu_primitives; print('it needs a GPU: imported, not run')"],
            limit=_LIMIT,
        ),
        Part(
            "fused_kernels",
            [python, "-m", "bench.fused_kernels", "--json", RESULT],
            [python, "-c", "import bench.fused_kernels; print('it needs a GPU: imported, not run')"],
            limit=_LIMIT,
        ),
        Part(
            "host",
            [python, "-m", "bench.gpu_host", "--json", RESULT],
            without_judging("bench.gpu_host", "--calls", "2", "--json", RESULT),
        ),
        emulated("emulate_llama", "--shapes", "llama"),
        emulated("exposed_llama", "--shapes", "llama", "--rounds", "1", "--exposed", "--methods", *_PROFILED),
        _nsight(python),
        emulated("emulate_gpt3", "--shapes", "gpt3"),
        emulated("emulate_small", "--shapes", "small", "ragged"),
        emulated("emulate_graphs", "--shapes", "decode", "--ops", "ar", "--graph", "20"),
        emulated("emulate_pcie", "--shapes", "llama", "--link", "pcie", "--rounds", "5"),
        emulated("emulate_device", "--shapes", "llama", "--link", "device", "--rounds", "5"),
        Part(
            "sleep_trick",
            [python, "-m", "bench.start_order", "--emulate", "8", "--json", RESULT],
            [python, "-c", "import bench.start_order; print('it needs a GPU: imported, not run')"],
            limit=_LIMIT,
        ),
        *(measured(shapes) for shapes in ("llama", "gpt3", "small", "ragged")),
        Part(
            "train",
            [python, "-m", "symm_overlap.cli", "train", "--device", "cuda", "--tp", "2", "--compare"],
            [python, "-m", "symm_overlap.cli", "train", "--help"],
            needs="" if gpus > 1 else "needs two GPUs",
        ),
    ]
