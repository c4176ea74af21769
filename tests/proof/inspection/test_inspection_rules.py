"""Findings against what was meant: rules over the paths of arguments, and the collectives that a plan expects."""

import jax
import jax.numpy as jnp
import planted
import pytest
from jax import P
from jax.sharding import AxisType
from jax_versions import RESHARDS_SCANNED_STREAM

import meshwright
from meshwright.record import Collective


def mesh_of(**degrees):
    return jax.make_mesh(tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))


def row_and_column(mesh, *, split):
    """A tensor parallel MLP whose second weight is split as the first, or left whole."""
    params = {
        "w_in": planted.array(mesh, (64, 128), None, "tp"),
        "w_out": planted.array(mesh, (128, 64), *(("tp", None) if split else ())),
    }

    def forward(params, x):
        return jax.nn.relu(x @ params["w_in"]) @ params["w_out"]

    return forward, (params, planted.array(mesh, (32, 64), "dp"))


def test_a_parameter_and_its_moments_that_were_forgotten_alike_are_one_finding():
    mesh = mesh_of(fsdp=8)
    split, whole = planted.array(mesh, (256, 256), "fsdp", None), planted.array(mesh, (256, 64))

    def step(params, moments, x):
        gradients = jax.grad(lambda params: ((x @ params["w"] @ params["head"]) ** 2).mean())(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda p, m: p - m, params, moments), moments

    states = {"w": split, "head": whole}
    jitted = jax.jit(step, donate_argnums=(0, 1))
    found = meshwright.inspect(jitted, states, states, planted.array(mesh, (64, 256), "fsdp")).findings
    (forgotten,) = [one for one in found if one.kind == "replicated parameter"]
    assert (forgotten.name, forgotten.others) == ("params['head']", ("moments['head']",))
    assert forgotten.bytes == 2 * 256 * 64 * 4 * 7 // 8
    assert "params['head'] f32[256,64], as moments['head'], has a copy" in forgotten.evidence


RULES = {r"w_in|w_gate": (None, "tp"), r"w_out": ("tp", None)}


def findings(split, **given):
    mesh = mesh_of(dp=2, tp=4)
    function, args = row_and_column(mesh, split=split)
    return meshwright.inspect(function, *args, **given).findings


def test_an_argument_that_its_rule_splits_and_the_program_does_not_is_told_with_its_bytes():
    (found,) = findings(False, rules=RULES)
    assert found.kind == "replicated parameter"
    assert (found.name, str(found.shape), found.axes) == ("params['w_out']", "f32[128,64]", ("tp",))
    assert "params['w_out'] f32[128,64] has a copy on each of 4 devices along tp" in found.evidence
    assert found.bytes == 128 * 64 * 4 * 3 // 4
    assert "test_inspection_rules.py" in found.source


def test_without_rules_a_whole_weight_over_an_axis_of_no_batch_may_be_meant():
    assert findings(False) == ()


def test_a_program_as_its_rules_say_has_no_finding():
    assert findings(True, rules=RULES) == ()


REDUCED = Collective(kind="all-reduce", axes=("tp",), phase="forward", bytes=0)


def test_what_is_expected_is_no_finding_and_what_is_not_is_one():
    assert findings(True, expected=[REDUCED]) == ()
    (found,) = findings(True, expected=[])
    assert (found.kind, found.bytes) == ("unexpected collective", 16 * 64 * 4)
    assert found.cost_seconds > 0
    assert (found.collective, found.array, found.axes) == ("all-reduce", "f32[16,64]", ("tp",))


def test_an_all_reduce_over_two_axes_is_expected_where_one_over_each_is():
    mesh = mesh_of(dp=2, tp=4)

    def body(x):
        return jax.lax.psum(x, ("dp", "tp"))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P())
    over_dp = Collective(kind="all-reduce", axes=("dp",), phase="forward", bytes=0)
    x = planted.array(mesh, (64, 64), ("dp", "tp"))
    assert meshwright.inspect(mapped, x, expected=[REDUCED, over_dp]).findings == ()
    assert len(meshwright.inspect(mapped, x, expected=[over_dp]).findings) == 1


def summed(mesh, body, *shapes):
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False)
    found = meshwright.inspect(mapped, [planted.array(mesh, shape, "tp") for shape in shapes]).findings
    assert {finding.kind for finding in found} == {"reduced twice"}
    return found


def test_the_costs_of_alike_findings_from_one_line_are_added_up():
    def body(xs):
        (x,) = xs
        for _ in range(4):
            x = jax.lax.psum(jnp.sin(x), "tp")
        return x

    (found,) = summed(mesh_of(tp=8), body, (64, 64))
    assert found.bytes == 3 * 8 * 64 * 4


def test_of_sums_that_xla_combines_with_others_only_those_that_are_reduced_already_count():
    def body(xs):
        return [jax.lax.psum(jax.lax.psum(x, "tp") + 1, "tp") for x in xs]

    found = summed(mesh_of(tp=8), body, (64, 64), (128, 64))
    assert sum(finding.bytes for finding in found) == (8 + 16) * 64 * 4


def unconstrained_layers(mesh, *, is_scanned):
    """Layers whose weights fsdp and tp split, and whose activations no constraint keeps split over fsdp."""
    d, heads, f = 256, 8, 1024

    def layer(x, params):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        x = x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, params["o"])
        return x + jax.nn.silu(x @ params["w_in"]) @ params["w_out"]

    def loss(params, tokens):
        x = params["embed"][tokens]
        if is_scanned:
            x, _ = jax.lax.scan(lambda x, _: (layer(x, params), None), x, length=4)
        else:
            x = layer(layer(x, params), params)
        logits = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1).mean()

    def step(params, tokens):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, tokens))

    params = {name: planted.array(mesh, (d, heads, d // heads), "fsdp", "tp", None) for name in "qkv"}
    params |= {"o": planted.array(mesh, (heads, d // heads, d), "tp", None, "fsdp")}
    params |= {"w_in": planted.array(mesh, (d, f), "fsdp", "tp"), "w_out": planted.array(mesh, (f, d), "tp", "fsdp")}
    params |= {
        "embed": planted.array(mesh, (512, d), "tp", "fsdp"),
        "head": planted.array(mesh, (d, 512), "fsdp", "tp"),
    }
    shardings = jax.tree.map(lambda one: one.sharding, params)
    tokens = planted.array(mesh, (16, 128), "fsdp", dtype=jnp.int32)
    return jax.jit(step, donate_argnums=0, out_shardings=shardings), (params, tokens)


@pytest.mark.parametrize("is_scanned", [False, True])
def test_what_one_missing_constraint_gathers_is_one_finding(is_scanned):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    function, args = unconstrained_layers(mesh, is_scanned=is_scanned)
    found, *others = meshwright.inspect(function, *args).findings
    assert [one.id for one in others] == ["gathered-to-reshard"] * (is_scanned and RESHARDS_SCANNED_STREAM)
    assert (found.kind, found.axes) == ("unexpected collective", ("fsdp",))
    assert found.source.split(" ")[0].rpartition(":")[0].endswith("test_inspection_rules.py")
    # The loop's body, which then runs for the whole batch, counts as work of this finding.
    assert is_scanned or found.elsewhere
    assert not found.elsewhere or f"the same at {len(found.elsewhere)} other line" in found.evidence


def test_data_that_follow_a_lookup_and_back_in_the_backward_pass_are_one_finding():
    """The table's columns are split over the axis of the batch: rows and their gradients each move in an all-to-all."""
    mesh = mesh_of(fsdp=4, tp=2)

    def loss(table, tokens):
        rows = jax.lax.with_sharding_constraint(table[tokens], jax.NamedSharding(mesh, P("fsdp")))
        return (jnp.sin(rows) ** 2).mean()

    def step(table, tokens):
        return table - 0.1 * jax.grad(loss)(table, tokens)

    arguments = planted.array(mesh, (512, 256), "tp", "fsdp"), planted.array(mesh, (16, 128), "fsdp", dtype=jnp.int32)
    report = meshwright.inspect(jax.jit(step, donate_argnums=0), *arguments)
    moved = [one for one in report.collectives if one.kind == "all-to-all"]
    assert {one.phase for one in moved} == {"forward", "backward"}
    (found,) = report.findings
    assert found.bytes == sum(one.bytes for one in moved)
    assert "other line" not in found.evidence
