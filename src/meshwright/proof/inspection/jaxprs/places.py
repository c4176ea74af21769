"""The user's source line of an equation: the innermost frame outside JAX and installed packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from meshwright.description.hlo.parser import LIBRARIES, OUTSIDE

JAX = str(Path(jax.__file__).parent)


def place(equation: Any) -> str:
    """Return file:line of the user's code for an equation; if none is the user's, a package's innermost line, or ''."""
    first = ""
    for frame in _frames(equation):
        if frame.file_name.startswith(JAX):
            continue
        if OUTSIDE.search(frame.file_name):
            break
        found = f"{frame.file_name}:{frame.line_num}"
        if not LIBRARIES.search(frame.file_name):
            return found
        first = first or found
    return first


def is_explicit_cast(equation: Any) -> bool:
    """Whether a cast equation comes from a call such as `astype`; otherwise JAX added it to promote two dtypes."""
    names = {frame.function_name.rpartition(".")[2] for frame in _frames(equation)}
    return bool(names & {"astype", "convert_element_type", "asarray", "array"})


def is_promoted(equation: Any) -> bool:
    """Whether a cast equation comes from `promote_dtype`, by which Flax gives a layer's operands one dtype."""
    return any(frame.function_name.endswith("promote_dtype") for frame in _frames(equation))


def _frames(equation: Any) -> Any:
    """The stack of an equation, innermost frame first."""
    traceback = equation.source_info.traceback
    return traceback.frames if traceback is not None else ()
