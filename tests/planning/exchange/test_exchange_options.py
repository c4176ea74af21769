"""Tables of other frameworks' options name only options that these frameworks document."""

import ast
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.planning.exchange import levanter, maxtext, megatron, mesh_dim, torchtitan
from meshwright.planning.exchange.plan_fields import OVERLAPS
from meshwright.planning.exchange.tables import exchange_names, load_table, named_options

DOCUMENTED = tomllib.loads((Path(__file__).parent / "documented.toml").read_text())
MODULES = {
    "easylm": mesh_dim,
    "levanter": levanter,
    "lwm": mesh_dim,
    "maxtext": maxtext,
    "megatron": megatron,
    "torchtitan": torchtitan,
}
TAKES = {"take", "number", "whole", "flag", "means", "refusal"}


def names_of(framework):
    return set(DOCUMENTED[framework]["names"].split())


def options_in(module):
    """The options that a module names where it reads one, or assigns to `option`."""
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        first = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKES:
            first = node.args[0] if node.args else None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "option":
            first = node.value
        if isinstance(first, ast.Constant) and first.value:
            yield first.value


@pytest.mark.parametrize("framework", exchange_names())
def test_tables_and_modules_name_documented_options(framework):
    table, known = load_table(framework), names_of(framework)
    assert DOCUMENTED[framework]["source"].split(",")[0] == table.source.split(",")[0]
    assert set(options_in(MODULES[framework])) - {"optimizer.type"} <= {*named_options(table)}
    named = {*named_options(table), *table.defaults}
    assert not named - known
    for pattern in (pattern for patterns in table.nothing.values() for pattern in patterns):
        is_section = pattern.removesuffix(".*") in known
        assert is_section or any(fnmatchcase(name, pattern) for name in known), pattern


@pytest.mark.parametrize("framework", exchange_names())
def test_tables_set_fields_that_a_plan_has(framework):
    table = load_table(framework)
    fields = {*Workload.__dataclass_fields__, *Strategy.__dataclass_fields__, *OVERLAPS}
    named = [*table.numbers.values(), *table.fixed, *table.unsaid]
    named += [field for meaning in table.words.values() for field in meaning]
    assert {field for field in named if "." not in field} <= fields
    assert all(len(meaning) == 1 for meaning in table.words.values())
