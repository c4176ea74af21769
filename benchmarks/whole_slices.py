"""Which collectives over a whole slice XLA's TPU compiler runs as all-reduces.

    PYTHONPATH=benchmarks .venv/bin/python benchmarks/whole_slices.py

A bf16 weight, [2048, 8192]: its gradient summed over every device of a slice onto shards, and its shards gathered; over
one axis, over two at once, and over two in turn. Needs libtpu and no TPU; two seconds a program.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import Mesh

from meshwright.description.hardware.slices import within_slice
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.records import read_hlo
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.compiler.program import CompileRequest

SLICES = (
    *(
        "v5e:2x4",
        "v5e:4x4",
        "v5e:4x8",
        "v5e:8x8",
        "v5e:16x16",
        "v6e:4x4",
        "v6e:4x8",
        "v4:2x2x1",
        "v4:2x2x2",
        "v4:4x4x4",
    ),
    *("v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8", "2*v5p:4x4x4", "tpu7x:2x2x4", "tpu7x:4x4x4"),
)
IN_TURN = {"v5e:4x4": (4, 4), "v5e:16x16": (16, 16), "v6e:4x4": (4, 4), "v5p:4x4x4": (16, 4)}
"""Slices whose sums over one axis are all-reduces, as two axes."""


def lower(mesh: Mesh, *, gathers: bool = False, in_turn: bool = False) -> jax.stages.Lowered:
    """A weight's gradient, or with `gathers` the weight, lowered.

    in_turn: scattered over the last axis after those before it, or gathered over it before them.
    """
    axes = mesh.axis_names

    def gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        total = jnp.einsum("sd,sf->df", x, cotangent, out_sharding=P(None, None, unreduced=frozenset(axes)))
        if in_turn:
            total = jax.reshard(total, P(axes[:-1], None, unreduced=frozenset(axes[-1:])))
        return jax.reshard(total, P(axes, None)).astype(jnp.float32)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        if in_turn:
            weight = jax.reshard(weight, P(axes[:-1], None))
        return x @ jax.reshard(weight, P(None, None))

    split = jax.sharding.NamedSharding(mesh, P(axes, None))
    rows = 128 * mesh.size
    shapes = ((rows, 2048), (2048, 8192)) if gathers else ((rows, 2048), (rows, 8192))
    with jax.set_mesh(mesh):
        return jax.jit(product if gathers else gradient).lower(
            *(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split) for shape in shapes)
        )


def kinds(hardware: str, mesh: Mapping[str, int], **arguments: bool) -> str:
    """The collectives of the program, with their bytes; arguments: of `lower`."""
    request = CompileRequest(function="whole_slices:lower", hardware=hardware, mesh=mesh, arguments=arguments)
    program = compile_in_child(request)
    record = read_hlo(program.hlo, within_slice(mesh, parse_system(hardware).num_slices), hardware=hardware)
    return ", ".join(f"{move.kind} {'*'.join(move.axes)} {move.bytes / 1e6:.1f} MB" for move in record.collectives)


def main() -> None:
    for gathers in (False, True):
        print("gathers" if gathers else "sums onto shards")
        for hardware in SLICES:
            count = parse_system(hardware).num_devices
            print(f"{hardware:<12}one axis          {kinds(hardware, {'fsdp': count}, gathers=gathers)}", flush=True)
            if hardware in IN_TURN:
                outer, inner = IN_TURN[hardware]
                mesh = {"dp": outer, "fsdp": inner}
                print(f"{'':<12}two at once       {kinds(hardware, mesh, gathers=gathers)}", flush=True)
                print(f"{'':<12}two in turn       {kinds(hardware, mesh, gathers=gathers, in_turn=True)}", flush=True)


if __name__ == "__main__":
    main()
