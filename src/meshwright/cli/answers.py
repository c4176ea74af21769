"""Print an answer with a picture: the end of `meshwright matmul cases`, `collective` and `show pipeline`."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.pictures.answers.answer import DrawnAnswer, write_picture


def print_answer(found: DrawnAnswer, svg: Path | None, *, as_json: bool) -> None:
    """Write the picture to `svg` if given, and print the answer's screen, or with `as_json` its data."""
    if svg is not None:
        write_picture(found, svg)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    found.print()
    if svg is not None:
        print(f"\n wrote  {svg}")
