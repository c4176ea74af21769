"""Every field of a family's config.json, and whether meshwright honours it: `python tests/references/fields.py`.

It follows from the mutations that `make_mutations.py` kept: what is read of each changed config.json is refused, or
another model, or the same one. `test_families_mutations.py` holds that this is what transformers does.
"""

import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mutations import ABSENT, STRANGERS

from meshwright.description.families.registry import model_from_hugging_face
from meshwright.description.step.legality import check_runnable
from meshwright.description.step.model import ModelConfig
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape

FOLDER = Path(__file__).parent
LATER = (
    *("cohere2", "dots1", "ernie4_5", "exaone4", "glm4", "glm4_moe", "granite", "granitemoe", "hunyuan_v1_dense"),
    *("nemotron", "olmo3", "olmoe", "phi", "seed_oss", "smollm3", "starcoder2"),
)
"""Families after all others in tests that give each family something else, so that the others keep theirs."""


LATEST = (
    *("qwen3_next", "minimax_m2", "qwen2_moe_sparse", "qwen3_moe_sparse", "llama4_text"),
    *("qwen3_5_text", "qwen3_5_moe_text", "mistral4", "gemma4_text", "gemma4_text_moe", "gemma4_unified_text"),
    "gemma4_text_e2b",
    *("gemma3n_text", "phimoe"),
)
"""Families after those, for the same reason."""


def in_order(families: Iterable[str]) -> tuple[str, ...]:
    """Families by name, later ones last."""
    late = dict.fromkeys(LATER, 1) | {family: 2 + number for number, family in enumerate(LATEST)}
    return tuple(sorted(families, key=lambda family: (late.get(family, 0), family)))


FAMILIES = in_order(path.parent.name for path in FOLDER.glob("*/mutations.json"))
Verdict = Literal["honoured", "honoured or refused by value", "refused", "without effect"]


class Read(NamedTuple):
    """A mutation of a family as it is read here: `row` of its file by its number, the model or the refusal."""

    number: int
    row: dict[str, Any]
    config: dict[str, Any]
    model: ModelConfig | None
    refusal: str


def base(family: str) -> dict[str, Any]:
    """The config.json of a golden."""
    return json.loads((FOLDER / family / "config.json").read_text())


def read(family: str, config: dict[str, Any]) -> ModelConfig:
    """The model of a config.json, which has to run."""
    model = model_from_hugging_face(config, name=family)
    check_runnable(model, MeshShape())
    return model


def mutated(family: str) -> Iterator[Read]:
    """Every mutation of a family, read."""
    before = base(family)
    for number, row in enumerate(json.loads((FOLDER / family / "mutations.json").read_text())):
        config = {name: value for name, value in (before | row["changes"]).items() if value != ABSENT}
        try:
            yield Read(number, row, config, read(family, config), "")
        except MeshwrightError as error:
            yield Read(number, row, config, None, str(error))


def verdicts(kind: str) -> dict[str, Verdict]:
    """What becomes of each field of a family, by its model_type; without those that other families have."""
    outcomes: dict[str, set[str]] = {}
    for family in FAMILIES:
        config = base(family)
        if config["model_type"] != kind:
            continue
        before = read(family, config)
        for each in mutated(family):
            field = each.row["field"]
            is_stranger = field in (*STRANGERS, "layer_types") and field not in config
            is_needed = each.row["changes"] == {field: ABSENT} and each.model is None
            # It was changed together with rotary embedding, which alone is refused.
            is_of_rope = "rope_parameters" in each.row["changes"] and field == "max_position_embeddings"
            if is_stranger or is_needed or (is_of_rope and each.model is None and field not in each.refusal):
                continue
            outcome = "refused" if each.model is None else "without effect" if each.model == before else "honoured"
            outcomes.setdefault(field, set()).add(outcome)
    found: dict[str, Verdict] = {}
    for field, kinds in outcomes.items():
        if kinds >= {"honoured", "refused"}:
            found[field] = "honoured or refused by value"
        else:
            found[field] = next(kind for kind in ("honoured", "refused", "without effect") if kind in kinds)
    return found


def main() -> None:
    """Print each field with the families that do alike."""
    by_field: dict[str, dict[Verdict, list[str]]] = {}
    kinds = sorted({base(family)["model_type"] for family in FAMILIES})
    for kind in kinds:
        for field, verdict in verdicts(kind).items():
            by_field.setdefault(field, {}).setdefault(verdict, []).append(kind)
    for field, by_verdict in sorted(by_field.items(), key=lambda item: item[0].lstrip("_")):
        for number, (verdict, having) in enumerate(sorted(by_verdict.items())):
            names = " by all that have it" if len(by_verdict) == 1 and len(having) > 3 else f": {', '.join(having)}"
            title = "" if number else field
            print(textwrap.fill(verdict + names, 98, initial_indent=f"{title:<48} ", subsequent_indent=" " * 51))


if __name__ == "__main__":
    main()
