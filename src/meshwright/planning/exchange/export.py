"""Write a plan as another framework's settings, and check that reading them gives the same plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import System
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.exchange import levanter, maxtext, megatron, torchtitan
from meshwright.planning.exchange.files import write_values
from meshwright.planning.exchange.plan_fields import THETA, plan_fields
from meshwright.planning.exchange.reading import read_options
from meshwright.planning.exchange.tables import OptionTable, load_table
from meshwright.planning.options import STRATEGY_OPTIONS, WORKLOAD_OPTIONS

_WRITERS: Mapping[str, Callable[[dict[str, Any], System], dict[str, Any]]] = {
    "levanter": levanter.write,
    "maxtext": maxtext.write,
    "megatron": megatron.write,
    "torchtitan": torchtitan.write,
}


@dataclass(frozen=True)
class Exported:
    """A plan as another framework's settings.

    text: the content of the settings file. unsaid: for each field of the plan that the file leaves out, the reason.
    """

    text: str
    unsaid: Mapping[str, str]


def export_settings(
    framework: str, workload: Workload, mesh: MeshShape, strategy: Strategy, system: System
) -> Exported:
    """Return a plan as settings of another framework: maxtext, torchtitan, megatron or levanter.

    Raises:
        MeshwrightError: the framework is unknown, or has no option or value for a field of the plan.
    """
    table = export_table(framework)
    fields = plan_fields(workload, mesh, strategy)
    values = _values(framework, table, fields, workload.config, system)
    try:
        known = {field: fields[field] for field in table.unsaid if field.startswith("model.")}
        read = read_options(framework, values, system, known=known)
    except MeshwrightError as error:
        raise MeshwrightError(f"{table.title} cannot run this plan: {error}") from None
    theirs = plan_fields(read.workload, read.mesh, read.strategy)
    wrong = {
        field: theirs.get(field) for field in fields if field not in table.unsaid and theirs.get(field) != fields[field]
    }
    if wrong:
        said = ", ".join(f"{field.removeprefix('model.')}={_shown(fields[field])}" for field in wrong)
        others = ", ".join(_shown(value) for value in wrong.values())
        if "param_dtype" in wrong:  # By default moments have the parameters' dtype, so advice names both.
            wrong["moment_dtype"] = theirs["moment_dtype"]
        advice = " ".join(filter(None, (_option(field, value) for field, value in wrong.items())))
        hint = f"; plan with {advice}" if advice else ""
        raise MeshwrightError(f"{table.title} cannot say {said}: its steps have {others}{hint}")
    unsaid = {
        field: why for field, why in table.unsaid.items() if field in known or fields.get(field) != theirs.get(field)
    }
    return Exported(write_values(values, table.format), unsaid)


def export_table(framework: str) -> OptionTable:
    """Return the table of a framework that plans can be exported to. Raises for any other name."""
    if framework not in _WRITERS:
        raise MeshwrightError(f"no export for {framework!r}; a plan is written for {', '.join(_WRITERS)}")
    return load_table(framework)


def _values(
    framework: str, table: OptionTable, fields: dict[str, Any], model: ModelConfig, system: System
) -> dict[str, Any]:
    """Return the values of the framework's options that express the fields of a plan, by option."""
    values: dict[str, Any] = {}
    preset = PRESETS.get(model.name)
    named = ""
    if preset is not None and preset == replace(model, num_layers=preset.num_layers):
        named = table.models.get(model.name, "")
    if framework == "torchtitan" and not named:
        raise MeshwrightError(f"torchtitan has no flavor of {model.name}; it has {', '.join(table.models)}")
    if framework == "torchtitan" and preset != model:
        raise MeshwrightError(
            f"torchtitan's flavors have all layers; {model.name} with num_layers={model.num_layers} does not"
        )
    if framework == "maxtext" and named:
        values["model_name"] = named
        if preset != model:
            values |= {"override_model_config": True, "base_num_decoder_layers": model.num_layers}
    written = _WRITERS[framework](fields | {"model": named}, system)
    skipped = ("model.", "experts.") if named else ()
    for option, field in table.numbers.items():
        if fields.get(field) is not None and not field.startswith(skipped):
            values[option] = int(fields[field]) if field == THETA else fields[field]
    for option, meaning in table.words.items():
        ((field, words),) = meaning.items()
        if field not in fields or (skipped and field.startswith(skipped)):
            continue
        value = "" if fields[field] is None else fields[field]
        word = next((word for word, ours in words.items() if ours == value), None)
        if word is None and (framework, value) == ("maxtext", "offload"):
            continue  # `maxtext.write` expresses it by two options.
        if word is None:
            known = ", ".join(str(ours) for ours in dict.fromkeys(words.values()))
            raise MeshwrightError(f"{table.title} has no {field}={fields[field]}; its {option} is {known} here")
        if word not in ("", "false") or (table.format != "flags" and word):
            values[option] = {"true": True, "false": False}.get(word, word)
    if not named:
        values |= {option: allowed[0] for option, allowed in table.structure.items()}
    return values | written


def _shown(value: Any) -> str:
    """Return a value as text for a message; for an object, only its type."""
    return type(value).__name__ if is_dataclass(value) else str(value)


def _option(field: str, value: Any) -> str:
    """Return the option of `meshwright plan` that sets a field to a value; '' if there is none."""
    name = {"compute_dtype": "dtype"}.get(field, field)
    if name not in (*WORKLOAD_OPTIONS, *STRATEGY_OPTIONS) or value is None or value is False:
        return ""
    return f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
