"""Rules for the package: the modules that each layer may import, the names it may use, and the sizes of its files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import symm_overlap
from tests.plan.test_imports import cycle_in

ROOT = Path(__file__).parents[1]
PACKAGE = Path(symm_overlap.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# The parts of this package that a folder (or file) may import, besides itself. The longest matching name counts.
BELOW: dict[str, set[str]] = {
    "_extension": {"_C"},
    "_torch": set(),
    "_version": set(),
    "plan": {"_sim"},
    "custom_gradient": {"_torch"},
    "settings": {"_C", "_torch", "plan"},
    "blocks": {"settings"},
    "runtime": {"_C", "_torch", "plan"},
    "collective": {"_C", "_torch", "_version", "blocks", "kernels", "plan", "runtime", "settings"},
    "collective/choosing": {
        *("kernels", "plan", "runtime", "settings"),
        *("collective/problem", "collective/planners"),
    },
    "collective/dispatch": {
        *("_C", "_torch", "runtime", "settings"),
        *("collective/_torch", "collective/arguments", "collective/exchange"),
    },
    "collective/exchange": {
        *("_C", "_torch", "kernels", "plan", "runtime", "settings"),
        *("collective/choosing", "collective/layouts", "collective/parts", "collective/planners"),
        *("collective/problem", "collective/scaled"),
    },
    "collective/parts": {"runtime", "collective/layouts", "collective/scaled"},
    "collective/planners": {"plan"},
    "fsdp": set(),
    "kernels": set(),
    "inductor": {"_torch", "__init__", "blocks", "collective", "runtime", "settings"},
    "nn": {"_torch", "collective", "custom_gradient", "settings"},
    "pipeline": {"_sim", "plan"},
    "pipeline/model": {"pipeline"},
    "pipeline/model/trace": {
        *("pipeline/model/_torch", "pipeline/model/environment", "pipeline/model/kept_fakes"),
        *("pipeline/model/memory", "pipeline/model/skeleton"),
    },
    "pipeline/simulation": {"_sim", "plan", "pipeline/action", "pipeline/schedule"},
    "profile": {"collective", "pipeline", "plan", "runtime"},
    "fsdp/communication": {"_torch", "collective", "fsdp/_torch", "plan", "runtime", "settings"},
    "fsdp/layers": {"_torch", "collective", "custom_gradient", "fsdp/_torch"},
    "fsdp/prefetch": {"_torch", "fsdp/_torch", "plan"},
    "pipeline/runtime": {"_C", "_torch", "pipeline", "plan", "runtime", "settings"},
    "inductor/patterns": {"inductor", "collective"},
    "demo": {"_C", "_torch", "__init__", "collective", "fsdp", "pipeline", "plan", "runtime", "settings"},
    "__main__": {"cli"},
    "cli": {
        *(
            "_C",
            "_torch",
            "_version",
            "__init__",
            "collective",
            "demo",
            "fsdp",
            "kernels",
            "pipeline",
            "plan",
            "profile",
            "runtime",
        ),
        "settings",
    },
    "__init__": {"_extension", "_version", "blocks", "collective", "fsdp", "inductor", "nn", "pipeline", "profile"},
}


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text())


def at_import(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, without those in functions or for type checking only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from at_import(node)


def imported(name: str, statements: Iterator[ast.AST]) -> set[str]:
    """Return the modules of this package that these statements of a file import, such as "plan/step"."""
    here = name.removesuffix(".py").split("/")[:-1]
    found = set()
    for node in statements:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "symm_overlap"):
            base = here[: len(here) + 1 - node.level] if node.level else []
            path = [*base, *(node.module or "").split(".")[0 if node.level else 1 :]]
            path = [part for part in path if part]
            for alias in node.names:
                compiled = alias.name if not path and alias.name in ("_C", "_sim") else None
                found.add(module_of([*path, alias.name]) or compiled or module_of(path) or "/".join(path))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "symm_overlap":
                    found.add(module_of(alias.name.split(".")[1:]) or alias.name)
    return found


def module_of(path: list[str]) -> str | None:
    """Return the file of a dotted name, without its suffix. For a package, this is its __init__."""
    plain, package = "/".join(path), "/".join([*path, "__init__"])
    return plain if f"{plain}.py" in FILES else package if f"{package}.py" in FILES else None


def rule_of(name: str) -> str:
    """Return the key of `BELOW` for a file."""
    fits = [key for key in BELOW if name in (f"{key}.py", key) or name.startswith(f"{key}/")]
    return max(fits, key=len, default="")


def broken(rule: Callable[[str], object], files: Sequence[str] = FILES) -> dict[str, object]:
    """Return what breaks a rule, by file. One test checks all files, because a test for each file would take longer."""
    return {name: found for name in files if (found := rule(name))}


def above(name: str) -> list[str]:
    """Return the modules that a file imports although it must not."""
    allowed = BELOW[rule_of(name)] | {rule_of(name)}
    found = imported(name, ast.walk(tree_of(name)))
    return [module for module in found if not any(module == key or module.startswith(f"{key}/") for key in allowed)]


def test_every_file_has_a_layer_and_imports_only_what_is_below_it() -> None:
    assert not broken(lambda name: not rule_of(name)), "these files have no layer: add to BELOW what they may import"
    assert not broken(above)
    assert above("plan/step.py") == []


def test_dir_lists_the_modules_that_are_imported_on_first_use() -> None:
    lazy = {"fsdp", "inductor", "nn", "pipeline", "profile"}
    assert lazy <= set(dir(symm_overlap))
    assert all(getattr(symm_overlap, name).__name__ == f"symm_overlap.{name}" for name in lazy)


def test_imports_are_found() -> None:
    assert {"plan/__init__", "runtime/__init__"} <= imported(
        "collective/exchange/planned.py", ast.walk(ast.parse("from ...plan import Plan\nfrom ... import runtime"))
    )
    assert imported("cli/x.py", ast.walk(ast.parse("from symm_overlap.plan.step import Step"))) == {"plan/step"}
    assert imported("settings.py", ast.walk(ast.parse("from . import _C"))) == {"_C"}
    assert rule_of("collective/planners/gather.py") == "collective/planners"


def test_no_module_imports_itself_by_way_of_others_when_it_is_loaded() -> None:
    graph = {name.removesuffix(".py"): imported(name, at_import(tree_of(name))) for name in FILES}
    # `from . import a` in a package's __init__ loads a, which may import its siblings, but not the package.
    assert {"plan/plan", "plan/step"} <= graph["plan/builder"], "the graph lacks imports that are known to exist"
    assert cycle_in(graph) is None


def back_ends(name: str) -> list[str]:
    """Return the imported modules that belong to one kind of device."""
    modules = imported(name, ast.walk(tree_of(name)))
    return [module for module in modules if module.startswith(("runtime/cpu", "runtime/cuda"))]


def test_only_the_runtime_tells_devices_apart() -> None:
    assert not broken(back_ends, [name for name in FILES if name.startswith("collective/")])
    assert back_ends("runtime/backends.py")


def compared(tree: ast.AST, attribute: str) -> list[str]:
    """Return the comparisons in which one side ends with this attribute, such as ``x.device.type == "cpu"``."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(ast.unparse(side).endswith(attribute) for side in (node.left, *node.comparators))
    ]


def test_no_branch_on_the_kind_of_device_stands_above_the_runtime() -> None:
    higher = [name for name in FILES if not name.startswith("runtime/")]
    assert not broken(lambda name: compared(tree_of(name), "device.type"), higher)
    assert compared(ast.parse("if x.device.type == 'cpu': pass"), "device.type")


def test_an_op_asks_for_no_path() -> None:
    ops = [name for name in FILES if name.startswith("collective/ops/")]
    assert len(ops) > 10
    assert not broken(lambda name: compared(tree_of(name), ".path") + compared(tree_of(name), ".exchange"), ops)


def private_names(tree: ast.AST) -> set[str]:
    """Return torch's private names that a module uses: those with an underscore in their path, and distributed_c10d."""
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            first, *rest = name.split(".")
            private = [part for part in rest if part.startswith("_") and not part.startswith("__")]
            if first in ("torch", "dist") and rest[:1] != ["ops"] and (private or "distributed_c10d" in rest):
                found.add(name)
    return found


# The private names of the compiler and of torch's pipelines have their own files, because importing them takes longer
# than all other imports together.
PRIVATE = (
    "_torch.py",
    "collective/_torch.py",
    "fsdp/_torch.py",
    "inductor/_torch.py",
    "nn/_torch.py",
    "pipeline/_torch.py",
    "pipeline/model/_torch.py",
    "pipeline/runtime/_torch.py",
    "profile/_torch.py",
    "runtime/_torch.py",
)


def test_private_apis_of_torch_are_used_in_one_file_only() -> None:
    assert not broken(lambda name: private_names(tree_of(name)), [name for name in FILES if name not in PRIVATE])


def test_private_names_are_found() -> None:
    assert private_names(tree_of("_torch.py"))
    for code in ("import torch._C", "from torch.distributed import distributed_c10d", "torch._scaled_mm(a)"):
        assert private_names(ast.parse(code)), code
    assert not private_names(ast.parse("torch.__version__; _C.copy(a, b); from torch import nn"))


def test_no_file_is_over_300_lines() -> None:
    lengths = {
        path: len(path.read_text().splitlines()) for top in (PACKAGE, ROOT / "tests") for path in top.rglob("*.py")
    }
    assert len(lengths) > 600
    assert not {str(path): length for path, length in lengths.items() if length > 300}


def long_functions(tree: ast.AST) -> list[str]:
    """Return the functions whose body, without its docstring, has more than 60 lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            if body[-1].end_lineno - body[0].lineno + 1 > 60:  # type: ignore[operator]
                found.append(node.name)
    return found


def test_no_function_body_is_over_60_lines() -> None:
    assert not broken(lambda name: long_functions(tree_of(name)))
    lines = "    pass\n" * 60
    assert long_functions(ast.parse(f"def f():\n{lines}")) == []
    assert long_functions(ast.parse(f"def f():\n{lines}    pass\n")) == ["f"]
