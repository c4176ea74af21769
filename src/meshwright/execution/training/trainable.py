"""Select the trained part of a parameter tree, and merge it back with the frozen part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Tree = Any
"""Nested dicts of arrays by name, like parameters."""


def drop_paths(tree: Tree, paths: Collection[str], prefix: str = "") -> Tree:
    """Return a tree without the leaves at some paths (`layers.query`), and without empty subtrees."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            if kept := drop_paths(value, paths, f"{path}."):
                found[name] = kept
        elif path not in paths:
            found[name] = value
    return found


def merge_trees(tree: Tree, part: Tree) -> Tree:
    """Return a tree with the leaves of `part` added, or replacing its own."""
    found = dict(tree)
    for name, value in part.items():
        found[name] = merge_trees(found.get(name, {}), value) if isinstance(value, Mapping) else value
    return found
