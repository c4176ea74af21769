"""What transformers makes of each golden's config.json after changes: `tests/references/FAMILY/mutations.{json,npz}`.

The JSON has a row for each mutation (`mutations.py`): the field, the changes, and the outcome.

- `same`: the logits are those of the config as it was.
- `changed`: they are others; `logits_N` of the arrays has them, [positions, vocab] in float32, N the row's number.
- `refused`: transformers raises, and no logits are known.

`shapes` has the tensors whose shape is another then, null where there is none. Weights follow from names and shapes
(`drawn.py`). Run by `make references`; a family by itself: `make_mutations.py llama`.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import text_models  # noqa: F401
import torch
import transformers
from drawn import drawn
from mutations import ABSENT, SKIPPED, mutations
from safetensors import safe_open
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent
POSITIONS = (4, 15, 24)
"""Whose logits are kept: within and beyond windows, before and after the length that rotary scaling begins at."""

NEEDED = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "n_embd",
    "n_layer",
    "intermediate_size",
    "moe_intermediate_size",
)
"""Fields whose defaults are those of a large model, which is not made."""

CHANGED, SAME = 6e-5, 1e-5
"""Of the logits' range: what differs by more is changed, by less the same; between them a mutation is too weak."""


def main() -> None:
    """Write what becomes of every family, or of those named."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    for path in sorted(FOLDER.glob("*/config.json")):
        if path.parent.name in sys.argv[1:] or (not sys.argv[1:] and path.parent.name not in SKIPPED):
            make(path.parent)


def make(folder: Path) -> None:
    """The mutations of one family."""
    config = json.loads((folder / "config.json").read_text())
    shapes, logits = computed(config)
    rows, arrays = [], {"logits": logits}
    seen = {json.dumps(config, sort_keys=True)}
    for field, changes in mutations(config):
        changed = {name: value for name, value in (config | changes).items() if value != ABSENT}
        if any(name not in changed for name in NEEDED if name in config):
            continue
        text = json.dumps(changed, sort_keys=True)
        if text in seen:
            continue
        seen.add(text)
        row: dict[str, Any] = {"field": field, "changes": changes}
        try:
            theirs, found = computed(changed)
        except Exception as error:  # Whatever transformers refuses a field with.
            if [*changes.values()] == [None]:
                continue  # Of another type than transformers takes: what older files have for a field left out.
            rows.append(row | {"outcome": "refused", "because": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        other = {
            name: theirs.get(name) for name in shapes.keys() | theirs.keys() if shapes.get(name) != theirs.get(name)
        }
        moved = 1.0 if found.shape != logits.shape else np.abs(found - logits).max() / np.ptp(logits)
        row["outcome"] = "changed" if moved > CHANGED else "same"
        if SAME < moved <= CHANGED:
            print(f"{folder.name}: {changes} moves the logits by {moved:.1e} of their range, which shows nothing")
        if other:
            row["shapes"] = dict(sorted(other.items()))
        if row["outcome"] == "changed":
            arrays[f"logits_{len(rows)}"] = found
        rows.append(row)
    lines = ",\n".join(json.dumps(row) for row in rows)
    (folder / "mutations.json").write_text(f"[\n{lines}\n]\n")
    np.savez_compressed(folder / "mutations.npz", positions=np.array(POSITIONS), **arrays)
    outcomes = {kind: sum(row["outcome"] == kind for row in rows) for kind in ("changed", "same", "refused")}
    print(f"{folder.name:<12}{len(rows):>4} mutations: {outcomes}", flush=True)


def computed(config: dict[str, Any]) -> tuple[dict[str, list[int]], np.ndarray]:
    """The shapes of the tensors of a config.json, and the logits with weights drawn for them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(config))
        read = transformers.AutoConfig.from_pretrained(path)
        transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float32).save_pretrained(path / "made")
        with safe_open(path / "made" / "model.safetensors", framework="np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        weights = {name: drawn(name, tuple(shape)) for name, shape in shapes.items()}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    tokens = np.random.default_rng(0).integers(0, min(config["vocab_size"], 80), (1, POSITIONS[-1] + 1))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits[0].numpy()
    return shapes, logits[list(POSITIONS)]


if __name__ == "__main__":
    main()
