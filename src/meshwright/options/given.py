"""Check the keywords that somebody gives a function of the library: their names, and the types of their values."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.options import keywords
from meshwright.support.field_types import check_value


def given(options: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, Any]:
    """Return the options that are not None. allowed: the names that options may have.

    Raises:
        MeshwrightError: a name is not in `allowed` (the message suggests the nearest), or a value has a wrong type.
    """
    names = list(allowed)
    for name in options:
        if name not in names:
            hint = did_you_mean(difflib.get_close_matches(name, names, n=1)).strip()
            raise MeshwrightError(f"there is no option {name!r}; {hint or 'options are ' + ', '.join(names)}")
    found = {name: value for name, value in options.items() if value is not None}
    for name in found.keys() & _types().keys():
        value = found[name]
        # NumPy's integers are not instances of int.
        is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
        check_value(name, operator.index(value) if is_whole else value, _types()[name])
    return found


@cache
def _types() -> Mapping[str, Any]:
    """Return the type of each option by name, without `| None`.

    Counts, meshes and hardware are left out: the functions that read these have messages that say more.
    """
    members: dict[str, list[Any]] = {}
    for kind in vars(keywords).values():
        if isinstance(kind, type) and kind.__module__ == keywords.__name__:
            for name, hint in get_type_hints(kind).items():
                own = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
                members.setdefault(name, []).extend(own)
    return {
        name: Union[tuple(one for one in own if one is not NoneType)]  # noqa: UP007
        for name, own in members.items()
        if int not in own and not any(map(is_dataclass, own))
    }
