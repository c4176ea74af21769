"""Adapters on weights in int8 and nf4: steps are those of adapters on the weights that these stand for."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_training_pretrained import folder, loss_of_batch, train  # noqa: F401  A fixture.

import meshwright as mw
from meshwright.description.families.adapters import with_adapters
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.parameter_tree import Parameter, leaves
from meshwright.description.step.strategy import DEFAULT
from meshwright.description.step.trained import stored_weight
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.loading.adapter import save_adapter
from meshwright.execution.models.quantised.weights import NF4, Nf4Weight, dequantised, is_quantised, plain, quantised
from meshwright.execution.runtime.mesh import build_mesh
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.slots import layer_of_slots
from meshwright.execution.training.step import initial_state, train_step
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape

ONE = with_adapters(replace(PRESETS["tiny"], num_layers=1, num_kv_heads=4), rank=4)
DENSE = with_adapters(replace(PRESETS["tiny"], num_layers=2, num_kv_heads=4), rank=4)
DORA = with_adapters(replace(PRESETS["tiny"], num_layers=2, num_kv_heads=4), rank=4, dora=True)
UNEVEN = with_adapters(replace(PRESETS["tiny"], num_layers=3, num_kv_heads=4), rank=4)
EXPERTS = with_adapters(replace(PRESETS["tiny-moe"], num_layers=1, num_kv_heads=4), rank=4)
STAGES = {"num_microbatches": 4, "schedule": "1f1b"}
LORA = {"lora_rank": 4, "lora_alpha": 8.0, "learning_rate": 0.02}


def workload(model, **options):
    return Workload(model=model, batch=8, seq_len=32, compute_dtype="f32", **options)


def losses_of(state, work, shape, strategy, mesh):
    """The losses of three steps."""
    optimizer = Optimizer(learning_rate=0.05, warmup_steps=1)
    step, layout = train_step(work, ShardingContext(shape), optimizer, strategy), ShardingContext(shape)
    draw, found = np.random.default_rng(0), []
    for _ in range(3):
        tokens = draw.integers(0, work.config.vocab, (work.batch, work.seq_len + 1)).astype(np.int32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        placed = {name: jax.device_put(array, layout.spec("batch", "sequence")) for name, array in batch.items()}
        state, metrics = step(state, placed)
        found.append(float(metrics["loss"]))
    return found, state


def started(work, shape, strategy=DEFAULT):
    mesh = build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(mesh):
        return mesh, initial_state(work, ShardingContext(shape), Optimizer(), mesh, strategy, seed=3)


@pytest.mark.parametrize(
    ("model", "base", "shape", "options"),
    [
        (ONE, "nf4", MeshShape(dp=2, fsdp=2, tp=2), {}),
        pytest.param(DENSE, "int8", MeshShape(dp=2, fsdp=2, tp=2), {}, marks=pytest.mark.matrix),
        pytest.param(DENSE, "nf4", MeshShape(), {}, marks=pytest.mark.exhaustive),
        pytest.param(DENSE, "nf4", MeshShape(tp=2), {"remat": "none"}, marks=pytest.mark.exhaustive),
        pytest.param(DENSE, "int8", MeshShape(fsdp=4), {"remat": "matmuls"}, marks=pytest.mark.matrix),
        pytest.param(DENSE, "nf4", MeshShape(fsdp=2, sp=2, tp=2), {"num_microbatches": 2}, marks=pytest.mark.matrix),
        pytest.param(DENSE, "nf4", MeshShape(fsdp=8), {"zero_stage": 0}, marks=pytest.mark.matrix),
        pytest.param(DENSE, "nf4", MeshShape(dp=2, fsdp=2, tp=2), {"zero_stage": 1}, marks=pytest.mark.matrix),
        pytest.param(
            DENSE, "int8", MeshShape(fsdp=4), {"zero_stage": 2, "num_microbatches": 2}, marks=pytest.mark.matrix
        ),
        pytest.param(UNEVEN, "nf4", MeshShape(pp=2, fsdp=2), {**STAGES, "zero_stage": 1}, marks=pytest.mark.matrix),
        pytest.param(DENSE, "nf4", MeshShape(pp=2, fsdp=2, tp=2), {"num_microbatches": 2}, marks=pytest.mark.matrix),
        pytest.param(UNEVEN, "int8", MeshShape(pp=2, fsdp=2), STAGES, marks=pytest.mark.matrix),
        pytest.param(UNEVEN, "nf4", MeshShape(pp=2, dp=2, tp=2), STAGES, marks=pytest.mark.exhaustive),
        pytest.param(DORA, "nf4", MeshShape(), {}, marks=pytest.mark.matrix),
        pytest.param(EXPERTS, "nf4", MeshShape(ep=2, fsdp=4), {}, marks=pytest.mark.exhaustive),
        pytest.param(EXPERTS, "int8", MeshShape(ep=2, fsdp=2, tp=2), {}, marks=pytest.mark.matrix),
    ],
)
def test_steps_are_those_of_adapters_on_the_dequantised_weights(model, base, shape, options):
    options = dict(options)
    work = workload(model, quantize_base=base, remat=options.pop("remat", "block"))
    strategy = replace(DEFAULT, **options)
    mesh, state = started(work, shape, strategy)
    one, alone = started(work, MeshShape())
    quantities = [is_quantised(leaf) for _, leaf in leaves(state["params"])]
    assert 5 < sum(quantities) < len(quantities)
    with jax.set_mesh(one):
        exact = alone | {"params": jax.jit(lambda params: plain(params, jnp.float32))(alone["params"])}
        wanted, after = losses_of(exact, replace(work, quantize_base=None), MeshShape(), DEFAULT, one)
    before = jax.tree.map(np.asarray, state["params"])
    with jax.set_mesh(mesh):
        found, state = losses_of(state, work, shape, strategy, mesh)
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    assert len(set(np.round(wanted, 3))) == 3
    slots = layer_of_slots(work.config, ShardingContext(shape), strategy)
    for (path, own), (_, ours), (_, was) in zip(*map(leaves, (after["params"], state["params"], before)), strict=True):
        if is_quantised(ours):
            # Held as they were, to the bit, and the same on every mesh.
            assert all(np.array_equal(*pair) for pair in zip(ours, was, strict=True)), path
        else:
            ours = np.asarray(ours)
            if path.startswith("layers."):
                ours = ours[[slots.index(layer) for layer in range(model.num_layers)]]
            np.testing.assert_allclose(ours, np.asarray(own), rtol=2e-3, atol=2e-5, err_msg=path)


def test_nf4_is_that_of_the_paper():
    """Each element is the nearest of the 16 values times its block's largest, and blocks are of 64 along a dim."""
    weight = np.random.default_rng(0).normal(size=(2, 24, 128)).astype(np.float32)
    weight[0, 3] = 0
    parameter = Parameter(shape=weight.shape, axes=("layers", "embed", "mlp"), num_inputs=1)
    with jax.set_mesh(build_mesh(MeshShape(), jax.devices()[:1])):
        stored = jax.jit(quantised, static_argnums=(1, 2))(jnp.asarray(weight), parameter, "nf4")
        found = np.asarray(dequantised(stored, jnp.float32))
    assert isinstance(stored, Nf4Weight)
    assert [(array.shape, str(array.dtype)) for array in stored] == [
        (own.parameter.shape, {"bf16": "bfloat16"}.get(own.dtype, own.dtype)) for own in stored_weight(parameter, "nf4")
    ]
    blocks = weight.reshape(2, 24, 2, 64)
    scale = np.abs(blocks).max(-1, keepdims=True).astype(jnp.bfloat16).astype(np.float32)
    shares = blocks / np.maximum(scale, 1e-30)
    table = np.array(NF4, np.float32)
    wanted = table[np.abs(shares[..., None] - table).argmin(-1)] * scale
    np.testing.assert_array_equal(found, wanted.reshape(weight.shape))
    first = np.asarray(stored.values)[0, 0, 0]
    codes = np.abs(shares[0, 0, 0, :, None] - table).argmin(-1)
    np.testing.assert_array_equal(first, codes[:32] | codes[32:] << 4)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):  # noqa: F811
    """Six steps of adapters on weights in int8, and their losses."""
    directory = tmp_path_factory.mktemp("qlora") / "run"
    options = {"steps": 6, "save_every": 2, "quantize_base": "int8", **LORA}
    return directory, train(folder, directory, "dp=2,fsdp=2,tp=2", what=folder / "llama", **options)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_run_goes_on_and_is_exported_as_what_it_computed(folder, run, tmp_path):  # noqa: F811
    directory, losses = run
    assert losses[-1] < losses[0]
    shutil.copytree(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    again = []
    with pytest.warns(UserWarning, match="."):
        mw.train(
            tmp_path / "run",
            resume=True,
            mesh="fsdp=8",
            zero_stage=1,
            change=True,
            steps=6,
            on_step=lambda row: again.append(row["loss"]),
        )
    assert again == pytest.approx(losses[4:], rel=1e-5)
    # The largest file of each part: Orbax may keep a second copy of what it merged.
    sizes = {
        part.name: max(file.stat().st_size for file in part.rglob("*") if file.is_file())
        for part in (directory / "checkpoints" / "6").iterdir()
        if part.is_dir()
    }
    base = (folder / "llama" / "model.safetensors").stat().st_size
    assert sizes["params"] < base / 2
    assert sizes["frozen"] < base / 4
    # What is merged are the weights that the run computed with, not those of the directory.
    shutil.copytree(directory, tmp_path / "next")
    more = []
    with pytest.warns(UserWarning, match="schedule of the learning rate"):
        mw.train(tmp_path / "next", resume=True, steps=7, on_step=lambda row: more.append(row["loss"]))
    mw.load(directory, on="cpu:1").save(tmp_path / "merged")
    assert more == pytest.approx([loss_of_batch(mw.load(tmp_path / "merged", on="cpu:1"), folder)], rel=1e-5)
    save_adapter(directory, tmp_path / "adapter")
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    mw.load(folder / "llama", on="cpu:1", adapter=tmp_path / "adapter")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"quantize_base": "nf4"},
            "quantize_base is nf4, of weights under adapters, and llama has none; give lora_rank",
        ),
        ({"quantize_base": "nf8", **LORA}, "quantize_base"),
        ({"quantize_base": "nf4", **LORA}, "layers.query is [4, 32, 4, 2, 12]: nf4 would have blocks of 4; use int8"),
    ],
)
def test_what_no_quantised_run_can_have_is_one_line(folder, tmp_path, options, said):  # noqa: F811
    options = {"mesh": "fsdp=8", **options}
    with pytest.raises(MeshwrightError) as error:
        train(folder, tmp_path / "run", options.pop("mesh"), what=folder / "llama", steps=1, **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("base", "mesh"), [("nf4", "fsdp=4,tp=2"), ("int8", "fsdp=4,tp=2"), ("nf4", "pp=2,fsdp=2,tp=2")]
)
def test_memory_of_a_step_is_as_planned(base, mesh):
    """Arguments to the byte; temporaries as far off as those of adapters on plain weights."""
    options = {"on": "cpu:8", "batch": 16, "seq_len": 64, "mesh": mesh, "num_microbatches": 2, "lora_rank": 8}
    found, plainly = (
        {row.quantity: row for row in mw.verify("tiny", quantize_base=own, **options).rows} for own in (base, None)
    )
    assert found["memory arguments"].is_equal
    assert found["flops"].compiled == plainly["flops"].compiled
    held, usually = (rows["memory arguments"].compiled or 0 for rows in (found, plainly))
    assert held < 0.8 * usually
    of, usual = (rows["memory temporaries"] for rows in (found, plainly))
    assert of.compiled is not None
    assert usual.compiled is not None
    assert of.predicted == usual.predicted
    assert of.compiled < 1.05 * usual.compiled


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("nf4", {"mesh": "fsdp=4,tp=2", "zero_stage": 1}),
        ("int8", {"mesh": "dp=2,fsdp=4", "zero_stage": 2, "num_microbatches": 2}),
        ("nf4", {"mesh": "pp=2,fsdp=2,tp=2", "zero_stage": 1, "num_microbatches": 2}),
    ],
)
def test_zero_1_and_2_hold_the_base_whole_and_never_gather_it(base, options):
    """Adapters are gathered, and the embedding, which is no weight of a layer."""
    options = {"batch": 16, "seq_len": 64, "lora_rank": 8, **options}
    found = mw.verify("tiny", on="cpu:8", quantize_base=base, **options)
    rows = {row.quantity: row for row in found.rows}
    assert rows["memory arguments"].is_equal
    assert rows["flops"].is_explained
    assert all(row.is_equal for row in found.rows if row.unit == "B" and not row.quantity.startswith("memory"))

    def gathered(plan):
        moves = plan.predicted.collectives
        return sum(move.bytes for move in moves if move.kind == "all-gather" and "fsdp" in move.axes)

    assert 0 < gathered(found.plan) < gathered(mw.plan("tiny", "cpu:8", **options)) / 3
