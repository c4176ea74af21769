from importlib.metadata import version

import jax
import jax.numpy as jnp
import pytest

from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.phases import describe, phase_of, scope_of, split_op_name

# What JAX prints, and what that is: 0.10.2, and in the second and the third row 0.11.
NAMES = [
    ("jit(step)/jvp(layers)/while/body/closed_call/block/mlp/reshard", "forward", "layers/block/mlp/reshard"),
    ("jit(step)/jvp(layers)/while/body/eval_jaxpr/mlp/reshard", "forward", "layers/mlp/reshard"),
    ("jit(step)/jvp(layers)/while/body/jit", "forward", "layers"),
    ("jit(step)/transpose(jvp(layers))/while/body/closed_call/checkpoint/rematted_computation/mlp/dot_general",
     "recompute", "layers/mlp/dot_general"),
    ("jit(step)/transpose(jvp(layers))/while/body/closed_call/checkpoint/mlp/bsd,df->bsf/dot_general", "backward",
     "layers/mlp/bsd,df->bsf/dot_general"),
    ("jit(f)/transpose(jvp(jvp()))/checkpoint/rematted_computation/blk/dot_general", "recompute", "blk/dot_general"),
    ("jit(step)/update/reduce_sum", "update", "update/reduce_sum"),
    ("jit(step)/jvp(cache)/update/add", "forward", "cache/update/add"),
    ("jit(step)/gradients/jvp(gradients)/while/body/add", "backward", "gradients/gradients/add"),
    ("jit(step)/gradients/jvp()/while/body/add", "forward", "gradients/add"),
    ("jit(step)/updates/add", "forward", "updates/add"),
    ("jit(step)/jvp()/jit(silu)/mul", "forward", "mul"),
    ("jvp(vmap(blk))/dot_general", "forward", "blk/dot_general"),
    ("state['w']", "forward", "state['w']"),
    ("", "forward", ""),
]  # fmt: skip


@pytest.mark.parametrize(("op_name", "phase", "scope"), NAMES)
def test_an_op_name_says_the_phase_and_the_scopes(op_name, phase, scope):
    assert (phase_of(op_name), scope_of(op_name)) == (phase, scope)


@pytest.mark.parametrize(
    ("op_name", "names"),
    [
        ("jit(f)/a/b", ("jit(f)/a/b",)),
        ("jit(f)/(a/b:c/d)", ("jit(f)/a/b", "jit(f)/c/d")),
        ("jit(f)/jvp(x)/(a:jvp(b)/c:d)/e", ("jit(f)/jvp(x)/a/e", "jit(f)/jvp(x)/jvp(b)/c/e", "jit(f)/jvp(x)/d/e")),
        ("jit(f)/a;jit(f)/b", ("jit(f)/a", "jit(f)/b")),
        ("", ("",)),
    ],
)
def test_op_names_that_xla_joined_are_parted_again(op_name, names):
    assert split_op_name(op_name) == names


def test_what_is_compiled_counts_not_what_was_written():
    """Outside of loops XLA:CPU of jaxlib 0.10 finds that what checkpoint runs again is there already, and drops it."""

    def block(x, w):
        return jnp.sin(x @ w)

    def loss(w, x):
        for _ in range(3):
            x = jax.checkpoint(block)(x, w)
        return x.sum()

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        with jax.named_scope("update"):
            return value, w - gradient @ gradient

    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    module = parse_hlo(jax.jit(step).lower(x, x).compile().as_text())
    dots = [describe(module, i)[0].phase for i in module.instructions() if i.opcode == "dot"]
    again = {} if version("jaxlib").startswith("0.10.") else {"recompute": 3}
    # Nothing asks for the gradient of the first x.
    assert {phase: dots.count(phase) for phase in set(dots)} == {"forward": 3, "backward": 5, "update": 1} | again


def test_a_gradient_that_a_loop_completes_is_backward_though_the_loop_stands_forward():
    """As 1F1B's does of the head; sums of several arrays have one name where XLA keeps that of the last alone."""
    loop = "jit(step)/gradients/jvp()/while"
    module = parse_hlo(f"""HloModule m, num_partitions=2

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

%body (b: (f32[4], f32[4])) -> (f32[4], f32[4]) {{
  %b = (f32[4], f32[4]) parameter(0)
  %loss = f32[4] sine(%b#0), metadata={{op_name="{loop}/body/jvp()/sin"}}
  %head = f32[4] cosine(%b#1), metadata={{op_name="{loop}/body/transpose(jvp())/cos"}}
  ROOT %t = (f32[4], f32[4]) tuple(%loss, %head)
}}

%condition (c: (f32[4], f32[4])) -> pred[] {{
  %c = (f32[4], f32[4]) parameter(0)
  ROOT %more = pred[] constant(false)
}}

ENTRY %main (p: (f32[4], f32[4])) -> (f32[4], f32[4]) {{
  %p = (f32[4], f32[4]) parameter(0)
  %loop = (f32[4], f32[4]) while(%p), condition=%condition, body=%body, metadata={{op_name="{loop}"}}
  %one = f32[4] get-tuple-element(%loop), index=0, metadata={{op_name="{loop}"}}
  %other = f32[4] get-tuple-element(%loop), index=1, metadata={{op_name="{loop}"}}
  ROOT %sums = (f32[4], f32[4]) all-reduce(%one, %other), replica_groups={{}}, to_apply=%add, metadata={{op_name="n"}}
}}
""")
    sums = module.computations["main"].instructions["sums"]
    assert [one.phase for one in describe(module, sums, number=2)] == ["forward", "backward"]


def test_what_xla_itself_runs_again_is_recompute():
    module = parse_hlo(
        "HloModule m\n\nENTRY %main (p: f32[4]) -> f32[4] {\n  %p = f32[4]{0} parameter(0)\n"
        '  %a = f32[4]{0} sine(%p), metadata={op_name="jit(f)/jvp()/sin"}\n'
        '  ROOT %a.remat2 = f32[4]{0} sine(%p), metadata={op_name="jit(f)/jvp()/sin"}\n}\n'
    )
    main = module.computations["main"].instructions
    assert [describe(module, main[name])[0].phase for name in ("a", "a.remat2")] == ["forward", "recompute"]
