"""Convert another framework's options to a workload, a mesh and a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.description.families.comparison import features
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import System
from meshwright.description.step.model import Model, ModelConfig
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.exchange import levanter, maxtext, megatron, mesh_dim, torchtitan
from meshwright.planning.exchange.plan_fields import THETA, mesh_of, model_of, strategy_of, workload_of
from meshwright.planning.exchange.settings import Meaning, Settings, same
from meshwright.planning.exchange.tables import load_table

_READERS: Mapping[str, Callable[[Settings], None]] = {
    "easylm": mesh_dim.read,
    "levanter": levanter.read,
    "lwm": mesh_dim.read,
    "maxtext": maxtext.read,
    "megatron": megatron.read,
    "torchtitan": torchtitan.read,
}

_SIZES: Mapping[str, Callable[[Settings], None]] = {
    "easylm": mesh_dim.read_sizes,
    "levanter": levanter.read_sizes,
    "lwm": mesh_dim.read_sizes,
    "megatron": megatron.read_sizes,
}


@dataclass(frozen=True, kw_only=True)
class Read:
    """A plan read from another framework's options.

    meanings: the meaning of each option. nothing: the options that do not affect a step, by the reason.
    """

    workload: Workload
    mesh: MeshShape
    strategy: Strategy
    meanings: tuple[Meaning, ...]
    nothing: Mapping[str, list[str]]


def read_options(
    name: str,
    values: Mapping[str, Any],
    system: System,
    *,
    model: ModelConfig | None = None,
    model_name: str = "imported",
    known: Mapping[str, Any] | None = None,
) -> Read:
    """Return the plan that the options of a framework describe.

    Args:
        name: the framework.
        values: the values of its options, as `exchange.files.read_values` returns them.
        system: the hardware; the degrees must multiply to its devices.
        model: the model, if the options do not describe it. Sizes in the options must agree with it.
        model_name: the name of a model that is described by sizes and is not a preset.
        known: values of fields that no option sets, e.g. of the vocabulary size, which comes from a tokenizer.

    Raises:
        MeshwrightError: an option or a value is unknown, or cannot be planned.
    """
    settings = Settings(load_table(name), values, system)
    if settings.table.mesh_dim:
        mesh_dim.expand(settings)
    _read_numbers(settings)
    _read_words(settings, name)
    if name in _SIZES:
        _SIZES[name](settings)
    settings.fields |= known or {}
    settings.model = _read_model(settings, name, model, model_name)
    settings.fields |= settings.table.fixed
    settings.fields.setdefault("attention", "flash")
    options = [option for option, field in settings.table.numbers.items() if field == "seq_len"]
    if options and "seq_len" not in settings.fields:
        raise settings.refusal(options[0], "is missing")
    _READERS[name](settings)
    fields = settings.fields
    has_parts = fields.get("sp", 1) > 1 and fields.get("sp_method") != "ulysses"
    if fields["attention"] == "cudnn" and (system.chip.kind != "gpu" or has_parts):
        # cuDNN's kernel is planned only on GPUs and for whole sequences.
        fields["attention"] = "flash"
    settings.take_single_valued()
    nothing = settings.take_without_effect()
    settings.check_all_known()
    mesh = mesh_of(settings.fields)
    workload = workload_of(settings.fields, settings.model)
    strategy = strategy_of(settings.fields, mesh)
    return Read(workload=workload, mesh=mesh, strategy=strategy, meanings=tuple(settings.meanings), nothing=nothing)


def _read_numbers(settings: Settings) -> None:
    """Set the fields that have a numeric option each; without the option, a field has the framework's default."""
    for option, field in settings.table.numbers.items():
        is_typed = option in settings.left
        if not is_typed and option not in settings.table.defaults:
            continue
        value = settings.number(option, settings.table.defaults.get(option))
        settings.fields[field] = value
        if is_typed:
            settings.means(option, value, f"{_shown(field)}={value}")
    if settings.fields.get("experts.count", 0) < 2:
        for field in [field for field in settings.fields if field.startswith("experts.")]:
            del settings.fields[field]
    for field in (THETA, "model.norms.epsilon", "dropout", "z_loss", "experts.balance_weight"):
        if field in settings.fields:
            settings.fields[field] = float(settings.fields[field])


def _shown(field: str) -> str:
    """Return the name of a field in texts: its keyword in `meshwright.plan`."""
    return "dtype" if field == "compute_dtype" else field.removeprefix("model.").removeprefix("experts.")


def _read_words(settings: Settings, name: str) -> None:
    """Set the fields whose option is a word from a list; without the option, a field has the framework's default."""
    for option, meaning in settings.table.words.items():
        is_typed = option in settings.left
        if not is_typed and option not in settings.table.defaults:
            continue
        value = settings.take(option, settings.table.defaults.get(option))
        word = str(value).lower() if isinstance(value, bool) else str(value)
        ((field, words),) = meaning.items()
        if word not in words and (word.lower() in words or word.lower() in ("true", "false")):
            word = word.lower()
        if word not in words:
            if name == "maxtext" and maxtext.names_saved_values(option, word):
                settings.fields["remat_policy"] = word
                continue
            known = ", ".join(repr(known) for known in words)
            raise settings.refusal(option, f"is {value!r}, which has no counterpart here; those read are {known}")
        settings.fields[field] = None if words[word] == "" else words[word]
        if is_typed:
            ours = words[word] if words[word] != "" else "off"
            settings.means(option, value, f"{_shown(field)}={ours}")


def _read_model(settings: Settings, name: str, model: ModelConfig | None, model_name: str) -> Model:
    """Return `model` if given; else the preset that the file names; else a model of the file's sizes.

    name: the framework, as "maxtext". model_name: the name of a model of the file's sizes.
    """
    table, fields = settings.table, settings.fields
    theirs = ""
    if name == "maxtext":
        theirs = settings.text("model_name", "default")
    elif name == "torchtitan":
        theirs = torchtitan.preset_name(settings)
    named = next((preset for preset, known in table.models.items() if known == theirs), "")
    if named:
        settings.means("model_name" if name == "maxtext" else "model.flavor", theirs, named)
    elif theirs not in ("", "default") and model is None:
        raise MeshwrightError(
            f"{table.title}: model {theirs} is not one of {', '.join(table.models.values())}; name a MODEL"
        )
    found = model or (PRESETS[named] if named else None)
    if found is None:
        for option, values in settings.table.structure.items():
            value = settings.take(option, settings.table.defaults.get(option, values[0]))
            if not any(same(value, known) for known in values):
                raise settings.refusal(
                    option, f"is {value}; a model is read from sizes where it is {values[0]}; name a MODEL instead"
                )
        return model_of(fields, model_name, "not in the file; name a MODEL, a preset as llama3-8b or a config.json")
    for option in table.structure:
        if option in settings.left:
            settings.means(option, settings.take(option), f"of the model's structure, which {found.name} has itself")
    for field in sorted(_typed_fields(settings)):
        size, has = fields[field], features(found).get(field.removeprefix("model."))
        if field == "model.num_layers":
            found = replace(found, num_layers=size)
        elif not same(size, has):
            raise MeshwrightError(
                f"{table.title}: {field.removeprefix('model.')} is {size} in the file; {found.name} has {has}"
            )
    return found


def _typed_fields(settings: Settings) -> set[str]:
    """Return the fields of the model (`model.embed`) that the file's own options set, not the framework's defaults."""
    table = settings.table
    typed = {field for option, field in table.numbers.items() if option in settings.typed}
    typed |= {field for option, words in table.words.items() for field in words if option in settings.typed}
    computed = (
        settings.fields.keys()
        - set(table.numbers.values())
        - {field for words in table.words.values() for field in words}
    )
    return {field for field in typed | computed if field.startswith("model.")}
