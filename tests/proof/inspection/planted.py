"""Small programs with one planted mistake each, and the same without it.

Each function takes a mesh (axes dp, fsdp, tp as the table says, all Auto) and returns (function, arguments).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.lax import with_sharding_constraint as constrain

Program = tuple[Any, tuple[Any, ...]]


def array(mesh: Any, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract array with a spec on a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P(*spec)))


# A transformer as tutorials write it: every weight has its spec in a table, and whoever makes the weights must use it.

D, HEADS, F, VOCAB, BATCH, SEQ = 64, 8, 128, 96, 8, 16
SPECS = {
    "embed": ((VOCAB, D), (None, None)),
    "wq": ((D, HEADS, D // HEADS), (None, "tp", None)),
    "wk": ((D, HEADS, D // HEADS), (None, "tp", None)),
    "wv": ((D, HEADS, D // HEADS), (None, "tp", None)),
    "wo": ((HEADS, D // HEADS, D), ("tp", None, None)),
    "w_in": ((D, F), (None, "tp")),
    "w_out": ((F, D), ("tp", None)),
    "head": ((D, VOCAB), (None, "tp")),
}


def transformer_loss(params: Any, tokens: Any) -> Any:
    """The mean loss of the next token, one layer."""
    x = params["embed"][tokens]
    with jax.named_scope("attention"):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in ("wq", "wk", "wv"))
        weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) / (D // HEADS) ** 0.5)
        x = x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, params["wo"])
    with jax.named_scope("mlp"):
        x = x + jax.nn.silu(x @ params["w_in"]) @ params["w_out"]
    logits = jax.nn.log_softmax(x @ params["head"])
    return -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1).mean()


def transformer(mesh: Any, *, applied: bool) -> Program:
    """A train step, tensor parallel by its table of specs: applied to the weights, or written down and never used."""

    def step(params: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(transformer_loss)(params, tokens)
        with jax.named_scope("update"):
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    params = {name: array(mesh, shape, *(spec if applied else ())) for name, (shape, spec) in SPECS.items()}
    return jax.jit(step, donate_argnums=0), (params, array(mesh, (BATCH, SEQ), "dp", dtype=jnp.int32))


def forgotten_weight(mesh: Any, *, forgotten: bool) -> Program:
    """Two layers of fully sharded weights; one of the four was never given its sharding."""

    def loss(params: Any, x: Any) -> Any:
        for w_in, w_out in params["layers"]:
            x = x + jax.nn.relu(x @ w_in) @ w_out
        return (x**2).mean()

    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return constrain(moved, jax.tree.map(lambda p: p.sharding, layers))

    split = array(mesh, (64, 128), "fsdp", None), array(mesh, (128, 64), None, "fsdp")
    last = (split[0], array(mesh, (128, 64))) if forgotten else split
    layers = {"layers": [split, last]}
    return jax.jit(step, donate_argnums=0), (layers, array(mesh, (64, 64), "fsdp"))


def wasted_constraint(mesh: Any, *, used: bool) -> Program:
    """A constraint on the hidden layer whose result is thrown away, or continues."""

    def forward(params: Any, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params["w_in"])
        constrained = constrain(hidden, jax.NamedSharding(mesh, P("dp", "tp")))
        return (constrained if used else hidden) @ params["w_out"]

    params = {"w_in": array(mesh, (64, 128), None, "tp"), "w_out": array(mesh, (128, 64), "tp", None)}
    return forward, (params, array(mesh, (32, 64), "dp"))


def uneven_constraint(mesh: Any, *, size: int) -> Program:
    """A constraint that splits a hidden layer of some size over tp."""

    def forward(params: Any, x: Any) -> Any:
        hidden = constrain(jax.nn.relu(x @ params["w_in"]), jax.NamedSharding(mesh, P("dp", "tp")))
        return hidden @ params["w_out"]

    params = {"w_in": array(mesh, (64, size)), "w_out": array(mesh, (size, 64))}
    return forward, (params, array(mesh, (32, 64), "dp"))


def microbatches(mesh: Any, *, outer: bool) -> Program:
    """A batch cut into microbatches for a loop: along the dim that dp splits, or with it kept inside each of them."""

    def forward(w: Any, x: Any) -> Any:
        if outer:
            parts = x.reshape(4, 16, 64)
            parts = constrain(parts, jax.NamedSharding(mesh, P(None, "dp", None)))
        else:
            parts = x.reshape(16, 4, 64).swapaxes(0, 1)
        return jax.lax.map(lambda part: jax.nn.relu(part @ w), parts)

    return forward, (array(mesh, (64, 64)), array(mesh, (64, 64), "dp"))


def transposed(mesh: Any, *, matching: bool) -> Program:
    """Attention scores over positions that tp splits, or over heads that tp splits as it splits the queries."""

    def forward(q: Any, k: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), k)

    heads, positions = ("dp", None, "tp", None), ("dp", "tp", None, None)
    q = array(mesh, (8, 32, 8, 16), *heads)
    return jax.jit(forward, out_shardings=q.sharding), (
        q,
        array(mesh, (8, 32, 8, 16), *(heads if matching else positions)),
    )


def rolled(mesh: Any, *, on_split_dim: bool) -> Program:
    """Positions rolled by one: along the dim that tp splits, or along another."""

    def forward(w: Any, x: Any) -> Any:
        return jnp.roll(x, 1, axis=1) @ w

    spec = ("dp", "tp", None) if on_split_dim else ("dp", None, None)
    w = array(mesh, (64, 64)) if on_split_dim else array(mesh, (64, 64), None, "tp")
    return forward, (w, array(mesh, (8, 64, 64), *spec))


def gathered_batch(mesh: Any, *, gathered: bool) -> Program:
    """Features mixed over the whole batch by a matrix, or each on its own."""

    def forward(w: Any, mix: Any, x: Any) -> Any:
        features = jax.nn.relu(x @ w)
        return mix @ features if gathered else features @ w

    return forward, (array(mesh, (64, 64)), array(mesh, (128, 128), "dp"), array(mesh, (128, 64), "dp"))


def gradient_norm(mesh: Any, *, whole: bool) -> Program:
    """Clipped gradients of fully sharded weights: made whole for the norm, or left in their shards."""

    def loss(w: Any, x: Any) -> Any:
        return (jax.nn.relu(x @ w) ** 2).mean()

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(loss)(w, x)
        gradient = constrain(gradient, jax.NamedSharding(mesh, P() if whole else P("fsdp", None)))
        clipped = gradient / jnp.maximum(1.0, jnp.sqrt((gradient**2).sum()))
        return constrain(w - 0.1 * clipped, jax.NamedSharding(mesh, P("fsdp", None)))

    return jax.jit(step, donate_argnums=0), (array(mesh, (64, 128), "fsdp", None), array(mesh, (64, 64), "fsdp"))


def gathers_in_loop(mesh: Any, *, inside: bool) -> Program:
    """Weights gathered by hand for every microbatch, or once before all of them."""

    def body(w: Any, x: Any) -> Any:
        def one(part: Any) -> Any:
            if inside:  # the barrier is what keeps XLA from taking it out of the loop
                shard, part = jax.lax.optimization_barrier((w, part))
                whole = jax.lax.all_gather(shard, "fsdp", tiled=True)
            else:
                whole = before
            return jax.nn.relu(part @ whole)

        before = None if inside else jax.lax.all_gather(w, "fsdp", tiled=True)
        return jax.lax.map(one, x)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("fsdp"), P(None, "fsdp")), out_specs=P(None, "fsdp"), check_vma=False
    )
    return mapped, (array(mesh, (64, 64), "fsdp"), array(mesh, (4, 32, 64), None, "fsdp"))


def gathers_twice(mesh: Any, *, twice: bool) -> Program:
    """One weight gathered in two dtypes for two products, or once for both."""

    def body(w: Any, x: Any) -> Any:
        whole = jax.lax.all_gather(w, "fsdp", tiled=True)
        again = jax.lax.all_gather(w.astype(jnp.bfloat16), "fsdp", tiled=True) if twice else whole
        return jax.nn.relu(x @ whole) @ again.T.astype(jnp.float32)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"), check_vma=False)
    return mapped, (array(mesh, (64, 64), "fsdp"), array(mesh, (32, 64), "fsdp"))


def sums_twice(mesh: Any, *, twice: bool) -> Program:
    """A tensor parallel product summed over tp, and summed once more."""

    def body(w: Any, x: Any) -> Any:
        y = jax.lax.psum(x @ w, "tp")
        return jax.lax.psum(jax.nn.relu(y), "tp") if twice else jax.nn.relu(y)

    specs = (P("tp", None), P("dp", "tp"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("dp", None), check_vma=False)
    return mapped, (array(mesh, (64, 64), "tp", None), array(mesh, (32, 64), "dp", "tp"))


def scalar_summed_twice(mesh: Any, *, how: str) -> Program:
    """A loss summed over tp, and summed or averaged once more; or a count of what each device holds."""

    def body(x: Any) -> Any:
        total = jax.lax.psum((x**2).sum(), "tp")
        if how == "sum":
            return jax.lax.psum(jnp.sqrt(total), "tp")
        return jax.lax.pmean(jnp.sqrt(total), "tp")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False)
    return mapped, (array(mesh, (64, 64), "tp"),)


def unsummed(mesh: Any, *, summed: bool) -> Program:
    """A product whose parts nobody adds up, said to be whole; or added up."""

    def body(x: Any, w: Any) -> Any:
        y = x @ w
        return jax.lax.psum(y, "tp") if summed else y

    specs = (P("dp", "tp"), P("tp", None))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("dp", None), check_vma=False)
    return mapped, (array(mesh, (32, 64), "dp", "tp"), array(mesh, (64, 64), "tp", None))


def optimizer_step(mesh: Any, *, state: bool = True, batch: bool = True, donated: bool = True) -> Program:
    """A fully sharded train step, but for what is not split or not donated."""
    specs = {"w_in": ((512, 1024), (None, "fsdp")), "w_out": ((1024, 512), ("fsdp", None))}
    params = {name: array(mesh, *(shape, *spec)) for name, (shape, spec) in specs.items()}
    moments = {name: array(mesh, shape, *(spec if state else ())) for name, (shape, spec) in specs.items()}
    made = jax.tree.map(lambda one: one.sharding, (params, params if state else moments))

    def loss(params: Any, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params["w_in"])
        if batch:
            hidden = constrain(hidden, jax.NamedSharding(mesh, P("fsdp", None)))
        y = hidden @ params["w_out"]
        return ((constrain(y, jax.NamedSharding(mesh, P("fsdp", None))) if batch else y) ** 2).mean()

    def step(params: Any, moments: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    jitted = jax.jit(step, donate_argnums=(0, 1) if donated else (), out_shardings=made)
    return jitted, (params, moments, array(mesh, (64, 512), *(("fsdp",) if batch else ())))


def put_on_a_device(mesh: Any, *, inside: bool) -> Program:
    """An array put on one device inside of jit, or left alone."""

    def forward(x: Any) -> Any:
        return jnp.sin(jax.device_put(x, jax.devices()[0]) if inside else x)

    return forward, (array(mesh, (64, 64), "dp"),)


def transformed(mesh: Any, *, by_partitioner: bool, axis: int = 1) -> Program:
    """A Fourier transform of an array whose first dim dp splits: left to the partitioner, or in shard_map."""

    def forward(x: Any) -> Any:
        return jnp.fft.fft(x, axis=axis).real

    mapped = jax.shard_map(forward, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    return forward if by_partitioner else mapped, (array(mesh, (64, 64), "dp"),)


def accumulated(mesh: Any, *, on_split_dim: bool) -> Program:
    """A cumulative sum along the dim that dp splits, or along the other."""

    def forward(x: Any) -> Any:
        return jnp.cumsum(x, axis=0 if on_split_dim else 1)

    return forward, (array(mesh, (64, 64), "dp"),)


def unsplit_batch(mesh: Any, *, split: bool) -> Program:
    """Data parallel by the mesh, with a batch that dp does not split, or does."""

    def forward(w: Any, x: Any) -> Any:
        return jax.nn.relu(x @ w)

    return forward, (array(mesh, (64, 64), None, "tp"), array(mesh, (64, 64), *(("dp",) if split else ())))


def stages(mesh: Any, *, layers: tuple[int, int]) -> Program:
    """Two stages of a pipeline, each with some layers, which every device picks by its place along pp."""

    def stage(x: Any, w: Any, number: int) -> Any:
        for _ in range(layers[number]):
            x = jax.nn.relu(x @ w[0])
        return x

    def body(w: Any, x: Any) -> Any:
        index = jax.lax.axis_index("pp")
        x = jax.lax.switch(index, [partial(stage, number=number) for number in range(2)], x, w)
        return jax.lax.ppermute(x, "pp", [(0, 1), (1, 0)])

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("pp"), P("pp")), out_specs=P("pp"), axis_names={"pp"}, check_vma=False
    )
    return mapped, (array(mesh, (2, 64, 64), "pp", None, None), array(mesh, (64, 64), ("pp", "dp")))


def reshuffled(mesh: Any, *, far: bool) -> Program:
    """A value moved to axes on other dims, between which the partitioner knows no way, or to one that it can reach."""

    def forward(x: Any) -> Any:
        y = constrain(jnp.sin(x), jax.NamedSharding(mesh, P(None, "fsdp", "dp")))
        after = P(None, None, ("dp", "fsdp", "tp")) if far else P("fsdp", None, "dp")
        return constrain(jnp.cos(y), jax.NamedSharding(mesh, after))

    return forward, (array(mesh, (16, 16, 16), None, "fsdp", "dp"),)


def waits(mesh: Any, *, for_nothing: bool) -> Program:
    """A sum over tp, and a chain of products that does not need it, or that does."""

    def body(w: Any, x: Any, y: Any) -> Any:
        total = jax.lax.psum(x, "tp")
        z = y if for_nothing else y + total
        for _ in range(4):
            z = jnp.tanh(z @ w)
        return z + total

    specs = (P(), P("tp"), P("tp"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False)
    rows, width = mesh.shape["tp"] * 2048, 2048
    big = [
        array(mesh, shape, *spec, dtype=jnp.bfloat16)
        for shape, spec in (((width, width), P()), ((rows, width), specs[1]))
    ]
    return mapped, (big[0], big[1], big[1])


def small_matrices(mesh: Any, *, size: int) -> Program:
    """Products of many small matrices, which a TPU holds in tiles of 8 x 128."""

    def forward(w: Any, x: Any) -> Any:
        return jnp.einsum("eij,ejk->eik", jnp.tanh(jnp.einsum("eij,ejk->eik", x, w)), w)

    return forward, (array(mesh, (16384, size, size), "dp"), array(mesh, (16384, size, size), "dp"))


def row_and_column(mesh: Any) -> Program:
    """A tensor parallel MLP: its sums over tp are nearly all that is sent."""

    def forward(params: Any, x: Any) -> Any:
        return x + jax.nn.relu(x @ params["w_in"]) @ params["w_out"]

    params = {"w_in": array(mesh, (4096, 8192), None, "tp"), "w_out": array(mesh, (8192, 4096), "tp", None)}
    return forward, (params, array(mesh, (8192, 4096), "dp"))
