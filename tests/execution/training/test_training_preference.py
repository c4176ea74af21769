"""Preference tuning: its loss beside NumPy's, its gradients beside one device, a reference that is frozen and kept."""

import json
import shutil
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.lora import LoRA
from meshwright.description.step.model import Experts
from meshwright.description.step.parameter_tree import drop_paths, is_adapter, leaves, parameters
from meshwright.description.step.reference import check_reference, reference_pass, shares_base
from meshwright.description.step.rules import rules_of
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.models.forward import all_logits
from meshwright.execution.models.quantised.weights import is_quantised, plain
from meshwright.execution.runtime.arrays import initialise
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.data.config import DataConfig
from meshwright.execution.training.data.pair_batches import BatchPlacement
from meshwright.execution.training.data.pairs import open_pairs
from meshwright.execution.training.gradients import loss_and_gradients
from meshwright.execution.training.library import train
from meshwright.execution.training.preference import inputs as preference_inputs
from meshwright.execution.training.preference.loss import MEANS, Preference, pair_means
from meshwright.execution.training.preference.reference import abstract_reference, reference_step
from meshwright.execution.training.run_directory.run import RunConfig, read_metrics
from meshwright.execution.training.run_directory.saving import Saving
from meshwright.execution.training.step import initial_state, train_step
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.execution.training.watching import EvaluationConfig
from meshwright.mesh import MeshShape
from meshwright.planning.cost.arguments import argument_bytes
from meshwright.planning.cost.model_states import States
from meshwright.planning.plan import make_plan
from meshwright.proof.verification.plans import verify_plan

MODEL = replace(PRESETS["tiny"], embed=64, mlp=64, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8)
MOE = replace(MODEL, name="moe", experts=Experts(count=4, num_active=2, mlp=32, balance_weight=0.1))
WORKLOAD = Workload(model=MODEL, batch=8, seq_len=32, compute_dtype="f32", objective="dpo")
LORA = LoRA(rank=4, alpha=8.0, targets=("query", "down"))
ADAPTED = replace(WORKLOAD, model=replace(MODEL, lora=LORA))


def text(seed=0):
    """Tokens [16, 33] of 8 pairs, and the weights [16, 32] of their targets: a prompt, an answer, padding."""
    rng = np.random.default_rng(seed)
    first, last = rng.integers(2, 8, (8, 1)).repeat(2, axis=0), rng.integers(12, 32, (16, 1))
    columns = np.arange(32)
    weights = ((columns >= first) & (columns < last)).astype(np.float32)
    return rng.integers(0, 256, (16, 33)).astype(np.int32), weights


def put_in_shards(shape, strategy):
    """The mesh of some devices with its layout, and the test's batch on it."""
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape, rules_of(strategy))
    return mesh, layout, BatchPlacement.of(mesh, layout, WORKLOAD.seq_len, strategy).rows(*text())


def from_reference(workload, shape, strategy):
    """What a reference with other parameters than the policy makes of the batch, on its own mesh."""
    own = reference_pass(workload, shape, strategy)
    mesh, layout, batch = put_in_shards(own.mesh, own.strategy)
    with jax.set_mesh(mesh):
        params = initialise(parameters(workload.model), jax.random.key(1), mesh, layout, "f32")
        return reference_step(own)(params, batch)


@cache
def differentiated(workload, shape, strategy):
    """The loss of a batch, its parts and its gradients, and what the reference made of each row."""
    made = from_reference(workload, shape, strategy)
    mesh, layout, batch = put_in_shards(shape, strategy)
    run = partial(loss_and_gradients, workload=workload, layout=layout, strategy=strategy)
    with jax.set_mesh(mesh):
        params = initialise(parameters(workload.model), jax.random.key(0), mesh, layout, "f32")
        batch["reference"] = jax.device_put(made, NamedSharding(mesh, layout.spec("batch")))
        (value, parts), gradients = jax.jit(lambda params, batch: run(params, batch))(params, batch)
    return value.item(), np.asarray(parts.means), jax.tree.map(np.asarray, gradients), np.asarray(made)


def numpy_log_probabilities(seed):
    """The log-probability [16] of each row's answer in float64, from the logits of parameters of a seed."""
    tokens, weights = text()
    mesh, layout = build_mesh(MeshShape(), jax.devices()[:1]), ShardingContext(MeshShape())
    with jax.set_mesh(mesh):
        params = initialise(parameters(MODEL), jax.random.key(seed), mesh, layout, "f32")
        lengths = np.full(16, 32)
        found = np.asarray(all_logits(params, tokens[:, :-1], lengths, MODEL, MeshShape(), jnp.float32), np.float64)
    found -= found.max(-1, keepdims=True)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    picked = np.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]
    return (picked * weights).sum(-1)


@pytest.fixture(scope="module")
def by_numpy():
    return numpy_log_probabilities(0), numpy_log_probabilities(1)


PREFERENCES = (
    Preference(beta=0.3),
    Preference(beta=0.1, label_smoothing=0.2),
    Preference(loss="ipo", beta=0.05),
)


def numpy_means(policy, reference, preference):
    """`MEANS` as the papers have them, pair by pair."""
    rows = []
    for pair in range(len(policy) // 2):
        chosen, rejected = 2 * pair, 2 * pair + 1
        ratio = (policy[chosen] - policy[rejected]) - (reference[chosen] - reference[rejected])
        if preference.loss == "ipo":
            loss = (ratio - 1 / (2 * preference.beta)) ** 2
        else:
            right, wrong = (1 / (1 + np.exp(-sign * preference.beta * ratio)) for sign in (1, -1))
            share = preference.label_smoothing
            loss = -(1 - share) * np.log(right) - share * np.log(wrong)
        rewards = [preference.beta * (policy[row] - reference[row]) for row in (chosen, rejected)]
        rows.append([loss, *rewards, rewards[0] - rewards[1], ratio > 0, policy[chosen], policy[rejected]])
    return np.mean(rows, axis=0)


def test_the_loss_of_a_step_is_that_of_numpy_on_the_same_logits(by_numpy):
    value, means, _, made = differentiated(WORKLOAD, MeshShape(), DEFAULT)
    policy, reference = by_numpy
    np.testing.assert_allclose(made, reference, rtol=1e-5)
    np.testing.assert_allclose(means, numpy_means(policy, reference, Preference()), rtol=1e-4, atol=1e-5)
    assert value == means[0]
    assert len(means) == len(MEANS)


@pytest.mark.parametrize("preference", PREFERENCES, ids=str)
def test_each_loss_of_pairs_is_that_of_numpy(preference, by_numpy):
    policy, reference = (jnp.asarray(rows, jnp.float32) for rows in by_numpy)
    with jax.set_mesh(build_mesh(MeshShape(), jax.devices()[:1])):
        found = pair_means(policy, reference, preference, ShardingContext(MeshShape()))
    np.testing.assert_allclose(found, numpy_means(*by_numpy, preference), rtol=2e-5, atol=2e-5)


def test_no_gradient_flows_to_the_reference(by_numpy):
    policy, reference = (jnp.asarray(rows, jnp.float32) for rows in by_numpy)

    def loss(policy, reference):
        return pair_means(policy, reference, Preference(), ShardingContext(MeshShape()))[0]

    with jax.set_mesh(build_mesh(MeshShape(), jax.devices()[:1])):
        to_policy, to_reference = jax.grad(loss, argnums=(0, 1))(policy, reference)
    assert np.abs(to_policy).min() > 0
    assert not np.any(to_reference)


ELSEWHERE = MeshShape(fsdp=2, tp=4)
WAYS = [
    pytest.param(MODEL, MeshShape(fsdp=8), Strategy(reference_mesh=ELSEWHERE), id="fsdp8-reference-fsdp2-tp4"),
    *(
        pytest.param(model, shape, strategy, marks=pytest.mark.matrix, id=f"{model.name}-{shape}-{number}")
        for number, (model, shape, strategy) in enumerate((
            (MODEL, MeshShape(fsdp=2), DEFAULT),
            (MODEL, MeshShape(fsdp=2, tp=2), Strategy(num_microbatches=2)),
            (MODEL, MeshShape(dp=2, fsdp=2, sp=2), Strategy(num_microbatches=2, reference_mesh=MeshShape(tp=8))),
            (MODEL, MeshShape(dp=2, fsdp=2, tp=2), Strategy(num_microbatches=2, zero_stage=1)),
            (
                MODEL,
                MeshShape(fsdp=2, sp=4),
                Strategy(attention="flash", sp_method="ring", reference_mesh=MeshShape(dp=4, sp=2)),
            ),
            (MOE, MeshShape(fsdp=2, ep=2), Strategy(reference_mesh=MeshShape(tp=2, ep=2))),
        ))
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape", "strategy"), WAYS)
def test_loss_and_gradients_are_those_of_one_device_wherever_policy_and_reference_are(model, shape, strategy):
    workload = replace(WORKLOAD, model=model)
    value, means, gradients, made = differentiated(workload, shape, strategy)
    alone = differentiated(workload, MeshShape(), DEFAULT)
    np.testing.assert_allclose(made, alone[3], rtol=1e-5)
    np.testing.assert_allclose(means, alone[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(value, alone[0], rtol=1e-5)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(alone[2]), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())


CONFIG = RunConfig(
    workload=WORKLOAD,
    mesh=MeshShape(fsdp=8),
    hardware="cpu:8",
    strategy=Strategy(reference_mesh=ELSEWHERE),
    optimizer=Optimizer(learning_rate=1e-3, warmup_steps=1, decay_steps=6),
    steps=6,
    saving=Saving(every=3),
)


@pytest.fixture
def pairs(tmp_path):
    """A file of pairs in which the chosen answer ends otherwise than the rejected one."""
    path = tmp_path / "pairs.jsonl"
    words = [f"word {number}: " for number in range(24)]
    records = [{"prompt": word, "chosen": f"{word[:4]} yes", "rejected": f"{word[:4]} no"} for word in words]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def with_data(path, config=CONFIG):
    return replace(config, data=DataConfig(sources=(str(path),)))


def same(rows, others):
    """Whether the steps of two runs measured the same to the bit."""
    names = ("loss", "grad_norm", *MEANS)
    return [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in others]


@pytest.mark.slow
def test_margins_grow_on_pairs_from_a_policy_that_begins_as_its_reference(pairs, tmp_path):
    train(with_data(pairs), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert [row["reward_margin"] for row in rows] == sorted(row["reward_margin"] for row in rows)
    assert rows[-1]["reward_margin"] > 0.1
    assert rows[-1]["reward_accuracy"] == 1.0
    assert (rows[0]["pairs"], rows[0]["prompt_cut"]) == (24, 0)


@pytest.mark.slow
def test_held_out_pairs_are_evaluated_as_a_step_measures_them(pairs, tmp_path):
    """By a live reference and by one that was run before; and what is evaluated changes no step."""
    every = replace(CONFIG, evaluating=EvaluationConfig(every=3, data=(str(pairs),)))
    train(with_data(pairs, every), tmp_path / "live")
    before = replace(every, workload=replace(every.workload, reference="precomputed"), strategy=DEFAULT)
    train(with_data(pairs, before), tmp_path / "before")
    rows = read_metrics(tmp_path / "live")
    plain = with_data(pairs, replace(CONFIG, evaluating=EvaluationConfig()))
    train(plain, tmp_path / "plain")
    assert same(rows, read_metrics(tmp_path / "plain"))
    found = [row for row in rows if "eval_loss" in row]
    assert [(row["step"], row["eval_pairs"]) for row in found] == [(2, 24), (5, 24)]
    assert found[-1]["eval_reward_accuracy"] == 1.0
    assert found[-1]["eval_loss"] < found[0]["eval_loss"] < np.log(2)
    for row, other in zip(found, (row for row in read_metrics(tmp_path / "before") if "eval_loss" in row), strict=True):
        for name in MEANS:
            assert row[f"eval_{name}"] == pytest.approx(other[f"eval_{name}"], rel=1e-4, abs=1e-5)


def test_pairs_that_are_held_out_are_in_no_step(pairs):
    config = DataConfig(sources=(str(pairs),), held_out=0.4)
    found = open_pairs(config, (), None, replace(CONFIG.workload, batch=4))
    assert sorted([*found.training, *found.held_out]) == list(range(24))
    assert 4 <= len(found.held_out) < len(found.training)
    with pytest.raises(MeshwrightError, match="are held out, and a batch has 8; give more pairs, another --held-out"):
        open_pairs(replace(config, held_out=0.1), (), None, replace(CONFIG.workload, batch=8))


@pytest.mark.matrix
def test_a_resumed_run_is_equal_to_the_bit_and_reads_the_reference_that_it_keeps(pairs, tmp_path):
    train(with_data(pairs), tmp_path / "whole")
    train(with_data(pairs, replace(CONFIG, steps=3)), tmp_path / "run")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "run" / "reference").rglob("*") if path.is_file()}
    train(with_data(pairs), tmp_path / "run")
    assert same(read_metrics(tmp_path / "run"), read_metrics(tmp_path / "whole"))
    after = {path.name: path.read_bytes() for path in (tmp_path / "run" / "reference").rglob("*") if path.is_file()}
    assert kept == after
    shutil.rmtree(tmp_path / "run" / "reference")
    with pytest.raises(MeshwrightError, match="has lost its reference/"):
        train(with_data(pairs, replace(CONFIG, steps=9)), tmp_path / "run")


@pytest.mark.matrix
def test_a_run_goes_on_with_its_reference_on_another_mesh(pairs, tmp_path):
    train(with_data(pairs), tmp_path / "whole")
    train(with_data(pairs, replace(CONFIG, steps=3)), tmp_path / "run")
    elsewhere = replace(CONFIG, mesh=MeshShape(dp=2, tp=4), strategy=DEFAULT)
    train(with_data(pairs, elsewhere), tmp_path / "run")
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("run", "whole")]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.matrix
def test_a_precomputed_reference_trains_as_a_live_one_and_is_of_its_own_pairs(pairs, tmp_path):
    live = replace(CONFIG, strategy=DEFAULT)
    before = replace(live, workload=replace(WORKLOAD, reference="precomputed"))
    train(with_data(pairs, live), tmp_path / "live")
    train(with_data(pairs, replace(before, steps=3)), tmp_path / "run")
    train(with_data(pairs, before), tmp_path / "run")
    assert same(read_metrics(tmp_path / "run"), read_metrics(tmp_path / "live"))
    pairs.write_text(pairs.read_text().replace("yes", "yea"))
    with pytest.raises(MeshwrightError, match=r"is of other pairs than --data|--allow"):
        train(with_data(pairs, replace(before, steps=9)), tmp_path / "run")


@pytest.mark.matrix
def test_a_step_is_given_the_bytes_that_its_plan_says():
    """The policy's arguments and the reference's, to the byte, and no reference among the policy's state."""
    shape, strategy = MeshShape(fsdp=8), DEFAULT
    mesh, layout, batch = put_in_shards(shape, strategy)
    own = reference_pass(WORKLOAD, shape, strategy)
    with jax.set_mesh(mesh):
        state = initial_state(WORKLOAD, layout, Optimizer(), mesh, strategy, seed=0)
        params = state["params"]
        rows = jax.device_put(np.zeros(16, np.float32), NamedSharding(mesh, layout.spec("batch")))
        step = train_step(WORKLOAD, layout, Optimizer(), strategy).lower(state, batch | {"reference": rows}).compile()
        beside = reference_step(own).lower(params, batch).compile()
    sizes = [program.memory_analysis().argument_size_in_bytes for program in (step, beside)]
    assert sum(sizes) == argument_bytes(WORKLOAD, shape, strategy)


VERIFIED = [
    (MODEL, "cpu:8", MeshShape(fsdp=8), Strategy(reference_mesh=ELSEWHERE)),
    (MODEL, "cpu:8", MeshShape(dp=2, fsdp=2, sp=2), Strategy(num_microbatches=2, reference_mesh=MeshShape(tp=8))),
    (MOE, "cpu:8", MeshShape(dp=2, fsdp=2, ep=2), DEFAULT),
    (MODEL, "v5e:2x4", MeshShape(fsdp=8), Strategy(reference_mesh=ELSEWHERE)),
    (MODEL, "v5e:2x4", MeshShape(fsdp=2, tp=4), Strategy(num_microbatches=2)),
    (replace(MODEL, name="adapted", lora=LORA), "cpu:8", MeshShape(fsdp=4, tp=2), DEFAULT),
    (replace(MODEL, name="adapted", lora=LORA), "cpu:8", MeshShape(fsdp=4, tp=2), Strategy(zero_stage=0)),
    (replace(MODEL, name="adapted", lora=LORA), "v5e:2x4", MeshShape(fsdp=8), DEFAULT),
    (replace(MODEL, name="quantised", lora=LORA), "cpu:8", MeshShape(fsdp=4, tp=2), DEFAULT),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "hardware", "shape", "strategy"), VERIFIED, ids=lambda value: getattr(value, "name", str(value))[:40]
)
def test_both_programs_have_the_flops_and_collectives_of_the_plan_or_the_difference_is_named(
    model, hardware, shape, strategy
):
    workload = replace(WORKLOAD, model=model, quantize_base="int8" if model.name == "quantised" else None)
    found = verify_plan(make_plan(workload, shape, parse_system(hardware), strategy))
    rows = {row.quantity: row for row in found.rows}
    assert rows["flops"].is_explained
    assert any(name.endswith("reference") for name in rows)
    assert [name for name, row in rows.items() if row.unit == "B" and not row.is_explained] == []


def test_the_reference_of_adapters_takes_no_memory_on_the_policys_own_mesh():
    shape = MeshShape(fsdp=8)
    kinds = [(ADAPTED, shape, Strategy(reference_mesh=mesh)) for mesh in (None, shape, ELSEWHERE)]
    assert [shares_base(*how) for how in kinds] == [True, True, False]
    own, same_mesh, elsewhere = (argument_bytes(*how) for how in kinds)
    without = argument_bytes(replace(ADAPTED, reference="precomputed"), shape)
    # The reference's text, 3 x 4 bytes a token, is beside the policy's.
    assert own == same_mesh == without + 12 * ADAPTED.tokens // 8
    assert elsewhere > own + 0.9 * States(ADAPTED, shape).frozen
    assert not shares_base(WORKLOAD, shape, DEFAULT)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(DEFAULT, id="default"),
        pytest.param(Strategy(zero_stage=0), id="zero_stage=0", marks=pytest.mark.exhaustive),
        pytest.param(Strategy(num_microbatches=2), id="num_microbatches=2", marks=pytest.mark.exhaustive),
    ],
)
def test_the_reference_of_adapters_is_the_base_and_trains_as_a_copy_does(pairs, tmp_path, monkeypatch, strategy):
    """Resumed too; nothing is kept of it, and the bytes that programs are given are those of the plan."""
    config = replace(CONFIG, workload=ADAPTED, mesh=MeshShape(fsdp=4, tp=2), strategy=strategy)
    config = replace(config, evaluating=EvaluationConfig(every=3, data=(str(pairs),)))
    train(with_data(pairs, replace(config, steps=3)), tmp_path / "base")
    train(with_data(pairs, config), tmp_path / "base")
    assert not (tmp_path / "base" / "reference").exists()
    monkeypatch.setattr(preference_inputs, "shares_base", lambda *how: False)
    train(with_data(pairs, config), tmp_path / "copy")
    rows, others = (read_metrics(tmp_path / name) for name in ("base", "copy"))
    assert same(rows, others)
    assert [row.get("eval_loss") for row in rows] == [row.get("eval_loss") for row in others]
    assert rows[-1]["reward_margin"] > 0
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(fsdp=4, tp=2)], ids=str)
def test_a_step_on_a_quantised_base_is_that_on_the_weights_it_stands_for(shape):
    """The loss, its gradients, and what the reference makes of the base, beside dequantised weights on one device."""

    def step(work, shape, whole=None):
        mesh, layout, batch = put_in_shards(shape, DEFAULT)
        own = reference_pass(work, shape, DEFAULT)
        with jax.set_mesh(mesh):
            params = initial_state(work, layout, Optimizer(), mesh, seed=0)["params"]
            params["layers"]["down_lora_b"] += 0.1
            if whole is not None:
                params = jax.tree.map(lambda to, array: jax.device_put(array, to.sharding), params, whole)
            base = drop_paths(params, [path for path, _ in leaves(params) if is_adapter(path)])
            lowered = reference_step(own).lower(abstract_reference(own, mesh, base=work.quantize_base), batch)
            made = lowered.compile()(base, batch)
            batch["reference"] = jax.device_put(made, NamedSharding(mesh, layout.spec("batch")))
            run = partial(loss_and_gradients, workload=work, layout=layout, strategy=DEFAULT)
            (value, _), gradients = jax.jit(lambda params, batch: run(params, batch))(params, batch)
        return value.item(), np.asarray(made), jax.tree.map(np.asarray, gradients), params

    quantised = replace(ADAPTED, quantize_base="int8")
    value, made, gradients, stored = step(quantised, shape)
    assert is_quantised(stored["layers"]["query"])
    whole = jax.tree.map(np.asarray, plain(step(quantised, MeshShape())[-1], jnp.float32))
    wanted = step(ADAPTED, MeshShape(), whole)
    np.testing.assert_allclose(made, wanted[1], rtol=1e-5)
    assert abs(value - np.log(2)) > 1e-4
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    for (path, found), (_, exact) in zip(leaves(gradients), leaves(wanted[2]), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-3, atol=2e-5 * np.abs(exact).max(), err_msg=path)


@pytest.mark.matrix
def test_a_run_of_pairs_on_a_quantised_base_begins_at_its_reference_and_goes_on(pairs, tmp_path):
    config = replace(
        CONFIG, workload=replace(ADAPTED, quantize_base="int8"), mesh=MeshShape(fsdp=4, tp=2), strategy=DEFAULT
    )
    train(with_data(pairs, config), tmp_path / "whole")
    train(with_data(pairs, replace(config, steps=3)), tmp_path / "run")
    train(with_data(pairs, config), tmp_path / "run")
    rows, others = (read_metrics(tmp_path / name) for name in ("whole", "run"))
    assert same(rows, others)
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[-1]["reward_margin"] > 0


def test_a_reference_of_a_quantised_base_is_that_base(pairs, tmp_path):
    quantised = replace(ADAPTED, quantize_base="int8")
    with pytest.raises(MeshwrightError, match="the reference reads the policy's weights in int8 where they are"):
        check_reference(quantised, MeshShape(fsdp=8), Strategy(reference_mesh=ELSEWHERE))
    with pytest.raises(MeshwrightError, match="zero_stage=1 has the weights in int8 whole on each device"):
        check_reference(quantised, MeshShape(fsdp=8), Strategy(zero_stage=1))
    with pytest.raises(MeshwrightError, match="reference='precomputed' is of weights before they are in int8"):
        replace(quantised, reference="precomputed")


@pytest.mark.matrix
def test_a_run_of_adapters_goes_on_with_a_reference_elsewhere(pairs, tmp_path):
    shared = replace(CONFIG, workload=ADAPTED, strategy=DEFAULT)
    train(with_data(pairs, shared), tmp_path / "whole")
    train(with_data(pairs, replace(shared, steps=3)), tmp_path / "run")
    train(with_data(pairs, replace(shared, strategy=Strategy(reference_mesh=ELSEWHERE))), tmp_path / "run")
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("run", "whole")]
    np.testing.assert_allclose(*losses, rtol=1e-5)
