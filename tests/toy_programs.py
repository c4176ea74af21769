"""Small programs to compile: each function takes a mesh and plain arguments and returns a `jax.stages.Lowered`."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import Mesh

BATCH, SEQ_LEN, EMBED, MLP = 8, 16, 32, 64


def train_step(
    mesh: Mesh, *, layers: int = 3, remat: bool = True, dtype: str = "float32", scale: int = 1, batch: int = BATCH
) -> Any:
    """Loss, gradients and a plain update of residual MLPs: batch over dp and fsdp, weights over fsdp, hidden over tp.

    Between the layers the activations are sharded over the sequence by tp. Every collective is asked for by a reshard.
    """
    rows, split = ("dp", "fsdp"), P(("dp", "fsdp"), "tp", None)

    def block(x: Any, weights: Any) -> Any:
        w_in, w_out = (w.astype(dtype) for w in weights)
        with jax.named_scope("mlp"):
            x_full = jax.reshard(x, P(rows, None, None, reduced={"tp"}))
            w_in = jax.reshard(w_in, P(None, "tp", reduced={"dp", "fsdp"}))
            w_out = jax.reshard(w_out, P("tp", None, reduced={"dp", "fsdp"}))
            hidden = jax.nn.silu(jnp.einsum("bsd,df->bsf", x_full, w_in))
            y = jnp.einsum("bsf,fd->bsd", hidden, w_out, out_sharding=P(rows, None, None, unreduced={"tp"}))
            return x + jax.reshard(y, split)

    def loss(weights: Any, x: Any) -> Any:
        body = jax.checkpoint(block) if remat else block
        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x.astype(dtype), weights)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(weights: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(weights, x)
        with jax.named_scope("update"):
            largest = jnp.maximum(*(abs(g).max() for g in gradients))
            return jax.tree.map(lambda w, g: w - 0.1 * g / largest, weights, gradients)

    weights = (
        array(mesh, (layers, scale * EMBED, scale * MLP), P(None, "fsdp", "tp")),
        array(mesh, (layers, scale * MLP, scale * EMBED), P(None, "tp", "fsdp")),
    )
    with jax.set_mesh(mesh):
        return jax.jit(step, donate_argnums=0).lower(weights, array(mesh, (batch, SEQ_LEN, scale * EMBED), split))


def array(mesh: Mesh, shape: tuple[int, ...], spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract array on a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


def matmuls(mesh: Mesh) -> Any:
    """Two products and no loop, on one device's worth of data."""
    a, b = array(mesh, (64, 32), P()), array(mesh, (32, 128), P())
    with jax.set_mesh(mesh):
        return jax.jit(lambda a, b: (a @ b, jnp.einsum("ik,jk->ij", a, a))).lower(a, b)


def wrong(mesh: Mesh) -> Any:
    """A program with a mistake in it."""
    return jax.jit(lambda x: x @ x).lower(array(mesh, (2, 3), P()))


def not_lowered(mesh: Mesh) -> Any:
    """Something that is no lowered program."""
    return mesh.shape


def too_large(mesh: Mesh) -> Any:
    """More than the memory of any chip: 64 GiB of temporaries a device."""
    x = array(mesh, (1 << 18, 1 << 18), P())
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: jnp.sort(x, axis=1) + jnp.sort(x, axis=0)).lower(x)


def killed(mesh: Mesh) -> Any:
    """The process ends without a word."""
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def cpu_mesh(**degrees: int) -> Mesh:
    """The mesh of meshwright's axes over this process's simulated devices."""
    from meshwright.mesh import MeshShape

    layout = MeshShape(**degrees).layout
    types = (jax.sharding.AxisType.Explicit,) * len(layout)
    return jax.make_mesh(tuple(layout.values()), tuple(layout), axis_types=types)


def per_device(
    mesh: Mesh, function: Any, *shapes: tuple[int, ...], specs: Any, out: Any, dtype: Any = jnp.float32
) -> Any:
    """A function of one device's shards, lowered: what it does with its axes' names is what is compiled."""
    arrays = [array(mesh, shape, spec, dtype) for shape, spec in zip(shapes, specs, strict=True)]
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(function, in_specs=tuple(specs), out_specs=out, check_vma=False)
        return jax.jit(mapped).lower(*arrays)


def unrolled(text: str, nbytes: int) -> str:
    """The HLO text of a program with its computations repeated under names of their own, at least nbytes long."""
    head, _, rest = text.partition("\n%")
    computations, entry = ("%" + rest).split("\nENTRY", 1)
    names = "|".join(re.escape(name) for name in re.findall(r"^%([\w.\-]+) \(", computations, re.MULTILINE))
    defined = re.compile(rf"%({names})\b")
    bodies = [defined.sub(rf"%\1_copy{i}", computations) for i in range(1 + nbytes // len(computations))]
    return "\n".join([head, computations, *bodies, "ENTRY" + entry])
