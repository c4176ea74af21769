"""The mesh axes that split each family, in training and in serving: `python tests/references/axes.py`.

It follows from plans of the references' config.json over two devices; over pp, a model of only one cycle of layers
gets two. `test_family_axes.py` takes steps of each family over each of these axes and compares them with those of one
device.
"""

import textwrap
from collections import defaultdict
from dataclasses import replace
from functools import cache

from fields import FOLDER, in_order

import meshwright as mw
from meshwright.description.families.load import load_model
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.stages import most_stages

FAMILIES = in_order(path.parent.name for path in FOLDER.glob("*/config.json"))
TRAINING, SERVING = ("dp", "fsdp", "tp", "sp", "ep", "pp"), ("dp", "fsdp", "tp", "sp", "ep")


def model_of(family: str, axis: str) -> ModelConfig:
    """The model of a family's config.json, over pp with at least two cycles of layers."""
    model = load_model(FOLDER / family)
    return replace(model, num_layers=2 * model.num_layers) if axis == "pp" and most_stages(model) == 1 else model


@cache
def axes_of(family: str) -> tuple[str, str]:
    """The axes that can split a family's training and its serving, of each a text."""

    def can_be(axis: str, **options: object) -> bool:
        try:
            mw.plan(model_of(family, axis), on="cpu:2", batch=4, mesh=f"{axis}=2", **options)
        except mw.MeshwrightError:
            return False
        return True

    training = (axis for axis in TRAINING if can_be(axis, seq_len=32))
    serving = (axis for axis in SERVING if can_be(axis, serve="decode", prompt_len=16, output_len=16))
    return " ".join(training), " ".join(serving)


if __name__ == "__main__":
    found = defaultdict[tuple[str, str], list[str]](list)
    for one in FAMILIES:
        found[axes_of(one)].append(one)
    print(f"{'training':24}{'serving':19}families")
    for (training, serving), families in found.items():
        first, *rest = textwrap.wrap(", ".join(families), 57)
        print(f"{training:24}{serving:19}{first}", *(" " * 43 + line for line in rest), sep="\n")
