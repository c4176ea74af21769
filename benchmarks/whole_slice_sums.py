"""Where XLA's TPU compiler makes a reduce-scatter of a gradient's sum, and where an all-reduce and a slice.

    PYTHONPATH=benchmarks .venv/bin/python benchmarks/whole_slice_sums.py

One product of a bf16 gradient, [2048, 8192], summed over every device of a slice onto its shards: over one axis, over
two at once, and over two in turn. Needs libtpu and no TPU; two seconds a program.
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

SLICES = ("v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:16x16", "v6e:4x4", "v6e:4x8", "v5p:2x2x4", "v5p:4x4x4")
IN_TURN = {"v5e:4x4": (4, 4), "v5e:8x8": (8, 8), "v5e:16x16": (16, 16), "v6e:4x4": (4, 4), "v5p:4x4x4": (16, 4)}
"""Slices whose sums over one axis are all-reduces, as two axes."""


def lower(mesh: Mesh, *, in_turn: bool = False) -> jax.stages.Lowered:
    """A weight's gradient, lowered; in_turn: scattered over the last axis after those before it."""
    axes = mesh.axis_names

    def gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        total = jnp.einsum("sd,sf->df", x, cotangent, out_sharding=P(None, None, unreduced=frozenset(axes)))
        if in_turn:
            total = jax.reshard(total, P(axes[:-1], None, unreduced=frozenset(axes[-1:])))
        return jax.reshard(total, P(axes, None)).astype(jnp.float32)

    tokens = jax.sharding.NamedSharding(mesh, P(axes, None))
    arrays = [jax.ShapeDtypeStruct((128 * mesh.size, d), jnp.bfloat16, sharding=tokens) for d in (2048, 8192)]
    with jax.set_mesh(mesh):
        return jax.jit(gradient).lower(*arrays)


def kinds(hardware: str, mesh: Mapping[str, int], *, in_turn: bool = False) -> str:
    """The collectives of the program, with their bytes."""
    request = CompileRequest(
        function="whole_slice_sums:lower", hardware=hardware, mesh=mesh, arguments={"in_turn": in_turn}
    )
    program = compile_in_child(request)
    record = read_hlo(program.hlo, within_slice(mesh, parse_system(hardware).num_slices), hardware=hardware)
    return ", ".join(f"{move.kind} {'*'.join(move.axes)} {move.bytes / 1e6:.1f} MB" for move in record.collectives)


def main() -> None:
    for hardware in SLICES:
        count = parse_system(hardware).num_devices
        print(f"{hardware:<12}one axis          {kinds(hardware, {'fsdp': count})}", flush=True)
        if hardware in IN_TURN:
            outer, inner = IN_TURN[hardware]
            mesh = {"dp": outer, "fsdp": inner}
            print(f"{'':<12}two at once       {kinds(hardware, mesh)}", flush=True)
            print(f"{'':<12}two in turn       {kinds(hardware, mesh, in_turn=True)}", flush=True)


if __name__ == "__main__":
    main()
