"""The text of a user's file with sharding constraints added, and the diff."""

from __future__ import annotations

import ast
import difflib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from jax.sharding import PartitionSpec

from meshwright.proof.program_plans.sources import Assignment, first_place, read_source


def changed_files(constraints: Mapping[Assignment, PartitionSpec]) -> dict[Path, str]:
    """Return {file: its text with constraints}. constraints: {assignment: the spec to constrain its value to}."""
    by_file: dict[Path, dict[Assignment, PartitionSpec]] = defaultdict(dict)
    for at, spec in constraints.items():
        by_file[at.file][at] = spec
    return {file: constrained_text(read_source(file), found) for file, found in by_file.items()}


def constrained_text(text: str, constraints: Mapping[Assignment, PartitionSpec]) -> str:
    """Return a file's text with the constraints added after their assignments, and the imports that they need."""
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    end = "\r\n" if "\r\n" in text else "\n"
    jax_name, spec_name = _imported(tree, "jax"), _imported(tree, "PartitionSpec")
    for at, spec in sorted(constraints.items(), key=lambda item: -item[0].line):
        call = f"{jax_name or 'jax'}.lax.with_sharding_constraint({at.name}, {spec_text(spec, spec_name)})"
        lines[at.line - 1] = lines[at.line - 1].rstrip("\r\n") + end
        lines.insert(at.line, f"{at.indent}{at.name} = {call}{end}")
    # After the last import from JAX, else the last import.
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    of_jax = [node for node in imports if ast.unparse(node).split()[1].split(".")[0] == "jax"]
    before = of_jax or imports or tree.body[: first_place(tree)]
    place = before[-1].end_lineno or 0 if before else 0
    imports = ([] if jax_name else ["import jax"]) + ([] if spec_name else ["from jax.sharding import PartitionSpec"])
    lines[place:place] = [f"{one}{end}" for one in imports]
    return "".join(lines)


def diff(file: Path, before: str, after: str) -> str:
    """Return the unified diff of a file, for `git apply` or `patch`, with its path relative to this directory."""
    here = Path.cwd()
    path = (
        file.resolve().relative_to(here).as_posix()
        if file.resolve().is_relative_to(here)
        else str(file.resolve()).lstrip("/")
    )
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def spec_text(spec: PartitionSpec, name: str = "") -> str:
    """Return a spec as source text. name: the file's name for PartitionSpec; '' if it is not imported yet."""
    name = name or "PartitionSpec"
    entries = (f"{name}.UNCONSTRAINED" if one is PartitionSpec.UNCONSTRAINED else _entry(one) for one in spec)
    return f"{name}({', '.join(entries)})"


def _entry(axes: str | tuple[str, ...] | None) -> str:
    """Return the axes of a dim as source text: `None`, `"dp"` or `("dp", "fsdp")`."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    texts = [f'"{name}"' for name in names]
    return f"({', '.join(texts)})" if len(texts) > 1 else (texts or ["None"])[0]


def _imported(tree: ast.Module, name: str) -> str:
    """Return the name under which a file imports `name`, `jax` or a member of a JAX module; '' if it does not."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if alias.name == name:
                    return alias.asname or alias.name
                if isinstance(node, ast.Import) and not alias.asname and alias.name.startswith(f"{name}."):
                    return name
    return ""
