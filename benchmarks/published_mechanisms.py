"""What each mechanism of other frameworks is worth: the error on published runs with it and without it.

    .venv/bin/python benchmarks/published_mechanisms.py FILE...

A mechanism is a field of a framework's file (`meshwright/description/frameworks/data`). Left out, the field has its
value for meshwright. Errors are those of `published_runs.py`: core rows, and all rows of training, balanced over
sources. A mechanism whose error falls without it cancels another one, or is wrong.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from published_rows import Setting
from published_runs import Scored, errors, score

from meshwright.description.step.strategy import DEFAULT, XLA, FrameworkProfile

Change = Callable[[Setting], Setting]

STRATEGY = ("collective_matmul", "gradient_dtype", "tp_stream", "dropout")
"""Fields of `Strategy` that the files set."""


def main() -> None:
    """Print a table for all rows of some files together."""
    parser = argparse.ArgumentParser(description="What each mechanism of other frameworks is worth on published runs.")
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    rows = [row for file in args.files for row in json.loads(file.read_text())["records"] if row["kind"] == "train"]
    whole = score(rows)[0]
    print(f"{'left out':28} {'rows changed':>12} {'core':>8} {'all':>8}")
    print(f"{'nothing':28} {0:12} {_error(whole, core=True):8.1%} {_error(whole):8.1%}")
    for name, change in mechanisms().items():
        without = score(rows, change)[0]
        changed = sum(abs(a.predicted / b.predicted - 1) > 1e-3 for a, b in zip(whole, without, strict=True))
        if changed:
            print(f"{name:28} {changed:12} {_error(without, core=True):8.1%} {_error(without):8.1%}")


def mechanisms() -> dict[str, Change]:
    """Each mechanism, with the change of a setting that leaves it out."""
    found: dict[str, Change] = {
        field.name: partial(_of_profile, field.name, getattr(XLA, field.name))
        for field in fields(FrameworkProfile)
        if field.name not in ("name", "saved_values", "spmd_pipeline")
    }
    found |= {name: partial(_of_strategy, name, getattr(DEFAULT, name)) for name in STRATEGY}
    found["remat by the values' names"] = _saves_products
    found["fused attention"] = partial(_of_strategy, "attention", "scores")
    found["cuDNN's attention"] = _flash
    found["virtual stages"] = partial(_of_strategy, "virtual_stages", 1)
    return found


def _of_profile(name: str, value: Any, setting: Setting) -> Setting:
    return replace(
        setting, strategy=replace(setting.strategy, profile=replace(setting.strategy.profile, **{name: value}))
    )


def _of_strategy(name: str, value: Any, setting: Setting) -> Setting:
    return replace(setting, strategy=replace(setting.strategy, **{name: value}))


def _saves_products(setting: Setting) -> Setting:
    """Read a policy that names values as one that saves every matmul."""
    remat = "matmuls" if setting.workload.remat == "named" else setting.workload.remat
    return replace(setting, workload=replace(setting.workload, remat=remat))


def _flash(setting: Setting) -> Setting:
    return _of_strategy("attention", "flash", setting) if setting.strategy.attention == "cudnn" else setting


def _error(scored: list[Scored], *, core: bool = False) -> float:
    timed = [item for item in scored if item.measured and (item.row["core"] or not core)]
    return errors(timed, lambda item: item.error)["source_balanced_mean_abs_error"]


if __name__ == "__main__":
    main()
