"""The house: a package imports only from those below it, no modules import each other, planning needs no JAX."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent

# From the ground up: modules of the top level, wings, and the packages of a wing, each before what may import it.
FLOORS = (
    "errors",
    "units",
    "support",
    "mesh",
    "record",
    "description.notation",
    "description.hardware",
    "description.step",
    "description.families",
    "description.frameworks",
    "options",
    "planning.cost",
    "planning",
    "execution.processes",
    "description.hlo",
    "execution.text",
    "execution.data",
    "execution.runtime",
    "execution.weights",
    "execution.models",
    "execution.training",
    "execution.loading",
    "serving",
    "proof.compiler",
    "proof.simulate",
    "proof.verification",
    "proof.programs",
    "proof.inspection",
    "proof.program_plans",
    "pictures",
    "lessons",
    "examples",
    "learn",
    "cli",
    "__main__",
)
WINGS = {floor.split(".")[0] for floor in FLOORS if (ROOT / floor.split(".")[0]).is_dir()}
# Planning imports neither JAX nor NumPy, so that `meshwright plan` answers at once.
WITHOUT_JAX = FLOORS[: FLOORS.index("description.hlo")]

# Packages of use to any JAX user: all that they may import of meshwright.
NEEDS = {"description.hlo": {"errors", "record", "description.hlo"}}

# What a shape and a plan do in JAX stands above them, and so do an inspection's screen and page; these files load it in
# the methods that need it, by these names.
BRIDGES = {
    "mesh.py": ("meshwright.execution.runtime.carry",),
    "planning/plan.py": ("meshwright.execution.runtime.carry",),
    "planning/library.py": ("meshwright.proof.program_plans.plan",),
    "proof/program_plans/plan.py": ("meshwright.pictures.screens.programs",),
    "proof/verification/plans.py": ("meshwright.pictures.screens.verification",),
    "proof/verification/serving.py": ("meshwright.pictures.screens.verification",),
    "proof/inspection/inspection.py": ("meshwright.pictures.pages", "meshwright.pictures.screens.inspection"),
}

# A module, or a function in one, that a string names: for import_module, a table of lazy names, or a child's `-m`.
NAMED = re.compile(r"meshwright((?:\.\w+)+)\.?(?::\w+)?")


def module_name(path: Path) -> str:
    """The dotted name of a file, a package's for its `__init__.py`."""
    parts = ("meshwright", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
FILES = sorted(path for path in MODULES.values() if path.name != "__init__.py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def import_statements(path: Path) -> Iterator[tuple[str, str]]:
    """Every imported (module, name), in functions and under TYPE_CHECKING too; the name is '' for `import module`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno} imports relatively"
            yield from ((node.module or "", alias.name) for alias in node.names)


def named_in_strings(path: Path) -> Iterator[str]:
    """Every module of meshwright that a whole string names, or the beginning of an f-string."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (found := NAMED.fullmatch(node.value)):
            yield f"meshwright{found[1]}"


def packages_of(path: Path) -> set[str]:
    """The packages of meshwright, and its single modules on the top level, that a file depends on."""
    names = [f"{module}.{name}" for module, name in import_statements(path)] + list(named_in_strings(path))
    bridges = BRIDGES.get(str(path.relative_to(ROOT)), ()) if path.is_relative_to(ROOT) else ()
    names = [name for name in names if not name.startswith(bridges)] if bridges else names
    return {floor for name in names if name.startswith("meshwright.") and (floor := floor_named(name.split(".")[1:]))}


def floor_named(parts: Sequence[str]) -> str:
    """The floor of a module by the parts of its name below `meshwright`, '' if it has none."""
    return next((floor for count in (2, 1) if (floor := ".".join(parts[:count])) in FLOORS), "")


def floor_of(path: Path) -> str:
    """The floor a file stands on; the docstrings of a wing and of the whole stand on none."""
    return floor_named(path.relative_to(ROOT).with_suffix("").parts)


def needed(module: str, name: str) -> str:
    """The module that an import needs: what is imported, or the module that holds it."""
    return f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def circles(graph: dict[str, set[str]]) -> list[str]:
    """A circle of imports as text for each module that can reach itself, the shortest."""
    found = []
    for start in graph:
        paths = {start: [start]}
        queue = [start]
        while queue:
            module = queue.pop(0)
            for after in sorted(graph.get(module, ())):
                if after == start:
                    found.append(" -> ".join([*paths[module], start]))
                    queue.clear()
                    break
                if after not in paths:
                    paths[after] = [*paths[module], after]
                    queue.append(after)
    return found


def test_a_file_imports_from_its_own_floor_and_those_below():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}, which is above {floor_of(path)}"
        for path in FILES
        for name in packages_of(path)
        if FLOORS.index(name) > FLOORS.index(floor_of(path))
    ]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(BRIDGES))
def test_a_bridge_is_crossed_in_a_function_only(name):
    top = [node for node in tree_of(ROOT / name).body if isinstance(node, ast.ImportFrom)]
    for bridge in BRIDGES[name]:
        assert bridge not in {node.module for node in top}
        assert bridge in {module for module, _ in import_statements(ROOT / name)}


@pytest.mark.parametrize("package", NEEDS)
def test_a_package_for_any_jax_user_needs_little_else(package):
    needed = set().union(*(packages_of(path) for path in FILES if floor_of(path) == package))
    assert needed <= NEEDS[package]


def test_every_file_stands_on_a_floor_and_every_folder_is_a_wing():
    assert [str(path.relative_to(ROOT)) for path in FILES if not floor_of(path)] == []
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == WINGS


def test_a_folder_has_at_most_25_modules():
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in FILES)
    assert {name: count for name, count in folders.items() if count > 25} == {}


def test_no_modules_import_each_other():
    graph = {
        name: {
            target
            for module, imported in import_statements(path)
            if (target := needed(module, imported)) in MODULES
            and target not in BRIDGES.get(str(path.relative_to(ROOT)), ())
        }
        for name, path in MODULES.items()
        if path.name != "__init__.py"
    }
    assert circles(graph) == []


def test_a_package_is_a_docstring_so_that_an_import_names_the_file_it_reads():
    wrong = [
        f"{path.relative_to(ROOT)} holds {ast.unparse(node)[:60]}"
        for path in MODULES.values()
        if path.name == "__init__.py" and path.parent != ROOT
        for node in tree_of(path).body[1:]
    ]
    assert wrong == []
    assert [name for name, path in MODULES.items() if not ast.get_docstring(tree_of(path))] == []


def test_circles_are_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert circles(graph) == ["a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c"]


def test_imports_in_functions_and_in_strings_are_seen(tmp_path):
    path = tmp_path / "hidden.py"
    path.write_text(
        "def f(name):\n    import meshwright.cli.main\n    from meshwright.pictures import show\n"
        '    run(["-m", "meshwright.proof.compiler.worker"])\n'
        '    import_module(f"meshwright.execution.training.{name}")\n'
        'HOMES = {"f": ("meshwright.proof.verification", "f"), "g": "meshwright.proof.inspection.lower:g"}\n'
    )
    assert packages_of(path) == {
        "cli", "pictures", "proof.compiler", "execution.training", "proof.verification", "proof.inspection",
    }  # fmt: skip


def test_the_lower_floors_name_neither_jax_nor_numpy():
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in FILES
        if floor_of(path) in WITHOUT_JAX
        for module, _ in import_statements(path)
        if module.split(".")[0] in {"jax", "jaxlib", "flax", "optax", "numpy"}
    ]
    assert wrong == []


def test_no_file_uses_jax_internals_but_the_one_that_compiles_for_absent_gpus():
    """JAX asks the process's own GPUs for their compute capability, and has no public argument for that of a target."""
    using = [path.relative_to(ROOT).as_posix() for path in FILES if "jax._src" in path.read_text()]
    assert using == ["proof/compiler/worker.py"]


def test_no_file_is_longer_than_500_lines():
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in FILES}
    assert {name: count for name, count in lines.items() if count > 500} == {}


def test_planning_loads_neither_jax_nor_numpy_nor_any_package_but_those_of_the_command_line():
    code = (
        "import sys; before = set(sys.modules); from meshwright.cli.main import main\n"
        "main(['plan', 'llama3-8b', '--on', 'v5p:4x4x4', '--batch', '512', '--seq-len', '8192'])\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "print(*sorted(loaded), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stderr.split()) <= {"meshwright", "rich"}


def test_reading_hlo_loads_no_jax():
    code = "import sys, meshwright.description.hlo.text; print({'jax', 'jaxlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
