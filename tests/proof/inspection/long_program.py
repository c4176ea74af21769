"""A language model's train step as users write it, in one file: clean, or with one mistake by its name.

Fully sharded over fsdp, tensor parallel over tp, bfloat16 with float32 state, a scan over layers that are recomputed,
AdamW and an average of the weights by hand, gradients accumulated over microbatches.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.ad_checkpoint import checkpoint_name

LAYERS, EMBED, HEADS, HEAD_DIM, MLP, VOCAB, BATCH, SEQ = 4, 128, 4, 32, 512, 1024, 16, 128

MISTAKES = {
    "state not donated": "not-donated",
    "hidden layer constrained whole": "unsharding-constraint",
    "rotary tables captured": "captured-constant",
    "scaled by a NumPy number": "wide-product",
    "average whole on every device": "replicated-states",
    "print in the scan": "host-call-in-loop",
    "logits returned whole": "gathered-result",
    "moments come back in bfloat16": "state-changed",
    "head split on its contraction": "split-contraction",
    "layers gathered before the scan": "hoisted-gather",
    "moments split along another dim": "mislaid-state",
    "residual stream constrained whole": "unsharding-constraint",
}
"""The mistakes that can be planted, each with the id of its finding."""


@dataclass(frozen=True)
class Specs:
    """The sharding of every parameter, and of what is computed with them."""

    layers: dict
    embedding: P
    head: P
    residual: P
    hidden: P


def specs_of(mistake):
    layers = {
        "scale": P(None, None),
        "q": P(None, "fsdp", "tp", None),
        "k": P(None, "fsdp", "tp", None),
        "v": P(None, "fsdp", "tp", None),
        "o": P(None, "tp", None, "fsdp"),
        "gate": P(None, "fsdp", "tp"),
        "up": P(None, "fsdp", "tp"),
        "down": P(None, "tp", "fsdp"),
    }
    head = P("tp", "fsdp") if mistake == "head split on its contraction" else P("fsdp", "tp")
    hidden = P("fsdp") if mistake == "hidden layer constrained whole" else P("fsdp", None, "tp")
    residual = P() if mistake == "residual stream constrained whole" else P("fsdp")
    return Specs(layers=layers, embedding=P("tp", "fsdp"), head=head, hidden=hidden, residual=residual)


def shapes():
    """The shape of every parameter."""
    heads = (LAYERS, EMBED, HEADS, HEAD_DIM)
    layers = {
        "scale": (LAYERS, EMBED),
        "q": heads,
        "k": heads,
        "v": heads,
        "o": (LAYERS, HEADS, HEAD_DIM, EMBED),
        "gate": (LAYERS, EMBED, MLP),
        "up": (LAYERS, EMBED, MLP),
        "down": (LAYERS, MLP, EMBED),
    }
    return {"layers": layers, "embedding": (VOCAB, EMBED), "head": (EMBED, VOCAB)}


def rotary_tables(length):
    """Cosines and sines of positions [length, HEAD_DIM / 2]."""
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


TABLES = rotary_tables(8192)


class Model:
    """The forward pass on a mesh."""

    def __init__(self, mesh, specs, mistake):
        self.mesh, self.specs, self.mistake = mesh, specs, mistake

    def constrain(self, x, spec):
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(self.mesh, spec))

    def gathered(self, name, weight):
        """A weight of one layer, whole along fsdp, in bfloat16."""
        axes = [axis if axis == "tp" else None for axis in self.specs.layers[name][1:]]
        return self.constrain(weight.astype(jnp.bfloat16), P(*axes))

    def normed(self, x, scale):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
        return (wide * scale[None, None]).astype(jnp.bfloat16)

    def rotated(self, x, tables):
        cos, sin = (table[None, :, None].astype(x.dtype) for table in tables)
        left, right = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    def attention(self, layer, x, tables):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, self.gathered(name, layer[name])) for name in "qkv")
        q, k = self.rotated(q, tables), self.rotated(k, tables)
        scale = np.sqrt(HEAD_DIM) if self.mistake == "scaled by a NumPy number" else HEAD_DIM**0.5
        scores = jnp.einsum("bqhk,bshk->bhqs", q / scale, k).astype(jnp.float32)
        positions = jnp.arange(x.shape[1])
        causal = positions[None, None, :, None] >= positions[None, None, None, :]
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(jnp.bfloat16)
        out = jnp.einsum("bhqs,bshk->bqhk", weights, v)
        return jnp.einsum("bqhk,hkd->bqd", out, self.gathered("o", layer["o"]))

    def mlp(self, layer, x):
        gate, up = (x @ self.gathered(name, layer[name]) for name in ("gate", "up"))
        hidden = self.constrain(jax.nn.silu(gate) * up, self.specs.hidden)
        return hidden @ self.gathered("down", layer["down"])

    def layer(self, tables, x, layer):
        attended = self.constrain(self.attention(layer, self.normed(x, layer["scale"]), tables), self.specs.residual)
        x = x + checkpoint_name(attended, "summed")
        made = self.constrain(self.mlp(layer, self.normed(x, layer["scale"])), self.specs.residual)
        x = x + checkpoint_name(made, "summed")
        if self.mistake == "print in the scan":
            jax.debug.print("{}", x[0, 0, 0])
        return x, None

    def logits(self, params, tokens, tables):
        table = self.constrain(params["embedding"].astype(jnp.bfloat16), P("tp", None))
        one_hot = jax.nn.one_hot(tokens, VOCAB, dtype=jnp.bfloat16)
        x = self.constrain(one_hot @ table, P("fsdp"))
        layers = params["layers"]
        if self.mistake == "layers gathered before the scan":
            layers = {name: self.constrain(w, P(*(a if a == "tp" else None for a in self.specs.layers[name])))
                      for name, w in layers.items()}  # fmt: skip
        policy = jax.checkpoint_policies.save_only_these_names("summed")
        x, _ = jax.lax.scan(jax.checkpoint(partial(self.layer, tables), policy=policy), x, layers)
        head_axes = ("tp", None) if self.mistake == "head split on its contraction" else (None, "tp")
        head = self.constrain(params["head"].astype(jnp.bfloat16), P(*head_axes))
        return x @ head

    def loss(self, params, tokens, tables):
        logits = self.logits(params, tokens, tables)
        scores = jax.nn.log_softmax(logits.astype(jnp.float32)[:, :-1])
        one_hot = jax.nn.one_hot(tokens[:, 1:], VOCAB)
        return -(scores * one_hot).sum(-1).mean(), logits


def adamw(state, gradients, step, rate=1e-3, decay=0.1):
    """New parameters and moments."""
    first = jax.tree.map(lambda m, g: 0.9 * m.astype(g.dtype) + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, state["second"], gradients)
    fraction = 1 - 0.9 ** (step + 1.0), 1 - 0.99 ** (step + 1.0)

    def update(w, m, v):
        return w - rate * (m / fraction[0] / (jnp.sqrt(v / fraction[1]) + 1e-8) + decay * w)

    return jax.tree.map(update, state["params"], first, second), first, second


def make(mesh, mistake=""):
    """The train step and its arguments."""
    specs = specs_of(mistake)
    model = Model(mesh, specs, mistake)
    laid = {"layers": specs.layers, "embedding": specs.embedding, "head": specs.head}
    params = jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec)),
        shapes(), laid, is_leaf=lambda one: isinstance(one, tuple) and not isinstance(one, P),
    )  # fmt: skip
    shardings = jax.tree.map(lambda one: one.sharding, params)

    def stepped(state, tokens, tables):
        (loss, logits), gradients = jax.value_and_grad(model.loss, has_aux=True)(state["params"], tokens, tables)
        gradients = jax.lax.with_sharding_constraint(gradients, shardings)
        params, first, second = adamw(state, gradients, state["step"].astype(jnp.float32))
        if mistake == "moments come back in bfloat16":
            first = jax.tree.map(lambda m: m.astype(jnp.bfloat16), first)
        average = jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new, state["average"], params)
        new = {"params": params, "first": first, "second": second, "average": average, "step": state["step"] + 1}
        return (new, loss, logits) if mistake == "logits returned whole" else (new, loss)

    def replaced(spec):
        return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=spec(one)), params)

    def turned(one):
        spec = one.sharding.spec
        return jax.NamedSharding(mesh, P(None, "tp", "fsdp") if spec == P(None, "fsdp", "tp") else spec)

    whole = replaced(lambda one: jax.NamedSharding(mesh, P()))
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=jax.NamedSharding(mesh, P()))
    first = replaced(turned) if mistake == "moments split along another dim" else params
    average = whole if mistake == "average whole on every device" else params
    state = {"params": params, "first": first, "second": params, "average": average, "step": scalar}
    out = [jax.tree.map(lambda one: one.sharding, state), jax.NamedSharding(mesh, P())]
    out += [jax.NamedSharding(mesh, P())] * (mistake == "logits returned whole")
    donated = () if mistake == "state not donated" else (0,)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32, sharding=jax.NamedSharding(mesh, P("fsdp")))
    tables = tuple(jax.ShapeDtypeStruct((SEQ, HEAD_DIM // 2), jnp.float32) for _ in range(2))
    if mistake == "rotary tables captured":
        whole_tables = tuple(jnp.asarray(table) for table in TABLES)

        def step(state, tokens):
            return stepped(state, tokens, tuple(jax.lax.slice_in_dim(table, 0, SEQ) for table in whole_tables))

        return jax.jit(step, donate_argnums=donated, out_shardings=tuple(out)), (state, tokens)
    return jax.jit(stepped, donate_argnums=donated, out_shardings=tuple(out)), (state, tokens, tables)
