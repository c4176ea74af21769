"""Advice for JAX's sharding errors: what is wrong, why, and a line of code that works."""

from __future__ import annotations

import re
from collections.abc import Callable

_GONE = {
    "all_gather_async": "jax.lax.all_gather(x, axis, tiled=True)",
    "psum_async": "jax.lax.psum(x, axis)",
    "reduce_scatter_async": "jax.lax.psum_scatter(x, axis, tiled=True)",
    "all_to_all_async": "jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)",
    "ppermute_async": "jax.lax.ppermute(x, axis, pairs)",
}
"""Function names in teaching material that JAX does not have, each with its replacement."""


def advice(error: str) -> str:
    """Return advice for an error message of JAX; '' if there is none."""
    for pattern, answer in _ANSWERS:
        if found := re.search(pattern, error):
            return answer(found)
    return ""


def _ambiguous(found: re.Match[str]) -> str:
    axes = _axes(found[1])
    return (
        f"case 3 of a sharded product: both operands split the summed dim over {axes}, so each device has a part of the"
        f" sum and JAX does not choose how they are added: jnp.matmul(a, b, out_sharding=P(None, None)) all-reduces"
        f" over {axes}, and with {axes} on a dim of out_sharding it is a reduce-scatter"
    )


def _illegal(found: re.Match[str]) -> str:
    axes = _axes(found[1])
    return (
        f"case 4 of a sharded product: both operands split a dim that stays over {axes}, and one axis splits one dim of"
        f" a result: gather one operand first, as a @ jax.reshard(b, P(None, None)), or say which dim keeps it, as"
        f" jnp.matmul(a, b, out_sharding=P({axes!r}, None))"
    )


def _unplaced(found: re.Match[str]) -> str:
    never = "" if _axes(found[2]) else "the array was never split, and "
    return (
        f"{never}shard_map moves nothing on an explicit mesh: reshard it before, as f(jax.reshard(x, P({found[1]}))),"
        " or make the argument with this sharding"
    )


def _gone(found: re.Match[str]) -> str:
    return f"JAX has no such function, compilers make collectives asynchronous themselves: {_GONE[found[1]]}"


def _says(text: str) -> Callable[[re.Match[str]], str]:
    return lambda _: text


_broadcast = _says(
    "the operands are split in different ways: bring one to the other's, as"
    " a + jax.reshard(b, jax.typeof(a).sharding.spec)"
)
_scalar = _says("a scalar has no dim that None could stand for: NamedSharding(mesh, P())")
_flat = _says(
    "jax.devices() is a list, in one dim, and each name needs a dim: jax.make_mesh((2, 4), ('data', 'model')), or"
    " Mesh(np.array(jax.devices()).reshape(2, 4), ('data', 'model'))"
)
_sort = _says("each device would sort its own part: gather that dim before, as jnp.sort(jax.reshard(x, P(None, None)))")
_inside = _says("inside of jit device_put splits nothing: jax.lax.with_sharding_constraint(x, P(…)) in its place")
_absent = _says(
    "no array can be placed on hardware that is not here: give jax.ShapeDtypeStruct(shape, dtype,"
    " sharding=NamedSharding(mesh, spec)) in the place of arrays and of jax.device_put"
)

DEVICES_ABSENT = r"UNIMPLEMENTED|no attribute 'local_devices'"
"""JAX's errors for putting an array on devices that are described but not present."""

_ANSWERS: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"ambiguous how the output should be sharded[^(]*lhs_contracting_spec=\((.*?)\) and", _ambiguous),
    (r"dot_general .*illegally sharded result: \w+\[(.*?)\]", _illegal),
    (r"incompatible shardings for broadcasting", _broadcast),
    (r"in_specs passed to shard_map: P\((.*?)\) does not match the specs of the input: P\((.*?)\)", _unplaced),
    (r"only valid for values of rank at least 1, but was applied to a value of rank 0", _scalar),
    (rf"no attribute '({'|'.join(_GONE)})'", _gone),
    (r"Mesh requires the ndim of its first argument", _flat),
    (r"Arguments to \w+ must be unsharded over the sorting dimension", _sort),
    (r"set a mesh via `jax.set_mesh` if a PartitionSpec is passed to device_put", _inside),
    (DEVICES_ABSENT, _absent),
)
"""Patterns of error messages of JAX 0.10, each with the function that returns its advice."""


def _axes(spec: str) -> str:
    """Return the mesh axes named in `'dp', None` (a spec) or in `f32[8@dp,4]` (a JAX type), joined by ` and `."""
    named = re.findall(r"'([^']+)'", spec) or re.findall(r"@\(?([\w, ]+?)\)?(?=[,\]]|$)", spec)
    return " and ".join(dict.fromkeys(named))
