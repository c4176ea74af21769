"""The house: each package imports only from those below it, and those on the ground floor need no JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent

# From the ground up. Before `parallel` nothing imports JAX, so that `meshwright plan` answers at once.
FLOORS = (
    "errors",
    "units",
    "mesh",
    "record",
    "notation",
    "hardware",
    "workload",
    "cost",
    "planner",
    "parallel",
    "models",
    "compiled",
    "findings",
    "training",
    "pictures",
    "pages",
    "cli",
)
WITHOUT_JAX = FLOORS[: FLOORS.index("parallel")]


def imported(path):
    """The top-level packages that a file imports: (package, whether of meshwright)."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "meshwright" and len(parts) > 1:
                yield parts[1], True
            elif parts[0] != "meshwright":
                yield parts[0], False


def floor_of(path):
    """The floor a file stands on."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_from_its_own_floor_and_those_below(path):
    here = FLOORS.index(floor_of(path))
    for name, is_ours in imported(path):
        if is_ours and name in FLOORS:
            assert FLOORS.index(name) <= here, f"{path.name} imports {name}, which is above {floor_of(path)}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if floor_of(p) in WITHOUT_JAX], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_ground_floor_names_no_jax(path):
    assert not {name for name, is_ours in imported(path) if not is_ours} & {"jax", "jaxlib", "flax", "optax", "numpy"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_uses_jax_internals_or_is_longer_than_500_lines(path):
    text = path.read_text()
    assert "jax._src" not in text
    assert text.count("\n") <= 500


def test_planning_loads_neither_jax_nor_numpy():
    code = (
        "import sys; from meshwright.cli.main import main\n"
        "main(['plan', 'llama3-8b', '--on', 'v5p:4x4x4', '--batch', '512', '--seq-len', '8192'])\n"
        "print({'jax', 'jaxlib', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
