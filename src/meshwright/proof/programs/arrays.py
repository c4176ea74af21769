"""Trace functions whose arguments or results have leaves that are not arrays, such as Equinox modules.

An Equinox module has its activation function as a leaf. Such leaves become constants, as in `equinox.filter_jit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import jax
from jax.stages import Traced


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or a `jax.ShapeDtypeStruct`-like abstract value."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


@dataclass
class Tree:
    """A tree without its arrays: the structure, and the other leaves by their index."""

    structure: Any = None
    others: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Any) -> Tree:
        """Return the structure of a tree, with its leaves that are not arrays."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, {number: leaf for number, leaf in enumerate(leaves) if not is_array(leaf)})

    def whole(self, arrays: Sequence[Any]) -> Any:
        """Return the whole tree, with these arrays filled in."""
        left = iter(arrays)
        count = self.structure.num_leaves
        return jax.tree.unflatten(
            self.structure, [self.others[n] if n in self.others else next(left) for n in range(count)]
        )


def trace_arrays(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Traced, Tree]:
    """Trace a function; return the trace, and the result's tree without its arrays.

    If any leaf of the arguments is neither an array nor a number, all leaves that are not arrays become constants: in
    such trees numbers are often settings. A jitted function is traced as it is, with its own static arguments.
    Arguments donated by a jitted function inside stay donated.
    """
    if hasattr(function, "trace"):
        traced: Traced = function.trace(*args, **kwargs)  # type: ignore[attr-defined]
        return traced, Tree(jax.tree.structure(traced.out_info))
    given, returned = Tree.of((args, kwargs)), Tree()
    call = function
    if not all(isinstance(leaf, Number) for leaf in given.others.values()):

        @functools.wraps(function, updated=())
        def of_arrays(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = given.whole(jax.tree.leaves((args, kwargs)))
            result = function(*args, **kwargs)
            found = Tree.of(result)
            returned.structure, returned.others = found.structure, found.others
            return only_arrays(result)

        call = of_arrays
        args, kwargs = only_arrays((args, kwargs))
    traced = jax.jit(call).trace(*args, **kwargs)
    if donated := _donated(traced):
        traced = jax.jit(call, donate_argnums=donated).trace(*args, **kwargs)
    if returned.structure is None:
        returned.structure = jax.tree.structure(traced.out_info)
    return traced, returned


def only_arrays(tree: Any) -> Any:
    """Return a tree with None in place of leaves that are not arrays."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)


def _donated(traced: Traced) -> tuple[int, ...]:
    """Return the indices of the positional arguments whose arrays are all donated by jitted functions called inside."""
    equations = traced.jaxpr.jaxpr.eqns
    donated = {
        var
        for equation in equations
        for var, is_donated in zip(equation.invars, equation.params.get("donated_invars", ()), strict=False)
        if is_donated and not hasattr(var, "val")
    }
    args, _ = traced.args_info
    variables, found = iter(traced.jaxpr.jaxpr.invars), list[int]()
    for number, argument in enumerate(args):
        own = [next(variables) for _ in jax.tree.leaves(argument)]
        if own and donated.issuperset(own):
            found.append(number)
    return tuple(found)
