"""Dtypes of sums and products, and dropout, in whole steps."""

from collections import Counter
from dataclasses import asdict, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.records import read_hlo
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.rules import rules_of
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.execution.runtime.arrays import initialise
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.gradients import loss_and_gradients
from meshwright.execution.training.library import train
from meshwright.execution.training.run_directory.run import RunConfig, read_metrics
from meshwright.execution.training.step import lower_train_step
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.planning.plan import make_plan
from meshwright.planning.prediction import predict
from meshwright.proof.verification.comparison import in_plans_terms
from meshwright.proof.verification.differences import Difference
from meshwright.proof.verification.library import verify

MODEL = replace(PRESETS["tiny"], embed=64, mlp=128, num_heads=4, num_kv_heads=4, head_dim=16)
BF16 = Workload(model=MODEL, batch=16, seq_len=16, compute_dtype="bf16")
F32 = replace(BF16, compute_dtype="f32")
TEXT = np.random.default_rng(0).integers(0, MODEL.vocab, (BF16.batch, BF16.seq_len + 1))


@cache
def gradients(shape, workload, strategy=DEFAULT):
    """The loss of the text on a mesh, and its gradients whole."""
    mesh, layout = build_mesh(shape, jax.devices()[: shape.num_devices]), ShardingContext(shape, rules_of(strategy))
    with jax.set_mesh(mesh):
        place = jax.sharding.NamedSharding(mesh, layout.spec("batch", "sequence"))
        batch = {"tokens": jax.device_put(TEXT[:, :-1], place), "targets": jax.device_put(TEXT[:, 1:], place)}
        params = initialise(parameters(MODEL), jax.random.key(0), mesh, layout, "f32")
        found = jax.jit(lambda params: loss_and_gradients(params, batch, workload, layout, strategy))(params)
    return float(found[0][0]), dict(leaves(jax.tree.map(np.asarray, found[1])))


def apart(one, other):
    """The largest distance of two sets of gradients, as a share of the norm of each."""
    return max(np.linalg.norm(one[path] - other[path]) / np.linalg.norm(other[path]) for path in one)


@pytest.mark.parametrize(("dtype", "total"), [(jnp.float32, 257), (jnp.bfloat16, 256), (None, 256)])
def test_a_gradient_is_summed_over_devices_in_the_dtype_of_sums(dtype, total):
    """256 of one device and 1 of the other, of which bf16, with its 8 bits, has no sum."""
    shape = MeshShape(fsdp=2)
    layout = ShardingContext(shape, gradient_dtype=dtype)
    with jax.set_mesh(build_mesh(shape, jax.devices()[:2])):
        stored = jax.device_put(np.zeros((4, 8), np.float32), layout.spec("embed", "mlp"))
        x = jax.device_put(np.array([[256.0] * 4, [1.0] * 4], jnp.bfloat16), layout.spec("batch", "activation"))

        def of(stored):
            weight = layout.weight(stored, "embed", "mlp", dtype=jnp.bfloat16)
            return jnp.sum(jnp.einsum("bd,df->bf", x, weight).astype(jnp.float32))

        gradient = jax.jit(jax.grad(of))(stored)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, total)


ROUNDINGS = 3 * (15 * MODEL.num_layers + 2)
"""Numbers that bf16 rounds one after another on the way to a gradient: those of attention and mlp of each layer, of
both ends, and backward twice as many."""


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=pytest.mark.matrix), 3])
def test_gradients_of_bf16_microbatches_are_near_those_in_float32(zero_stage):
    """As near as so many roundings of up to 2^-8 each in random directions take them."""
    strategy = Strategy(num_microbatches=2, zero_stage=zero_stage, gradient_dtype="f32")
    _, found = gradients(MeshShape(fsdp=2), BF16, strategy)
    _, wanted = gradients(MeshShape(), F32)
    assert apart(found, wanted) < ROUNDINGS**0.5 * 2**-8


def test_gradients_are_summed_in_the_dtype_that_is_said():
    """In that of the products unless another is: then they come out as numbers of that; those of stages too."""
    staged = Strategy(gradient_dtype="f32", zero_stage=1, num_microbatches=2)
    rows = (
        (MeshShape(fsdp=2), DEFAULT, True),
        (MeshShape(fsdp=2), Strategy(gradient_dtype="f32"), False),
        (MeshShape(pp=2), staged, False),
    )
    for shape, strategy, is_narrow in rows:
        _, found = gradients(shape, BF16, strategy)
        narrow = {path: bool((array == array.astype(jnp.bfloat16)).all()) for path, array in found.items()}
        assert {narrow[path] for path in found if "norm" not in path} == {is_narrow}, strategy


def test_narrow_sums_of_float32_gradients_are_off_by_their_rounding():
    """Each of two parts rounds by half of 2^-8 at most, and so does their sum."""
    _, found = gradients(MeshShape(fsdp=2), F32, Strategy(gradient_dtype="bf16"))
    _, wanted = gradients(MeshShape(), F32)
    assert 2**-11 < apart(found, wanted) < 2 * 2**-9


SUMMED = [
    (MeshShape(dp=2, fsdp=2, tp=2), DEFAULT),
    pytest.param(MeshShape(dp=2, fsdp=2), Strategy(zero_stage=0), marks=pytest.mark.matrix),
    pytest.param(MeshShape(dp=2, fsdp=2, sp=2), Strategy(zero_stage=1, num_microbatches=2), marks=pytest.mark.matrix),
    (MeshShape(dp=2, fsdp=2, tp=2), Strategy(zero_stage=2, num_microbatches=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy"), SUMMED)
def test_float32_sums_of_bf16_gradients_move_what_is_planned(shape, strategy):
    strategy, hardware = replace(strategy, gradient_dtype="f32"), f"cpu:{shape.num_devices}"
    lowered = lower_train_step(
        build_mesh(shape, jax.devices()[: shape.num_devices]), workload=asdict(BF16), strategy=asdict(strategy)
    )
    compiled = in_plans_terms(read_hlo(lowered.compile().as_text() or "", shape.layout, hardware=hardware))
    assert amounts(compiled) == amounts(predict(BF16, shape, parse_system(hardware), strategy))


def amounts(record):
    """The bytes of collectives by kind, axes and phase."""
    found = Counter()
    for move in record.collectives:
        found[move.kind, move.axes, move.phase] += move.bytes
    return found


ROUNDED = {"int8": 1 / 127, "fp8": 2**-4}
"""Half a step as a share: of the largest of a slice twice as much for int8, of each number for e4m3."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("int8", marks=pytest.mark.matrix), "fp8"])
def test_products_in_8_bits_train_as_near_float32_as_they_round(dtype):
    """The loss and each gradient, summed dims split over tp or not; of a gradient three roundings come together."""
    share, (value, wanted) = ROUNDED[dtype], gradients(MeshShape(), F32)
    for shape in (MeshShape(), MeshShape(fsdp=2, tp=2, pp=2)):
        loss, found = gradients(shape, F32, Strategy(matmul_dtype=dtype, num_microbatches=shape.pp))
        assert 0 < abs(loss - value) < share * value
        assert 0 < apart(found, wanted) < 3 * share


@pytest.mark.slow
@pytest.mark.matrix
def test_a_run_with_dropout_that_is_resumed_drops_what_an_unbroken_one_does(tmp_path):
    config = RunConfig(
        workload=replace(F32, model=replace(MODEL, num_layers=1), batch=8),
        mesh=MeshShape(fsdp=2, tp=4),
        hardware="cpu:8",
        optimizer=Optimizer(warmup_steps=1, decay_steps=4, first_rate=0.0),
        steps=4,
        strategy=Strategy(dropout=0.2),
    )
    train(config, tmp_path / "unbroken")
    train(replace(config, steps=2), tmp_path / "broken")
    train(replace(config, mesh=MeshShape(dp=2, fsdp=2, sp=2)), tmp_path / "broken")
    unbroken, broken = ([row["loss"] for row in read_metrics(tmp_path / name)] for name in ("unbroken", "broken"))
    assert broken == pytest.approx(unbroken, rel=1e-5)


NARROW = [
    ("v5e:2x2", "int8", {("s8", "s8"): 7 + 6 + 7}),
    ("h100:4", "fp8", {("f8e4m3fn", "f8e4m3fn"), ("f8e5m2", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2")}),
]
"""Of int8 the seven products of a layer forward, what backward reads of them again, and the seven gradients of what
each reads. The GPU compiler makes one of those that read the same, so that of fp8 there are some of each kind."""


@pytest.mark.matrix  # `test_models_quantised.py` has the products, and compares them with NumPy's.
@pytest.mark.parametrize(("hardware", "dtype", "wanted"), NARROW)
def test_compilers_of_accelerators_multiply_in_8_bits(hardware, dtype, wanted):
    workload = replace(BF16, model=replace(MODEL, embed=256, mlp=512, num_heads=8, num_kv_heads=8, head_dim=32))
    plan = make_plan(workload, MeshShape(fsdp=2, tp=2), parse_system(hardware), Strategy(matmul_dtype=dtype))
    verified = verify(plan)
    module = parse_hlo(verified.program.hlo)
    products = (op for op in module.instructions() if op.opcode in ("dot", "convolution"))
    found = Counter(tuple(operand.shape.dtype for operand in module.operands(op)) for op in products)
    narrow = {kinds: count for kinds, count in found.items() if not {"bf16", "f32"}.intersection(kinds)}
    assert (narrow if isinstance(wanted, dict) else narrow.keys()) == wanted
    assert all(
        row.is_equal or Difference.OTHER_PHASE in {cause.difference for cause in row.causes}
        for row in verified.rows
        if row.unit == "B" and "all-" in row.quantity
    )
