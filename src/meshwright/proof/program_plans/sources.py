"""Mark the assignments in a user's files, so that each can be found in the traced program.

A marked module is imported from changed source: a call of `mark` follows each `name = expression`. When the function is
traced inside `marking`, the call becomes a sharding constraint with all dims unconstrained, in a name scope with the
assignment's number. JAX transforms it like a real constraint: its transpose constrains the cotangent, and
rematerialization repeats it.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, PartitionSpec

from meshwright.proof.compiler.load import is_installed
from meshwright.proof.inspection.meshes import only_mesh

_MARK = "__meshwright_mark__"

_SCOPE = re.compile(r"meshwright_mark_(\d+)_(\d+)")
"""The name scope of a marked value: the number of its assignment, and the value's number of dims."""


@dataclass(frozen=True)
class Assignment:
    """`name = expression` in a function. line: the statement's last line, from 1. indent: its indentation."""

    file: Path
    line: int
    indent: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"


class Marks(ast.NodeTransformer):
    """Add a call of `mark` after each assignment to one name in functions; list the assignments, indexed by number."""

    def __init__(self) -> None:
        self.assignments: list[Assignment] = []
        self._file, self._lines, self._is_in_function = Path(), list[str](), False

    def marked(self, file: Path, text: str) -> ast.Module:
        """Return the syntax tree of a file with its assignments marked."""
        tree = ast.parse(text, str(file))
        self._file, self._lines, self._is_in_function = file, text.splitlines(), False
        self.visit(tree)
        imported = ast.parse(f"from {__name__} import mark as {_MARK}").body[0]
        tree.body.insert(first_place(tree), imported)
        return ast.fix_missing_locations(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Mark the assignments of a function."""
        return self._inside(node, is_in_function=True)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Mark assignments in the methods of a class, not its attributes."""
        return self._inside(node, is_in_function=False)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        """Return `name = expression` followed by the call that marks it (`_assigned`)."""
        return self._assigned(node, node.targets)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | list[ast.AST]:
        """Return `name += expression` followed by the call that marks it (`_assigned`)."""
        return self._assigned(node, [node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | list[ast.AST]:
        """Return `name: type = expression` followed by the call that marks it (`_assigned`)."""
        return self._assigned(node, [node.target] if node.value else [])

    def _inside(self, node: ast.AST, *, is_in_function: bool) -> ast.AST:
        outside, self._is_in_function = self._is_in_function, is_in_function
        self.generic_visit(node)
        self._is_in_function = outside
        return node

    def _assigned(self, node: Any, targets: list[ast.expr]) -> ast.AST | list[ast.AST]:
        """Return a statement, with a call of `mark` after it if it assigns one name and is alone on its lines."""
        before = self._lines[node.lineno - 1].encode()[: node.col_offset]
        after = self._lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        is_alone = not before.strip() and (not after.strip() or after.lstrip().startswith("#"))
        if not (self._is_in_function and is_alone and len(targets) == 1 and isinstance(targets[0], ast.Name)):
            return node
        name = targets[0].id
        call = ast.parse(f"{name} = {_MARK}({name}, {len(self.assignments)})").body[0]
        for inner in ast.walk(call):
            ast.copy_location(inner, node)
        self.assignments.append(Assignment(self._file, node.end_lineno, before.decode(), name))
        return [node, call]


def first_place(tree: ast.Module) -> int:
    """Return the index in `tree.body` of the first statement after the docstring and `from __future__` imports."""
    place = 0
    for number, node in enumerate(tree.body):
        is_docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        place = number + 1
    return place


_marking: list[AbstractMesh] = []


@contextmanager
def marking(mesh: AbstractMesh) -> Iterator[None]:
    """Context in which tracing turns the calls of `mark` into constraints on this mesh."""
    with only_mesh(mesh):
        _marking.append(mesh)
        try:
            yield
        finally:
            _marking.pop()


def mark(value: Any, number: int) -> Any:
    """Return an assigned value. A traced float array of at least two dims gets a sharding constraint that marks it.

    The constraint leaves all dims unconstrained, and its name scope holds `number`, the number of the assignment, so
    that it can be found in the program. Values inside `shard_map` are returned as they are: JAX allows no sharding
    constraints there.
    """
    is_marked = _marking and jax.sharding.get_abstract_mesh() == _marking[-1] and isinstance(value, Tracer)
    if not is_marked or jnp.ndim(value) < 2 or not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    with jax.named_scope(f"meshwright_mark_{number}_{value.ndim}"):
        return jax.lax.with_sharding_constraint(value, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * value.ndim))


def mark_in(scope: str) -> tuple[int, int] | None:
    """Return the assignment number and the number of dims that `mark` put in a name scope; None if it did not."""
    found = _SCOPE.search(scope)
    return (int(found[1]), int(found[2])) if found else None


@contextmanager
def sources(rewrite: Callable[[Path, str], ast.Module | str]) -> Iterator[None]:
    """Context in which the user's modules are imported from changed sources, including modules already imported.

    rewrite: returns the new text or syntax tree, from a file and its text. Installed packages are not rewritten.
    """

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        file = Path(loader.get_filename(name))
        if is_installed(file):
            return super(SourceFileLoader, loader).get_code(name)
        return compile(rewrite(file, read_source(file)), str(file), "exec", dont_inherit=True)

    before = _forget_modules()
    # All finders, and loading a file by its path, use this loader.
    setattr(SourceFileLoader, "get_code", get_code)  # noqa: B010
    try:
        yield
    finally:
        delattr(SourceFileLoader, "get_code")  # the inherited method is found again
        _forget_modules()
        sys.modules.update(before)


def _forget_modules() -> dict[str, ModuleType]:
    """Remove the modules of the user's files from `sys.modules`, and return them by name."""
    found = {
        name: module
        for name, module in sys.modules.items()
        if name != "__main__" and (file := getattr(module, "__file__", None)) and not is_installed(Path(file))
    }
    for name in found:
        del sys.modules[name]
    return found


def read_source(file: Path) -> str:
    """Return the text of a Python file, decoded as it declares and with its line endings unchanged."""
    with file.open("rb") as opened:
        encoding, _ = tokenize.detect_encoding(opened.readline)
    return file.read_bytes().decode(encoding)
