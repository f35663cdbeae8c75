"""Modules of symm_overlap.plan have no import cycles, and import nothing from the layers above."""

import ast
from pathlib import Path

import pytest

import symm_overlap.plan as package

ROOT = Path(package.__file__).parent
MODULES = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.rglob("*.py"))


def imports(path, module):
    """Return all that a module imports, also in functions and for types: paths relative to the package's root.

    A path that leads out of the package begins with "..".
    """
    here = module.split("/")[:-1]
    found = set()
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.ImportFrom) and statement.level:
            up = statement.level - 1
            base = here[: len(here) - up] if up <= len(here) else [".."]
            target = base + (statement.module.split(".") if statement.module else [])
            names = [target] if statement.module else [[*target, alias.name] for alias in statement.names]
            found |= {"/".join(name) for name in names}
    return found


def resolved(name):
    """Return the module that an import names: a file, or the __init__ of a folder."""
    return name if name in MODULES else f"{name}/__init__" if f"{name}/__init__" in MODULES else name


COMPILED = "../_sim"
GRAPH = {module: {resolved(name) for name in imports(ROOT / f"{module}.py", module)} for module in MODULES}


def cycle_in(graph):
    """Return a list of modules, each of which imports the next, and the last the first. None if there is no cycle."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return None
        path.append(module)
        found = next(filter(None, map(visit, sorted(graph.get(module, ())))), None)
        path.pop()
        done.add(module)
        return found

    return next(filter(None, map(visit, sorted(graph))), None)


def test_no_module_imports_itself_by_way_of_others():
    assert cycle_in(GRAPH) is None


def test_cycles_are_found():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    assert "step" in GRAPH["program"], "the graph contains known imports"
    assert "kinds" in GRAPH["draw/svg"]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_above_is_imported(module):
    above = [name for name in GRAPH[module] if name.startswith("..")]
    assert above == ([COMPILED] if module == "work" else []), "only the compiled module, which is below all layers"


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("testing/")])
def test_the_product_does_not_import_helpers_of_tests(module):
    assert not [name for name in GRAPH[module] if name.startswith("testing")]
