"""Check the keywords that somebody gives a function of the library: their names, and the types of their values."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_type_hints

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.options import keywords
from meshwright.support.field_types import check_value


def given(options: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, Any]:
    """Return the options that are not None.

    Raises:
        MeshwrightError: a name is not allowed (with the nearest one), or a value is not of the option's type.
    """
    names = list(allowed)
    for name in options:
        if name not in names:
            hint = did_you_mean(difflib.get_close_matches(name, names, n=1)).strip()
            raise MeshwrightError(f"there is no option {name!r}; {hint or 'options are ' + ', '.join(names)}")
    found = {name: value for name, value in options.items() if value is not None}
    for name in found.keys() & _types().keys():
        # NumPy's whole numbers are no int.
        value = operator.index(found[name]) if hasattr(found[name], "__index__") else found[name]
        check_value(name, found[name] if isinstance(found[name], bool) else value, _types()[name])
    return found


@cache
def _types() -> Mapping[str, Any]:
    """Return the types of options by name; those of counts, meshes and hardware are left to the functions that read
    these, whose messages say more.
    """
    found: dict[str, Any] = {}
    for kind in vars(keywords).values():
        if isinstance(kind, type) and kind.__module__ == keywords.__name__:
            for name, hint in get_type_hints(kind).items():
                found[name] = Union[found[name], hint] if name in found else hint  # noqa: UP007
    return {
        name: hint
        for name, hint in found.items()
        if int not in (members := get_args(hint) or (hint,)) and not any(map(is_dataclass, members))
    }
