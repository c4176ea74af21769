"""The user's line of an op: frames of JAX and of installed packages are climbed."""

from __future__ import annotations

import site
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax._src import source_info_util

_JAX = str(Path(jax.__file__).parent)


def place(equation: Any) -> str:
    """Return file:line of the user's code that an equation comes from; the innermost line if only packages have one."""
    traceback = equation.source_info.traceback
    frames = [one for one in (traceback.frames if traceback is not None else []) if not one.file_name.startswith(_JAX)]
    installed = _installed()
    own = [one for one in frames if not one.file_name.startswith(installed)]
    frame = next(iter(own or frames), None)
    return f"{frame.file_name}:{frame.line_num}" if frame else "an unknown line"


@contextmanager
def without_packages() -> Iterator[None]:
    """Lower with the user's lines as the source of ops, not lines of installed packages (Flax, Optax)."""
    paths = [str(path) for path in _installed()]
    known = source_info_util._exclude_paths
    for path in paths:
        source_info_util.register_exclusion(path)
    try:
        yield
    finally:
        for path in paths:
            known.remove(path)
        source_info_util.register_exclusion(known.pop())  # which clears what it remembers


def _installed() -> tuple[str, ...]:
    """The folders of installed packages."""
    return tuple(f"{path}/" for path in (*site.getsitepackages(), site.getusersitepackages()))


def says_so(equation: Any) -> bool:
    """Whether the user's code asks for a cast itself, and JAX did not add it because two dtypes met."""
    traceback = equation.source_info.traceback
    names = {one.function_name.rpartition(".")[2] for one in (traceback.frames if traceback is not None else [])}
    return bool(names & {"astype", "convert_element_type", "asarray", "array"})
