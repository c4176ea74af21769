"""A layer of a server as JAX compiles it on 8 simulated devices: the collectives that are priced, and the right result.

Products are asked for in the layouts of `SERVING_RULES`; what each leaves unreduced is placed as is priced.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from meshwright.cost import serving_collectives
from meshwright.hlo import canonicalize_collective, parse_hlo, read_collectives
from meshwright.mesh import MeshShape
from meshwright.record import merge
from meshwright.runtime import build_mesh
from meshwright.step import ModelConfig, Serving, ServingLayout

B, S, D, K, G, H, F = 8, 16, 64, 2, 2, 16, 128
MODEL = ModelConfig(
    name="small", num_layers=1, embed=D, mlp=F, num_heads=K * G, num_kv_heads=K, head_dim=H, vocab=32
)  # fmt: skip
SERVING = Serving(
    model=MODEL, prompt_len=S - 1, output_len=1, compute_dtype="f32", weight_dtype="f32", kv_dtype="f32", page_size=1
)  # fmt: skip
X, Y = "fsdp", ("sp", "tp")
SHAPES = {
    "query": (D, K, G, H), "key": (D, K, H), "value": (D, K, H), "output": (K, G, H, D), "gate": (D, F), "up": (D, F),
    "down": (F, D), "x": (B, D), "keys": (B, S, K, H), "values": (B, S, K, H),
}  # fmt: skip
CACHE = {"heads": P(None, None, "tp"), "batch": P((X, "sp"), None, "tp"), "sequence": P(None, (X, "sp"), "tp")}


def specs(cache):
    """How a server's rules lay each array."""
    return {
        "query": P(X, "tp", "sp"), "key": P(X, "tp"), "value": P(X, "tp"), "output": P("tp", "sp", None, X),
        "gate": P(X, Y), "up": P(X, Y), "down": P(Y, X), "x": P(None, X), "keys": CACHE[cache], "values": CACHE[cache],
    }  # fmt: skip


def attention(arrays, x, cache):
    """One token of each sequence against its cache, without a place for the token's own key and value."""
    whole = P(None, "tp", "sp", None)
    queries = jnp.einsum("bd,dkgh->bkgh", x, arrays["query"], out_sharding=P(None, "tp", "sp", None, unreduced={X}))
    pairs = [
        jnp.einsum("bd,dkh->bkh", x, arrays[n], out_sharding=P(None, "tp", None, unreduced={X}))
        for n in ("key", "value")
    ]
    if cache == "batch":
        queries = jax.reshard(jax.reshard(queries, P(X, "tp", "sp", None)), P((X, "sp"), "tp", None, None))
        pairs = [jax.reshard(pair, P(X, "tp", None)) for pair in pairs]
    else:
        queries = jax.reshard(queries, whole)
        pairs = [jax.reshard(pair, P(None, "tp", None)) for pair in pairs]
    if cache == "sequence":
        queries = jax.reshard(queries, P(None, "tp", None, None))
    scores = jnp.einsum("bkgh,bskh->bkgs", queries, arrays["keys"])
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    sums = weights.sum(-1)
    if cache == "sequence":
        partial = P(None, "tp", None, None, unreduced={X, "sp"})
        heads = jnp.einsum("bkgs,bskh->bkgh", weights, arrays["values"], out_sharding=partial)
        heads = jax.reshard(jax.reshard(heads, P(None, "tp", "sp", None, unreduced={X})), whole)
        heads = heads / jax.reshard(sums, P(None, "tp", "sp"))[..., None]
    else:
        heads = jnp.einsum("bkgs,bskh->bkgh", weights, arrays["values"]) / sums[..., None]
    if cache == "batch":
        heads = jax.reshard(jax.reshard(heads, P(X, "tp", "sp", None)), whole)
    out = jnp.einsum("bkgh,kghd->bd", heads, arrays["output"], out_sharding=P(None, X, unreduced=set(Y)))
    return jax.reshard(out, P(None, X)), pairs


def mlp(arrays, x):
    """The gated mlp."""
    split = P(None, (*Y, X))
    gate, up = (
        jax.reshard(jnp.einsum("bd,df->bf", x, arrays[n], out_sharding=P(None, Y, unreduced={X})), split)
        for n in ("gate", "up")
    )
    hidden = jax.reshard(jax.nn.silu(gate) * up, P(None, Y))
    return jax.reshard(
        jnp.einsum("bf,fd->bd", hidden, arrays["down"], out_sharding=P(None, X, unreduced=set(Y))), P(None, X)
    )


def layer(arrays, cache):
    """Attention and mlp in a row, and the new keys and values."""
    added, pairs = attention(arrays, arrays["x"], cache)
    x = arrays["x"] + added
    return x + mlp(arrays, x), pairs


def on_one_device(arrays):
    """The same without a mesh."""
    x = arrays["x"]
    queries = np.einsum("bd,dkgh->bkgh", x, arrays["query"])
    scores = np.einsum("bkgh,bskh->bkgs", queries, arrays["keys"])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    heads = np.einsum("bkgs,bskh->bkgh", weights / weights.sum(-1, keepdims=True), arrays["values"])
    x = x + np.einsum("bkgh,kghd->bd", heads, arrays["output"])
    gate = x @ arrays["gate"]
    return x + (gate / (1 + np.exp(-gate)) * (x @ arrays["up"])) @ arrays["down"]


@pytest.mark.parametrize(
    ("shape", "cache"),
    [
        (MeshShape(fsdp=4, tp=2), "heads"),
        (MeshShape(fsdp=2, sp=2, tp=2), "heads"),
        (MeshShape(fsdp=2, sp=2, tp=2), "batch"),
        (MeshShape(fsdp=2, sp=2, tp=2), "sequence"),
        (MeshShape(fsdp=4, tp=2), "batch"),
    ],
    ids=str,
)
def test_a_layer_has_the_collectives_that_are_priced_and_the_result_of_one_device(shape, cache):
    draw = np.random.default_rng(0)
    arrays = {name: draw.normal(size=size).astype(np.float32) / 8 for name, size in SHAPES.items()}
    mesh = build_mesh(shape)
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(arrays[name], jax.NamedSharding(mesh, spec)) for name, spec in specs(cache).items()
        }
        compiled = jax.jit(lambda placed: layer(placed, cache)).lower(placed).compile()
        found, _ = compiled(placed)
    np.testing.assert_allclose(found, on_one_device(arrays), rtol=1e-4, atol=1e-4)

    read = read_collectives(parse_hlo(compiled.as_text()), shape.layout).collectives
    compiled_bytes = summed(merge(one for move in read for one in canonicalize_collective(move, shape.degrees)))
    moves = serving_collectives(SERVING, ServingLayout(shape, cache), B)
    ends = ("embedding", "logits", "best tokens", "attention norm", "mlp norm")
    assert compiled_bytes == summed(move for move in moves if move.array not in ends)


def summed(moves):
    """The bytes by kind and axes."""
    found = {}
    for move in moves:
        key = move.kind, frozenset(move.axes)
        found[key] = found.get(key, 0) + move.bytes
    return found
