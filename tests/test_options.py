"""Options are declared once: the keywords of the library are those of the dataclasses that commands read.

To write the keywords after a change of `meshwright.options`: python tests/test_options.py
"""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import meshwright
from meshwright.cli.words.help import field_docs
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.options import plan, processes, serving, training
from meshwright.options.declare import Keyword

FILE = Path(meshwright.__file__).parent / "options" / "keywords.py"
GROUPS = {
    "WorkloadOptions": ("TypedDict", "The workload, and how its hardware is described.", [plan.WorkloadArgs], {"on"}),
    "StrategyOptions": (
        "TypedDict",
        "How a step runs. Default: the planner's choice; where it does not choose, the value in parentheses.",
        [plan.StrategyArgs],
        set(),
    ),
    "ServingOptions": (
        "TypedDict",
        "The serving workload and its hardware.",
        [serving.ServedArgs, serving.FormatArgs],
        {"serve"},
    ),
    "PlanOptions": ("WorkloadOptions, StrategyOptions", "A plan: workload, strategy, hardware and mesh.", [], set()),
    "SearchOptions": (
        "WorkloadOptions, StrategyOptions",
        "The workload of `meshwright.plan`, and choices that the planner must keep.",
        [],
        set(),
    ),
    "TrainOptions": (
        "PlanOptions",
        "A run: its plan, and the settings that are not in it.",
        [
            training.StartArgs,
            training.DataArgs,
            training.PreferenceArgs,
            training.OptimizerArgs,
            training.SavingArgs,
            training.WatchArgs,
        ],
        {"from_scratch"},
    ),
    "ServeOptions": (
        "TypedDict",
        "A server: the model's devices, the engine, HTTP, and its processes.",
        [serving.ModelArgs, serving.ServeArgs, processes.ProcessArgs],
        {"model"},
    ),
}
"""The keywords' classes: what each extends, its docstring, the groups it has, and their options that it leaves out."""

MORE = {
    "PlanOptions": {
        "on": ("SystemLike", "The hardware, as v5p:4x4x4."),
        "mesh": ("MeshLike | None", "As fsdp=-1,tp=4. Default: the planner chooses."),
    },
    "SearchOptions": {
        "include_planned": ("bool", "Include plans that meshwright cannot train yet."),
        "framework": (
            "str | None",
            "Predict steps as another framework runs them: megatron-core, maxtext, torchtitan, …. Default: meshwright.",
        ),
    },
}
"""Keywords that are arguments of their own at the commands."""

HEAD = '''"""The keywords of the library, for type checkers: written by `python tests/test_options.py`, not by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from meshwright.description.step.trained import BaseFormat
from meshwright.description.step.strategy import (
    Attention, MatmulDtype, OnBadStep, Optimizer, RateSchedule, SequenceMethod, TpStream,
)
from meshwright.description.step.serving import CacheSplit
from meshwright.description.step.workload import Dtype, Objective, Reference, Remat
from meshwright.options.values import Count, MeshLike, SystemLike
'''


def declared(group):
    """Every field of a group: its name, the type of the keyword as source text, and its help."""
    hints = get_type_hints(group, include_extras=True)
    docs = field_docs(group)
    for node in ast.parse(textwrap.dedent(inspect.getsource(group))).body[0].body:
        if isinstance(node, ast.AnnAssign):
            name = node.target.id
            yield name, keyword_type(node.annotation, getattr(hints[name], "__metadata__", ())), docs[name]


def keyword_type(annotation, metadata):
    """The type that the library takes where a command takes text."""
    if found := next((item.type for item in metadata if isinstance(item, Keyword)), None):
        return found
    plain = ast.unparse(annotation.slice.elts[0] if isinstance(annotation, ast.Subscript) else annotation)
    plain = plain.replace("'", '"')
    if plain == "bool":
        return "bool | None"
    return {"tuple[str, ...]": "str | Sequence[str] | None", "Path | None": "str | Path | None"}.get(plain, plain)


def written():
    """The source of `options/keywords.py`, formatted."""
    lines = [HEAD]
    for name, (bases, doc, groups, without) in GROUPS.items():
        found = [one for group in groups for one in declared(group) if one[0] not in without]
        found += [(option, *what) for option, what in MORE.get(name, {}).items()]
        lines += ["", f"class {name}({bases}, total=False):", f'    """{doc}"""', ""]
        for option, kind, text in found:
            help_ = textwrap.fill(text, 112, subsequent_indent="    ")
            lines += [
                f"    {option}: {kind}",
                f'    """{help_}"""' if "\n" not in help_ else f'    """{help_}\n    """',
            ]
        lines.append("")
    source = "\n".join(lines)
    for command in (["check", "--fix-only", "--select", "I"], ["format"]):
        ruff = Path(sys.executable).with_name("ruff")
        source = subprocess.run(
            [ruff, *command, "-q", "--stdin-filename", str(FILE), "-"],
            input=source,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return source


def test_the_keywords_of_the_library_are_the_options_of_the_commands():
    assert FILE.read_text() == written()


def test_a_setting_is_of_one_option():
    paths = [setting.path for setting in training.SETTINGS.values()]
    assert len(paths) == len(set(paths)) == 39
    names = [field.name for group in GROUPS["TrainOptions"][2] for field in fields(group)]
    assert set(training.SETTINGS) == {*names, "adapter"} - {"from_scratch"}


def default_of(setting):
    """The default of the field of a run's config that a setting names."""
    part, _, name = setting.path.rpartition(".")
    config = get_type_hints(RunConfig)[part] if part else RunConfig
    return next(field.default for field in fields(config) if field.name == name)


def test_the_default_that_a_help_tells_is_the_one_of_the_config():
    helps = {name: text for _, _, groups, _ in GROUPS.values() for group in groups for name, _, text in declared(group)}
    told = {
        name: found[1]
        for name in training.SETTINGS
        if name != "save_every" and (found := re.search(r"Default: ([a-z0-9][\w.-]*?)[.,;]*(?: |$)", helps[name]))
    }
    same = {
        name
        for name, text in told.items()
        if (default := default_of(training.SETTINGS[name])) == text or is_number(text, default)
    }
    assert same == {
        "b1", "b2", "bad_data", "beta", "clip_norm", "decay_share", "eps", "eval_every", "final_rate", "grace_seconds",
        "held_out", "keep", "label_smoothing", "learning_rate", "lr_schedule", "max_bad_steps", "momentum",
        "on_bad_step", "preference_loss", "seed", "weight_decay",
    }  # fmt: skip


def is_number(text, default):
    """Whether a text is the number that a default is."""
    try:
        return float(text) == default
    except ValueError:
        return False


if __name__ == "__main__":
    FILE.write_text(written())
