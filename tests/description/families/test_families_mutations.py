"""Each field of a config.json changes our logits as it changes those of transformers, or is refused by name.

What transformers makes of each change is in `tests/references/FAMILY/mutations.{json,npz}` (`make_mutations.py`).
"""

import functools
import json
import sys
from dataclasses import is_dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parents[2] / "references"))
import fields
from drawn import drawn

import meshwright as mw
from meshwright.description.families.comparison import features
from meshwright.execution.weights.places import places

WEIGHTS = "model.safetensors"
TOLERANCE = 2e-5
"""Of the logits' range, in float32."""


def shapes(model):
    return {name: list(place.tensor_shape) for place in places(model).values() for _, name in place.names()}


@pytest.mark.parametrize("family", fields.FAMILIES)
def test_a_changed_field_is_refused_or_changes_the_model_as_it_does_in_transformers(family):
    before = fields.read(family, fields.base(family))
    tensors = shapes(before)
    wrong = []
    for each in fields.mutated(family):
        row, said = each.row, f"{each.row['changes']}, {each.row['outcome']} in transformers"
        if each.model is None:
            # Of two names of one field the refusal has the published one.
            names = {
                row["field"].rpartition(".")[2],
                *row["changes"],
                row["field"].replace("local_", ""),
                "rope scaling",
            }
            if not any(name in each.refusal.replace("rope_scaling", "rope scaling") for name in names):
                wrong.append(f"{said}: refused without its name: {each.refusal}")
        # A library that was not installed is not a refusal of the format (GPTQ).
        elif row["outcome"] == "refused" and not row["because"].startswith("ImportError"):
            wrong.append(f"{said}: read")
        elif row["outcome"] == "changed" and each.model == before:
            wrong.append(f"{said}: ignored")
        elif shapes(each.model) != {
            name: shape for name, shape in (tensors | row.get("shapes", {})).items() if shape is not None
        }:
            wrong.append(f"{said}: tensors of other shapes")
    assert not wrong, "\n".join(wrong)


def parts(model):
    """The fields of a model by path; where its layers have parts of their own, a field has the values of all layers."""
    found = {}
    for path, value in features(model).items():
        if isinstance(value, tuple) and any(map(is_dataclass, value)):
            for each in value:
                for name, own in features(each).items():
                    found.setdefault(f"{path}.{name}", []).append(own)
        else:
            found[path] = value
    return found


def form(value):
    """A value without its numbers, whatever they are."""
    if isinstance(value, list | tuple):
        return tuple(map(form, value))
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else value


def change(model, before):
    """What differs between two models: paths of fields, in which layers, and the form of the new value."""
    new, old = parts(model), parts(before)
    found = set()
    for path in {*new, *old}:
        one, other = new.get(path), old.get(path)
        if one != other:
            is_alike = isinstance(one, list) and isinstance(other, list) and len(one) == len(other)
            layers = tuple(mine != its for mine, its in zip(one, other, strict=True)) if is_alike else None
            found.add((path, layers, form(one)))
    return frozenset(found)


@functools.cache
def first_to_change():
    """The models that `make matrix` runs: of each kind of model, a change of the same fields in the first family alone.

    A program is made of a `ModelConfig`, whichever family's file it was read from; that every family's is read as it
    should be, the test above holds.
    """
    seen, found = set(), {}
    for family in fields.FAMILIES:
        before = fields.read(family, fields.base(family))
        kind = "latent" if before.attention.latent else "experts" if before.experts else "dense"
        found[family] = {before}
        for each in fields.mutated(family):
            if each.model is None or each.model == before:
                continue
            changed = (kind, change(each.model, before))
            if changed not in seen:
                found[family].add(each.model)
                seen.add(changed)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("family", fields.FAMILIES)
def test_logits_of_changed_configs_are_those_of_transformers(family, tmp_path):
    golden = np.load(fields.FOLDER / family / "mutations.npz")
    positions = golden["positions"]
    before = fields.read(family, fields.base(family))
    rows = {before: []}
    for each in fields.mutated(family):
        # What transformers did not read, for want of a library (GPTQ), has no logits.
        if each.model in first_to_change()[family] and each.row["outcome"] != "refused":
            rows.setdefault(each.model, []).append(each)
    wrong = []
    for number, (model, alike) in enumerate(rows.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(alike[0].config if number else fields.base(family)))
        save_file({name: drawn(name, tuple(shape)) for name, shape in shapes(model).items()}, folder / WEIGHTS)
        tokens = np.random.default_rng(0).integers(0, min(model.vocab, 80), (1, positions[-1] + 1))
        found = np.asarray(mw.load(folder, on="cpu:1").logits(tokens))[0, positions]
        for changes, outcome, name in [
            *([] if number else [({}, "", "logits")]),
            *((each.row["changes"], each.row["outcome"], f"logits_{each.number}") for each in alike),
        ]:
            wanted = golden["logits" if outcome == "same" else name]
            error = np.abs(found - wanted).max() / np.ptp(wanted)
            if error > TOLERANCE:
                wrong.append(f"{changes}: {error:.1e} of the logits' range from transformers")
    assert not wrong, "\n".join(wrong)
