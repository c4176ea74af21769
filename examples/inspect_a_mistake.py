"""A mistake that JAX takes without a word, found in the compiled program.

    python examples/inspect_a_mistake.py

The mlp is meant to be tensor parallel: its first weights are split over `tp`. But one constraint gathers the hidden
layer, and every device along `tp` then does the same second product.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright


def program() -> tuple:
    """A mesh, and the mlp's forward pass with abstract arguments on it."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))

    def array(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def mlp(params: dict, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ params["w_in"])
        hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, P("dp", None)))  # the mistake
        return hidden @ params["w_out"]

    params = {"w_in": array((256, 1024), None, "tp"), "w_out": array((1024, 256))}
    return mesh, mlp, (params, array((512, 256), "dp", None))


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # simulated: the compiled program is that of eight real ones
    mesh, mlp, args = program()
    report = meshwright.inspect(mlp, *args, mesh=mesh)
    for collective in report.collectives:
        print(
            f"{collective.kind} over {'*'.join(collective.axes)}: {collective.bytes:,} bytes, from {collective.source}"
        )
    for finding in report.findings:
        print(f"\n{finding.kind}: {finding.evidence}\n  from {finding.source}\n  fix: {finding.fix}")


if __name__ == "__main__":
    main()
