"""Experts over devices compute what every expert on every token does, and move what is planned."""

from dataclasses import asdict, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.records import read_hlo
from meshwright.description.step.blocks import moe_block
from meshwright.description.step.model import Experts
from meshwright.description.step.parameter_tree import parameters
from meshwright.description.step.token_routing import dropless_padding
from meshwright.description.step.workload import Workload
from meshwright.execution.models import decoder, layer
from meshwright.execution.models.generation.generate import generate_tokens
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.execution.models.linear import residual_linear
from meshwright.execution.models.moe import MoeOps, load_of_layers, moe_layer
from meshwright.execution.runtime.arrays import initialise
from meshwright.execution.runtime.experts.routing import ExpertLoad, route
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.step import abstract_batch, abstract_state, lower_train_step, train_step
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import dropless_padding_collectives, step_collectives
from meshwright.planning.prediction import predict
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.compiler.program import CompileRequest
from meshwright.proof.compiler.records import read_program
from meshwright.proof.verification.comparison import in_plans_terms
from meshwright.record import merge

BATCH, LENGTH = 8, 16
EXPERTS = Experts(count=8, num_active=2, mlp=32, balance_weight=0.1)
MODEL = replace(PRESETS["tiny"], embed=64, mlp=128, num_heads=16, num_layers=2, experts=EXPERTS)
AMPLE = 4.0
"""A capacity of all tokens of a device for each expert: nothing is dropped."""

STREAM = ("batch", "residual_sequence", "activation")

MESHES = [
    MeshShape(),
    MeshShape(ep=2),
    MeshShape(ep=4),
    MeshShape(ep=8),
    MeshShape(fsdp=2, tp=4),
    MeshShape(ep=2, fsdp=4),
    MeshShape(ep=4, tp=2),
    MeshShape(ep=2, dp=2),
    MeshShape(ep=2, sp=4),
    MeshShape(ep=2, fsdp=2, tp=2),
    MeshShape(ep=2, sp=2, tp=2),
]


@cache
def draw():
    """The weights of a block of experts, as declared, a stream to work on, and a gradient of what comes of it."""
    declared = {
        name: p for name, p in parameters(replace(MODEL, num_layers=1))["layers"].items() if is_of_experts(name)
    }
    random = np.random.default_rng(0)
    weights = {
        name: np.float32(p.scale) * random.standard_normal(p.shape[1:], np.float32) for name, p in declared.items()
    }
    h, gradient = (random.standard_normal((BATCH, LENGTH, MODEL.embed), np.float32) for _ in range(2))
    return weights, h, gradient, {name: p.axes[1:] for name, p in declared.items()}


def is_of_experts(name):
    return name == "router" or name.startswith("expert_")


@partial(jax.jit, static_argnums=2)
def dense(h, weights, num_active, kept=True):
    """Every expert on every token, weighted by the routing; `kept` [b, s, e] masks copies that are dropped."""
    scores = h @ weights["router"]
    lowest = jnp.sort(scores, axis=-1)[..., -num_active][..., None]
    chosen = scores >= lowest
    shares = jnp.where(chosen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    shares = jnp.where(kept, shares / shares.sum(-1, keepdims=True), 0.0)
    gate, up = (jnp.einsum("bsd,edf->bsef", h, weights[f"expert_{name}"]) for name in ("gate", "up"))
    made = jnp.einsum("bsef,efd->bsed", gate / (1 + jnp.exp(-gate)) * up, weights["expert_down"])
    return jnp.einsum("bsed,bse->bsd", made, shares), chosen, scores


def moe(h, weights, experts, layout):
    """What experts add to the stream, from their router on, and their load."""
    _, router, dispatch, gate, up, hidden, down, *_ = moe_block(MODEL, experts).ops
    logits = residual_linear(h, weights["router"], router, layout)
    return moe_layer(h, logits, weights, MoeOps(dispatch, (gate, up), hidden, down), layout)


def on_mesh(shape, experts, weights=None, h=None):
    """What experts add to the stream, its gradients, and their load, on the first devices."""
    drawn, stream, gradient, axes = draw()
    weights, h = weights or drawn, stream if h is None else h
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(w, layout.spec(*axes[name])) for name, w in weights.items()}
        h, gradient = (jax.device_put(x, layout.spec(*STREAM)) for x in (h, gradient))

        @jax.jit
        def run(weights, h):
            added, back, load = jax.vjp(lambda w, h: moe(h, w, experts, layout), weights, h, has_aux=True)
            return added, back(gradient), load_of_layers([load[None]])

        return jax.tree.map(np.asarray, run(placed, h))


def assert_near(found, wanted):
    """Each array to 1e-5 of its norm."""
    flat = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, one), other in flat:
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other), jax.tree_util.keystr(path)


@jax.jit
def dense_with_gradients(weights, h, gradient, kept):
    """The dense block: its result, gradients, and what is chosen."""
    added, back, chosen = jax.vjp(lambda w, h: dense(h, w, EXPERTS.num_active, kept)[:2], weights, h, has_aux=True)
    return added, back(gradient), chosen


@cache
def alone():
    """The dense block: its result, gradients, and the copies of each expert."""
    weights, h, gradient, _ = draw()
    added, gradients, chosen = dense_with_gradients(weights, h, gradient, np.True_)
    return added, gradients, np.asarray(chosen).sum((0, 1))


@pytest.mark.parametrize(
    ("shape", "factor"), [(shape, None) for shape in MESHES] + [(shape, AMPLE) for shape in MESHES[::2]], ids=str
)
def test_experts_over_devices_are_every_expert_on_every_token(shape, factor):
    added, gradients, load = on_mesh(shape, replace(EXPERTS, capacity_factor=factor))
    assert_near((added, gradients), alone()[:2])
    np.testing.assert_array_equal(load.copies[0], alone()[2])
    assert load.dropped.sum() == 0


@pytest.mark.parametrize("shape", [MeshShape(ep=4), MeshShape(ep=2, tp=2)], ids=str)
def test_no_copy_is_dropped_if_all_go_to_two_experts(shape):
    """Dropless is exact whatever the routing: here one device has all the work."""
    weights, h, _, _ = draw()
    h, router = h.copy(), weights["router"].copy()
    h[..., 0], router[0] = 4.0, [9.0, 9.0, 0, 0, 0, 0, 0, 0]
    crowded = weights | {"router": router}
    wanted, chosen, _ = dense(h, crowded, EXPERTS.num_active)
    added, _, load = on_mesh(shape, EXPERTS, crowded, h)
    assert np.asarray(chosen).sum((0, 1)).tolist() == [BATCH * LENGTH] * 2 + [0] * 6
    assert_near(added, wanted)
    assert load.max_over_mean == EXPERTS.count / EXPERTS.num_active


def ragged_all_to_all(rows, output, starts, sent, places, received, *, axis_name):
    """What `jax.lax.ragged_all_to_all` is documented to do, by gathers: XLA:CPU has none. NaN where sizes disagree."""
    me = jax.lax.axis_index(axis_name)
    everyone = [jax.lax.all_gather(x, axis_name) for x in (rows, starts, sent, places)]
    for source, (theirs, begin, size, place) in enumerate(zip(*everyone, strict=True)):
        row = jnp.arange(output.shape[0]) - place[me]
        here = (row >= 0) & (row < size[me])
        moved = theirs[jnp.where(here, begin[me] + row, 0)]
        output = jnp.where(here[:, None], jnp.where(received[source] == size[me], moved, jnp.nan), output)
    return output


@pytest.mark.parametrize("shape", [MeshShape(ep=4), MeshShape(ep=2, tp=2)], ids=str)
def test_a_ragged_exchange_brings_every_row_where_a_padded_one_does(shape, monkeypatch):
    """The branch of TPUs, backward too; rows of no expert are NaN there, and must reach nothing."""
    product = jax.lax.ragged_dot

    def undefined_beyond(rows, weights, sizes, **more):
        is_row = jnp.arange(rows.shape[0])[:, None] < sizes.sum()
        return jnp.where(is_row, product(rows, weights, sizes, **more), jnp.nan)

    def other_platform(*operands, default, cpu=None, tpu=None):
        del cpu
        return (tpu or default)(*operands)

    monkeypatch.setattr(jax.lax, "platform_dependent", other_platform)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(jax.lax, "ragged_dot", undefined_beyond)
    added, gradients, _ = on_mesh(shape, EXPERTS)
    assert_near((added, gradients), alone()[:2])


def beyond_capacity(shape, slots):
    """The copies [b, s, e] that have a slot when each device fills those of each expert, first choices first."""
    weights, h, _, _ = draw()
    _, chosen, scores = dense(h, weights, EXPERTS.num_active)
    order = np.argsort(-np.asarray(scores), axis=-1)[..., : EXPERTS.num_active]
    kept = np.array(chosen)
    b, s = BATCH // shape.ep, LENGTH // (shape.tp if shape.ep > 1 else 1)
    for rows in range(0, BATCH, b):
        for columns in range(0, LENGTH, s):
            used = np.zeros(EXPERTS.count, int)
            for choice in range(EXPERTS.num_active):
                for i, j in np.ndindex(b, s):
                    expert = order[rows + i, columns + j, choice]
                    kept[rows + i, columns + j, expert] = used[expert] < slots
                    used[expert] += 1
    return kept, int((np.asarray(chosen) & ~kept).sum())


@pytest.mark.parametrize("factor", [0.5, 1.0])
@pytest.mark.parametrize("shape", [MeshShape(ep=2), MeshShape(tp=2), MeshShape(ep=2, tp=2)], ids=str)
def test_exactly_the_copies_beyond_capacity_are_dropped_and_counted(shape, factor):
    weights, h, gradient, _ = draw()
    tokens = BATCH * LENGTH // (shape.num_devices if shape.ep > 1 else 1)
    kept, dropped = beyond_capacity(shape, int(np.ceil(factor * tokens * EXPERTS.num_active / EXPERTS.count)))
    wanted, wanted_gradients, _ = dense_with_gradients(weights, h, gradient, kept)
    added, gradients, load = on_mesh(shape, replace(EXPERTS, capacity_factor=factor))
    assert dropped > 0
    assert load.dropped.sum() == dropped
    assert load.dropped_share == pytest.approx(dropped / (BATCH * LENGTH * EXPERTS.num_active))
    assert_near((added, gradients), (wanted, wanted_gradients))


def test_shares_of_the_chosen_sum_to_one():
    routing = route(jnp.array([[0.0, 2.0, 1.0], [5.0, 5.0, -1.0]]), 2)
    assert routing.chosen.tolist() == [[1, 2], [0, 1]]
    np.testing.assert_allclose(routing.shares, [[1 / (1 + np.exp(-1)), 1 / (1 + np.e)], [0.5, 0.5]], rtol=1e-6)


def test_the_balance_loss_is_one_in_balance_and_the_number_of_experts_at_worst():
    """Switch, arXiv:2101.03961, equations 4 to 6, for one layer of 4 experts and 8 tokens."""
    even, crowded = jnp.full((1, 4), 2.0), jnp.array([[8.0, 0.0, 0.0, 0.0]])
    none = jnp.zeros((1, 4))
    assert ExpertLoad(even, none, even).balance_loss == 1
    assert ExpertLoad(crowded, none, crowded).balance_loss == 4
    assert ExpertLoad(crowded, none, even).balance_loss == 1
    assert ExpertLoad(crowded, none, crowded).max_over_mean == 4


TEXT = np.random.default_rng(0).integers(0, MODEL.vocab, (BATCH, LENGTH + 1))


def decoder_loss(model, *, remat="block"):
    """The loss that training minimizes and its gradients, in float32, on one device."""
    mesh, layout = build_mesh(MeshShape(), jax.devices()[:1]), ShardingContext(MeshShape())

    def total(params, batch):
        return decoder.loss_and_load(params, batch, model, layout, dtype=jnp.float32, remat=remat)[0]

    with jax.set_mesh(mesh):
        params = initialise(parameters(model), jax.random.key(0), mesh, layout, "f32")
        place = layout.spec("batch", "sequence")
        batch = {"tokens": jax.device_put(TEXT[:, :-1], place), "targets": jax.device_put(TEXT[:, 1:], place)}
        value, gradients = jax.jit(jax.value_and_grad(total))(params, batch)
    return float(value), jax.tree.map(np.asarray, gradients)


def dense_moe_layer(h, logits, weights, ops, layout, matmul_dtype=None, segments=None, *, is_partial=False):
    """`moe_layer` by every expert on every token, on one device."""
    assert not is_partial
    del logits, layout, matmul_dtype, segments
    experts = ops.experts(ops.dispatch.num_experts)
    added, chosen, scores = dense(h, weights, experts.num_active)
    copies, probability = chosen.sum((0, 1)), jax.nn.softmax(scores, -1).sum((0, 1))
    return added, jnp.stack([copies.astype(jnp.float32), jnp.zeros(experts.count), probability])[None]


VARIANTS = {
    "as Mixtral's": EXPERTS,
    "shared and dense layers": replace(EXPERTS, shared_mlp=48, num_dense_layers=1),
}


@pytest.mark.parametrize("name", [pytest.param("as Mixtral's", marks=pytest.mark.matrix), "shared and dense layers"])
def test_a_decoder_of_experts_computes_what_one_of_dense_experts_does(name, monkeypatch):
    """On one device, to which `kit_rows.py` holds every mesh."""
    model = replace(MODEL, experts=VARIANTS[name])
    found, of_weights = decoder_loss(model)
    monkeypatch.setattr(layer, "moe_layer", dense_moe_layer)
    value, gradients = decoder_loss(model, remat="none")
    assert found == pytest.approx(value, rel=1e-6)
    assert_near(of_weights, gradients)


def continued(shape, num_samples):
    """The likeliest tokens [steps, samples] after a prompt, of a model with shared experts and a dense layer."""
    model = replace(MODEL, experts=VARIANTS["shared and dense layers"])
    mesh = build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(mesh):
        params = initialise(parameters(model), jax.random.key(0), mesh, ShardingContext(shape), "f32")
        prompts, sampling = [np.arange(6)] * num_samples, [Sampling()] * num_samples
        drawn = generate_tokens(params, prompts, model, shape, num_tokens=3, sampling=sampling, dtype=jnp.float32)
        return np.stack(list(drawn))


@pytest.mark.matrix
def test_tokens_drawn_from_experts_do_not_depend_on_the_mesh():
    """Where tokens are not split over tp, as they are not here, experts' parts are summed over it."""
    np.testing.assert_array_equal(continued(MeshShape(ep=2, tp=2), 2), continued(MeshShape(), 2))


def test_samples_that_experts_do_not_divide_are_padded():
    np.testing.assert_array_equal(continued(MeshShape(ep=2), 1), continued(MeshShape(), 1))


def test_a_step_reports_the_load_of_experts():
    shape, workload = MeshShape(ep=2, tp=2), Workload(model=MODEL, batch=8, seq_len=16)
    mesh, layout = build_mesh(shape, jax.devices()[:4]), ShardingContext(shape)
    with jax.set_mesh(mesh):
        state = abstract_state(workload, layout, Optimizer(), mesh)
        batch = abstract_batch(workload, layout, mesh)
        _, metrics = jax.eval_shape(train_step(workload, layout, Optimizer()), state, batch)
    names = {"experts_balance_loss", "experts_max_over_mean", "experts_dropped_share"}
    assert set(metrics) == {"loss", "grad_norm"} | names
    assert all(metrics[name].shape == () for name in metrics)


@pytest.mark.slow
def test_a_step_with_a_capacity_that_drops_moves_what_is_planned():
    """To the byte, by kind, mesh axes and phase: of slots that do not hold all, as those in `kit_rows.py` do."""
    shape, experts = MeshShape(ep=2, fsdp=2, tp=2), replace(EXPERTS, capacity_factor=1.25, shared_mlp=32)
    workload = Workload(model=replace(MODEL, experts=experts), batch=16, seq_len=32, compute_dtype="f32")
    compiled = lower_train_step(build_mesh(shape), workload=asdict(workload)).compile()
    found = in_plans_terms(read_hlo(compiled.as_text(), shape.layout, hardware="cpu:8"))
    planned = predict(workload, shape, parse_system("cpu:8"))
    assert amounts(found.collectives) == amounts(merge(planned.collectives))
    assert found.flops == planned.flops


def amounts(collectives):
    return {(c.kind, c.axes, c.phase): c.bytes for c in collectives}


def test_room_for_any_routing_is_named():
    """Of 128 tokens each could go to 2 of the 4 experts of either of 2 devices: room for 512 rows, 256 in balance."""
    workload = Workload(model=MODEL, batch=16, seq_len=32)
    assert dropless_padding(workload, MeshShape(ep=2, tp=2)) == 2
    assert dropless_padding(workload, MeshShape(ep=8)) == 4
    assert dropless_padding(workload, MeshShape(tp=2)) == 1
    ragged = amounts(merge(dropless_padding_collectives(workload, MeshShape(ep=2, tp=2), is_ragged=True)))
    padded = amounts(merge(dropless_padding_collectives(workload, MeshShape(ep=2, tp=2), is_ragged=False)))
    gathers = {key for key in padded if key[0] != "all-to-all"}
    assert {key for key in padded if padded[key] == ragged[key]} == gathers
    with_slots = replace(workload, model=replace(MODEL, experts=replace(EXPERTS, capacity_factor=1.0)))
    assert dropless_padding_collectives(with_slots, MeshShape(ep=2, tp=2), is_ragged=False) == ()


@pytest.mark.matrix
def test_the_tpu_compiler_exchanges_what_there_is():
    """Without a capacity rows go over ep by ragged all-to-alls; what is gathered over tp has room for any routing."""
    mesh = MeshShape(ep=4, tp=2)
    model = replace(MODEL, embed=256, experts=replace(EXPERTS, mlp=256))
    workload = Workload(model=model, batch=8, seq_len=512)
    request = CompileRequest(
        function="meshwright.execution.training.step:lower_train_step",
        hardware="v5e:2x4",
        mesh=mesh.layout,
        arguments={"workload": asdict(workload)},
        effort="fast",
    )
    program = compile_in_child(request)
    found = amounts(in_plans_terms(read_program(program, mesh, "v5e:2x4")).collectives)
    planned = (*step_collectives(workload, mesh), *dropless_padding_collectives(workload, mesh, is_ragged=True))
    assert "ragged-all-to-all" in program.hlo
    exchanged = {key: nbytes for key, nbytes in amounts(merge(planned)).items() if key[0] == "all-to-all"}
    assert {key: found[key] for key in exchanged} == exchanged
