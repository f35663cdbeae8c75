"""``python -m tests.mutate``: make small changes to the code, one at a time, and list the changes that no test detects.

A change is made in a copy of the package. Then the tests that detect changes in that file most quickly are run against
the copy. For each change that survives, add a test, remove dead code, or add a line to tests/mutations.md that explains
why the change has no relevant effect.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "symm_overlap"

PLANNERS = [f"tests/collective/planners/test_{name}.py" for name in ("planners", "buffers", "values", "schedules")]
VALUES = [f"tests/collective/test_{name}.py" for name in ("single_elements", "rank_order", "empty", "copying_plans")]
GRADIENTS = (
    "tests/collective/test_autograd.py::test_first_and_second_gradients_are_those_of_plain_pytorch_on_every_path[2]"
)
STRIDES = "tests/collective/test_torch_integration.py::test_fake_strides_are_the_real_ones_and_those_of_torch[2]"
FLOP = "tests/collective/test_transforms_of_torch.py::test_flop_counters_count_an_op_as_the_matmuls_of_plain_pytorch"
TOUCH = "tests/collective/test_accesses.py::test_steps_touch_only_what_their_plan_declares_and_orders"
ACCESSES = [f"{TOUCH}[{case}-3]" for case in ("all_gather_matmul bfloat16", "all_gather_weight_grad dim 0")]
SAVE = "tests/collective/test_autograd.py::test_save_decides_what_is_kept_for_the_backward_pass"
AUTOCAST = "tests/collective/test_settings.py::test_autocast_casts_as_for_a_matmul_on_every_path"
OPS = [
    SAVE,
    AUTOCAST,
    GRADIENTS,
    *VALUES,
    FLOP,
    *(f"tests/collective/test_{name}.py" for name in ("fake_group", "errors", "arguments", "more_gradients")),
]

SCALED_OPS = ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter", "scaled_matmuls_reduce_scatter")
SCALED = [
    *(f"tests/collective/test_scaled_{name}.py" for name in ("matmul", "scatter", "sums", "as_torch_ops")),
    "tests/collective/test_symm_mem_names.py",
    f"{TOUCH}[scaled matmuls dim 1 rows=True-3]",
    "tests/collective/test_paths_of_ops.py",
]

PIPELINE_TABLES = ("action", "schedule", "csv_text", "interop")

PATHS = ["tests/collective/test_paths.py", "tests/collective/test_paths_of_ops.py"]

# For each folder or file: the tests to run. Quick tests that detect most changes come first.
TESTS: dict[str, list[str]] = {
    "collective/planners": [*PLANNERS, "tests/collective/planners/test_synchronisation.py"],
    "collective/choosing/chooser.py": PATHS,
    "collective/problem.py": PATHS,
    "collective/explain.py": PATHS,
    "collective/layouts.py": [STRIDES, *OPS],
    "collective/parts": [*ACCESSES, *OPS],
    "collective/arguments.py": ["tests/collective/test_errors.py", "tests/collective/test_arguments.py"],
    "collective/ops": OPS,
    **dict.fromkeys(
        [f"collective/{name}.py" for name in ("scaled", "parts/scaled", *(f"ops/{op}" for op in SCALED_OPS))], SCALED
    ),
    "collective/ops/symm_mem_names.py": [
        f"tests/collective/test_{name}.py" for name in ("symm_mem_names", "compile_cache")
    ],
    **{
        f"collective/ops/{op}.py": [*OPS, "tests/collective/test_gathered_weight.py"]
        for op in ("all_gather_weight_matmul", "weight_grad_reduce_scatter")
    },
    "collective/ops/matmuls_reduce_scatter_keep.py": [
        "tests/collective/test_kept_products.py",
        "tests/inductor/test_kept_products.py",
    ],
    "collective/dispatch/functional.py": [
        f"tests/collective/test_{name}.py" for name in ("arguments", "check", "tracebacks")
    ],
    "collective/dispatch/autograd.py": [
        GRADIENTS,
        SAVE,
        *(f"tests/collective/test_{name}.py" for name in ("backward_settings", "transforms_of_torch", "arguments")),
    ],
    "collective/dispatch/registration.py": [
        AUTOCAST,
        FLOP,
        *(f"tests/collective/test_{name}.py" for name in ("check", "tracebacks", "fake_group", "transforms_of_torch")),
    ],
    "collective/exchange/fake.py": ["tests/collective/test_fake_group.py"],
    "collective/exchange": [
        GRADIENTS,
        *VALUES,
        "tests/collective/test_c10d.py",
        "tests/collective/test_mismatch.py",
        "tests/collective/test_check.py",
        "tests/collective/test_symmetric_input.py",
        "tests/collective/test_torch_integration.py::test_random_values_are_within_the_rounding_of_the_dtype",
    ],
    "collective/exchange/comparison.py": [
        f"tests/collective/test_{name}.py" for name in ("check", "mismatch", "failures")
    ],
    "inductor": [
        *(
            f"tests/inductor/test_{name}.py"
            for name in ("patterns", "hard_graphs", "writer", "arrangement", "moved", "one_kernel", "groups")
        ),
        "tests/inductor/test_quantised.py",
        "tests/inductor/test_values.py",
    ],
    "settings.py": [
        f"tests/collective/test_{name}.py" for name in ("paths", "backward_settings", "settings", "errors")
    ],
    "pipeline/generators": ["tests/pipeline/test_generators.py", "tests/pipeline/test_generators_torch.py"],
    "pipeline/lowering": ["tests/pipeline/test_lowering.py", "tests/pipeline/test_lowering_torch.py"],
    **{
        f"pipeline/{name}.py": [f"tests/pipeline/test_{each}.py" for each in PIPELINE_TABLES]
        for name in (*PIPELINE_TABLES, "placement")
    },
    "pipeline/verify": ["tests/pipeline/test_verify.py"],
    **{
        f"pipeline/{name}.py": ["tests/pipeline/test_unit_time.py", "tests/pipeline/test_encoded.py"]
        for name in ("simulation/unit_time", "simulation/encoded")
    },
    **{
        f"pipeline/simulation/{name}.py": ["tests/pipeline/test_cost.py"]
        for name in ("cost", "costs", "cost_result", "work")
    },
    **{
        f"plan/{name}.py": ["tests/plan/test_engine.py", "tests/plan/test_simulate.py"] for name in ("work", "simulate")
    },
    "plan/ranges.py": ["tests/plan/test_ranges.py", "tests/profile/test_nested.py"],
    "collective/exchange/ranges.py": ["tests/profile/test_call_ranges.py", "tests/profile/test_record.py"],
    "profile": [
        *(f"tests/profile/test_{name}.py" for name in ("intervals", "exposure", "roles", "readers", "nested")),
        "tests/cli/test_profile.py",
        "tests/profile/test_record.py",
    ],
    "runtime/cpu/sliced_matmul.py": ["tests/collective/test_sliced_matmul.py"],
    "runtime": [
        *VALUES,
        *(f"tests/collective/test_{name}.py" for name in ("mismatch", "settings", "memory", "failures")),
    ],
}
LEFT_OUT = ("runtime/cuda",)  # tests on CPU ranks do not run it

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def changes(tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    """Yield every small change of a module, except of its decorators: its description, and the changed module."""
    decorators = {
        id(part) for node in ast.walk(tree) for each in getattr(node, "decorator_list", ()) for part in ast.walk(each)
    }
    for at, node in enumerate(ast.walk(tree)):
        if id(node) in decorators:
            continue
        if _can_change(node):
            changed = copy.deepcopy(tree)
            before = ast.unparse(node)
            # ast.walk visits a deep copy in the same order.
            after = _change(list(ast.walk(changed))[at])
            yield f"line {getattr(node, 'lineno', '?')}: {before}  ->  {after}", changed


def _can_change(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        return type(node.op) in SWAPS
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Call):
        return len(node.args) >= 2 and not any(isinstance(each, ast.Starred) for each in node.args)
    return False


def _change(node: ast.AST) -> str:
    """Change a node in place, and return its new source text."""
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()
        node.operand = ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
    elif isinstance(node, ast.Constant):
        node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.Call):
        node.args[0], node.args[1] = node.args[1], node.args[0]
    return ast.unparse(ast.fix_missing_locations(node))


def tests_of(name: str) -> list[str]:
    """Return the tests for a file of the package: the entry of `TESTS` with the longest matching prefix."""
    prefixes = [prefix for prefix in TESTS if name == prefix or name.startswith(prefix + "/")]
    return TESTS[max(prefixes, key=len)] if prefixes and not name.startswith(LEFT_OUT) else []


def survives(folder: Path, tests: list[str], seconds: float) -> bool:
    """True if all tests pass against the package in ``folder``. A test that hangs has detected the change."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        process.kill()  # its rank processes end with it
        process.wait()
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="number of changes to try")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice of changes")
    parser.add_argument("--first", type=int, default=0, help="first change to try, to continue an earlier run")
    parser.add_argument("--only", default="", help="only files whose names begin so, such as collective/planners")
    parser.add_argument("--seconds", type=float, default=120, help="time after which a change's tests are stopped")
    arguments = parser.parse_args()

    found: list[tuple[str, str, ast.Module]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(arguments.only) and tests_of(name):
            found += [(name, what, changed) for what, changed in changes(ast.parse(path.read_text()))]
    chosen = random.Random(arguments.seed).sample(found, min(arguments.count, len(found)))
    print(f"{len(chosen)} of {len(found)} changes", flush=True)
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="symm_overlap_mutate_") as place:
        folder = Path(place)
        for each in ("symm_overlap", "tests", "csrc", "bench"):
            shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for tests in {tuple(tests_of(name)) for name, _, _ in chosen}:
            # Tests that fail anyway, or that pytest does not find, would seem to notice every change.
            if not survives(folder, list(tests), 10 * arguments.seconds):
                print(f"without a change, these tests fail: {' '.join(tests)}")
                return 1
        for number, (name, what, changed) in list(enumerate(chosen))[arguments.first :]:
            target = folder / "symm_overlap" / name
            target.write_text(ast.unparse(changed))
            start = time.monotonic()
            alive = survives(folder, tests_of(name), arguments.seconds)
            survivors += alive
            shutil.copy(PACKAGE / name, target)
            verdict = "SURVIVES" if alive else "noticed"
            print(f"{number} {verdict} in {time.monotonic() - start:.0f} s: {name} {what}", flush=True)
    print(f"{survivors} of {len(chosen)} survive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
