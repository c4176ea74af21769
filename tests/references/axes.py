"""The mesh axes that split each family, in training and in serving: `python tests/references/axes.py`.

It follows from plans of the references' config.json over two devices. `test_family_axes.py` takes steps of each family
over each of these axes and compares them with those of one device.
"""

import textwrap
from collections import defaultdict
from functools import cache

from fields import FOLDER, in_order

import meshwright as mw

FAMILIES = in_order(path.parent.name for path in FOLDER.glob("*/config.json"))
TRAINING, SERVING = ("dp", "fsdp", "tp", "sp", "ep", "pp"), ("dp", "fsdp", "tp", "sp", "ep")


@cache
def axes_of(family: str) -> tuple[str, str]:
    """The axes that can split a family's training and its serving, of each a text."""

    def can_be(axis: str, **options: object) -> bool:
        try:
            mw.plan(str(FOLDER / family), on="cpu:2", batch=4, mesh=f"{axis}=2", **options)
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
